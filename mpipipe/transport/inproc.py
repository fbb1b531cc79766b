"""A transport between threads of one process, for tests: it can delay, reorder, drop and kill on demand.

It keeps what MPI promises and nothing more. Messages between two ranks with the same channel and tag arrive in order,
so do the broadcasts of a lane, so do control messages between two ranks; everything else may overtake anything else,
and does, as a seeded random generator decides.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpipipe.transport.base import Buffer, Channel, Done, OnControl, Transport


@dataclass(slots=True)
class _Posted:
    """One rank's side of an operation."""

    buffer: Buffer
    done: Done


class Network:
    """Ranks that exchange messages through one thread, which picks the next delivery at random.

    Args:
        size: number of ranks.
        seed: of the random order; None delivers in the order in which operations could be completed.
        delay: seconds that the network rests between deliveries.
        drop: called with (source, destination, tag) for each direct message; True loses it.
    """

    def __init__(
        self,
        size: int,
        seed: int | None = None,
        delay: float = 0.0,
        drop: Callable[[int, int, int], bool] | None = None,
    ) -> None:
        self.size = size
        self._random = None if seed is None else random.Random(seed)
        self._delay = delay
        self._drop = drop
        self._lock = threading.Condition()
        self._sends: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        self._receives: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        # Broadcasts by lane: each root's in order, with the ranks that still have to take it.
        self._roots: dict[tuple[int, ...], deque[tuple[_Posted, set[int]]]] = defaultdict(deque)
        self._takers: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        self._control: dict[tuple[int, int], deque[dict[str, Any]]] = defaultdict(deque)
        self._handlers: dict[int, OnControl] = {}
        self._channels = [0] * size
        self._dead: set[int] = set()
        self._closed = False
        self.transports = [InprocTransport(self, rank) for rank in range(size)]
        self._thread = threading.Thread(target=self._run, name="mpipipe-network", daemon=True)
        self._thread.start()

    def kill(self, rank: int) -> None:
        """From now on nothing comes from a rank and nothing reaches it."""
        with self._lock:
            self._dead.add(rank)

    def close(self) -> None:
        """Stop delivering."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, kind: str, key: tuple[int, ...], posted: _Posted) -> None:
        """Take one side of an operation: ``send``, ``receive`` or ``broadcast``."""
        with self._lock:
            if kind == "send":
                self._sends[key].append(posted)
            elif kind == "receive":
                self._receives[key].append(posted)
            else:
                channel, lane, root, rank = key
                if rank == root:
                    self._roots[channel, lane].append((posted, set(range(self.size)) - {root}))
                else:
                    self._takers[channel, lane, rank].append(posted)
            self._lock.notify_all()

    def post_control(self, source: int, dest: int, message: dict[str, Any]) -> None:
        """Take a control message."""
        with self._lock:
            self._control[source, dest].append(message)
            self._lock.notify_all()

    def set_handler(self, rank: int, handler: OnControl) -> None:
        """Have a rank's control messages handled."""
        with self._lock:
            self._handlers[rank] = handler
            self._lock.notify_all()

    def next_channel(self, rank: int) -> int:
        """The number of a rank's next channel: ranks open theirs in the same order."""
        with self._lock:
            self._channels[rank] += 1
            return self._channels[rank]

    def _run(self) -> None:
        while True:
            with self._lock:
                possible = self._possible()
                while not possible and not self._closed:
                    self._lock.wait()
                    possible = self._possible()
                if self._closed:
                    return
                chosen = self._random.choice(possible) if self._random else possible[0]
                callbacks = chosen()
            for callback in callbacks:
                callback()
            if self._delay:
                time.sleep(self._delay)

    def _possible(self) -> list[Callable[[], list[Done]]]:
        """Every delivery that could be made now; the lock is held."""
        possible: list[Callable[[], list[Done]]] = []
        for key, sends in self._sends.items():
            if sends and self._lost(key):
                possible.append(partial(self._lose, key))
            elif sends and self._receives[key]:
                possible.append(partial(self._deliver, key))
        for lane, roots in self._roots.items():
            for rank in range(self.size):
                if rank not in self._dead and any(rank in missing for _, missing in roots):
                    if self._takers[(*lane, rank)]:
                        possible.append(partial(self._take, lane, rank))
        for (source, dest), messages in self._control.items():
            if messages and dest in self._handlers and not self._dead & {source, dest}:
                possible.append(partial(self._deliver_control, source, dest))
        return possible

    def _lost(self, key: Any) -> bool:
        _, source, dest, tag = key
        return bool(self._dead & {source, dest}) or (self._drop is not None and self._drop(source, dest, tag))

    def _lose(self, key: tuple[int, ...]) -> list[Done]:
        return [self._sends[key].popleft().done]

    def _deliver(self, key: tuple[int, ...]) -> list[Done]:
        sent, received = self._sends[key].popleft(), self._receives[key].popleft()
        received.buffer[:] = sent.buffer
        return [sent.done, received.done]

    def _take(self, lane: Any, rank: int) -> list[Done]:
        taker = self._takers[(*lane, rank)].popleft()
        posted, missing = next(entry for entry in self._roots[lane] if rank in entry[1])
        taker.buffer[:] = posted.buffer
        missing.discard(rank)
        callbacks = [taker.done]
        while self._roots[lane] and not self._roots[lane][0][1]:
            callbacks.append(self._roots[lane].popleft()[0].done)
        return callbacks

    def _deliver_control(self, source: int, dest: int) -> list[Done]:
        message = self._control[source, dest].popleft()
        handler = self._handlers[dest]
        return [lambda: handler(source, message)]


class InprocTransport(Transport):
    """One rank of a :class:`Network`."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.size = rank, network.size
        self._network = network

    def open_channel(self, lanes: int) -> InprocChannel:
        """See :meth:`Transport.open_channel`."""
        return InprocChannel(self._network, self.rank, self._network.next_channel(self.rank))

    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """See :meth:`Transport.send_control`."""
        self._network.post_control(self.rank, dest, message)

    def on_control(self, handler: OnControl) -> None:
        """See :meth:`Transport.on_control`."""
        self._network.set_handler(self.rank, handler)

    def abort(self, code: int) -> None:
        """See :meth:`Transport.abort`: the network stops."""
        self._network.close()

    def close(self) -> None:
        """See :meth:`Transport.close`. The network goes on for the other ranks."""


class InprocChannel(Channel):
    """A channel of an :class:`InprocTransport`."""

    def __init__(self, network: Network, rank: int, number: int) -> None:
        self._network, self._rank, self._number = network, rank, number

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.isend`."""
        self._network.post("send", (self._number, self._rank, dest, tag), _Posted(buffer, done))

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.irecv`."""
        self._network.post("receive", (self._number, source, self._rank, tag), _Posted(buffer, done))

    def ibcast(self, lane: int, root: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.ibcast`."""
        self._network.post("broadcast", (self._number, lane, root, self._rank), _Posted(buffer, done))
