"""How fast the network is, measured once at the start of a run, and the sizes of messages that follow from it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpipipe.transport.base import Buffer, Channel, Done

_TAG = 0
# Messages under way at once, each way and between each two ranks, while measuring; as with a credit of three pieces.
_UNDER_WAY = 3
_SMALL, _LARGEST = 1024, 4 << 20  # bytes
_COUNT = 16
_LONG_ENOUGH = 0.1  # seconds that the bulk transfer takes at least, where it stays within _LARGEST


@dataclass(frozen=True, slots=True)
class Link:
    """The server's link to all clients together.

    Attributes:
        rate: bytes per second each way, both ways at once.
        overhead: seconds that the shortest message adds, by computing and waiting, to a stream of messages.
    """

    rate: float
    overhead: float


def measure(channel: Channel, clients: Sequence[int]) -> Link:
    """At the server: exchange messages with all clients at once, first short, then longer and longer ones.

    It takes about a second on a slow network and some hundredths of one on a fast one.
    """
    _round(channel, clients, _SMALL, _UNDER_WAY)  # connections are made here
    overhead = _round(channel, clients, _SMALL, 4 * _COUNT) / (8 * _COUNT * len(clients))
    nbytes = 16 << 10
    while (seconds := _round(channel, clients, nbytes, _COUNT)) < _LONG_ENOUGH and nbytes < _LARGEST:
        nbytes *= 2 if seconds > _LONG_ENOUGH / 8 else 8
    for client in clients:
        _tell(channel, client, 0, 0)
    return Link(rate=_COUNT * nbytes * len(clients) / seconds, overhead=overhead)


def take_part(channel: Channel, server: int) -> None:
    """At a client: take part in :func:`measure`."""
    while True:
        order = np.zeros(2, dtype=np.int64)
        arrived = threading.Event()
        channel.irecv(server, _TAG, order.view(np.uint8), arrived.set)
        arrived.wait()
        nbytes, count = map(int, order)
        if not count:
            return
        _Stream(channel, server, nbytes, count).wait()


def _tell(channel: Channel, client: int, nbytes: int, count: int) -> None:
    arrived = threading.Event()
    channel.isend(client, _TAG, np.array([nbytes, count], dtype=np.int64).view(np.uint8), arrived.set)
    arrived.wait()


def _round(channel: Channel, clients: Sequence[int], nbytes: int, count: int) -> float:
    """Seconds for exchanging ``count`` messages of ``nbytes`` with every client, all at once."""
    for client in clients:
        _tell(channel, client, nbytes, count)
    start = time.perf_counter()
    streams = [_Stream(channel, client, nbytes, count) for client in clients]
    for stream in streams:
        stream.wait()
    return time.perf_counter() - start


class _Stream:
    """So many messages to a rank and as many from it, a few under way at once."""

    def __init__(self, channel: Channel, peer: int, nbytes: int, count: int) -> None:
        self._channel, self._peer = channel, peer
        self._sends = self._receives = count  # still to be started
        self._open = 2 * count  # still to be done
        self._done = threading.Event()
        self._out = np.zeros(nbytes, dtype=np.uint8)
        for _ in range(min(_UNDER_WAY, count)):
            self._receive(np.empty(nbytes, dtype=np.uint8))
        for _ in range(min(_UNDER_WAY, count)):
            self._send()

    def wait(self) -> None:
        """Wait until all have come and gone."""
        self._done.wait()

    def _send(self) -> None:
        if self._sends:
            self._sends -= 1
            self._channel.isend(self._peer, _TAG, self._out, lambda: self._one_done(self._send))

    def _receive(self, buffer: Buffer) -> None:
        if self._receives:
            self._receives -= 1
            self._channel.irecv(self._peer, _TAG, buffer, lambda: self._one_done(lambda: self._receive(buffer)))

    def _one_done(self, again: Done) -> None:
        again()
        self._open -= 1
        if not self._open:
            self._done.set()


# Seconds that a piece costs the server beyond its messages: to reduce, update and hand it about.
_UPDATE_SECONDS = 1e-4
# Pieces under way to a rank at once.
_CREDIT = 3
# The server's graph has some tens of operations for each piece: more pieces than this would cost more than they bring.
_MOST_PIECES = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """In bytes: of a piece, up to which neighbouring layers share a bucket, and of what may be under way."""

    piece_bytes: int
    fuse_bytes: int
    credit_bytes: int

    @classmethod
    def of(cls, piece_bytes: int) -> Sizes:
        """The sizes that go with pieces of a size."""
        return cls(piece_bytes, fuse_bytes=piece_bytes // 4, credit_bytes=_CREDIT * piece_bytes)


def choose_sizes(link: Link, nbytes: int, clients: int) -> Sizes:
    """Sizes for a model of ``nbytes``.

    The credit is a few pieces, c: enough to fill the link while word of an arrival is on its way back, and no more, for
    what is under way cannot be overtaken. So an urgent piece of s bytes waits for c n s / B seconds on its way in and
    as long on its way out, and M / s pieces cost a fixed time h each: the sum of 2 c n s / B and h M / s is least for
    s = sqrt(M h B / 2 c n) (after Peng et al., "ByteScheduler", SOSP 2019, and the theory of pipelined broadcasts).
    """
    cost = _UPDATE_SECONDS + clients * link.overhead
    ideal = math.sqrt(nbytes * cost * link.rate / (2 * _CREDIT * clients))
    piece = min(max(ideal, nbytes / _MOST_PIECES, 16 << 10), 4 << 20)
    piece = int(piece) // 4096 * 4096
    return Sizes.of(piece)
