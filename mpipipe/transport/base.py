"""What a transport offers: nonblocking operations on channels, and small control messages.

A *channel* belongs to one optimizer. It has its own space of tags, and *lanes* for broadcasts: MPI wants collectives
started in the same order on every rank of a communicator (MPI 4.1, 6.12), so each lane is a communicator of its own and
lanes are independent of each other.

Every ``done`` callback, and every control message's, runs on the transport's thread and must return at once.
Buffers are C-contiguous arrays of bytes and must stay untouched until ``done``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]
Done = Callable[[], None]
OnControl = Callable[[int, dict[str, Any]], None]


class Channel(ABC):
    """The messages of one optimizer."""

    @abstractmethod
    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """Start sending ``buffer`` to a rank."""

    @abstractmethod
    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """Have ``buffer`` filled by the next message of a rank with this tag."""

    @abstractmethod
    def ibcast(self, lane: int, root: int, buffer: Buffer, done: Done) -> None:
        """Take part in the next broadcast of a lane: ``buffer`` is read at ``root`` and filled elsewhere."""


class Transport(ABC):
    """One rank's end of the network. All methods may be called from any thread."""

    rank: int
    size: int

    @abstractmethod
    def open_channel(self, lanes: int) -> Channel:
        """Make a channel. Collective: every rank opens its channels in the same order; blocks until it is there."""

    @abstractmethod
    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """Send a small message. Those between two ranks arrive in order."""

    @abstractmethod
    def on_control(self, handler: OnControl) -> None:
        """Have ``handler(source, message)`` called for every control message, those already here first."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every process of the run, at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop the transport's thread once all that was handed over has left. Posted receives are withdrawn."""
