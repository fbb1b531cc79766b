"""Whatever is read from outside, malformed in any way, is taken or refused with a reason.

Settings and environment variables, and the file of a timeline with the command that reads it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_trace_runs import simulate, write_run

from mpipipe import launcher, quiet
from mpipipe.config import Config, variable_name
from mpipipe.errors import ConfigError
from mpipipe.timeline import command
from mpipipe.timeline.chrome import FILE
from mpipipe.trace import KINDS

ROOT = Path(__file__).parents[2]
fuzz = settings(max_examples=200, deadline=None)

# ----------------------------------------------------------------------------------------------------------- settings

SETTINGS = {setting.name: setting for setting in fields(Config)}
TEXTS = (
    *(
        "",
        " ",
        "\t\n",
        "0",
        "00",
        "-0",
        "-1",
        "+1",
        "1e9",
        "1e-9",
        "1e999",
        "0x10",
        "1_000",
        "4.5",
        ".",
        "-",
        "4M",
        "4MiB",
    ),
    *("4MiBB", "4ib", "4bib", "4MM", "M", "B", "-4K", "4 K", "4K\0", "\0", "9" * 100, "9" * 5000, "9" * 4300 + "G"),
    *(
        "nan",
        "-nan",
        "inf",
        "-inf",
        "infinity",
        "٣",
        "²",
        "½",
        "４M",
        "1",
        "yes",
        "YES ",
        "true\0",
        "None",
        "[]",
        "auto",
    ),
    *(
        "plain",
        "PLAIN",
        "bf16 ",
        "fp8",
        "warn",
        "Warn",
        "skip\n",
        "a/b",
        "\udcff",
        "\ud800",
        "é",
        "\x1b[31m",
        "x" * 5000,
    ),
)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
NUMBERS = (0, 1, -1, 1024, 4096, 1 << 30, 1 << 63, 1 << 64, 10**400, -(10**400), 10**5000, -(10**5000))
OTHERS = (
    *(True, False, 0.0, -0.0, 0.5, 1e9, 1e308, -1e-9, 5e-324, math.nan, math.inf, -math.inf, 1j),
    *(b"", b"4M", b"\xff", [], [1], ["plain"], (), {}, {"a": 1}, object(), int, DEEP),
)

texts = (
    st.sampled_from(TEXTS)
    | st.text(max_size=20)
    | st.from_regex(r"\s?[-+]?[0-9_.]{1,12}\s?[kKmMgGtT]?(iB|B|b|ib)?\s?", fullmatch=True)
)
arguments = (
    texts
    | st.sampled_from(NUMBERS)
    | st.sampled_from(OTHERS)
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.binary(max_size=5)
    | st.lists(st.integers() | st.text(max_size=3), max_size=3)
)


def shown(name: str, value: Any) -> set[str]:
    """The beginnings of the ways in which an error may show a value: as it was given, or as what it was taken for."""
    forms = [lambda: value, lambda: SETTINGS[name].metadata["parse"](value), lambda: float(value)]
    found = set()
    for form in forms:
        with contextlib.suppress(Exception):
            found.add(repr(form())[:40])
    return found or {type(value).__name__}  # nobody can write it out


def taken_or_refused(name: str, value: Any, where: str, environ: dict[str, str], **argument: Any) -> None:
    """A setting has a value that it can have; or the error names it, where it came from, and the value."""
    try:
        config = Config.make(environ, **argument)
    except ConfigError as error:
        text = str(error)
        assert where in text and "\n" not in text
        assert any(form in text for form in shown(name, value))
        return
    for setting in SETTINGS.values():
        made = getattr(config, setting.name)
        if setting.name != name or made is None:
            assert made == setting.default
    made = getattr(config, name)
    if made is None:
        return
    hint, limits = get_type_hints(Config)[name], SETTINGS[name].metadata
    assert type(made) in (get_args(hint) or (hint,))
    if type(made) in (int, float):
        assert limits["least"] <= made <= limits["most"]
    if made != "":  # what was taken can be written out, and is taken again for what it is
        assert getattr(Config.make({variable_name(name): str(made)}), name) == made


def from_environment(name: str, text: str) -> None:
    variable = variable_name(name)
    taken_or_refused(name, text, f"the environment variable {variable} ", {variable: text})


def from_argument(name: str, value: Any) -> None:
    taken_or_refused(name, value, f"init({name}=...)", {}, **{name: value})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_takes_or_refuses_every_malformed_text(name):
    for text in TEXTS:
        from_environment(name, text)
        from_argument(name, text)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_takes_or_refuses_every_malformed_argument(name):
    for value in (*NUMBERS, *OTHERS):
        from_argument(name, value)


@pytest.mark.parametrize("name", SETTINGS)
@fuzz
@given(data=st.data())
def test_a_setting_takes_or_refuses_any_text_and_any_argument(name, data):
    from_environment(name, data.draw(texts))
    from_argument(name, data.draw(arguments))


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_a_folder_that_no_system_can_have_is_refused_before_the_run_and_not_at_its_end(text):
    with pytest.raises(ConfigError, match=r"init\(timeline=...\)"):
        Config.make({}, timeline=text)


@fuzz
@given(st.text().filter(lambda name: name not in SETTINGS and name not in ("cls", "environ")), arguments)
def test_a_setting_that_there_is_not_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError) as caught:
        Config.make({}, **{name: value})
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- launchers

RANKS = [name for pair in launcher._VARIABLES for name in pair]
THREADS = [launcher._INTRA, launcher._INTER, "OMP_NUM_THREADS"]
numbers = st.sampled_from([*"00112233", "07", "-1", "²", "٣", "1 ", " 1", "1e0", "9" * 5000, "4(x2)", "", "x"])
environments = st.builds(
    lambda launched, others: {**launched, **others},
    st.fixed_dictionaries({"PMI_RANK": numbers, "PMI_SIZE": numbers, "MPI_LOCALNRANKS": numbers}) | st.just({}),
    st.dictionaries(
        st.sampled_from([*RANKS, *launcher._LOCAL_SIZES, "MPIPIPE_QUIET", "TF_CPP_MIN_LOG_LEVEL", *THREADS]),
        numbers | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5),
        max_size=3,
    ),
)


@fuzz
@given(environments)
def test_a_rank_is_a_number_or_there_is_none_whatever_the_launcher_says(environ):
    found = launcher.rank_and_size(environ)
    given_ = [(environ.get(rank, ""), environ.get(size, "")) for rank, size in launcher._VARIABLES]
    assert found is None or any((rank.lstrip("0") or "0", size.lstrip("0") or "0") == tuple(map(str, found))
                                for rank, size in given_)  # fmt: skip


@fuzz
@given(environments)
def test_tensorflow_gets_threads_or_none_are_set_whatever_the_launcher_says(environ):
    after = dict(environ)
    made = launcher.prepare_tensorflow(after, 4, 4)
    assert made == [f"{name}={after[name]}" for name in after if name not in environ]
    assert {name: after[name] for name in environ} == environ
    assert all(1 <= int(text.partition("=")[2]) <= 4 for text in made)


@fuzz
@given(environments)
def test_tensorflow_is_silenced_or_left_alone_whatever_the_environment_says(environ):
    with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(sys, "meta_path", [*sys.meta_path]):
        quiet.quieten_tensorflow()
        assert dict(os.environ) in (environ, {quiet._LOG_LEVEL: quiet._SILENT, **environ})


# ----------------------------------------------------------------------------------------------------------- timelines


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.fixture(scope="module")
def good(folder) -> Path:
    """A small timeline, as it is written. (As a path, for hypothesis prints what a test is given.)"""
    layers, nbytes = ("embedding", "dense", "logits"), (1_200_000, 300_000, 600_000)
    return write_run(folder / "good", simulate(4, 2, layers, nbytes), layers, nbytes)


def look(folder: Path, content: Any, *options: str, picture: bool = False) -> int:
    """Let the command look at a file; there are numbers, or one line with the file and what is wrong with it."""
    path = folder / FILE
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    out, err = io.StringIO(), io.StringIO()
    # Drawing takes most of the time.
    hidden: Any = mock.patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None})
    with (
        contextlib.nullcontext() if picture else hidden,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = command.main([str(folder), *options])
    printed, said = out.getvalue(), err.getvalue()
    if code == 0:
        assert said == "" and "step time" in printed and "nan" not in printed.replace(str(folder), "")
    else:
        assert code == 2 and printed == ""
        assert said.startswith(f"mpipipe.trace: {path}: ") and said.endswith("\n") and len(said.splitlines()) == 1
        assert 10 < len(said) - len(str(path)) < 400
    return code


def one_of_many(place: Any) -> Any:
    return list(place) if isinstance(place, dict) else range(len(place))


def change(data: st.DataObject, whole: dict[str, Any], values: st.SearchStrategy[Any]) -> None:
    """Delete, replace or repeat something somewhere in a JSON value."""
    place: Any = whole
    while True:
        key = data.draw(st.sampled_from(one_of_many(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        place = inner
    how = data.draw(st.sampled_from(["replace", "replace", "delete", "repeat", "swap"]))
    other = data.draw(st.sampled_from(one_of_many(place)))
    if how == "delete":
        del place[key]
    elif how == "repeat" and isinstance(place, list):
        place.insert(key, copy.deepcopy(inner))
    elif how == "repeat":
        place[data.draw(st.text(max_size=3) | st.integers(-1, 12).map(str))] = copy.deepcopy(inner)
    elif how == "swap":
        place[key], place[other] = place[other], place[key]
    else:
        place[key] = data.draw(values)


LARGEST = 2**53 - 1
plausible = st.integers(-2, 12) | st.integers(0, 2_000_000) | st.sampled_from([LARGEST - 1, LARGEST])
anything = plausible | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**30, 10**4000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def test_a_timeline_that_is_as_it_should_be_is_looked_at(folder, good):
    assert look(folder, good.read_bytes()) == 0


@pytest.mark.parametrize("values", [plausible, anything], ids=["plausible", "anything"])
@fuzz
@given(data=st.data())
def test_a_timeline_with_anything_anywhere_is_looked_at_or_refused_in_one_line(folder, good, values, data):
    whole = json.loads(good.read_bytes())
    whole["traceEvents"] = []  # which are for the eye only
    for _ in range(data.draw(st.integers(1, 4))):
        if whole:
            change(data, whole, values)
    look(folder, whole)


@fuzz
@given(data=st.data())
def test_a_timeline_that_is_cut_off_is_refused_in_one_line(folder, good, data):
    content = good.read_bytes().rstrip()
    end = len(content) - 1
    assert look(folder, content[: data.draw(st.integers(0, end) | st.integers(end - 200, end))]) == 2


@fuzz
@given(data=st.data())
def test_a_timeline_with_other_bytes_is_looked_at_or_refused_in_one_line(folder, good, data):
    content = bytearray(good.read_bytes())
    ours = content.index(b'"mpipipe"')
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(content) - 1) | st.integers(ours, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789-.,:[]{}"eE')))
    look(folder, bytes(content))


@fuzz
@given(st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
def test_a_file_that_is_no_timeline_is_refused_in_one_line(folder, content):
    assert look(folder, content) == 2


@fuzz
@given(
    st.integers(1, 3000), st.sampled_from(["[]", "{}"]), st.sampled_from(["format", "kinds", "sessions", "ranks", "x"])
)
def test_a_timeline_that_is_deep_anywhere_is_refused_in_one_line(folder, depth, brackets, key):
    opening = "[" if brackets == "[]" else '{"0":'
    deep = opening * depth + "0" + brackets[1] * depth
    good = {"format": 1, "kinds": list(KINDS), "sessions": {}, "ranks": {}}
    whole = json.dumps({"mpipipe": {**good, key: "here"}}).replace('"here"', deep)
    assert look(folder, whole.encode()) == 2


MALFORMED = {
    "NaN where nobody looks": ('"sessions"', '"other":NaN,"sessions"', "NaN is no number"),
    "infinity": ('"format":1', '"format":-Infinity', "-Infinity is no number"),
    "a format that only Python takes for 1": ('"format":1', '"format":true', "its format is True"),
    "a format of many words": ('"format":1', '"format":"' + "x" * 5000 + '"', "its format is 'xxx"),
    "a rank that there is twice": ('"ranks":{', '"ranks":{"01":[],', "rank '01' is not a number"),
    "a time before the first": ('"1":[[', '"1":[[-1,0,-1,0],[', r"rank 1 has [-1, 0, -1, 0], which is no mark"),
    "a kind before the first": ('"1":[[', '"1":[[0,-1,0,0],[', "rank 1 has [0, -1, 0, 0], which is no mark"),
    "no kinds": ('"step"', '"stop"', "no list of kinds"),
}


@pytest.mark.parametrize(("old", "new", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_the_line_says_what_is_wrong(folder, good, capsys, old, new, reason):
    events, key, ours = good.read_text().partition('"mpipipe"')
    assert old in ours
    (folder / FILE).write_text(events + key + ours.replace(old, new, 1))
    assert command.main([str(folder)]) == 2
    assert reason in capsys.readouterr().err


rows = st.builds(
    lambda time, kind, bucket, *rest: [time, kind, -1 if KINDS[kind] in ("step", "loss") else bucket, *rest],
    st.integers(0, 20) | st.sampled_from([2**50, LARGEST - 1, LARGEST]),
    st.integers(0, len(KINDS) - 1),
    st.integers(0, 2) | st.just(LARGEST),
    st.integers(-1, 4) | st.sampled_from([LARGEST - 1, LARGEST]),
    st.integers(-1, 2) | st.just(LARGEST),
    st.integers(-1, 3) | st.just(LARGEST),
    st.integers(0, 1) | st.just(LARGEST),
)
# Two steps of a client in a row, which is the least that can be counted, so that the rest is come to.
TWO_STEPS = [[5, KINDS.index(kind), -1 if kind == "step" else 0, step] for step in (2, 3) for kind in ("step", "ready")]
crowds = st.dictionaries(st.sampled_from(["0", "1", "2", "999999999"]), st.lists(rows, max_size=40), max_size=4)
sessions = st.lists(st.tuples(st.text(max_size=40), st.integers(0, LARGEST)), max_size=3)


def numbers_only(ranks: dict[str, Any], described: list[tuple[str, int]]) -> dict[str, Any]:
    layers, nbytes = [name for name, _ in described], [size for _, size in described]
    told = {"0": {"layers": layers, "nbytes": nbytes}}
    ranks = {**ranks, "1": [*ranks.get("1", []), *TWO_STEPS]}
    return {"mpipipe": {"format": 1, "kinds": list(KINDS), "sessions": told, "ranks": ranks}}


@fuzz
@given(crowds, sessions)
def test_a_timeline_of_any_numbers_can_be_looked_at_or_is_refused_in_one_line(folder, ranks, described):
    look(folder, numbers_only(ranks, described))


@settings(max_examples=12, deadline=None, phases=[Phase.generate])  # to shrink an example would take minutes
@given(crowds, sessions)
def test_a_timeline_of_any_numbers_can_be_drawn_or_is_refused_in_one_line(folder, ranks, described):
    pytest.importorskip("matplotlib")
    if look(folder, numbers_only(ranks, described), picture=True) == 0:
        (folder / "step.png").unlink()


@fuzz
@given(st.sampled_from(["--step", "--optimizer"]), texts)
def test_an_option_of_any_text_is_taken_or_refused(folder, good, option, text):
    try:
        look(folder, good.read_bytes(), f"{option}={text}")
    except SystemExit as refused:  # argparse has said why
        assert refused.code == 2


def _is_a_folder(path: Path) -> None:
    path.mkdir()


def _is_a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _cannot_be_read(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read everything")


def _is_in_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("make", [_is_a_folder, _is_a_link_to_itself, _cannot_be_read, _is_in_a_file])
def test_a_timeline_that_is_no_file_to_be_read_is_refused_in_one_line(tmp_path, capsys, make):
    path = tmp_path / "run" / FILE
    path.parent.mkdir()
    make(path)
    assert command.main([str(path.parent)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"mpipipe.trace: {path}: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b'{"mpipipe":{"format":1,"kinds":[NaN]}}'])
def test_the_command_ends_with_a_status_and_one_line(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "mpipipe.trace", str(tmp_path)],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith(f"mpipipe.trace: {tmp_path / FILE}: ")
