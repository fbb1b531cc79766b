"""The timeline: what happened to each bucket, and when.

Every rank has a :class:`Recorder`. With ``MPIPIPE_TIMELINE=DIR`` it keeps its marks, and at the end of the run those of
all ranks are written, on one clock, to ``DIR/trace.json``, which chrome://tracing and https://ui.perfetto.dev open.
``python -m mpipipe.trace DIR`` says in numbers and in a picture what was hidden behind the computing and who waited for
whom; see :mod:`mpipipe.timeline`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "step",  # client: the graph of a training step begins
    "loss",  # client: its forward pass is done
    "ready",  # client: a bucket's gradient has been computed
    "queued",  # client: it is in the send window
    "started",  # client: a piece of it has been handed to the network
    "sent",  # client: a piece of it has arrived at the server
    "received",  # server: a piece of a client's gradient is in (peer: the client); client: a piece of new weights is in
    "reduced",  # server: a piece has been summed over the clients
    "updated",  # server: one or more pieces have been updated by the optimizer
    "broadcast",  # server: a piece of new weights has arrived at a client (peer: the client)
    "assigned",  # client: the variables hold the new weights
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened on this rank.

    Attributes:
        time: seconds on this rank's monotonic clock.
        kind: what happened.
        bucket: to which bucket; -1 for ``step`` and ``loss``.
        step: in which step, from 0; -1 for weights that were there before the first.
        peer: the other rank, or -1 for none.
        piece: the piece (see :class:`mpipipe.protocol.plan.Piece`), the first one where several were updated together,
            or -1 for the whole bucket.
        session: the number of the optimizer.
    """

    time: float
    kind: Kind
    bucket: int
    step: int
    peer: int = -1
    piece: int = -1
    session: int = 0


class Recorder:
    """Collects marks where somebody wants them, and costs one attribute look-up where nobody does.

    Args:
        keep: whether to keep the marks, in about 150 bytes each.

    Attributes:
        active: whether marks are wanted.
    """

    def __init__(self, keep: bool) -> None:
        self.active = keep
        self._keep = keep
        # As tuples, for a Mark takes five times as long to make, and this is on the way of every message.
        self._kept: list[tuple[float, Kind, int, int, int, int, int]] = []
        self._listeners: tuple[Callable[[Mark], None], ...] = ()
        self._described: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    @property
    def marks(self) -> list[Mark]:
        """The marks that were kept, in the order in which they were made."""
        return [Mark(*kept) for kept in self._kept]

    def listen(self, listener: Callable[[Mark], None]) -> None:
        """Call ``listener(mark)`` for every mark from now on, on the thread on which it happens; be quick there."""
        self._listeners += (listener,)
        self.active = True

    def mark(self, kind: Kind, bucket: int, step: int, peer: int = -1, piece: int = -1, session: int = 0) -> None:
        """Note that something happened, now; from any thread. The arguments are those of :class:`Mark`."""
        if not self.active:
            return
        made = (time.monotonic(), kind, bucket, step, peer, piece, session)
        if self._keep:
            self._kept.append(made)
        for listener in self._listeners:
            listener(Mark(*made))

    def describe(self, session: int, layers: Sequence[str], nbytes: Sequence[int]) -> None:
        """Name an optimizer's buckets, in the order of the forward pass, and say how many bytes each has."""
        if len(layers) != len(nbytes):
            raise ValueError(f"{len(layers)} names but {len(nbytes)} sizes")
        self._described[session] = tuple(layers), tuple(nbytes)

    def export(self) -> dict[str, Any]:
        """This rank's part of the timeline, for :func:`write`: compact, and of types that JSON has.

        ``origin`` is a time in microseconds on this rank's monotonic clock; a mark is a list of its microseconds after
        that, the kind's place in :data:`KINDS`, the bucket, step, peer, piece and session, without defaults at the end.
        """
        kept = sorted(self._kept, key=lambda mark: mark[0])  # threads may have come in between a time and its append
        origin = round(kept[0][0] * 1e6) if kept else 0
        place = {kind: number for number, kind in enumerate(KINDS)}
        return {
            "origin": origin,
            "marks": [
                _without_defaults([round(at * 1e6) - origin, place[kind], bucket, step, *rest])
                for at, kind, bucket, step, *rest in kept
            ],
            "sessions": {
                str(session): {"layers": list(layers), "nbytes": list(nbytes)}
                for session, (layers, nbytes) in self._described.items()
            },
        }


def _without_defaults(row: list[int]) -> list[int]:
    """A mark's row without those of peer, piece and session at its end that have their default."""
    for default in (0, -1, -1):
        if row[-1] != default:
            break
        row.pop()
    return row


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """What to add to a client's clock to get the server's, from messages to the server and back.

    The server read its clock some time between the client's two readings, at best in the middle; so the sample with the
    shortest way there and back is the most certain one (Cristian, Probabilistic clock synchronization, 1989; the
    minimum filter of NTP, RFC 5905, section 10).

    Args:
        samples: (client's time before, server's time, client's time after), in seconds.

    Returns:
        The offset, and by how much it may be wrong either way, in seconds.

    Raises:
        ValueError: no sample, or one that ended before it began.
    """
    if not samples:
        raise ValueError("no samples to compare the clocks by")
    before, there, after = min(samples, key=lambda sample: sample[2] - sample[0])
    if after < before:
        raise ValueError(f"a message came back {before - after} s before it was sent")
    return there - (before + after) / 2, (after - before) / 2


def write(folder: str | Path, ranks: Mapping[int, tuple[Mapping[str, Any], float]]) -> Path:
    """Write the timeline of a run to ``folder/trace.json``, making the folder where there is none.

    Args:
        folder: where to.
        ranks: of each rank, what :meth:`Recorder.export` gave, and the seconds to add to its clock to get the server's.

    Returns:
        The file.
    """
    from mpipipe.timeline import chrome  # not on the way of those who record nothing

    return chrome.write(Path(folder), ranks)


# The package imports this module before `python -m` runs it, of which Python warns; but it may be run twice.
warnings.filterwarnings("ignore", "'mpipipe.trace' found in sys.modules", RuntimeWarning)

if __name__ == "__main__":
    from mpipipe.timeline import command

    raise SystemExit(command.main())
