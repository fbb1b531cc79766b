"""What a process knows of its rank before it has touched MPI."""

from __future__ import annotations

import pytest

from mpipipe import launcher


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
        {"PMI_RANK": "3", "PMI_SIZE": "8"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"},
    ],
)
def test_the_rank_is_known_under_every_launcher(environ):
    assert launcher.rank_and_size(environ) == (3, 8)


@pytest.mark.parametrize(
    "environ", [{}, {"PMI_RANK": "3"}, {"PMI_RANK": "", "PMI_SIZE": "8"}, {"PMI_RANK": "x", "PMI_SIZE": "8"}]
)
def test_without_a_launcher_there_is_no_rank(environ):
    assert launcher.rank_and_size(environ) is None


def test_mpirun_within_a_slurm_job_is_what_counts():
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    mpirun = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    assert launcher.rank_and_size({**slurm, **mpirun}) == (2, 4)


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
        launcher.quieten_tensorflow()
        return launcher.os.environ.get("TF_CPP_MIN_LOG_LEVEL")

    return with_environment


def test_tensorflow_is_silent_on_all_ranks_but_the_server(level):
    assert level(0) is None
    assert int(level(1)) == 3


def test_tensorflow_speaks_again_where_init_is_told_so(level):
    level(1)
    launcher.unquieten_tensorflow()
    assert "TF_CPP_MIN_LOG_LEVEL" not in launcher.os.environ
    level(1, TF_CPP_MIN_LOG_LEVEL="3")
    launcher.unquieten_tensorflow()
    assert launcher.os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"


def test_a_log_level_that_the_user_has_set_is_kept(level):
    assert level(1, TF_CPP_MIN_LOG_LEVEL="0") == "0"


@pytest.mark.parametrize("text", ["0", "no", "off", "false", "False", "OFF", " 0 "])
def test_tensorflow_speaks_where_the_setting_quiet_is_off_however_it_is_written(level, text):
    assert level(1, MPIPIPE_QUIET=text) is None
