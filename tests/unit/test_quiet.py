"""What ranks other than the server let TensorFlow say when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpipipe import quiet

ROOT = Path(__file__).parents[2]

# As TensorFlow 2.21 does, whatever its log level is.
TENSORFLOW = """
import os
LOG = '''WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1796271767.622366    1277 port.cc:153] oneDNN custom operations are on.
E0000 00:00:1796271767.622366    1277 cuda.cc:153] Unable to register
a warning of somebody else
F0000 00:00:1796271767.622366    1277 cpu_feature_guard.cc:227] This machine has no AVX
'''
os.write(2, LOG.encode())
"""


@pytest.fixture
def imported(tmp_path):
    """What is written to standard error while a rank imports what stands for TensorFlow."""

    def on(rank: int, code: str = TENSORFLOW, **environ: str) -> str:
        (tmp_path / "tensorflow.py").write_text(code)
        program = "import mpipipe, os, tensorflow; os.write(2, b'I0000 00:00:1.1 later\\n')"
        launched = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**inherited, **launched, **environ}, capture_output=True, text=True
        )
        return done.stderr

    return on


def test_nothing_of_tensorflows_log_is_printed_while_a_client_imports_it_but_what_ends_the_process(imported):
    assert imported(1).splitlines() == [
        "a warning of somebody else",
        "F0000 00:00:1796271767.622366    1277 cpu_feature_guard.cc:227] This machine has no AVX",
        "I0000 00:00:1.1 later",
    ]


@pytest.mark.parametrize("rank,environ", [(0, {}), (1, {"MPIPIPE_QUIET": "0"}), (1, {"TF_CPP_MIN_LOG_LEVEL": "1"})])
def test_all_is_printed_where_the_user_wants_it(imported, rank, environ):
    assert "oneDNN custom operations are on" in imported(rank, **environ)


def test_an_import_that_fails_says_why(imported):
    said = imported(1, TENSORFLOW + "raise ImportError('libcuda is missing')")
    assert "ImportError: libcuda is missing" in said and "somebody else" in said and "oneDNN" not in said


@pytest.fixture
def level(monkeypatch):
    """TensorFlow's log level after the package is imported on a rank, with some environment."""

    def with_environment(rank: int, **environ: str) -> str | None:
        for name in ("TF_CPP_MIN_LOG_LEVEL", "MPIPIPE_QUIET"):
            monkeypatch.setenv(name, "")  # so that it is put back in the end
            monkeypatch.delenv(name)
        for name, value in {"PMI_RANK": str(rank), "PMI_SIZE": "2", **environ}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        quiet.quieten_tensorflow()
        return os.environ.get("TF_CPP_MIN_LOG_LEVEL")

    return with_environment


def test_tensorflow_is_silent_on_all_ranks_but_the_server(level):
    assert level(0) is None
    assert int(level(1)) == 3


def test_tensorflow_speaks_again_where_init_is_told_so(level):
    level(1)
    quiet.unquieten_tensorflow()
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ
    level(1, TF_CPP_MIN_LOG_LEVEL="3")
    quiet.unquieten_tensorflow()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"


def test_a_log_level_that_the_user_has_set_is_kept(level):
    assert level(1, TF_CPP_MIN_LOG_LEVEL="0") == "0"


@pytest.mark.parametrize("text", ["0", "no", "off", "false", "False", "OFF", " 0 "])
def test_tensorflow_speaks_where_the_setting_quiet_is_off_however_it_is_written(level, text):
    assert level(1, MPIPIPE_QUIET=text) is None
