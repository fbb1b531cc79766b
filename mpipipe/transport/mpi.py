"""The transport over MPI. One thread owns all MPI calls from ``init`` to ``finalize``.

No MPI progresses in the background by itself, so the thread polls (``Testsome``), and sleeps between polls, longer the
longer nothing happens: a blocking ``Wait`` would spin on a core that the training needs.

Sends are synchronous-mode (``Issend``): they are done when the message has met its receive. A standard send of an eager
message is done as soon as MPI has a copy, so that everything would be under way at once and nothing could overtake it.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipipe.errors import EnvironmentProblem
from mpipipe.transport.base import Buffer, Channel, Done, OnControl, OnLost, Transport, hold

# Seconds between polls: the shortest, after something happened; the longest while messages come and go, and when
# there has been none for a while.
_NAP, _LONGEST_NAP, _IDLE_NAP = 100e-6, 2e-3, 10e-3
_IDLE_AFTER = 1.0  # seconds
_PROBE_EVERY = 1e-3  # seconds between looks for control messages, which are few and in no hurry: each look costs a poll
_CONTROL_TAG = 1

_Call = Callable[[], None]


@dataclass(slots=True)
class _Pending:
    """What belongs to a request under way.

    ``done`` is called when it is; ``failed`` where the other rank has died instead. A receive may never be done.
    """

    done: Done
    failed: Done
    peer: int
    is_receive: bool


def _nothing() -> None:
    """What is to be done about a receive that will never be filled."""


def _survives() -> bool:
    """Whether the MPI goes on when a process dies: Open MPI's ULFM, as ``mpirun --with-ft ulfm`` sets it up."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1" and "Open MPI" in MPI.Get_library_version()


