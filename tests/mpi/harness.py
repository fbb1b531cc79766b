"""Real mpirun jobs for tests: many cases in one job, because importing TensorFlow costs seconds on every rank."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "cases"
MPIS = ("openmpi", "mpich")
# Figures for the end of the suite's output, see conftest.py.
RECORDED: list[str] = []


@dataclass(frozen=True)
class Job:
    """A finished mpirun."""

    returncode: int
    output: str
    seconds: float

    def lines(self, start: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(start)]


def mpirun(
    mpi: str,
    ranks: int,
    *command: str,
    limit: float = 240,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    options: tuple[str, ...] = (),
) -> Job:
    """Run a Python command on some ranks; after ``limit`` seconds the ranks say where they stand and are ended.

    ``options`` are the launcher's. An environment variable that is given as an empty text is not set.
    """
    launcher, environ = launcher_of(mpi)
    environ |= {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Before the launcher ends: every rank prints the stacks of its threads (see run_cases.py).
        "MPIPIPE_TEST_LIMIT": str(limit - 5),
        **(env or {}),
    }
    environ = {name: value for name, value in environ.items() if value}
    start = time.monotonic()
    process = subprocess.Popen(
        [*launcher, *options, "-np", str(ranks), sys.executable, *command],
        env=environ,
        cwd=cwd or ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        output = _end(process)
        raise AssertionError(f"mpirun ({mpi}, {ranks} ranks) was not done after {limit:.0f} s:\n{output}") from None
    return Job(process.returncode, output, time.monotonic() - start)


def _end(process: subprocess.Popen[str]) -> str:
    """End a launcher and, through it, its ranks; returns what they had printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def launcher_of(mpi: str) -> tuple[list[str], dict[str, str]]:
    """An MPI's command line, and the environment in which it is to run."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MPIPIPE_", "OMPI_", "PMI"))}
    if mpi == "openmpi":
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        return [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "--bind-to", "none"], environ
    prefix = mpich_prefix()
    environ["MPI4PY_LIBMPI"] = str(prefix / "lib" / "libmpi.so.12")
    return [str(prefix / "bin" / "mpirun")], environ


def mpich_prefix() -> Path:
    """Where MPICH is."""
    return Path(os.environ.get("MPIPIPE_TEST_MPICH", ROOT / ".mpich"))


def case_names(module: str) -> list[str]:
    """The cases in a module of tests/mpi/cases, without importing it."""
    tree = ast.parse((CASES / f"{module}.py").read_text())
    return [
        node.name.removeprefix("case_")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]


@cache
def run_cases(
    mpi: str,
    ranks: int,
    module: str,
    *environment: str,
    only: tuple[str, ...] = (),
    limit: float = 900,
    options: tuple[str, ...] = (),
) -> Job:
    """All cases of a module in one job, run once however many tests look at it; environment as ``NAME=value``."""
    env = dict(setting.split("=", 1) for setting in environment)
    return mpirun(mpi, ranks, str(CASES.parent / "run_cases.py"), module, *only, limit=limit, env=env, options=options)


def check_case(job: Job, case: str, ranks: int) -> None:
    """Fail with what the ranks printed unless every rank has passed a case; keep what they want to have recorded."""
    passed = {int(match[1]) for match in re.finditer(rf"^PASSED {case} (\d+)$", job.output, re.MULTILINE)}
    RECORDED.extend(sorted(line.removeprefix("RECORD ") for line in job.lines(f"RECORD {case} ")))
    assert passed == set(range(ranks)), f"{case} passed on ranks {sorted(passed)} of {ranks}:\n{job.output[-12000:]}"
