"""Links between hosts that break or become slow in the middle of training. Hosts are network namespaces: needs root."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, Job, Launch, mpich, openmpi, why_no_hosts
from tests.chaos import launched
from tests.mpi.harness import MPIS, mpich_prefix

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made")

LIMIT = 90  # seconds for a run
STALL_ABORT = 8  # seconds
# What else it may take until all ranks have ended: the watch looks once a second, and MPI has 5 s to end a rank that is
# cut off, before that ends by itself.
GRACE = 10
LINK = 2  # the rank whose link it is


def start(hosts: Hosts, launch: Launch, folder: Path) -> Job:
    """Four ranks that train, once they are under way."""
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "3", "MPIPIPE_TEST_LIMIT": str(LIMIT - 5), "MPIPIPE_STALL_WARNING": "2",
        "MPIPIPE_STALL_ABORT": str(STALL_ABORT), "MPIPIPE_PIECE_BYTES": "1024", "CHAOS": "",
    }  # fmt: skip
    job = hosts.start(launch, 4, [sys.executable, str(launched.SCRIPT), str(folder), str(launched.EVERY)], environ)
    wait_for(job, lambda: "UNDER WAY" in job.log.read_text(errors="replace"), LIMIT)
    return job


def launch_of(mpi: str) -> Launch:
    return openmpi() if mpi == "openmpi" else mpich(mpich_prefix())


def wait_for(job: Job, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, job.tail(6000)
        time.sleep(0.05)


def ranks_left(hosts: Hosts) -> list[int]:
    """The ranks that are still there."""
    return [rank for rank in range(4) if any(map(_runs_the_script, hosts.processes(rank)))]


def _runs_the_script(pid: int) -> bool:
    try:
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return False
    return str(launched.SCRIPT) in words and Path(words[0]).name.startswith("python")


@pytest.mark.parametrize("mpi", MPIS)
def test_a_link_that_is_ten_times_slower_costs_time_and_nothing_else(mpi, tmp_path):
    with Hosts(4, "2mbit") as hosts:
        job = start(hosts, launch_of(mpi), tmp_path)
        hosts.shape(LINK, "200kbit")
        assert job.wait(LIMIT) == 0
        output = job.tail(100_000)
    assert launched.weights_in(output) == dict.fromkeys(range(4), launched.reference(False)), output
    said = [line for line in output.splitlines() if re.match(r"\[mpipipe 0\] waiting for", line)]
    assert all(f"rank {LINK}" in line for line in said), output
    assert "is lost" not in output and "ending the run" not in output, output


def test_a_link_that_is_down_for_a_moment_costs_time_and_nothing_else(tmp_path):
    with Hosts(4, "20mbit") as hosts:
        job = start(hosts, launch_of("openmpi"), tmp_path)
        hosts.set_link(LINK, "down")
        time.sleep(2)
        hosts.set_link(LINK, "up")
        assert job.wait(LIMIT) == 0
        output = job.tail(100_000)
    assert launched.weights_in(output) == dict.fromkeys(range(4), launched.reference(False)), output
    assert "is lost" not in output and "ending the run" not in output, output


@pytest.mark.parametrize("mpi", MPIS)
def test_a_link_that_breaks_ends_all_ranks_on_both_sides_of_it(mpi, tmp_path):
    with Hosts(4, "20mbit") as hosts:
        job = start(hosts, launch_of(mpi), tmp_path)
        hosts.set_link(LINK, "down")
        wait_for(job, lambda: not ranks_left(hosts), STALL_ABORT + GRACE)
        # The launcher waits for its own process on the host that is cut off.
        hosts.set_link(LINK, "up")
        wait_for(job, lambda: not job.running, 60)
        output = job.tail(100_000)
        assert job.returncode != 0, output
    said = rf"rank {LINK}, which has not answered for \d+ s, .*: ending the run on all ranks; saved to .*mpipipe"
    assert len(re.findall(said, output)) == 1, output
    assert list(tmp_path.glob("*.mpipipe")), output


def test_a_link_that_breaks_costs_one_client_where_the_others_survive(tmp_path):
    with Hosts(4, "20mbit") as hosts:
        job = start(hosts, dataclasses.replace(launch_of("openmpi"), options=("--with-ft", "ulfm")), tmp_path)
        hosts.set_link(LINK, "down")
        wait_for(job, lambda: ranks_left(hosts) in ([], [LINK]), LIMIT)
        wait_for(job, lambda: not ranks_left(hosts), STALL_ABORT + GRACE)
        output = job.tail(100_000)
    weights = launched.weights_in(output)
    assert set(weights) == {0, 1, 3} and len(set(weights.values())) == 1, output
    said = rf"rank {LINK} is lost in step \d+: .* which has not answered for \d+ s, .*; 2 of 3 clients go on"
    assert len(re.findall(said, output)) == 1, output
