"""Settings: arguments of init win over environment variables, which win over defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpipipe.config import Config, table, variable_name
from mpipipe.errors import ConfigError

MIB = 1 << 20


def test_every_setting_has_a_default():
    config = Config.make(environ={})
    assert config == Config()
    assert (config.max_buckets, config.overlap, config.wire, config.wire_weights) == (256, True, "plain", "plain")
    assert (config.client_progress, config.quiet, config.timeline) == (False, True, "")


def test_sizes_that_are_not_set_are_none_and_shown_as_auto():
    config = Config.make(environ={})
    assert (config.piece_bytes, config.fuse_bytes, config.credit_bytes) == (None, None, None)
    assert [row[0] for row in table() if row[2] == "auto"] == ["piece_bytes", "fuse_bytes", "credit_bytes"]


def test_settings_cannot_be_changed_later():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().quiet = False  # type: ignore[misc]


def test_an_argument_wins_over_the_environment_which_wins_over_the_default():
    environ = {"MPIPIPE_PIECE_BYTES": "2048", "MPIPIPE_MAX_BUCKETS": "5"}
    config = Config.make(environ, piece_bytes=8192)
    assert (config.piece_bytes, config.max_buckets, config.fuse_bytes) == (8192, 5, Config().fuse_bytes)


def test_an_argument_of_false_or_0_wins_too():
    config = Config.make({"MPIPIPE_QUIET": "1", "MPIPIPE_FUSE_BYTES": "4096"}, quiet=False, fuse_bytes=0)
    assert (config.quiet, config.fuse_bytes) == (False, 0)


def test_an_empty_environment_variable_and_an_argument_of_none_count_as_not_set():
    assert Config.make({"MPIPIPE_PIECE_BYTES": ""}, credit_bytes=None) == Config()


@pytest.mark.parametrize(
    "text,number",
    [("4194304", 4 * MIB), ("4M", 4 * MIB), ("4MiB", 4 * MIB), ("4mb", 4 * MIB), ("4096k", 4 * MIB), ("1G", 1 << 30),
     (" 2048 ", 2048), ("2048B", 2048), ("2KiB", 2048)],
)  # fmt: skip
def test_bytes_can_be_written_with_units(text, number):
    assert Config.make({"MPIPIPE_PIECE_BYTES": text}).piece_bytes == number
    assert Config.make({}, piece_bytes=text).piece_bytes == number


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on", " on "])
def test_a_flag_is_switched_on(text):
    assert Config.make({"MPIPIPE_CLIENT_PROGRESS": text}).client_progress is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off"])
def test_a_flag_is_switched_off(text):
    assert Config.make({"MPIPIPE_QUIET": text}).quiet is False
    assert Config.make({"MPIPIPE_OVERLAP": text}).overlap is False


def test_a_text_is_taken_as_it_is():
    assert Config.make({"MPIPIPE_TIMELINE": "Some Folder/1"}).timeline == "Some Folder/1"


@pytest.mark.parametrize("name", ["wire", "wire_weights"])
@pytest.mark.parametrize("form", ["plain", "bf16", "fp16"])
def test_a_wire_format_is_set_by_its_name(name, form):
    assert getattr(Config.make({}, **{name: form}), name) == form
    assert getattr(Config.make({variable_name(name): form}), name) == form


@pytest.mark.parametrize("form", ["fp8", "float16", "", "bf16 bf16", 16])
def test_a_wire_format_that_there_is_not_is_an_error_that_lists_those_there_are(form):
    with pytest.raises(ConfigError, match=r"wire format \(plain, bf16, fp16\)") as caught:
        Config.make({}, wire=form)
    assert repr(form) in str(caught.value)


def test_an_unknown_setting_is_an_error_that_lists_those_there_are():
    with pytest.raises(ConfigError, match="piece_size.*piece_bytes.*timeline"):
        Config.make({}, piece_size=1)


@pytest.mark.parametrize(
    "variable,value",
    [("MPIPIPE_PIECE_BYTES", "much"), ("MPIPIPE_PIECE_BYTES", "4X"), ("MPIPIPE_PIECE_BYTES", "M"),
     ("MPIPIPE_PIECE_BYTES", "0.5M"), ("MPIPIPE_MAX_BUCKETS", "4M"), ("MPIPIPE_QUIET", "maybe"),
     ("MPIPIPE_MAX_BUCKETS", "0"), ("MPIPIPE_MAX_BUCKETS", "4097"), ("MPIPIPE_CREDIT_BYTES", "12"),
     ("MPIPIPE_FUSE_BYTES", "-1"), ("MPIPIPE_OVERLAP", "sometimes"), ("MPIPIPE_WIRE", "int8"),
     ("MPIPIPE_WIRE_WEIGHTS", "1")],
)  # fmt: skip
def test_a_bad_environment_variable_is_an_error_that_names_it_and_its_value(variable, value):
    with pytest.raises(ConfigError) as caught:
        Config.make({variable: value})
    assert variable in str(caught.value) and value in str(caught.value)


@pytest.mark.parametrize(
    "name,value",
    [("piece_bytes", 12), ("piece_bytes", 4.5), ("piece_bytes", True), ("credit_bytes", False), ("quiet", 1),
     ("overlap", 0), ("timeline", 3), ("wire", True)],
)  # fmt: skip
def test_a_bad_argument_is_an_error_that_names_it_and_its_value(name, value):
    with pytest.raises(ConfigError) as caught:
        Config.make({}, **{name: value})
    assert f"init({name}=...)" in str(caught.value) and repr(value) in str(caught.value)


def test_an_error_says_what_the_least_value_is():
    with pytest.raises(ConfigError, match="least.*1024"):
        Config.make({"MPIPIPE_PIECE_BYTES": "1000"})


def test_settings_and_environment_variables_are_one_to_one_and_each_has_a_meaning():
    rows = table()
    assert [row[0] for row in rows] == [field.name for field in dataclasses.fields(Config)]
    assert all(row[1] == variable_name(row[0]) == "MPIPIPE_" + row[0].upper() for row in rows)
    assert all(row[3] for row in rows)


def test_the_readme_shows_every_setting_as_it_is():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, variable, default, meaning in table():
        assert f"| `{name}` | `{variable}` | `{default}` | {meaning} |" in readme