class MPITransport(Transport):
    """Messages over duplicates of one communicator.

    Where MPI survives a process that dies (MPI's User Level Failure Mitigation, Bland et al., 2013), operations with it
    end with an error, and so does the look for control messages from any rank, until the failure is acknowledged. All
    ranks meet at the server only, so the communicators go on as they are: they need not be shrunk.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        """Take over a communicator that nothing else uses. The caller makes no MPI call until :meth:`close`."""
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.survives = _survives()
        self.communicators = 1  # how many it has made, or taken over
        self._communicator = communicator
        self._lost: set[int] = set()
        self._lost_handler: OnLost | None = None
        self._forgotten: list[tuple[MPI.Request, _Pending]] = []  # MPI may still read or write their buffers
        self._statuses: list[MPI.Status] = []
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # what other threads want done, in order
        # Requests under way, and by position in that list what belongs to them.
        self._requests: list[MPI.Request] = []
        self._pending: list[_Pending] = []
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
            self.communicators += 1
            duplicates.append(communicator)
            self._add(request, _Pending(opened.set, _nothing, self.rank, is_receive=False))

        if not self._lost:
            self.submit(duplicate)
        while not opened.wait(timeout=1.0):
            if self._lost:
                raise EnvironmentProblem(
                    f"rank(s) {', '.join(map(str, sorted(self._lost)))} are lost: the ranks that are left cannot begin "
                    "with another optimizer"
                )
        return MPIChannel(self, duplicates[0])

    def send_control(self, dest: int, message: dict[str, Any]) -> None:
        """See :meth:`Transport.send_control`."""
        buffer = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        start = partial(self._communicator.Isend, [buffer, MPI.BYTE], dest, _CONTROL_TAG)
        self.send(start, dest, partial(hold, buffer))

    def on_control(self, handler: OnControl) -> None:
        """See :meth:`Transport.on_control`."""

        def install() -> None:
            self._handler = handler
            for source, message in self._early:
                handler(source, message)
            self._early.clear()

        self.submit(install)

    def on_lost(self, handler: OnLost) -> None:
        """See :meth:`Transport.on_lost`."""

        def install() -> None:
            self._lost_handler = handler
            for rank in self._lost:
                handler(rank)

        self.submit(install)

    def forget(self, rank: int) -> None:
        """See :meth:`Transport.forget`."""

        def take_out() -> None:
            self._lost.add(rank)
            for position in reversed(range(len(self._requests))):
                if self._pending[position].peer == rank:
                    request, pending = self._requests.pop(position), self._pending.pop(position)
                    self._forgotten.append((request, pending))
                    pending.failed()

        self.submit(take_out)

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

    def send(self, start: Callable[[], MPI.Request], dest: int, done: Done) -> None:
        """Start a send to a rank."""

        def call() -> None:
            if dest in self._lost:
                done()
            else:
                self._add(start(), _Pending(done, done, dest, is_receive=False))

        self.submit(call)

    def receive(self, start: Callable[[], MPI.Request], source: int, done: Done) -> None:
        """Start a receive from a rank."""

        def call() -> None:
            if source not in self._lost:
                self._add(start(), _Pending(done, _nothing, source, is_receive=True))

        self.submit(call)

    def _add(self, request: MPI.Request, pending: _Pending) -> None:
        self._requests.append(request)
        self._pending.append(pending)

    def _run(self) -> None:
        nap, last, probed = _NAP, time.monotonic(), 0.0
        while True:
            busy = self._complete()
            if (now := time.monotonic()) - probed >= _PROBE_EVERY or self._closing:
                probed = now
                busy |= self._take_control()
            if not busy and self._closing and self._calls.empty() and all(p.is_receive for p in self._pending):
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
        finished, failed = self._test_surviving() if self.survives else (MPI.Request.Testsome(self._requests), ())
        if not finished:
            return False
        # In the order in which they were started. Taken out of the lists first: what is called may add to them.
        finished.sort()
        ended = [(self._pending[position], position in failed) for position in finished]
        for position in reversed(finished):
            del self._requests[position], self._pending[position]
        for pending, has_failed in ended:
            (pending.failed if has_failed else pending.done)()
        if failed:
            self._note_lost()
        return True

    def _test_surviving(self) -> tuple[list[int] | None, list[int]]:
        """The positions of requests that have ended, and of those among them that have failed with their rank."""
        while len(self._statuses) < len(self._requests):
            self._statuses.append(MPI.Status())
        try:
            return MPI.Request.Testsome(self._requests, self._statuses[: len(self._requests)]), []
        except MPI.Exception as error:
            # The statuses are those of the requests that have ended, in the order of their positions.
            ended = [position for position, request in enumerate(self._requests) if request == MPI.REQUEST_NULL]
            errors = {p: status.Get_error() for p, status in zip(ended, self._statuses, strict=False)}
            expected = {MPI.SUCCESS, MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED}
            if error.Get_error_class() != MPI.ERR_IN_STATUS or not {*errors.values()} <= expected:
                raise
            return ended, [position for position, code in errors.items() if code != MPI.SUCCESS]

    def _note_lost(self) -> None:
        """Say which ranks have died since the last time."""
        failed = self._communicator.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, None, self._communicator.Get_group())
        self._communicator.Ack_failed()
        for rank in sorted(set(ranks) - self._lost):
            self._lost.add(rank)
            if self._lost_handler is not None:
                self._lost_handler(rank)

    def _take_control(self) -> bool:
        try:
            message = self._communicator.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, self._status)
            if message is None:
                return False
            buffer = bytearray(self._status.Get_count(MPI.BYTE))
            source = self._status.Get_source()
            message.Recv([buffer, MPI.BYTE])
        except MPI.Exception as error:
            if not self.survives or error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
            self._note_lost()
            return True
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
        self._transport.send(partial(self._communicator.Issend, [buffer, MPI.BYTE], dest, tag), dest, done)

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel.irecv`."""
        self._transport.receive(partial(self._communicator.Irecv, [buffer, MPI.BYTE], source, tag), source, done)

    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        """See :meth:`Channel._post`."""
        self.irecv(source, MPI.ANY_TAG, buffer, done)
