"""The file of a timeline: Chrome's trace events for the eye, and all marks for :mod:`mpipipe.timeline.analysis`.

The format is the JSON object form of the Trace Event Format (Google, "Trace Event Format", section "JSON Object
Format"): ``traceEvents`` holds metadata ("M") that names processes and threads, and complete events ("X") with a start
and a duration in microseconds; keys that a viewer does not know, here ``mpipipe``, it skips. Complete events of one
thread may lie within each other, but not overlap; Perfetto wants thread numbers that are unique in the whole file and
other than 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpipipe.timeline.clients import client_steps
from mpipipe.timeline.run import Run, Timeline, TimelineError
from mpipipe.timeline.spans import lanes, spans
from mpipipe.trace import KINDS, Mark

FILE = "trace.json"
_FORMAT = 1
_LARGEST = 2**53  # the numbers up to which JSON readers agree
_compact = json.JSONEncoder(separators=(",", ":")).encode


def write(folder: Path, ranks: Mapping[int, tuple[Mapping[str, Any], float]]) -> Path:
    """Write a run's timeline; see :func:`mpipipe.trace.write`."""
    data = _merge(ranks)
    run = _run(data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(_compact(event) for event in _events(run)))
        file.write('\n],"mpipipe":')
        file.write(_compact(data))
        file.write("}\n")
    return path


def read(path: Path) -> Run:
    """Read the marks of a timeline.

    Raises:
        TimelineError: there is no such file, or no timeline in it; says why.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise TimelineError(error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise TimelineError(f"it is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("mpipipe"), dict):
        raise TimelineError("it was not written by mpipipe: it has no object `mpipipe`")
    data = content["mpipipe"]
    if type(data.get("format")) is not int or data["format"] != _FORMAT:  # to Python True is 1 too
        raise TimelineError(f"its format is {_short(data.get('format'))}, and this version of mpipipe reads {_FORMAT}")
    return _run(data)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")  # NaN and the infinities, which Python would read


def _merge(ranks: Mapping[int, tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """What the ranks exported, with all times in microseconds after the first mark of the run, on one clock."""
    origins = {rank: export["origin"] + round(offset * 1e6) for rank, (export, offset) in ranks.items()}
    first = min((origins[rank] for rank, (export, _) in ranks.items() if export["marks"]), default=0)
    sessions: dict[str, Any] = {}
    for rank in sorted(ranks):  # the server's names before those that a client gave to the same layers
        for number, described in ranks[rank][0]["sessions"].items():
            sessions.setdefault(number, described)
    return {
        "format": _FORMAT,
        "kinds": KINDS,
        "sessions": sessions,
        "ranks": {
            str(rank): [[time + origins[rank] - first, *rest] for time, *rest in ranks[rank][0]["marks"]]
            for rank in sorted(ranks)
        },
    }


def _run(data: Mapping[str, Any]) -> Run:
    """The run that the part of a file which is ours tells of."""
    kinds = data.get("kinds")
    if not isinstance(kinds, list | tuple) or not all(kind in KINDS for kind in kinds):
        raise TimelineError(f"`kinds` is {_short(kinds)}, which is no list of kinds of marks")
    ranks, sessions = data.get("ranks"), data.get("sessions")
    if not isinstance(ranks, dict) or not isinstance(sessions, dict):
        raise TimelineError("`ranks` or `sessions` is missing, or is not an object")
    described = {_number(number, "session"): _session(number, session) for number, session in sessions.items()}
    marks = {}
    for name, rows in ranks.items():
        if not isinstance(rows, list):
            raise TimelineError(f"rank {_short(name)} has {_short(rows)} and not a list of marks")
        rank = _number(name, "rank")
        marks[rank] = sorted((_mark(row, kinds, rank) for row in rows), key=lambda mark: mark.time)
    return Run(marks, described)


def _number(name: str, what: str) -> int:
    # As it is written, for of the marks of ranks 1 and 01 half would be lost.
    if not (name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name))):
        raise TimelineError(f"{what} {_short(name)} is not a number")
    return int(name)


def _session(number: str, session: Any) -> tuple[Sequence[str], Sequence[int]]:
    layers = session.get("layers") if isinstance(session, dict) else None
    nbytes = session.get("nbytes") if isinstance(session, dict) else None
    if (
        isinstance(layers, list)
        and isinstance(nbytes, list)
        and len(layers) == len(nbytes)
        and all(isinstance(layer, str) for layer in layers)
        and all(_is_count(size) for size in nbytes)
    ):
        # What cannot be printed or drawn, such as half a surrogate pair, would end whoever tries.
        return ["".join(c if c.isprintable() else "?" for c in layer) for layer in layers], nbytes
    raise TimelineError(f"session {_short(number)} has no `layers` and `nbytes` of the same length")


def _mark(row: Any, kinds: Sequence[Any], rank: int) -> Mark:
    if isinstance(row, list) and 4 <= len(row) <= 7 and all(map(_is_integer, row)):
        time, kind, bucket, step, peer, piece, session = row + [-1, -1, 0][len(row) - 4 :]
        if 0 <= kind < len(kinds) and min(time, session) >= 0 and min(bucket, step, peer, piece) >= -1:
            if (bucket == -1) == (kinds[kind] in ("step", "loss")):
                return Mark(time / 1e6, kinds[kind], bucket, step, peer, piece, session)
    raise TimelineError(f"rank {rank} has {_short(row)}, which is no mark")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST  # a bool is no number of anything


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _events(run: Run) -> Iterator[dict[str, Any]]:
    """Chrome's events: a process for each rank; in it a thread for the steps, and one or more for each layer."""
    thread = max(run.marks, default=0) + 1  # the number last given; those below are processes
    for rank in sorted(run.marks):
        process = rank + 1
        yield _metadata("process_name", process, name=run.title(rank))
        yield _metadata("process_sort_index", process, sort_index=rank)
        for number, timeline in run.timelines.items():
            prefix = f"optimizer {number}: " if len(run.timelines) > 1 else ""
            for name, complete in _rows(timeline, rank):
                thread += 1
                yield _metadata("thread_name", process, thread, name=prefix + name)
                yield _metadata("thread_sort_index", process, thread, sort_index=thread)
                for event in complete:
                    yield {**event, "ph": "X", "pid": process, "tid": thread}


