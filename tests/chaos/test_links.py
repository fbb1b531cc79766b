"""Links between hosts that break or become slow in the middle of training. Hosts are network namespaces: needs root."""

from __future__ import annotations

import dataclasses
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
# A launcher's own look whether its other hosts are there: by default Open MPI's takes 8 minutes.
LOOK = ("oob_tcp_keepalive_time", "5"), ("oob_tcp_keepalive_intvl", "2"), ("oob_tcp_keepalive_probes", "3")
OPTIONS = tuple(word for name, value in LOOK for word in ("--prtemca", name, value))
CUT = 2  # the rank whose link it is


def launch_of(mpi: str) -> Launch:
    if mpi == "mpich":
        return mpich(Path(os.environ.get("MPIPIPE_TEST_MPICH", ROOT / ".mpich")))
    return dataclasses.replace(openmpi(), options=OPTIONS)


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


def ranks_on(hosts: Hosts, rank: int) -> list[int]:
    """The processes of the script on a rank's host."""
    found = []
    for pid in hosts.processes(rank):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(launched.SCRIPT).encode() in words and b"python" in Path(os.fsdecode(words[0])).name.encode():
            found.append(pid)
    return found


def weights_in(output: str) -> dict[str, str]:
    return dict(re.findall(r"DONE (\d+) (\d+)", output))


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_link_that_is_ten_times_slower_costs_time_and_nothing_else(mpi, tmp_path):
    with Hosts(4, "2mbit") as hosts:
        job = start(hosts, launch_of(mpi), tmp_path)
        hosts.shape(CUT, "200kbit")
        assert job.wait(LIMIT) == 0
        output = job.tail(100_000)
    assert weights_in(output) == dict.fromkeys("0123", launched.reference(False)), output
    said = [line for line in output.splitlines() if re.match(r"\[mpipipe 0\] waiting for", line)]
    assert all(f"rank {CUT}" in line for line in said), output
    assert "is lost" not in output and "ending the run" not in output, output


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_link_that_breaks_ends_the_run(mpi, tmp_path):
    with Hosts(4, "20mbit") as hosts:
        job = start(hosts, launch_of(mpi), tmp_path)
        hosts.set_link(CUT, "down")
        cut = time.monotonic()
        # Every rank ends, also the one that is cut off, of which nobody hears; then the launcher does.
        wait_for(job, lambda: not any(ranks_on(hosts, rank) for rank in range(4)), STALL_ABORT + 20)
        wait_for(job, lambda: not job.running, 60 - (time.monotonic() - cut))
        output = job.tail(100_000)
        assert job.returncode != 0, output
    said = (
        rf"waiting for \d+ s: rank {CUT}, which has not answered for \d+ s, .*: ending the run on all ranks; saved to"
    )
    assert len(re.findall(said, output)) == 1, output
    assert list(tmp_path.glob("*.mpipipe")), output


def test_a_link_that_breaks_costs_one_client_where_the_others_survive(tmp_path):
    launch = launch_of("openmpi")
    with Hosts(4, "20mbit") as hosts:
        job = start(hosts, dataclasses.replace(launch, options=("--with-ft", "ulfm", *launch.options)), tmp_path)
        hosts.set_link(CUT, "down")
        wait_for(job, lambda: not any(ranks_on(hosts, rank) for rank in range(4)), STALL_ABORT + 40)
        wait_for(job, lambda: not job.running, 40)
        output = job.tail(100_000)
    weights = weights_in(output)
    assert set(weights) == {"0", "1", "3"} and len(set(weights.values())) == 1, output
    lost = rf"rank {CUT} is lost in step \d+: waiting for \d+ s: rank {CUT}, which has not answered"
    assert len(re.findall(lost + r" .*; 2 of 3 clients go on", output)) == 1, output
