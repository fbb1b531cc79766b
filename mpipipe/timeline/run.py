"""A run's marks, on one clock, and one optimizer's part of them by what one wants to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpipipe.errors import MpipipeError
from mpipipe.trace import Kind, Mark


class TimelineError(MpipipeError):
    """A file that holds no timeline, or a timeline that does not hold what was asked for."""


@dataclass(frozen=True)
class Run:
    """All marks of a run.

    Attributes:
        marks: of each rank, in the order of time; in seconds on a clock that all ranks share.
        sessions: of each optimizer that was described, its buckets' names and their bytes.
    """

    marks: Mapping[int, Sequence[Mark]]
    sessions: Mapping[int, tuple[Sequence[str], Sequence[int]]]

    def roles(self, rank: int) -> tuple[str, ...]:
        """What a rank did: ``server``, ``client``, both or nothing."""
        kinds = {mark.kind for mark in self.marks[rank]}
        server, client = kinds & {"reduced", "updated", "broadcast"}, kinds & {"step", "ready", "sent"}
        return ("server",) * bool(server) + ("client",) * bool(client)

    def title(self, rank: int) -> str:
        """A rank's name for people, such as ``rank 1 (client)``."""
        roles = " and ".join(self.roles(rank))
        return f"rank {rank} ({roles})" if roles else f"rank {rank}"

    @cached_property
    def timelines(self) -> Mapping[int, Timeline]:
        """The marks by optimizer."""
        numbers = {mark.session for marks in self.marks.values() for mark in marks}
        return {number: Timeline(self, number) for number in sorted(numbers)}

    def timeline(self, session: int) -> Timeline:
        """One optimizer's marks.

        Raises:
            TimelineError: there are none.
        """
        if session not in self.timelines:
            known = ", ".join(str(number) for number in self.timelines) or "none"
            raise TimelineError(f"it has no marks of optimizer {session} (there are: {known})")
        return self.timelines[session]


class Timeline:
    """One optimizer's marks.

    Attributes:
        clients: the ranks that computed gradients.
        owners: of each bucket, the rank that updated it.
        buckets: those that there are marks of, in the order of the forward pass.
    """

    def __init__(self, run: Run, number: int) -> None:
        self._names, self._nbytes = run.sessions.get(number, ((), ()))
        self._marks: dict[tuple[int, Kind, int, int], list[Mark]] = {}
        self._steps: dict[int, set[int]] = {}
        self._touched: dict[tuple[int, int], set[int]] = {}
        self.owners: dict[int, int] = {}
        buckets = set()
        for rank, marks in run.marks.items():
            for mark in marks:
                if mark.session != number:
                    continue
                self._marks.setdefault((rank, mark.kind, mark.bucket, mark.step), []).append(mark)
                self._touched.setdefault((rank, mark.bucket), set()).add(mark.step)
                buckets.add(mark.bucket)
                if mark.kind == "ready":
                    self._steps.setdefault(rank, set()).add(mark.step)
                elif mark.kind in ("reduced", "updated"):
                    self.owners[mark.bucket] = rank
        self.buckets = sorted(buckets - {-1})
        self.clients = sorted(self._steps)

    @property
    def servers(self) -> list[int]:
        """The ranks that updated a bucket."""
        return sorted(set(self.owners.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets; 0 where nobody has said."""
        return sum(self._nbytes)

    def name(self, bucket: int) -> str:
        """What a bucket is called."""
        return self._names[bucket] if bucket < len(self._names) else f"bucket {bucket}"

    def steps(self, client: int) -> list[int]:
        """The steps in which a client computed gradients."""
        return sorted(self._steps.get(client, ()))

    def steps_of(self, rank: int, bucket: int) -> list[int]:
        """The steps in which something happened to a bucket on a rank."""
        return sorted(self._touched.get((rank, bucket), ()))

    def marks(self, rank: int, kind: Kind, bucket: int, step: int) -> Sequence[Mark]:
        """What happened to all pieces of a bucket in a step on a rank, in the order of time."""
        return self._marks.get((rank, kind, bucket, step), ())

    def first(self, rank: int, kind: Kind, bucket: int, step: int) -> float | None:
        """When the first piece had it happen, or None."""
        marks = self.marks(rank, kind, bucket, step)
        return marks[0].time if marks else None

    def last(self, rank: int, kind: Kind, bucket: int, step: int) -> float | None:
        """When the last piece had it happen, or None."""
        marks = self.marks(rank, kind, bucket, step)
        return marks[-1].time if marks else None

    def of_piece(self, rank: int, kind: Kind, bucket: int, step: int, piece: int) -> Sequence[Mark]:
        """The marks of a piece; where there are none, those of its bucket."""
        marks = self.marks(rank, kind, bucket, step)
        return [mark for mark in marks if mark.piece == piece] or marks

    def update_of(self, bucket: int, step: int, piece: int) -> float | None:
        """When the server's optimizer had updated a piece, or None.

        An update may cover several pieces, one after the other, and is marked with the first of them. Where it is
        marked with none, it is the first update after the piece had been summed.
        """
        owner = self.owners.get(bucket)
        if owner is None:
            return None
        updates = self.marks(owner, "updated", bucket, step)
        covering = [mark for mark in updates if 0 <= mark.piece <= piece]
        if covering:
            return max(covering, key=lambda mark: mark.piece).time
        summed = self.of_piece(owner, "reduced", bucket, step, piece)
        later = [mark.time for mark in updates if summed and mark.time >= summed[-1].time]
        return later[0] if later else self.last(owner, "updated", bucket, step)
