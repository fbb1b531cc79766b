"""Runs one row: starts all its columns, finds the batch size, and lets the columns take turns."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import hosts, shapes
from benchmarks.limit import fluid_step, straight_line, wire_seconds
from benchmarks.rows import Row

# Steps at the start of each turn that are not counted: they fill the pipeline and the caches.
_UNCOUNTED = 2
_READY, _TURN = 600.0, 300.0  # seconds


@dataclass(frozen=True)
class Settings:
    """What is the same in all rows.

    Attributes:
        mpich: prefix of MPICH.
        horovod: a Python that has Horovod, or none.
        torch: a Python that has torch, or none.
        rounds: how many turns each column gets.
        steps: counted steps of a turn.
        columns: the columns that are wanted, or none for all.
    """

    mpich: Path
    horovod: str = ""
    torch: str = ""
    rounds: int = 3
    steps: int = 4
    columns: Sequence[str] = ()


@dataclass
class Team:
    """The ranks of one job that serves one or more columns."""

    name: str
    ranks: int
    job: hosts.Job
    folder: Path
    pids: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    # Processor seconds that the ranks and that the whole machine have spent in the last turn, and its seconds.
    spent: tuple[float, float, float] = (0.0, 0.0, 1.0)
    _number: int = 0
    _running: bool = True

    def wait_ready(self) -> None:
        """Wait until every rank has built its model."""
        ready = self._collect(range(self.ranks), lambda line: line.get("ready", False), _READY)
        self.pids = [line["pid"] for line in ready.values()]
        self.facts = {key: value for key, value in ready[0].items() if key not in ("ready", "rank", "pid")}

    def turn(self, mode: str, steps: int, batch: int, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Let some ranks do steps; returns what each of them reports."""
        self.signal(signal.SIGCONT)
        self._number += 1
        number = self._number
        before = self._processor_seconds()
        self._write({"number": number, "mode": mode, "steps": steps, "batch": batch, "ranks": list(ranks)})
        reports = self._collect(ranks, lambda line: line.get("turn") == number, _TURN)
        own, machine, seconds = (after - then for after, then in zip(self._processor_seconds(), before, strict=True))
        self.spent = own, machine, seconds
        self.signal(signal.SIGSTOP)
        return reports

    def _processor_seconds(self) -> tuple[float, float, float]:
        own = sum(_ticks(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]) for pid in self.pids)
        # user, nice, system, idle, iowait, irq, softirq, steal
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        return own, _ticks(fields[:3] + fields[5:]), time.monotonic()

    def signal(self, number: int) -> None:
        """Stop (between turns, so that nothing of this team takes processor time) or continue all ranks."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                raise RuntimeError(f"a rank has ended:\n{self.job.tail()}") from None

    def end(self) -> None:
        """Have all ranks leave in an orderly way."""
        self.signal(signal.SIGCONT)
        self._write({"number": self._number + 1, "end": True})
        self.job.wait(60)

    def _write(self, turn: dict[str, Any]) -> None:
        new = self.folder / "turn.new"
        new.write_text(json.dumps(turn))
        new.rename(self.folder / "turn")

    def _collect(
        self, ranks: Sequence[int], wanted: Callable[[dict[str, Any]], bool], timeout: float
    ) -> dict[int, dict[str, Any]]:
        end = time.monotonic() + timeout
        found: dict[int, dict[str, Any]] = {}
        read: dict[int, int] = {}  # bytes of each rank's file when it was last read: a look that costs little
        while len(found) < len(ranks):
            if self.job.returncode or not self.job.running or time.monotonic() > end:
                self.job.wait(0)
                raise RuntimeError(f"{self.name} ended before its time:\n{self.job.tail()}")
            for rank in ranks:
                file = self.folder / f"rank-{rank}.jsonl"
                if rank in found or not file.exists() or file.stat().st_size == read.get(rank):
                    continue
                read[rank] = file.stat().st_size
                # What follows the last newline is a line that is still being written, or nothing.
                lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
                found.update((rank, line) for line in lines if wanted(line))
            time.sleep(0.02)
        return found


def _ticks(fields: Sequence[str]) -> float:
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Column:
    """What is measured in turns.

    Attributes:
        title: its name in the table.
        team: whose ranks do it.
        mode: what they do.
        ranks: which of them take part in the steps.
        who: "server" or "all", whose link is the limit; "" for columns that do not communicate.
        computing: the column that has this one's computing time.
    """

    title: str
    team: str
    mode: str
    ranks: range
    who: str = ""
    computing: str = ""


def columns(row: Row) -> list[Column]:
    """All columns of a row; those whose team is not there are left out by :func:`run`."""
    clients, everyone = range(1, row.hosts), range(row.hosts)
    return [
        Column("computing", "keras", "computing", clients),
        Column("computing, all ranks", "keras", "computing", everyone),
        Column("Keras alone", "keras", "computing", range(1, 2), "", "Keras alone"),
        Column("mpipipe", "mpipipe", "training", clients, "server", "computing"),
        Column("with a timeline", "timeline", "training", clients, "server", "computing"),
        Column("straight line", "straight", "training", clients, "server", "computing"),
        Column("mpi4py all-reduce", "keras", "allreduce", everyone, "all", "computing, all ranks"),
        Column("Horovod computing", "horovod", "computing", everyone),
        Column("Horovod as it comes", "horovod", "training", everyone, "all", "Horovod computing"),
        Column("Horovod, same MPI", "horovod-same", "training", everyone, "all", "Horovod computing"),
        Column("DDP computing", "ddp", "computing", everyone),
        Column("DDP Gloo", "ddp", "training", everyone, "all", "DDP computing"),
    ]


def run(row: Row, settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure one row.

    Returns:
        All that is known of it: the row, the link's rate, sizes, limits, and for each column every counted step.
        "others": cores that were busy with something else while one process trained alone.
    """
    with hosts.place(row.hosts, row.rate) as place:
        rate = link_rate(place)
        shape = shapes.shape(row.model, row.weight_bytes(rate))
        if row.model == "emulated":
            # Its batch is one, and its computing time is said, not found.
            shape = replace(shape, seconds=row.computing(row.clients * row.weight_bytes(rate) / rate))
        say(f"{row.title}: link {rate / 1e6:.1f} MB/s, {shape.name} of size {shape.size}")
        wanted = _wanted(row, settings)
        teams = _start(row, settings, place, shape, {column.team for column in wanted})
        failed = _ready(teams, say)
        sizes = teams["keras"].facts["layer_bytes"]
        wire = sum(wire_seconds(sizes, rate, row.clients))
        batch = 1 if shape.seconds else _find_batch(teams["keras"], row, row.computing(wire), say)
        shares = _layer_shares(teams["keras"], batch)
        steps, spent = _take_turns([c for c in wanted if c.team in teams], teams, batch, settings, failed, say)
        for team in teams.values():
            try:
                team.end()
            except RuntimeError as error:
                failed[team.name] = f"at the end: {error}"
        result = {
            "row": vars(row) | {"clients": row.clients, "ratio_wanted": row.ratio},
            "title": row.title,
            "rate": rate,
            "batch": batch,
            "size": shape.size,
            "bytes": sum(sizes),
            "layer_bytes": sizes,
            "layer_shares": shares,
            "facts": {name: team.facts for name, team in teams.items()},
            "failed": failed,
        }
        result |= summary(row, rate, sizes, shares, steps)
        for title, turns in spent.items():
            if title in result["columns"]:
                own, busy = (statistics.median(values) for values in zip(*turns, strict=True))
                result["columns"][title] |= {"cpu": own, "busy": busy, "cpu_of_turns": turns}
        alone = result["columns"]["Keras alone"]
        result["others"] = max(0.0, alone["busy"] - alone["cpu"] / alone["median"])
        return result


