"""Which piece goes next, and how many bytes are under way: priority and credit.

The backward pass makes the last layer's gradient first, and the next forward pass needs the first layer's weights
first. So whatever is ready goes in forward order, and no more than a credit of bytes is handed to the network at once:
what has been handed over cannot be overtaken any more, so a piece that becomes urgent waits for at most that much.
(Priority by layer: Jayarajan et al., "Priority-based Parameter Propagation", MLSys 2019; credit: Peng et al.,
"ByteScheduler", SOSP 2019.)

Where several send to one, a third thing matters: that none falls behind.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import AskFor, Pause, Resume
from mpipipe.protocol.plan import Piece, Plan


class SendWindow:
    """A priority queue of pieces for one destination, with a bounded number of bytes under way to it."""

    def __init__(self, credit_bytes: int) -> None:
        self._credit = credit_bytes
        # Ready and not yet under way: a heap of (priority, piece index), so that pieces of a bucket keep their order.
        self._waiting: list[tuple[int, int, Piece]] = []
        # Pieces given out and not yet reported done, by index. One can be there twice: its next step may begin before
        # word has come that the last one has arrived.
        self._started: Counter[int] = Counter()
        # Bytes of the pieces that have been given out and not yet reported done, and of all that have not.
        self._under_way = 0
        self.backlog = 0
        self._one_by_one = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return self.backlog == 0

    def push(self, pieces: Iterable[Piece], priority: int) -> list[Piece]:
        """Pieces are ready: returns those, of these or more urgent ones, that may start now."""
        for piece in pieces:
            self.backlog += piece.nbytes
            heapq.heappush(self._waiting, (priority, piece.index, piece))
        return self._start()

    def hurry(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those of these pieces that wait go before all others; returns pieces that may start now."""
        first = {piece.index for piece in pieces}
        self._waiting = [(-1 if entry[1] in first else entry[0], *entry[1:]) for entry in self._waiting]
        heapq.heapify(self._waiting)
        return self._start()

    def done(self, piece: Piece) -> list[Piece]:
        """A piece has arrived: returns the pieces that may start in its place."""
        if not self._started[piece.index]:
            raise ProtocolError(f"piece {piece.index} of bucket {piece.bucket} has arrived without being under way")
        self._started[piece.index] -= 1
        self._under_way -= piece.nbytes
        self.backlog -= piece.nbytes
        return self._start()

    def one_by_one(self, on: bool) -> list[Piece]:
        """Have one piece under way at a time, or again the whole credit; returns pieces that may start now."""
        if on == self._one_by_one:
            return []
        self._one_by_one = on
        return self._start()

    def _start(self) -> list[Piece]:
        started = []
        while self._waiting:
            piece = self._waiting[0][2]
            # A piece larger than the credit goes when it is alone: it must go some time.
            credit = 0 if self._one_by_one else self._credit
            if self._under_way and self._under_way + piece.nbytes > credit:
                break
            heapq.heappop(self._waiting)
            self._started[piece.index] += 1
            self._under_way += piece.nbytes
            started.append(piece)
        return started


