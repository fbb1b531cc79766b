"""Which piece goes next, and how many bytes are under way: priority and credit.

The backward pass makes the last layer's gradient first, and the next forward pass needs the first layer's weights
first. So whatever is ready goes in forward order, and no more than a credit of bytes is handed to the network at once:
what has been handed over cannot be overtaken any more, so a piece that becomes urgent waits for at most that much.
(Priority by layer: Jayarajan et al., "Priority-based Parameter Propagation", MLSys 2019; credit: Peng et al.,
"ByteScheduler", SOSP 2019.)
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.plan import Piece


class SendWindow:
    """A priority queue of pieces for one destination, with a bounded number of bytes under way to it."""

    def __init__(self, credit_bytes: int) -> None:
        self._credit = credit_bytes
        # Ready and not yet under way: a heap of (priority, piece index), so that pieces of a bucket keep their order.
        self._waiting: list[tuple[int, int, Piece]] = []
        # Pieces given out and not yet reported done, by index. One can be there twice: its next step may begin before
        # word has come that the last one has arrived.
        self._started: Counter[int] = Counter()
        # Bytes of the pieces that have been given out and not yet reported done.
        self._under_way = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and self._under_way == 0

    def push(self, pieces: Iterable[Piece], priority: int) -> list[Piece]:
        """Pieces are ready: returns those, of these or more urgent ones, that may start now."""
        for piece in pieces:
            heapq.heappush(self._waiting, (priority, piece.index, piece))
        return self._start()

    def done(self, piece: Piece) -> list[Piece]:
        """A piece has arrived: returns the pieces that may start in its place."""
        if not self._started[piece.index]:
            raise ProtocolError(f"piece {piece.index} of bucket {piece.bucket} has arrived without being under way")
        self._started[piece.index] -= 1
        self._under_way -= piece.nbytes
        return self._start()

    def _start(self) -> list[Piece]:
        started = []
        while self._waiting:
            piece = self._waiting[0][2]
            # A piece larger than the credit goes when it is alone: it must go some time.
            if self._under_way and self._under_way + piece.nbytes > self._credit:
                break
            heapq.heappop(self._waiting)
            self._started[piece.index] += 1
            self._under_way += piece.nbytes
            started.append(piece)
        return started
