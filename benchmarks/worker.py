"""One rank of one column of a row, started by the driver (``__main__.py``) and told by files what to do when.

All columns of a row are jobs that exist at the same time and take turns. A rank that is not to run polls a file every
20 ms: waiting in an MPI barrier would spin on cores that another column needs. (What keeps threads awake in the
background, as Horovod does, the driver stops with a signal between turns.) All "hosts" share the file system.

Files in the job's folder: ``turn`` holds the newest turn (written by the driver, replaced as a whole), and
``rank-N.jsonl`` gets one line from rank N when it is ready and one for each turn that it has taken part in.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks import shapes

_POLL = 0.02


class Column(Protocol):
    """What a rank of a column can do."""

    rank: int
    size: int

    def facts(self) -> dict[str, Any]:
        """Versions, threads, bytes: what the results should name."""

    def prepare(self, batch: int) -> None:
        """Make the data of that batch size."""

    def steps(self, mode: str, count: int) -> list[float]:
        """Do steps; returns the time at the start and at the end of each, seconds of a clock that all ranks share."""

    def serve(self) -> bool:
        """On a rank that only serves: do so until all others have closed. False on all other ranks."""

    def close(self) -> None:
        """Leave in an orderly way."""


def run(column: Column, folder: Path) -> None:
    """Take turns until there are no more."""
    report = folder / f"rank-{column.rank}.jsonl"
    _say(report, {"ready": True, "rank": column.rank, "pid": os.getpid(), **column.facts()})
    if not column.serve():
        for turn in _turns(folder):
            if column.rank not in turn["ranks"]:
                continue
            column.prepare(turn["batch"])
            cpu = time.process_time()
            if turn["mode"] == "layers":
                done = {"layers": column.layers()}  # type: ignore[attr-defined]
            else:
                done = {"times": column.steps(turn["mode"], turn["steps"])}
            _say(report, {"turn": turn["number"], **done, "cpu": time.process_time() - cpu})
    column.close()
    _say(report, {"closed": True})


def _bind(rank: int, cores: int) -> None:
    """Keep this process to so many cores, each rank to its own."""
    own = sorted(os.sched_getaffinity(0))[rank * cores : (rank + 1) * cores]
    for thread in os.listdir("/proc/self/task"):  # whoever is started later inherits it
        os.sched_setaffinity(int(thread), own)


def _turns(folder: Path) -> Iterator[dict[str, Any]]:
    """The turns, as they come; ends when one says so, and ends the process when the driver is gone."""
    driver, last = Path("/proc") / os.environ["BENCHMARKS_DRIVER"], 0
    while True:
        try:
            turn = json.loads((folder / "turn").read_text())
        except FileNotFoundError:
            turn = {"number": 0}
        if turn.get("end"):
            return
        if turn["number"] > last:
            last = turn["number"]
            yield turn
        elif not folder.exists() or not driver.exists():
            os._exit(1)
        else:
            time.sleep(_POLL)


def _say(report: Path, line: dict[str, Any]) -> None:
    with report.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _column(kind: str, model: shapes.Shape, threads: int) -> Column:
    if kind == "ddp":
        from benchmarks.ddp import Ddp

        return Ddp(model, threads)
    from benchmarks import columns

    made: Column = {"keras": columns.Keras, "mpipipe": columns.Mpipipe, "horovod": columns.Horovod}[kind](
        model, threads
    )
    return made


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["keras", "mpipipe", "horovod", "ddp"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=shapes.NAMES, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cores", type=int, default=0, help="cores of this rank alone; 0: shares all with all")
    options = parser.parse_args()
    model = shapes.Shape(options.model, options.size, options.seconds)
    column = _column(options.kind, model, options.threads)
    if options.cores:
        _bind(column.rank, options.cores)
    run(column, options.folder)


if __name__ == "__main__":
    main()
