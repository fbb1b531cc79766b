"""Links between hosts that become slow in the middle of training. Hosts are network namespaces: needs root."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, Launch, mpich, openmpi, why_no_hosts
from tests.chaos import launched
from tests.mpi.harness import ROOT

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made")

LIMIT = 90  # seconds for a run
STALL_ABORT = 8
SLOW = 2  # the rank whose link it is


def launch_of(mpi: str) -> Launch:
    if mpi == "mpich":
        return mpich(Path(os.environ.get("MPIPIPE_TEST_MPICH", ROOT / ".mpich")))
    return openmpi()


def start(hosts: Hosts, launch: Launch, folder: Path):
    """Four ranks that train, once they are under way."""
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "3", "MPIPIPE_TEST_LIMIT": str(LIMIT - 5), "MPIPIPE_STALL_WARNING": "2",
        "MPIPIPE_STALL_ABORT": str(STALL_ABORT), "MPIPIPE_PIECE_BYTES": "1024", "CHAOS": "",
    }  # fmt: skip
    command = [sys.executable, str(launched.SCRIPT), str(folder), str(launched.EVERY)]
    job = hosts.start(launch, 4, command, environ)
    wait_for(job, lambda: "UNDER WAY" in job.log.read_text(errors="replace"))
    return job


def wait_for(job, condition, seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, job.tail(6000)
        time.sleep(0.05)


def weights_in(output: str) -> dict[str, str]:
    return dict(re.findall(r"DONE (\d+) (\d+)", output))


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_link_that_is_ten_times_slower_costs_time_and_nothing_else(mpi, tmp_path):
    with Hosts(4, "2mbit") as hosts:
        job = start(hosts, launch_of(mpi), tmp_path)
        hosts.shape(SLOW, "200kbit")
        assert job.wait(LIMIT) == 0
        output = job.tail(100_000)
    assert weights_in(output) == dict.fromkeys("0123", launched.reference(False)), output
    said = [line for line in output.splitlines() if re.match(r"\[mpipipe 0\] waiting for", line)]
    assert all(f"rank {SLOW}" in line for line in said), output
    assert "is lost" not in output and "ending the run" not in output, output
