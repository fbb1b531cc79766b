"""The transport over MPI. One thread owns all MPI calls from ``init`` to ``finalize``.

No MPI progresses in the background by itself, so the thread polls (``Testsome``), and sleeps between polls, longer the
longer nothing happens: a blocking ``Wait`` would spin on a core that the training needs.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipipe.transport.base import Buffer, Channel, Done, OnControl, Transport

# Seconds between polls: the shortest, after something happened, and the longest, after a long silence.
_NAP, _LONGEST_NAP = 20e-6, 1e-3
_CONTROL_TAG = 1

_Call = Callable[[], None]


class MPITransport(Transport):
    """Messages over duplicates of one communicator."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        """Take over a communicator that nothing else uses. The caller makes no MPI call until :meth:`close`."""
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._communicator = communicator
        self._calls: deque[_Call] = deque()  # what other threads want done, in order
        self._wake = threading.Event()
        # Requests under way, and by position in that list: what to call when done, and whether it is a receive, which
        # may never be.
        self._requests: list[MPI.Request] = []
        self._done: list[Done] = []
        self._is_receive: list[bool] = []
        self._handler: OnControl | None = None
        self._early: list[tuple[int, dict[str, Any]]] = []  # control messages before there was a handler
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mpipipe-transport", daemon=True)
        self._thread.start()

    def open_channel(self, lanes: int) -> MPIChannel:
        """See :meth:`Transport.open_channel`. Uses ``lanes + 1`` communicators."""
        opened = threading.Event()
        duplicates: list[MPI.Intracomm] = []
        missing = [lanes + 1]

        def one_done() -> None:
            missing[0] -= 1
            if not missing[0]:
                opened.set()

        def duplicate() -> None:
            # Idup, not Dup: a blocking call would hold up the messages of other channels, for which another rank may
            # be waiting before it comes to open this one.
            for _ in range(lanes + 1):
                communicator, request = self._communicator.Idup()
                duplicates.append(communicator)
                self._add(request, one_done)

        self.submit(duplicate)
        opened.wait()
        return MPIChannel(self, duplicates[0], duplicates[1:])

    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """See :meth:`Transport.send_control`."""
        buffer = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        self.submit(
            lambda: self._add(self._communicator.Isend([buffer, MPI.BYTE], dest, _CONTROL_TAG), lambda: _hold(buffer))
        )

    def on_control(self, handler: OnControl) -> None:
        """See :meth:`Transport.on_control`."""

        def install() -> None:
            self._handler = handler
            for source, message in self._early:
                handler(source, message)
            self._early.clear()

        self.submit(install)

    def abort(self, code: int) -> None:
        """See :meth:`Transport.abort`. Safe from any thread, also while the transport's thread is in MPI."""
        self._communicator.Abort(code)

    def close(self) -> None:
        """See :meth:`Transport.close`. Afterwards the caller may use MPI again."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def submit(self, call: _Call) -> None:
        """Have the transport's thread make a call, after those submitted before."""
        self._calls.append(call)
        self._wake.set()

    def _add(self, request: MPI.Request, done: Done, receive: bool = False) -> None:
        self._requests.append(request)
        self._done.append(done)
        self._is_receive.append(receive)

    def _run(self) -> None:
        nap = _NAP
        while True:
            busy = self._make_calls() | self._complete() | self._take_control()
            if busy:
                nap = _NAP
                continue
            if self._closing and not self._calls and all(self._is_receive):
                break
            if self._wake.wait(nap):
                self._wake.clear()
                nap = _NAP
            nap = min(nap * 1.3, _LONGEST_NAP)
        for request in self._requests:
            request.Cancel()
            request.Free()

    def _make_calls(self) -> bool:
        made = False
        while self._calls:
            self._calls.popleft()()
            made = True
        return made

    def _complete(self) -> bool:
        if not self._requests:
            return False
        finished = MPI.Request.Testsome(self._requests)
        if not finished:
            return False
        # In the order in which they were started: those of one lane are done in that order.
        for position in sorted(finished):
            self._done[position]()
        for position in sorted(finished, reverse=True):
            del self._requests[position], self._done[position], self._is_receive[position]
        return True

    def _take_control(self) -> bool:
        status = MPI.Status()
        message = self._communicator.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, status)
        if message is None:
            return False
        buffer = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([buffer, MPI.BYTE])
        source, content = status.Get_source(), json.loads(buffer)
        if self._handler is None:
            self._early.append((source, content))
        else:
            self._handler(source, content)
        return True


class MPIChannel(Channel):
    """A channel with a communicator for messages between two ranks, and one per lane."""

    def __init__(self, transport: MPITransport, direct: MPI.Intracomm, lanes: list[MPI.Intracomm]) -> None:
        self._transport = transport
        self._direct = direct
        self._lanes = lanes

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.isend`."""
        self._transport.submit(lambda: self._transport._add(self._direct.Isend([buffer, MPI.BYTE], dest, tag), done))

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.irecv`."""
        self._transport.submit(
            lambda: self._transport._add(self._direct.Irecv([buffer, MPI.BYTE], source, tag), done, receive=True)
        )

    def ibcast(self, lane: int, root: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.ibcast`."""
        self._transport.submit(lambda: self._transport._add(self._lanes[lane].Ibcast([buffer, MPI.BYTE], root), done))


def _hold(buffer: Buffer) -> None:
    """Keep a buffer alive until its message has left: a callback that owns it."""
