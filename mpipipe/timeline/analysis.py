"""A run in numbers: how much of the communication was hidden behind the computing, and who waited for whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mpipipe.timeline.clients import Cause, ClientStep, client_steps
from mpipipe.timeline.intervals import Interval, difference, intersection, length, near, union
from mpipipe.timeline.run import Run, Timeline, TimelineError

# Steps at the start of a run that are not counted: TensorFlow traces, allocates and tunes in them.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class ClientNumbers:
    """One client: median seconds of a step in each state, and what it waited for over all steps together."""

    rank: int
    computing: float
    waiting: float
    between: float
    causes: Mapping[tuple[Cause, int], float]  # seconds by cause and rank

    def share(self, cause: Cause) -> float:
        """The part of its waiting that had a cause."""
        seconds = sum(self.causes.values())
        return sum(part for (why, _), part in self.causes.items() if why == cause) / seconds if seconds else 0.0

    @property
    def mostly_for(self) -> tuple[int, float] | None:
        """The rank that it waited for longest, which may be itself or -1 for an unknown one, and in which part."""
        by_rank: dict[int, float] = {}
        for (_, rank), seconds in self.causes.items():
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
        if not any(by_rank.values()):
            return None
        rank = max(by_rank, key=by_rank.__getitem__)
        return rank, by_rank[rank] / sum(by_rank.values())


@dataclass(frozen=True, slots=True)
class ServerNumbers:
    """One server: median seconds of a step in each state, and how often and how much each client came last."""

    rank: int
    working: float
    gathering: float
    idle: float
    last: Mapping[int, Sequence[float]]  # by client: the seconds that the others had been there before it

    @property
    def mostly_for(self) -> tuple[int, float, float] | None:
        """The client that came last most often, in which part of the cases, and by how much in the median case."""
        if not self.last:
            return None
        client = max(self.last, key=lambda client: len(self.last[client]))
        cases = sum(len(late) for late in self.last.values())
        return client, len(self.last[client]) / cases, median(self.last[client])


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a timeline says of the steps that were counted; times are in seconds."""

    steps: Sequence[int]
    step_seconds: Mapping[int, float]
    hidden: Mapping[int, float]
    clients: Sequence[ClientNumbers]
    servers: Sequence[ServerNumbers]

    @property
    def median_step(self) -> int:
        """The counted step whose time is the median one, or next to it."""
        ordered = sorted(self.steps, key=lambda step: (self.step_seconds[step], step))
        return ordered[(len(ordered) - 1) // 2]


def analyse(run: Run, session: int = 0, only: int | None = None) -> Numbers:
    """One optimizer's numbers, of all steps after the first two or of one step only.

    A step counts where a client has begun another one after it, for its communication goes on into that one.

    Raises:
        TimelineError: no step counts, or not the one that was asked for.
    """
    timeline = run.timeline(session)
    steps = {client: client_steps(timeline, client) for client in timeline.clients}
    whole = sorted({step for own in steps.values() for step in own if step + 1 in own})
    if not whole:
        raise TimelineError("it has no complete step: the marks of two steps, one after the other, are needed")
    if only is not None and only not in whole:
        raise TimelineError(f"it has no complete step {only}: there are {whole[0]} to {whole[-1]}")
    counted = [only] if only is not None else [step for step in whole if step >= WARM_UP] or whole
    computing = {client: _computing(run, client) for client in timeline.clients}
    seconds: dict[int, float] = {}
    hidden: dict[int, float] = {}
    for step in counted:
        clients = [client for client, own in steps.items() if step in own and step + 1 in own]
        seconds[step] = fmean(steps[client][step + 1].start - steps[client][step].start for client in clients)
        under_way = behind = 0.0
        for client in clients:
            network = _under_way(timeline, client, step)
            if network:
                under_way += length(network)
                busy = near(computing[client], network[0][0], network[-1][1])
                behind += length(intersection(network, busy))
        if under_way:
            hidden[step] = behind / under_way
    by_client = [_client(client, own, counted) for client, own in steps.items()]
    by_server = [_server(timeline, server, counted) for server in timeline.servers]
    return Numbers(
        counted,
        seconds,
        hidden,
        [client for client in by_client if client is not None],
        [server for server in by_server if server is not None],
    )


def _computing(run: Run, client: int) -> list[Interval]:
    """The seconds in which a client computed, whichever optimizer's step it was."""
    own = [client_steps(timeline, client) for timeline in run.timelines.values()]
    return union(part for steps in own for step in steps.values() for part in step.computing)


def _under_way(timeline: Timeline, client: int, step: int) -> list[Interval]:
    """The seconds in which a bucket of a client was between its gradient's and its new weights' being there."""
    ways = []
    for bucket in timeline.buckets:
        start = timeline.first(client, "ready", bucket, step)
        end = timeline.last(client, "received", bucket, step)
        end = timeline.last(client, "assigned", bucket, step) if end is None else end
        if start is not None and end is not None:
            ways.append((start, end))
    return union(ways)


def _client(rank: int, steps: Mapping[int, ClientStep], counted: Sequence[int]) -> ClientNumbers | None:
    mine = [step for step in counted if step in steps and step + 1 in steps]
    if not mine:
        return None
    causes: dict[tuple[Cause, int], float] = {}
    for step in mine:
        for wait in steps[step].waits:
            for reason in wait.reasons:
                key = reason.cause, reason.rank
                causes[key] = causes.get(key, 0.0) + reason.seconds
    return ClientNumbers(
        rank,
        median(length(steps[step].computing) for step in mine),
        median(steps[step].waiting for step in mine),
        median(max(0.0, steps[step + 1].start - steps[step].end) for step in mine),
        causes,
    )


def _server(timeline: Timeline, rank: int, counted: Collection[int]) -> ServerNumbers | None:
    buckets = [bucket for bucket in timeline.buckets if timeline.owners.get(bucket) == rank]

    def begins(step: int) -> float | None:
        """When the first gradient of a step came in."""
        firsts = [timeline.first(rank, "received", bucket, step) for bucket in buckets]
        return min((first for first in firsts if first is not None), default=None)

    working, gathering, idle = [], [], []
    late: dict[int, list[float]] = {}
    for step in counted:
        start, end = begins(step), begins(step + 1)
        if start is None or end is None or end <= start:
            continue
        holds, works = [], []
        for bucket in buckets:
            pieces: dict[int, dict[int, float]] = {}
            for mark in timeline.marks(rank, "received", bucket, step):
                pieces.setdefault(mark.piece, {})[mark.peer] = mark.time
            for piece, clients in pieces.items():
                *before, (last, client) = sorted((time, client) for client, time in clients.items())
                if before:
                    late.setdefault(client, []).append(last - before[-1][0])
                updated = timeline.update_of(bucket, step, piece)
                if updated is not None:
                    holds.append((min(clients.values()), updated))
                    works.append((last, updated))
        window = [(start, end)]
        held = intersection(union(holds), window)
        worked = intersection(union(works), window)
        working.append(length(worked))
        gathering.append(length(difference(held, worked)))
        idle.append(length(difference(window, held)))
    if not working:
        return None
    return ServerNumbers(rank, median(working), median(gathering), median(idle), late)
