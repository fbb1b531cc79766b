"""The phases of a bucket's way in a step, from the marks, and rows in which they do not cover each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mpipipe.timeline.run import Timeline

Phase: TypeAlias = Literal[
    # On a client:
    "wait to send",  # from the gradient's being computed until its first piece is handed to the network
    "send",  # until its last piece is at the server
    "at the server",  # until the server has updated the first piece: it waits for other clients, is summed and updated
    "receive",  # from then on until the last piece of the new weights is in
    "assign",  # until the variables hold them
    # On the server:
    "gather",  # from the first client's first piece until the last piece has been summed
    "update",  # from the first piece's having been summed until the last piece has been updated
    "broadcast",  # from the first piece's having been updated until the last one is at the last client
]


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a bucket in a step, in seconds."""

    phase: Phase
    bucket: int
    step: int
    start: float
    end: float


def spans(timeline: Timeline, rank: int, bucket: int, step: int) -> list[Span]:
    """The phases of a bucket in a step as one rank saw them; those that took no time are left out."""
    owner = timeline.owners.get(bucket)
    points: list[tuple[Phase, float | None, float | None]]
    if rank == owner:
        summed = timeline.first(rank, "reduced", bucket, step)
        updated = timeline.first(rank, "updated", bucket, step)
        points = [
            ("gather", timeline.first(rank, "received", bucket, step), timeline.last(rank, "reduced", bucket, step)),
            ("update", summed, timeline.last(rank, "updated", bucket, step)),
            ("broadcast", updated, timeline.last(rank, "broadcast", bucket, step)),
        ]
    else:
        started = timeline.first(rank, "started", bucket, step)
        sent = timeline.last(rank, "sent", bucket, step)
        # Only the server knows when the new weights set out. One piece's way would have no length without it.
        leaves = timeline.first(owner, "updated", bucket, step) if owner is not None else None
        if leaves is None:
            leaves = timeline.first(rank, "received", bucket, step)
        arrived = timeline.last(rank, "received", bucket, step)
        points = [
            ("wait to send", timeline.first(rank, "ready", bucket, step), started),
            ("send", started, sent),
            ("at the server", sent, leaves),
            ("receive", leaves, arrived),
            ("assign", arrived, timeline.last(rank, "assigned", bucket, step)),
        ]
    return [
        Span(phase, bucket, step, start, end)
        for phase, start, end in points
        if start is not None and end is not None and start < end
    ]


def lanes(row: Iterable[Span]) -> list[tuple[int, Span]]:
    """Each span with the number of a lane in which it covers no other, from 0; as few lanes as possible."""
    ends: list[float] = []
    placed = []
    for span in sorted(row, key=lambda span: (span.start, span.end)):
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane:] = [span.end, *ends[lane + 1 :]]
        placed.append((lane, span))
    return placed


def clusters(row: Iterable[Span]) -> list[list[Span]]:
    """The spans in groups that do not cover each other, in the order of time."""
    groups: list[list[Span]] = []
    end = float("-inf")
    for span in sorted(row, key=lambda span: (span.start, span.end)):
        if span.start >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span.end)
    return groups