class Pacer:
    """Keeps the clients side by side, at the server: in how much they send, and in what.

    The server can only sum a piece when every client's is in. What a client sends before others send the same is no use
    to anybody, but takes its share of the server's incoming link, while the outgoing one has nothing to do. So:

    * A client that has sent much more than another, which is still sending, pauses. Left to themselves the shares of
      the link are unequal and stay so: whoever gets less also gets the words of arrival later that allow it to send
      more.
    * A client that has turned to a more urgent bucket is asked for those pieces of the last one that others have sent
      before they turned. Each turns at the moment when it has computed the more urgent one, so hardly ever at the
      same piece.

    Nobody pauses for a client that may be computing: one is known to have something to send while only some pieces of
    a bucket have come from it. The one that has sent least among those never pauses, so there is always progress.

    Args:
        plan: the buckets.
        clients: those that send.
        slack_bytes: how far a client may be ahead.
    """

    def __init__(self, plan: Plan, clients: Iterable[int], slack_bytes: int) -> None:
        self._plan = plan
        self._slack_bytes = slack_bytes
        self._ahead = dict.fromkeys(clients, 0)  # bytes that have come and wait for those of others
        self._paused: set[int] = set()
        count = len(plan.buckets)
        # The step of each bucket's present gradient, and its pieces that have come from a client, from the one of whom
        # most have come, that have been summed, and up to which a client has been asked for them.
        self._step = [0] * count
        self._sent = {client: [0] * count for client in self._ahead}
        self._most = [0] * count
        self._summed = [0] * count
        self._asked = {client: [0] * count for client in self._ahead}
        # The buckets of which only some pieces have come from a client, and the one of which it has sent last.
        self._partial: dict[int, set[int]] = {client: set() for client in self._ahead}
        self._last = dict.fromkeys(self._ahead, -1)

    def received(self, client: int, piece: Piece, step: int) -> list[Pause | Resume | AskFor]:
        """A piece has come from a client: returns what to do.

        Raises:
            ProtocolError: it has sent one of them twice.
        """
        bucket, pieces = piece.bucket, len(self._plan.buckets[piece.bucket].pieces)
        self._ahead[client] += piece.nbytes
        self._sent[client][bucket] += 1
        if self._sent[client][bucket] > pieces:
            raise ProtocolError(f"rank {client} has sent more pieces of bucket {bucket} in step {step} than it has")
        self._step[bucket] = step
        if self._sent[client][bucket] < pieces:
            self._partial[client].add(bucket)
        else:
            self._partial[client].discard(bucket)
        commands: list[Pause | Resume | AskFor] = [*self._pause()]
        if pieces == 1:
            return commands
        turned, self._last[client] = self._last[client] != bucket, bucket
        if turned:
            commands += [ask for other in self._partial[client] for ask in self._ask(client, other)]
        if self._sent[client][bucket] > self._most[bucket]:
            self._most[bucket] = self._sent[client][bucket]
            commands += [ask for other in self._ahead for ask in self._ask(other, bucket)]
        return commands

    def remove(self, client: int) -> list[Pause | Resume]:
        """A client is not there any more: returns what to do about the others."""
        for of_client in (self._ahead, self._sent, self._asked, self._partial, self._last):
            del of_client[client]
        self._paused.discard(client)
        # Nobody waits for what only that client has sent.
        for bucket in range(len(self._most)):
            self._most[bucket] = max((sent[bucket] for sent in self._sent.values()), default=0)
        return self._pause()

    def restart(self) -> None:
        """What has been summed of the present gradients does not count: whoever had sent of them has been removed."""
        self._summed = [0] * len(self._summed)

    def reduced(self, piece: Piece, clients: Iterable[int]) -> list[Pause | Resume]:
        """The clients' gradients of a piece have been summed: returns what to do."""
        for client in clients:
            if client in self._ahead:
                self._ahead[client] -= piece.nbytes
        bucket = piece.bucket
        self._summed[bucket] += 1
        if self._summed[bucket] == len(self._plan.buckets[bucket].pieces):
            self._summed[bucket] = self._most[bucket] = 0
            for client in self._ahead:
                self._sent[client][bucket] = self._asked[client][bucket] = 0
        return self._pause()

    def _ask(self, client: int, bucket: int) -> list[AskFor]:
        """Ask a client that has turned away from a bucket for what others have sent of it; for one thing at a time."""
        most, sent = self._most[bucket], self._sent[client][bucket]
        wanting = bucket in self._partial[client] and bucket != self._last[client] and sent < most
        if not wanting or sent < self._asked[client][bucket]:
            return []
        self._asked[client][bucket] = most
        return [AskFor(client, self._plan.buckets[bucket].pieces[most - 1], self._step[bucket])]

    def _pause(self) -> list[Pause | Resume]:
        sending = [self._ahead[client] for client, partial in self._partial.items() if partial]
        limit = min(sending) + self._slack_bytes if sending else math.inf
        paused = {client for client, ahead in self._ahead.items() if ahead > limit}
        changed = sorted(paused ^ self._paused)
        self._paused = paused
        return [Pause(client) if client in paused else Resume(client) for client in changed]
