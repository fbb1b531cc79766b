"""A transport between threads of one process, for tests: it can delay, reorder, drop and kill on demand.

It keeps what MPI promises and nothing more. Messages between two ranks with the same channel and tag arrive in order,
so do control messages between two ranks; everything else may overtake anything else, and does, as a seeded random
generator decides.
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

from mpipipe.transport.base import Buffer, Channel, Done, OnControl, OnLost, Transport


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
        drop: called with (source, destination, tag) for each message; True loses it.
        hold: called in the same way; as long as it is True the message stays on its way (see :meth:`look_again`).
        survives: whether the other ranks hear of one that is killed.
    """

    def __init__(
        self,
        size: int,
        seed: int | None = None,
        delay: float = 0.0,
        drop: Callable[[int, int, int], bool] | None = None,
        hold: Callable[[int, int, int], bool] | None = None,
        survives: bool = False,
    ) -> None:
        self.size = size
        self.survives = survives
        self._random = None if seed is None else random.Random(seed)
        self._delay = delay
        self._drop = drop
        self._hold = hold
        self._lock = threading.Condition()
        # By (channel, source, destination, tag).
        self._sends: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        self._receives: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        # Receives for any tag, by (channel, source, destination).
        self._listening: dict[tuple[int, ...], deque[_Posted]] = defaultdict(deque)
        self._control: dict[tuple[int, int], deque[dict[str, Any]]] = defaultdict(deque)
        self._handlers: dict[int, OnControl] = {}
        self._lost_handlers: dict[int, OnLost] = {}
        self._news: deque[tuple[int, int]] = deque()  # (rank, one that has died) of whom it is yet to hear
        self._channels = [0] * size
        self._dead: set[int] = set()
        self._closed = False
        self.transports = [InprocTransport(self, rank) for rank in range(size)]
        self._thread = threading.Thread(target=self._run, name="mpipipe-network", daemon=True)
        self._thread.start()

    def kill(self, rank: int) -> None:
        """From now on nothing comes from a rank and nothing reaches it."""
        with self._lock:
            if self.survives and rank not in self._dead:
                self._news.extend((other, rank) for other in range(self.size) if other not in self._dead | {rank})
        self.forget(rank)

    def forget(self, rank: int) -> None:
        """As :meth:`kill`, but nobody is told."""
        with self._lock:
            self._dead.add(rank)
            self._lock.notify_all()

    def close(self) -> None:
        """Stop delivering."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look_again(self) -> None:
        """Deliver what may be now: call it when ``hold`` has become false for a message."""
        with self._lock:
            self._lock.notify_all()

    def send(self, key: tuple[int, ...], posted: _Posted) -> None:
        """Take a message: (channel, source, destination, tag)."""
        with self._lock:
            self._sends[key].append(posted)
            self._lock.notify_all()

    def receive(self, key: tuple[int, ...], posted: _Posted) -> None:
        """Take a receive: (channel, source, destination, tag), or without the tag for any."""
        with self._lock:
            (self._receives if len(key) == 4 else self._listening)[key].append(posted)
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

    def set_lost_handler(self, rank: int, handler: OnLost) -> None:
        """Have a rank told of others that have died."""
        with self._lock:
            self._lost_handlers[rank] = handler
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
            elif sends and (self._receives[key] or self._listening[key[:3]]) and not self._held(key):
                possible.append(partial(self._deliver, key))
        for (source, dest), messages in self._control.items():
            if messages and dest in self._handlers and not self._dead & {source, dest}:
                possible.append(partial(self._deliver_control, source, dest))
        if self._news and self._news[0][0] in self._lost_handlers:
            possible.append(self._tell_news)
        return possible

    def _lost(self, key: Any) -> bool:
        _, source, dest, tag = key
        return bool(self._dead & {source, dest}) or (self._drop is not None and self._drop(source, dest, tag))

    def _held(self, key: Any) -> bool:
        return self._hold is not None and self._hold(*key[1:])

    def _lose(self, key: tuple[int, ...]) -> list[Done]:
        return [self._sends[key].popleft().done]

    def _deliver(self, key: tuple[int, ...]) -> list[Done]:
        sent, received = self._sends[key].popleft(), (self._receives[key] or self._listening[key[:3]]).popleft()
        received.buffer[: sent.buffer.size] = sent.buffer
        return [sent.done, received.done]

    def _tell_news(self) -> list[Done]:
        rank, dead = self._news.popleft()
        return [partial(self._lost_handlers[rank], dead)] if rank not in self._dead else []

    def _deliver_control(self, source: int, dest: int) -> list[Done]:
        message = self._control[source, dest].popleft()
        handler = self._handlers[dest]
        return [lambda: handler(source, message)]


class InprocTransport(Transport):
    """One rank of a :class:`Network`."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.size, self.survives = rank, network.size, network.survives
        self._network = network

    def open_channel(self) -> InprocChannel:
        """See :meth:`Transport.open_channel`."""
        return InprocChannel(self._network, self.rank, self._network.next_channel(self.rank))

    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """See :meth:`Transport.send_control`."""
        self._network.post_control(self.rank, dest, message)

    def on_control(self, handler: OnControl) -> None:
        """See :meth:`Transport.on_control`."""
        self._network.set_handler(self.rank, handler)

    def on_lost(self, handler: OnLost) -> None:
        """See :meth:`Transport.on_lost`."""
        self._network.set_lost_handler(self.rank, handler)

    def forget(self, rank: int) -> None:
        """See :meth:`Transport.forget`: the rank is dead to all, who are not told."""
        self._network.forget(rank)

    def abort(self, code: int) -> None:
        """See :meth:`Transport.abort`: the network stops."""
        self._network.close()

    def close(self) -> None:
        """See :meth:`Transport.close`. The network goes on for the other ranks."""


class InprocChannel(Channel):
    """A channel of an :class:`InprocTransport`."""

    def __init__(self, network: Network, rank: int, number: int) -> None:
        super().__init__()
        self._network, self._rank, self._number = network, rank, number

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.isend`."""
        self._network.send((self._number, self._rank, dest, tag), _Posted(buffer, done))

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.irecv`."""
        self._network.receive((self._number, source, self._rank, tag), _Posted(buffer, done))

    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel._post`."""
        self._network.receive((self._number, source, self._rank), _Posted(buffer, done))