def summary(
    row: Row,
    rate: float,
    sizes: Sequence[float],
    shares: tuple[Sequence[float], Sequence[float]],
    steps: dict[str, list[float]],
) -> dict[str, Any]:
    """Limits and efficiencies from each column's steps.

    Args:
        row: the row.
        rate: bytes per second of a link and direction.
        sizes: bytes of each layer.
        shares: each layer's share of a step's computing, forward and backward.
        steps: seconds of the counted steps of each column.
    """
    median = {title: statistics.median(values) for title, values in steps.items()}
    wires = {who: wire_seconds(sizes, rate, row.clients if who == "server" else row.hosts, who) for who in _WHO}
    result: dict[str, Any] = {"wire": {who: sum(wire) for who, wire in wires.items()}, "columns": {}}
    for column in columns(row):
        if column.title not in steps:
            continue
        values = steps[column.title]
        entry: dict[str, Any] = {"steps": values, "min": min(values), "max": max(values)}
        entry["median"] = median[column.title]
        if column.who and column.computing in median:
            forward, backward = ([share * median[column.computing] for share in part] for part in shares)
            entry["computing"] = median[column.computing]
            entry["limit"] = fluid_step(forward, backward, wires[column.who])
            entry["straight"] = straight_line(forward, backward, wires[column.who])
            entry["efficiency"] = entry["limit"] / entry["median"]
        if column.who and "straight line" in median:
            entry["faster"] = median["straight line"] / entry["median"]
        result["columns"][column.title] = entry
    result["computing"] = median["computing"]
    result["ratio"] = result["wire"]["server"] / median["computing"]
    return result


