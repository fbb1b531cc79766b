"""What a client did in each step: when it computed, when it waited for new weights, and where those were meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Literal, TypeAlias, get_args

from mpipipe.timeline.intervals import Interval, difference
from mpipipe.timeline.run import Timeline

Cause: TypeAlias = Literal[
    "own way in",  # this client's own gradient is on its way to the server
    "backward",  # another client has not computed its gradient yet
    "way in",  # another client's gradient is on its way to the server
    "server",  # all gradients are in; the server sums them and updates the weights
    "way out",  # the new weights are on their way to this client
    "assign",  # they are in, but the variables do not hold them yet
    "unknown",  # there are no marks of it
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

# A layer's part of the forward pass is taken to be at least this part of an average layer's.
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Reason:
    """Seconds that a client waited, why, and for which rank."""

    cause: Cause
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which a forward pass stood still because a bucket's new weights were not there."""

    bucket: int
    start: float
    end: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class ClientStep:
    """One training step of a client: forward from ``start`` to ``loss``, backward from there to ``end``."""

    start: float
    loss: float
    end: float
    waits: tuple[Wait, ...]

    @property
    def computing(self) -> list[Interval]:
        """The seconds in which the client computed."""
        return difference([(self.start, self.end)], [(wait.start, wait.end) for wait in self.waits])

    @property
    def waiting(self) -> float:
        """For how many seconds its forward pass stood still."""
        return sum(wait.end - wait.start for wait in self.waits)


def client_steps(timeline: Timeline, client: int) -> dict[int, ClientStep]:
    """A client's steps, by number; without those whose beginning is not known."""
    shares = _shares(timeline, client)
    steps: dict[int, ClientStep] = {}
    end: float | None = None
    for step in timeline.steps(client):
        ready = [mark.time for bucket in timeline.buckets for mark in timeline.marks(client, "ready", bucket, step)]
        start = timeline.first(client, "step", -1, step)
        # A loop that does not mark its steps begins one when it has ended the one before.
        start, end = end if start is None else start, max(ready)
        loss = timeline.last(client, "loss", -1, step)
        loss = min(ready) if loss is None else loss
        if start is not None and start <= loss <= end:
            steps[step] = ClientStep(start, loss, end, _waits(timeline, client, step, start, loss, shares))
    return steps


def _shares(timeline: Timeline, client: int) -> Mapping[int, float]:
    """About which part of the forward pass each bucket's layers take: their part of the backward pass."""
    gaps: dict[int, list[float]] = {}
    for step in timeline.steps(client):
        before = timeline.last(client, "loss", -1, step)
        firsts = ((timeline.first(client, "ready", bucket, step), bucket) for bucket in timeline.buckets)
        for ready, bucket in sorted((time, bucket) for time, bucket in firsts if time is not None):
            if before is not None:
                gaps.setdefault(bucket, []).append(max(0.0, ready - before))
            before = ready
    typical = {bucket: median(some) for bucket, some in gaps.items()}
    usual = fmean(typical.values()) if any(typical.values()) else 1.0
    return {bucket: max(typical.get(bucket, usual), _SMALLEST_SHARE * usual) for bucket in timeline.buckets}


def _waits(
    timeline: Timeline, client: int, step: int, start: float, loss: float, shares: Mapping[int, float]
) -> tuple[Wait, ...]:
    """When the forward pass of a step waited for the weights of the step before, and for which bucket's.

    How long the layers themselves took is not marked. But the forward pass goes through the layers in order, each can
    begin when its weights are there, and the last one ends at ``loss``: so, with each layer's share of the computing
    given, there is exactly one amount of computing that fits, the least of those that each bucket leaves time for.
    """
    arrived = _times(timeline, client, "received", step - 1)
    assigned = _times(timeline, client, "assigned", step - 1)
    buckets = sorted({*arrived, *assigned})
    if not buckets:
        return ()
    # Nobody waits for the network when all weights are in, however late a mark of their assignment is made.
    complete = max(arrived.values(), default=loss)
    there = {
        bucket: min(max(start, min(assigned[bucket] if bucket in assigned else arrived[bucket], complete)), loss)
        for bucket in buckets
    }
    parts = [shares[bucket] for bucket in buckets]
    remaining = list(accumulate(reversed(parts)))[::-1]  # of the forward pass, when it comes to each bucket
    forward = min((loss - there[bucket]) * remaining[0] / rest for bucket, rest in zip(buckets, remaining, strict=True))
    # Where no variable was assigned before the last bucket was in, that is the bucket which all have waited for.
    together = bool(arrived) and len(assigned) == len(buckets) and min(assigned.values()) >= complete
    waits, now = [], start
    for bucket in buckets:
        if there[bucket] > now:
            late = max(arrived, key=arrived.__getitem__) if together else bucket
            reasons = _reasons(timeline, client, late, step - 1, now, there[bucket])
            waits.append(Wait(late, now, there[bucket], reasons))
            now = there[bucket]
        now += forward * shares[bucket] / remaining[0]
    return tuple(waits)


def _times(timeline: Timeline, client: int, kind: Literal["received", "assigned"], step: int) -> dict[int, float]:
    """When each bucket of a client had it happen to its last piece."""
    times = {}
    for bucket in timeline.buckets:
        time = timeline.last(client, kind, bucket, step)
        if time is not None and client != timeline.owners.get(bucket):
            times[bucket] = time
    return times


def _reasons(timeline: Timeline, client: int, bucket: int, step: int, start: float, end: float) -> tuple[Reason, ...]:
    """Where the piece of a bucket that came last to a client was between two times."""
    reasons = []
    for cause, rank, until in _way(timeline, client, bucket, step):
        if until > start:
            reasons.append(Reason(cause, rank, min(until, end) - start))
            start = min(until, end)
        if start >= end:
            break
    return tuple(reasons)


def _way(timeline: Timeline, client: int, bucket: int, step: int) -> Sequence[tuple[Cause, int, float]]:
    """Where the piece of a bucket that came last to a client was, for which rank it waited there, and until when."""
    forever = float("inf")
    owner, received = timeline.owners.get(bucket), timeline.marks(client, "received", bucket, step)
    if owner is None or not received:
        return [("unknown", -1, forever)]
    last = received[-1]
    way: list[tuple[Cause, int, float]] = []
    gradients = timeline.of_piece(owner, "received", bucket, step, last.piece)
    own = [mark.time for mark in gradients if mark.peer == client]
    if own:
        way.append(("own way in", client, own[-1]))
    if gradients and gradients[-1].peer != client:
        sender = gradients[-1].peer
        computed = timeline.last(sender, "ready", bucket, step)
        if computed is not None:
            way.append(("backward", sender, computed))
        way.append(("way in", sender, gradients[-1].time))
    updated = timeline.update_of(bucket, step, last.piece)
    if updated is not None:
        way.append(("server", owner, updated))
    return [*way, ("way out", owner, last.time), ("assign", client, forever)]
