"""Links between hosts that become slow in the middle of training. Hosts are network namespaces: needs root."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, Job, Launch, mpich, openmpi, why_no_hosts
from tests.chaos import launched
from tests.mpi.harness import MPIS, mpich_prefix

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made")

LIMIT = 90  # seconds for a run
SLOW = 2  # the rank whose link it is


def start(hosts: Hosts, launch: Launch, folder: Path) -> Job:
    """Four ranks that train, once they are under way."""
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "3", "MPIPIPE_TEST_LIMIT": str(LIMIT - 5), "MPIPIPE_STALL_WARNING": "2",
        "MPIPIPE_STALL_ABORT": "8", "MPIPIPE_PIECE_BYTES": "1024", "CHAOS": "",
    }  # fmt: skip
    job = hosts.start(launch, 4, [sys.executable, str(launched.SCRIPT), str(folder), str(launched.EVERY)], environ)
    deadline = time.monotonic() + LIMIT
    while "UNDER WAY" not in job.log.read_text(errors="replace"):
        assert time.monotonic() < deadline, job.tail(6000)
        time.sleep(0.05)
    return job


@pytest.mark.parametrize("mpi", MPIS)
def test_a_link_that_is_ten_times_slower_costs_time_and_nothing_else(mpi, tmp_path):
    with Hosts(4, "2mbit") as hosts:
        job = start(hosts, openmpi() if mpi == "openmpi" else mpich(mpich_prefix()), tmp_path)
        hosts.shape(SLOW, "200kbit")
        assert job.wait(LIMIT) == 0
        output = job.tail(100_000)
    assert launched.weights_in(output) == dict.fromkeys(range(4), launched.reference(False)), output
    said = [line for line in output.splitlines() if re.match(r"\[mpipipe 0\] waiting for", line)]
    assert all(f"rank {SLOW}" in line for line in said), output
    assert "is lost" not in output and "ending the run" not in output, output