_WHO = ("server", "all")


def link_rate(place: hosts.Place) -> float:
    """Bytes per second of a plain TCP stream between two hosts; for shared memory, of a copy by one core."""
    if place.rate is None:
        source = bytearray(64 << 20)
        target = bytearray(64 << 20)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            target[:] = source
            times.append(time.perf_counter() - begin)
        return len(source) / min(times)
    script = str(Path(__file__).with_name("stream.py"))
    job = place.start(hosts.Launch("none"), 2, [sys.executable, script, "2"], name="stream")
    job.wait(30)
    return float(job.log.read_text())


def threads_of(row: Row) -> int:
    """Threads of a rank: its share of the cores."""
    return max(1, (os.cpu_count() or 1) // row.hosts)


def cores_of(row: Row) -> int:
    """Cores that each rank has to itself, or 0 where all share all.

    On shared memory, where there are enough: a client then has the cores that plain Keras has, and the server its own.
    """
    return (os.cpu_count() or 1) // row.hosts if row.rate is None else 0


def _wanted(row: Row, settings: Settings) -> list[Column]:
    """The columns that were asked for and can be had, with the computing times that they need."""
    absent = set() if settings.horovod else {"horovod", "horovod-same"}
    absent |= set() if settings.torch else {"ddp"}
    names = tuple(name.lower() for name in settings.columns) or ("",)
    there = [column for column in columns(row) if column.team not in absent]
    chosen = {column.title for column in there if column.who and column.title.lower().startswith(names)}
    needed = {column.computing for column in there if column.title in chosen}
    always = {"computing", "computing, all ranks", "Keras alone"}
    return [column for column in there if column.title in chosen | needed | always]


def _start(row: Row, settings: Settings, place: hosts.Place, shape: shapes.Shape, names: set[str]) -> dict[str, Team]:
    same = hosts.mpipipes_settings()
    mpi = hosts.openmpi() if row.mpi == "openmpi" else hosts.mpich(settings.mpich)
    launches: dict[str, tuple[str, str, hosts.Launch, dict[str, str]]] = {
        "keras": ("keras", sys.executable, mpi, same),
        "mpipipe": ("mpipipe", sys.executable, mpi, {}),
        "timeline": ("mpipipe", sys.executable, mpi, {"MPIPIPE_TIMELINE": str(place.folder / "of-the-run")}),
        "straight": ("mpipipe", sys.executable, mpi, {"MPIPIPE_OVERLAP": "0"}),
        "horovod": ("horovod", settings.horovod, hosts.openmpi(settings.horovod), {}),
        "horovod-same": ("horovod", settings.horovod, hosts.openmpi(settings.horovod), same),
        "ddp": ("ddp", settings.torch, hosts.Launch("none"), {"MASTER_PORT": "47002"}),
    }
    teams = {}
    threads = str(threads_of(row))
    for name, (kind, python, launch, environ) in launches.items():
        if name not in names:
            continue
        folder = place.folder / name
        folder.mkdir()
        command = [python, "-m", "benchmarks.worker", kind, str(folder), "--threads", threads]
        command += ["--model", shape.name, "--size", str(shape.size), "--seconds", str(shape.seconds)]
        command += ["--cores", str(cores_of(row))]
        environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": threads, **environ}
        teams[name] = Team(name, row.hosts, place.start(launch, row.hosts, command, environ, name), folder)
    return teams


def _ready(teams: dict[str, Team], say: Callable[[str], None]) -> dict[str, str]:
    """Wait for all teams and stop them; returns why those that are not there have failed."""
    failed = {}
    for name, team in list(teams.items()):
        try:
            team.wait_ready()
            team.signal(signal.SIGSTOP)
        except RuntimeError as error:
            if name == "keras":
                raise
            failed[name] = str(error)
            say(f"  {name} is left out: {error}")
            team.job.stop()
            del teams[name]
    return failed


def _find_batch(team: Team, row: Row, seconds: float, say: Callable[[str], None]) -> int:
    """The batch size at which all clients, computing at once, take so many seconds a step."""
    seen: dict[int, float] = {}
    batch = 32
    for _ in range(6):
        reports = team.turn("computing", 4, batch, range(1, row.hosts))
        seen[batch] = statistics.median(_steps(reports, 1))
        if abs(seen[batch] / seconds - 1) < 0.05:
            break
        batch = min(max(1, round(_where(seen, seconds)), batch // 16), batch * 16)
        if batch in seen:
            break
    best = min(seen, key=lambda size: abs(seen[size] - seconds))
    say(f"  batch {best}: {seen[best]:.3f} s of computing ({seconds:.3f} wanted)")
    return best


def _where(seen: dict[int, float], seconds: float) -> float:
    """The batch size that takes so many seconds: a step takes some time, and so much more for each sample."""
    if len(seen) > 1:
        slope, offset = statistics.linear_regression(list(seen), list(seen.values()))
        if slope > 0 and offset > 0:
            return (seconds - offset) / slope
    return seconds * sum(seen) / sum(seen.values())


def _layer_shares(team: Team, batch: int) -> tuple[list[float], list[float]]:
    """Each layer's share of a step's computing, forward and backward, from one rank timing each layer alone."""
    forward, backward = team.turn("layers", 1, batch, [1])[1]["layers"]
    total = sum(forward) + sum(backward)
    return [seconds / total for seconds in forward], [seconds / total for seconds in backward]


def _take_turns(
    wanted: list[Column],
    teams: dict[str, Team],
    batch: int,
    settings: Settings,
    failed: dict[str, str],
    say: Callable[[str], None],
) -> tuple[dict[str, list[float]], dict[str, list[tuple[float, float]]]]:
    """All columns in turns, in an order that changes from round to round; the first round warms up.

    Returns:
        Of each column the seconds of every counted step; and of every turn its ranks' processor seconds a step, and how
        many cores of the machine were busy.
    """
    steps: dict[str, list[float]] = {}
    spent: dict[str, list[tuple[float, float]]] = {}
    order = random.Random(1)
    for number in range(settings.rounds + 1):
        for column in order.sample(wanted, len(wanted)):
            if column.team not in teams:
                continue
            try:
                count = _UNCOUNTED + (settings.steps if number else 1)
                reports = teams[column.team].turn(column.mode, count, batch, column.ranks)
            except RuntimeError as error:
                failed[column.team] = str(error)
                say(f"  {column.title} has failed: {str(error)[-1000:]}")
                teams.pop(column.team).job.stop()
                steps.pop(column.title, None)
                continue
            if number:
                steps.setdefault(column.title, []).extend(_steps(reports, _UNCOUNTED))
                own, machine, seconds = teams[column.team].spent
                spent.setdefault(column.title, []).append((own / count, machine / seconds))
    return steps, spent


def _steps(reports: dict[int, dict[str, Any]], skip: int) -> list[float]:
    """Seconds of each counted step, the mean over ranks."""
    each = [[after - before for before, after in pairwise(report["times"])] for report in reports.values()]
    return [statistics.fmean(values) for values in zip(*each, strict=True)][skip:]
