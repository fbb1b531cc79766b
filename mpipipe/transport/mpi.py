"""The transport over MPI. One thread owns all MPI calls from ``init`` to ``finalize``.

No MPI progresses in the background by itself, so the thread polls (``Testsome``), and sleeps between polls, longer the
longer nothing happens: a blocking ``Wait`` would spin on a core that the training needs.

Sends are synchronous-mode (``Issend``): they are done when the message has met its receive. A standard send of an eager
message is done as soon as MPI has a copy, so that everything would be under way at once and nothing could overtake it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipipe.transport.base import Buffer, Channel, Done, OnControl, Transport, hold

# Seconds between polls: the shortest, after something happened; the longest while messages come and go, and when
# there has been none for a while.
_NAP, _LONGEST_NAP, _IDLE_NAP = 100e-6, 2e-3, 10e-3
_IDLE_AFTER = 1.0  # seconds
_PROBE_EVERY = 1e-3  # seconds between looks for control messages, which are few and in no hurry: each look costs a poll
_CONTROL_TAG = 1

_Call = Callable[[], None]


class MPITransport(Transport):
    """Messages over duplicates of one communicator."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        """Take over a communicator that nothing else uses. The caller makes no MPI call until :meth:`close`."""
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._communicator = communicator
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # what other threads want done, in order
        # Requests under way, and by position in that list: what to call when done, and whether it is a receive, which
        # may never be.
        self._requests: list[MPI.Request] = []
        self._done: list[Done] = []
        self._is_receive: list[bool] = []
        self._handler: OnControl | None = None
        self._early: list[tuple[int, dict[str, Any]]] = []  # control messages before there was a handler
        self._status = MPI.Status()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mpipipe-transport", daemon=True)
        self._thread.start()

    def open_channel(self) -> MPIChannel:
        """See :meth:`Transport.open_channel`."""
        opened = threading.Event()
        duplicates: list[MPI.Intracomm] = []

        def duplicate() -> None:
            # Idup, not Dup: a blocking call would hold up the messages of other channels, for which another rank may
            # be waiting before it comes to open this one.
            communicator, request = self._communicator.Idup()
            duplicates.append(communicator)
            self._add(request, opened.set)

        self.submit(duplicate)
        opened.wait()
        return MPIChannel(self, duplicates[0])

    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """See :meth:`Transport.send_control`."""
        buffer = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        self.submit(
            lambda: self._add(self._communicator.Isend([buffer, MPI.BYTE], dest, _CONTROL_TAG), partial(hold, buffer))
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

        def stop() -> None:
            self._closing = True

        self.submit(stop)
        self._thread.join()

    def submit(self, call: _Call) -> None:
        """Have the transport's thread make a call, after those submitted before."""
        self._calls.put(call)

    def _add(self, request: MPI.Request, done: Done, receive: bool = False) -> None:
        self._requests.append(request)
        self._done.append(done)
        self._is_receive.append(receive)

    def _run(self) -> None:
        nap, last, probed = _NAP, time.monotonic(), 0.0
        while True:
            busy = self._complete()
            if (now := time.monotonic()) - probed >= _PROBE_EVERY or self._closing:
                probed = now
                busy |= self._take_control()
            if not busy and self._closing and self._calls.empty() and all(self._is_receive):
                break
            try:
                # Waits on a lock, not on a socket: a call of another thread ends the nap at once.
                call = self._calls.get_nowait() if busy else self._calls.get(timeout=nap)
                while True:
                    call()
                    busy = True
                    call = self._calls.get_nowait()
            except queue.Empty:
                pass
            if busy:
                nap, last = _NAP, time.monotonic()
            else:
                longest = _LONGEST_NAP if time.monotonic() - last < _IDLE_AFTER else _IDLE_NAP
                nap = min(nap * 2, longest)
        for request in self._requests:
            request.Cancel()
            request.Free()

    def _complete(self) -> bool:
        if not self._requests:
            return False
        finished = MPI.Request.Testsome(self._requests)
        if not finished:
            return False
        # In the order in which they were started. Taken out of the lists first: what is called may add to them.
        finished.sort()
        done = [self._done[position] for position in finished]
        for position in reversed(finished):
            del self._requests[position], self._done[position], self._is_receive[position]
        for call in done:
            call()
        return True

    def _take_control(self) -> bool:
        message = self._communicator.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, self._status)
        if message is None:
            return False
        buffer = bytearray(self._status.Get_count(MPI.BYTE))
        source = self._status.Get_source()
        message.Recv([buffer, MPI.BYTE])
        content = json.loads(buffer)
        if self._handler is None:
            self._early.append((source, content))
        else:
            self._handler(source, content)
        return True


class MPIChannel(Channel):
    """A channel, with a communicator of its own."""

    def __init__(self, transport: MPITransport, communicator: MPI.Intracomm) -> None:
        super().__init__()
        self._transport = transport
        self._communicator = communicator

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.isend`."""
        self._transport.submit(
            lambda: self._transport._add(self._communicator.Issend([buffer, MPI.BYTE], dest, tag), done)
        )

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.irecv`."""
        self._transport.submit(
            lambda: self._transport._add(self._communicator.Irecv([buffer, MPI.BYTE], source, tag), done, receive=True)
        )

    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel._post`."""
        self.irecv(source, MPI.ANY_TAG, buffer, done)
