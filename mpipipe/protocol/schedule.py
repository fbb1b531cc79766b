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

from mpipipe.errors import ProtocolError
from mpipipe.protocol.plan import Piece, Plan


class SendWindow:
    """A priority queue of pieces with a bounded number of bytes under way."""

    def __init__(self, plan: Plan, credit_bytes: int) -> None:
        self._plan = plan
        self._credit = credit_bytes
        # Ready and not yet under way: a heap of (priority, piece index), so that pieces of a bucket keep their order.
        self._waiting: list[tuple[int, int]] = []
        # Pieces given out and not yet reported done, by index. One can be there twice: its next step may begin before
        # the network has let go of the last one.
        self._started: Counter[int] = Counter()
        # Bytes of the pieces that have been given out and not yet reported done.
        self._under_way = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and self._under_way == 0

    def push(self, bucket: int) -> list[Piece]:
        """A bucket is ready: returns the pieces, of this or more urgent buckets, that may start now."""
        ready = self._plan.buckets[bucket]
        for piece in ready.pieces:
            heapq.heappush(self._waiting, (ready.priority, piece.index))
        return self._start()

    def done(self, piece: Piece) -> list[Piece]:
        """A piece has left its buffer: returns the pieces that may start in its place."""
        if not self._started[piece.index]:
            raise ProtocolError(f"piece {piece.index} of bucket {piece.bucket} has left without being under way")
        self._started[piece.index] -= 1
        self._under_way -= piece.nbytes
        return self._start()

    def _start(self) -> list[Piece]:
        started = []
        while self._waiting:
            piece = self._plan.pieces[self._waiting[0][1]]
            # A piece larger than the credit goes when it is alone: it must go some time.
            if self._under_way and self._under_way + piece.nbytes > self._credit:
                break
            heapq.heappop(self._waiting)
            self._started[piece.index] += 1
            self._under_way += piece.nbytes
            started.append(piece)
        return started