def _metadata(what: str, process: int, thread: int | None = None, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, **({} if thread is None else {"tid": thread}), "args": args}


def _rows(timeline: Timeline, rank: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Names and complete events of a rank's threads, in order."""
    computing: list[dict[str, Any]] = []
    before = float("-inf")
    for step, one in client_steps(timeline, rank).items():
        # A graph may begin a step before it has ended the one before.
        computing += _complete("forward", max(one.start, before), one.loss, step=step)
        for wait in one.waits:
            why = {f"{reason.cause}, rank {reason.rank}": _microseconds(reason.seconds) for reason in wait.reasons}
            name = f"wait for {timeline.name(wait.bucket)}"
            computing += _complete(name, max(wait.start, before), wait.end, step=step, why=why)
        computing += _complete("backward", max(one.loss, before), one.end, step=step)
        before = max(one.end, before)
    if computing:
        yield "step", computing
    for bucket in timeline.buckets:
        found = [span for step in timeline.steps_of(rank, bucket) for span in spans(timeline, rank, bucket, step)]
        lanes_: dict[int, list[dict[str, Any]]] = {}
        for lane, span in lanes(found):
            events = _complete(span.phase, span.start, span.end, step=span.step)
            lanes_.setdefault(lane, []).extend(events)
        for lane, events in sorted(lanes_.items()):
            yield timeline.name(bucket) + (f" ({lane + 1})" if lane else ""), events


def _complete(name: str, start: float, end: float, **args: Any) -> list[dict[str, Any]]:
    """A complete event; none where it would take no time."""
    begins, ends = _microseconds(start), _microseconds(end)
    if begins >= ends:
        return []
    return [{"name": name, "ts": begins, "dur": ends - begins, "args": args}]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
