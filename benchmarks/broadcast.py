"""Ways to get rank 0's buffers to all others while each of them sends as much to rank 0, as in a training step.

    python -m benchmarks.broadcast [--quick] [--mpich PREFIX] [--out FILE]

Eight buffers ("lanes") go out from rank 0 and eight come in from each client, all started at once. The ways:

    linear       rank 0 sends to each client (``Isend``)
    ibcast       the library's ``Ibcast``, on one communicator a lane
    persistent   MPI-4's ``Bcast_init``, on one communicator a lane
    binomial     a binomial tree of messages between two ranks: whoever has a lane passes it on
    chain        each rank passes pieces of 128 KiB on to the next

Times are in milliseconds, medians of several rounds in which the ways take turns. ``limit`` is what rank 0's link
needs, ``all`` is when everything was done everywhere, ``last`` when the last lane had come everywhere, ``mean`` when a
lane had come on average. The columns "one busy" are the same for the *other* clients while one (rank ``size // 2``,
which passes on in the trees and the chain) makes no MPI progress for 50 ms, then polls for 10 ms, and so on. ``cpu`` is
the processor time of rank 0 and of all others in a round. Nobody spins: all poll, ``Testsome`` and a nap of 100 us.
"tuned" is with the settings that mpipipe makes for the MPI.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import hosts

LANES = 8
_NAP = 100e-6
_BUSY, _BETWEEN = 50e-3, 10e-3
_PIECE = 128 << 10
_LINKS = {"200mbit": 24.5e6, "1gbit": 122e6}  # bytes per second that a TCP stream gets
_SECONDS = 0.3  # of rank 0's link, in each round: it sets the size of a lane
_SHARED_MEMORY_LANE = 1 << 20


class Poller:
    """Requests under way, and what to do when each is done."""

    def __init__(self, testsome: Callable[[list[Any]], list[int] | None], busy: bool) -> None:
        self._testsome, self._busy = testsome, busy
        self._requests: list[Any] = []
        self._done: list[Callable[[], None]] = []

    def add(self, request: Any, done: Callable[[], None] = lambda: None) -> None:
        """Take a request over."""
        self._requests.append(request)
        self._done.append(done)

    def run(self) -> None:
        """Until nothing is under way."""
        polls_until = time.perf_counter()
        while self._requests:
            if self._busy and time.perf_counter() > polls_until:
                time.sleep(_BUSY)
                polls_until = time.perf_counter() + _BETWEEN
            finished = self._testsome(self._requests) or []
            calls = [self._done[position] for position in finished]
            for position in sorted(finished, reverse=True):
                del self._requests[position], self._done[position]
            for call in calls:
                call()
            if not finished:
                time.sleep(_NAP)


def children(rank: int, size: int) -> list[int]:
    """The ranks to which a rank passes on in a binomial tree from rank 0, the largest subtree first."""
    lowest = rank & -rank if rank else 1 << size.bit_length()
    steps = (1 << bit for bit in reversed(range(size.bit_length())))
    return [rank + step for step in steps if step < lowest and rank + step < size]


def parent(rank: int) -> int:
    """The rank from which a rank other than 0 receives in that tree."""
    return rank - (rank & -rank)


class Broadcasts:
    """The ways: ``ways[name](lane, poller, came)`` starts one lane and calls ``came`` when it is in at this rank."""

    def __init__(self, world: Any, lanes: list[Any]) -> None:
        self.rank, self.size, self.lanes = world.Get_rank(), world.Get_size(), lanes
        self._direct = world.Dup()
        self._own = [world.Dup() for _ in lanes]
        self.ways: dict[str, Callable[[int, Poller, Callable[[], None]], None]] = {
            "linear": self._linear,
            "ibcast": self._ibcast,
            "binomial": self._binomial,
            "chain": self._chain,
        }
        try:
            self._requests = [c.Bcast_init(b, 0) for c, b in zip(self._own, lanes, strict=True)]
            self.ways["persistent"] = self._persistent
        except NotImplementedError:
            pass  # an MPI before 4.0

    def _linear(self, lane: int, poller: Poller, came: Callable[[], None]) -> None:
        self._pass_on(lane, self.lanes[lane], 0, list(range(1, self.size)) if self.rank == 0 else [], poller, came)

    def _ibcast(self, lane: int, poller: Poller, came: Callable[[], None]) -> None:
        poller.add(self._own[lane].Ibcast(self.lanes[lane], 0), came)

    def _persistent(self, lane: int, poller: Poller, came: Callable[[], None]) -> None:
        self._requests[lane].Start()
        poller.add(self._requests[lane], came)

    def _binomial(self, lane: int, poller: Poller, came: Callable[[], None]) -> None:
        self._pass_on(lane, self.lanes[lane], parent(self.rank), children(self.rank, self.size), poller, came)

    def _chain(self, lane: int, poller: Poller, came: Callable[[], None]) -> None:
        buffer = self.lanes[lane]
        starts = range(0, buffer.nbytes, _PIECE)
        missing = [len(starts)]

        def piece_came() -> None:
            missing[0] -= 1
            if not missing[0]:
                came()

        after = [self.rank + 1] if self.rank + 1 < self.size else []
        for number, at in enumerate(starts):
            tag = LANES * (number + 1) + lane
            self._pass_on(tag, buffer[at : at + _PIECE], self.rank - 1, after, poller, piece_came)

    def _pass_on(
        self, tag: int, data: Any, source: int, dests: list[int], poller: Poller, came: Callable[[], None]
    ) -> None:
        def pass_on() -> None:
            for dest in dests:
                poller.add(self._direct.Isend(data, dest, tag))
            came()

        if self.rank == 0:
            pass_on()
        else:
            poller.add(self._direct.Irecv(data, source, tag), pass_on)


def work(lane_bytes: int, rounds: int, out: Path) -> None:
    """One rank: all ways in turn, first with nobody busy, then with one client busy. Rank 0 writes what was seen."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    lanes = [np.zeros(lane_bytes, np.uint8) for _ in range(LANES)]
    gradients = [[np.ones(lane_bytes, np.uint8) for _ in range(LANES)] for _ in range(size - 1 if rank == 0 else 1)]
    direct = world.Dup()
    broadcasts = Broadcasts(world, lanes)
    seen = []
    for busy in (0, size // 2) if size > 2 else (0,):
        for number in range(rounds + 1):
            for way, start in broadcasts.ways.items():
                for lane, buffer in enumerate(lanes):
                    buffer.fill(number * LANES + lane + 1 if rank == 0 else 0)
                poller = Poller(MPI.Request.Testsome, bool(busy) and rank == busy)
                came: list[float] = []
                note = partial(_note_time, came)
                world.Barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                for lane in range(LANES):
                    start(lane, poller, note)
                    for client in range(1, size) if rank == 0 else ():
                        poller.add(direct.Irecv(gradients[client - 1][lane], client, lane))
                    if rank:
                        poller.add(direct.Isend(gradients[0][lane], 0, lane))
                poller.run()
                own = (begin, time.perf_counter(), came, time.process_time() - cpu)
                for lane, buffer in enumerate(lanes):
                    assert (buffer == number * LANES + lane + 1).all(), f"{way}: lane {lane} has not come whole"
                all_ranks = world.gather(own)
                if all_ranks and number:  # the first round opens connections
                    seen.append({"busy": busy, "way": way, **_summary(all_ranks, busy)})
    if rank == 0:
        out.write_text(json.dumps({"library": MPI.Get_library_version().splitlines()[0], "rounds": seen}))


def _note_time(times: list[float]) -> None:
    times.append(time.perf_counter())


def _summary(ranks: list[tuple[float, float, list[float], float]], busy: int) -> dict[str, float]:
    begin = ranks[0][0]
    times = [when - begin for number, rank in enumerate(ranks) if number not in (0, busy) for when in rank[2]]
    return {
        "all": max(rank[1] for rank in ranks) - begin,
        "last": max(times),
        "mean": statistics.fmean(times),
        "cpu": ranks[0][3],
        "cpu_others": sum(rank[3] for rank in ranks[1:]),
    }


def measure(mpi: str, launch: hosts.Launch, ranks: int, rate: str | None, rounds: int) -> list[dict[str, Any]]:
    """One row for each way, of one job."""
    lane_bytes = _SHARED_MEMORY_LANE
    limit = 0.0
    if rate is not None:
        lane_bytes = int(_LINKS[rate] * _SECONDS / LANES / (ranks - 1)) >> 10 << 10
        limit = LANES * lane_bytes * (ranks - 1) / _LINKS[rate]
    with hosts.place(ranks, rate) as place:
        out = place.folder / "rounds.json"
        command = [sys.executable, "-m", "benchmarks.broadcast", "--work", str(lane_bytes), str(rounds), str(out)]
        job = place.start(launch, ranks, command, hosts.mpipipes_settings() if mpi.endswith("tuned") else {})
        job.wait(300)
        result = json.loads(out.read_text())
    rows = []
    for way in dict.fromkeys(seen["way"] for seen in result["rounds"]):
        row = {"mpi": mpi, "ranks": ranks, "rate": rate or "memory", "lane_kib": lane_bytes >> 10, "way": way}
        row |= {"limit": limit, "library": result["library"]}
        for name, is_busy in (("", False), ("busy_", True)):
            mine = [seen for seen in result["rounds"] if seen["way"] == way and bool(seen["busy"]) == is_busy]
            for key in ("all", "last", "mean", "cpu", "cpu_others") if mine else ():
                row[name + key] = statistics.median(seen[key] for seen in mine)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        "                                                          limit    all   last   mean   cpu of 0, others"
        "   one busy: last   mean",
    ]

    def ms(row: dict[str, Any], key: str) -> str:
        return f"{row[key] * 1000:7.0f}" if key in row else "      -"

    for row in rows:
        head = f"{row['mpi']:14} {row['ranks']} ranks {row['rate']:>8} 8 x {row['lane_kib']:5} KiB  {row['way']:10}"
        times = " ".join([f"{row['limit'] * 1000:6.0f}", *(ms(row, key)[1:] for key in ("all", "last", "mean"))])
        lines.append(
            f"{head} {times} {ms(row, 'cpu')} {ms(row, 'cpu_others')} {ms(row, 'busy_last'):>16} {ms(row, 'busy_mean')}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or be one rank of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 ranks only")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--mpich", type=Path, default=hosts.ROOT / ".mpich", help="prefix of MPICH (default .mpich)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "broadcast.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(int(options.work[0]), int(options.work[1]), Path(options.work[2]))
        return
    hosts.clean_up_when_ended()
    known = {"openmpi": hosts.openmpi(), "mpich": hosts.mpich(options.mpich)}
    launches = {name + how: launch for name, launch in known.items() for how in ("", ", tuned")}
    reason = hosts.why_no_hosts()
    if reason:
        print(f"shared memory only: {reason}")
    rows: list[dict[str, Any]] = []
    for rate in (None,) if reason else (*_LINKS, None):
        for ranks in (4,) if options.quick else (2, 4, 8):
            for mpi, launch in launches.items():
                if Path(launch.mpirun).exists() and (rate or not mpi.endswith("tuned")):
                    rows += measure(mpi, launch, ranks, rate, options.rounds)
                    print(table(rows[-5:]) if len(rows) <= 5 else table(rows[-5:]).split("\n", 1)[1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
