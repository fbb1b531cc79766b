"""What a transport offers: nonblocking messages on channels, and small control messages.

A *channel* belongs to one optimizer and has its own space of tags. Messages between two ranks with the same tag arrive
in the order in which they were sent; nothing else is promised, and nothing else is needed. New weights go to each
client in a message of its own: a collective would have to be started in the same order on every rank (MPI 4.1, 6.12),
and would let a client that is busy hold up the others (``benchmarks/broadcast.py`` compares the ways).

Every callback, and every control message's, runs on the transport's thread and must return at once.
Buffers are C-contiguous arrays of bytes and must stay untouched until ``done``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]
Done = Callable[[], None]
OnMessage = Callable[[Buffer], None]
OnControl = Callable[[int, dict[str, Any]], None]
OnLost = Callable[[int], None]


# TensorFlow takes an array over as it is where it starts at a multiple of so many bytes, and copies it elsewhere.
_ALIGNMENT = 64


def aligned(nbytes: int) -> Buffer:
    """A new buffer that TensorFlow can take over without a copy. Whoever gives it to TensorFlow never writes to it."""
    whole = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + nbytes]


class Pool:
    """Buffers of one length that are used again. Safe from several threads."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[Buffer] = []  # append and pop of a list are atomic

    def take(self) -> Buffer:
        """A buffer; a new one where none is free."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self.nbytes, dtype=np.uint8)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        self._free.append(buffer)


def hold(buffer: Buffer) -> None:
    """Keep a buffer alive until its message has left: a callback that owns it."""


class _Listener:
    """The receives for one rank: each that is filled is posted again, at once or, after a pause, at its end."""

    def __init__(self, post: Callable[[Buffer, Done], None], pool: Pool, on_message: OnMessage) -> None:
        self._post, self._pool, self._on_message = post, pool, on_message
        self._lock = threading.Lock()  # what arrives does so on another thread
        self._paused = False
        self._left_out = 0

    def post(self) -> None:
        buffer = self._pool.take()
        self._post(buffer, lambda: self._arrived(buffer))

    def pause(self) -> None:
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            left_out, self._left_out = self._left_out, 0
        for _ in range(left_out):
            self.post()

    def _arrived(self, buffer: Buffer) -> None:
        with self._lock:
            paused = self._paused
            self._left_out += paused
        if not paused:
            self.post()
        self._on_message(buffer)


class Channel(ABC):
    """The messages of one optimizer."""

    def __init__(self) -> None:
        self._pool: Pool | None = None  # of the buffers that listen hands out
        self._listeners: dict[int, _Listener] = {}  # by rank

    @abstractmethod
    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """Start sending ``buffer`` to a rank; ``done`` when it has arrived there in a buffer that waited for it."""

    @abstractmethod
    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """Have ``buffer`` filled by the next message of a rank with this tag."""

    @abstractmethod
    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        """Have ``buffer`` filled by the next message of a rank, whatever its tag."""

    def listen(self, source: int, nbytes: int, depth: int, on_message: OnMessage) -> None:
        """Take every message of a rank, whatever its tag, from now on. Not together with :meth:`irecv`.

        A few receives for any tag, not one for each piece: testing those would cost more.

        Args:
            source: the rank.
            nbytes: the length of the longest message.
            depth: how many receives are posted at any time.
            on_message: called with each message's buffer, which may be longer than the message. Whoever is called
                gives it back by :meth:`release`.
        """
        self._pool = self._pool or Pool(nbytes)
        self._listeners[source] = _Listener(partial(self._post, source), self._pool, on_message)
        for _ in range(depth):
            self._listeners[source].post()

    def pause(self, source: int) -> None:
        """Post no further receives for a rank that is listened to; those that are posted may still be filled."""
        self._listeners[source].pause()

    def resume(self, source: int) -> None:
        """Post the receives that have been left out since :meth:`pause`."""
        self._listeners[source].resume()

    def release(self, buffer: Buffer) -> None:
        """Give back a buffer that :meth:`listen` has handed out. From any thread."""
        assert self._pool is not None
        self._pool.give(buffer)


class Transport(ABC):
    """One rank's end of the network. All methods may be called from any thread."""

    rank: int
    size: int
    # Whether this rank goes on when another one's process has died, and hears of it.
    survives: bool = False

    @abstractmethod
    def open_channel(self) -> Channel:
        """Make a channel. Collective: every rank opens its channels in the same order; blocks until it is there."""

    @abstractmethod
    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """Send a small message. Those between two ranks arrive in order."""

    @abstractmethod
    def on_control(self, handler: OnControl) -> None:
        """Have ``handler(source, message)`` called for every control message, those already here first."""

    @abstractmethod
    def on_lost(self, handler: OnLost) -> None:
        """Have ``handler(rank)`` called, once, for every rank whose process has died, where this one survives that.

        What such a rank had sent and what has not been received by then does not come any more. What is sent to it is
        ``done`` at once.
        """

    @abstractmethod
    def forget(self, rank: int) -> None:
        """Treat a rank that does not answer as one that has died, without a call of the handler."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every process of the run, at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop the transport's thread once all that was handed over has left. Posted receives are withdrawn."""
