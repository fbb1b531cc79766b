"""The engines: they feed a machine with what happens on the wire and in the training step, and do what it says.

An engine has one thread, which alone touches its machine. Everybody else only puts events into its queue. What arrives
and what must be sent are plain bytes here; TensorFlow is on the other side of two callbacks.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipipe.errors import DisagreementError
from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.server import ServerMachine
from mpipipe.trace import Recorder
from mpipipe.transport.base import Buffer, Channel
from mpipipe.wire import reduce

# What an engine calls with a bucket's number and bytes. The bytes are only valid during the call.
Deliver = Callable[[int, Buffer], None]


class _Engine(ABC):
    def __init__(self, plan: Plan, channel: Channel, recorder: Recorder) -> None:
        self.plan = plan
        self._channel = channel
        self._recorder = recorder
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpipipe-engine", daemon=True)

    def feed(self, event: Any) -> None:
        """Hand in an event, from any thread."""
        self._events.put(event)

    def close(self) -> None:
        """Stop the engine's thread after the events handed in so far."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                self._idle()
                continue
            if event is None:
                return
            self._handle(event)

    @abstractmethod
    def _idle(self) -> None:
        """Nothing has happened for a second."""

    @abstractmethod
    def _handle(self, event: Any) -> None: ...

    def _buffers(self) -> list[Buffer]:
        return [np.empty(bucket.nbytes, dtype=np.uint8) for bucket in self.plan.buckets]


def _part(buffer: Buffer, piece: Piece) -> Buffer:
    return buffer[piece.offset : piece.offset + piece.nbytes]


class ClientEngine(_Engine):
    """A client's engine.

    Args:
        plan: the buckets.
        channel: with a lane for each bucket.
        recorder: of the timeline.
        credit_bytes: how much may be under way.
        deliver: called with each bucket's new weights, on the engine's thread.
        server: the rank that owns the buckets.
    """

    def __init__(
        self, plan: Plan, channel: Channel, recorder: Recorder, credit_bytes: int, deliver: Deliver, server: int = 0
    ) -> None:
        super().__init__(plan, channel, recorder)
        self._machine = ClientMachine(plan, credit_bytes)
        self._deliver = deliver
        self._server = server
        self._gradients: dict[int, Buffer] = {}
        self._weights = self._buffers()
        self._delivered = [-1] * len(plan.buckets)  # the last step whose weights went to the training step
        self._followed: set[int] = set()
        self._changed = threading.Condition()
        self._unhandled = 0  # events handed in and not yet handled
        self._settled: int | None = 0  # steps done, or None in the middle of one; as of the last event handled
        self._thread.start()

    def feed(self, event: Any) -> None:
        """Hand in an event, from any thread."""
        with self._changed:
            self._unhandled += 1
            self._events.put(event)

    def gradient(self, bucket: int, data: Buffer) -> None:
        """A bucket's gradient is ready; ``data`` must stay untouched until its weights are delivered."""
        self._gradients[bucket] = data
        self.feed(m.GradientReady(bucket))

    def assigned(self, bucket: int) -> None:
        """The training step has put the weights that were last delivered into the variables."""
        self._recorder.mark("assigned", bucket, self._delivered[bucket])

    def settle(self, steps: int = 0) -> int:
        """Wait until nothing is under way and at least so many steps are done; returns how many are."""
        with self._changed:
            while self._unhandled or self._settled is None or self._settled < steps:
                self._changed.wait(timeout=1.0)  # in slices, so that an interrupt gets through
            return self._settled

    def take_followed(self) -> dict[int, Buffer]:
        """The latest weights of the buckets that came in while this client only followed, since the last call."""
        taken = {bucket: self._weights[bucket] for bucket in sorted(self._followed)}
        self._followed.clear()
        return taken

    def _handle(self, event: Any) -> None:
        if isinstance(event, m.GradientReady):
            self._recorder.mark("ready", event.bucket, self._machine.step_of(event.bucket))
        for command in self._machine.handle(event):
            if isinstance(command, m.SendGradient):
                self._send(command.piece, command.step)
            elif isinstance(command, m.ReceiveWeights):
                self._receive(command.piece)
            elif isinstance(command, m.DeliverWeights):
                self._recorder.mark("received", command.bucket, command.step, self._server)
                if command.followed:
                    self._followed.add(command.bucket)
                else:
                    self._delivered[command.bucket] = command.step
                    self._deliver(command.bucket, self._weights[command.bucket])
        with self._changed:
            self._unhandled -= 1
            self._settled = self._machine.steps if self._machine.between_steps else None
            self._changed.notify_all()

    def _idle(self) -> None:
        pass

    def _send(self, piece: Piece, step: int) -> None:
        def done() -> None:
            self._recorder.mark("sent", piece.bucket, step, self._server)
            self.feed(m.GradientSent(piece))

        self._channel.isend(self._server, piece.index, _part(self._gradients[piece.bucket], piece), done)

    def _receive(self, piece: Piece) -> None:
        part = _part(self._weights[piece.bucket], piece)
        self._channel.ibcast(piece.bucket, self._server, part, lambda: self.feed(m.WeightsReceived(piece)))


class ServerEngine(_Engine):
    """The server's engine.

    Args:
        plan: the buckets.
        channel: with a lane for each bucket.
        recorder: of the timeline.
        credit_bytes: how much may be under way.
        clients: the ranks that train.
        hand_over: called with each bucket's mean gradient, on the engine's thread.
        tell_to_follow: called with (client, step) when a step goes on without a client that has left.
        on_idle: called on the engine's thread when nothing has happened for a second, with the buckets that each
            client owes.
        rank: this rank.
    """

    def __init__(
        self,
        plan: Plan,
        channel: Channel,
        recorder: Recorder,
        credit_bytes: int,
        clients: list[int],
        hand_over: Deliver,
        tell_to_follow: Callable[[int, int], None],
        on_idle: Callable[[dict[int, list[int]]], None] = lambda owing: None,
        rank: int = 0,
    ) -> None:
        super().__init__(plan, channel, recorder)
        self._machine = ServerMachine(plan, clients, credit_bytes)
        self._hand_over = hand_over
        self._tell_to_follow = tell_to_follow
        self._on_idle = on_idle
        self._rank = rank
        self._gradients = {client: self._buffers() for client in clients}
        self._weights: dict[int, Buffer] = {}
        self._updates = [0] * len(plan.buckets)
        # True for each step begun, False for each end of a phase, in order.
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._begun = self._waited = 0  # steps put into that queue, and taken from it
        self._ended = False  # whether the end of the phase has been taken from it

    def start(self) -> None:
        """Post the receives and begin: from now on gradients are handed over."""
        for command in self._machine.start():
            self._execute(command)
        self._thread.start()

    def open_phase(self) -> None:
        """The clients that have ended the phase may take part again."""
        self._ended = False
        self.feed(m.PhaseOpened())

    def wait_step(self, timeout: float) -> bool | None:
        """Wait until a client begins the next step (True), or until all have ended the phase (False).

        Once a phase has ended, that is the answer until the next one is opened. None after ``timeout`` seconds.
        """
        if self._ended:
            return False
        try:
            began = self._steps.get(timeout=timeout)
        except queue.Empty:
            return None
        self._waited += began
        self._ended = not began
        return began

    @property
    def step_waits(self) -> bool:
        """Whether a step has begun that nobody has waited for."""
        return self._begun > self._waited

    def updated(self, bucket: int, data: Buffer) -> None:
        """The optimizer has updated a bucket: its new weights, which must stay untouched."""
        self._weights[bucket] = data
        self.feed(m.Updated(bucket))

    def _idle(self) -> None:
        self._on_idle(self._machine.waiting_for())

    def _handle(self, event: Any) -> None:
        if isinstance(event, m.GradientReceived):
            bucket = event.piece.bucket
            self._recorder.mark("received", bucket, self._machine.step_of(bucket), event.client)
        elif isinstance(event, m.Updated):
            self._recorder.mark("updated", event.bucket, self._updates[event.bucket])
            self._updates[event.bucket] += 1
        todo = deque(self._machine.handle(event))
        while todo:
            command = todo.popleft()
            self._execute(command)
            if isinstance(command, m.Reduce):
                todo.extend(self._machine.handle(m.Reduced(command.bucket)))

    def _execute(self, command: m.ServerCommand) -> None:
        if isinstance(command, m.PostReceive):
            self._receive(command.client, command.piece)
        elif isinstance(command, m.Reduce):
            parts = [self._gradients[client][command.bucket] for client in command.clients]
            mean = reduce.mean(parts, self.plan.buckets[command.bucket].dtype)
            self._recorder.mark("reduced", command.bucket, command.step)
            self._hand_over(command.bucket, mean)
        elif isinstance(command, m.Broadcast):
            self._broadcast(command.piece, command.step)
        elif isinstance(command, m.TellToFollow):
            self._tell_to_follow(command.client, command.step)
        elif isinstance(command, m.StepBegan):
            self._begun += 1
            self._steps.put(True)
        elif isinstance(command, m.PhaseEnded):
            self._steps.put(False)
        elif isinstance(command, m.Fail):
            raise DisagreementError(command.message)

    def _receive(self, client: int, piece: Piece) -> None:
        part = _part(self._gradients[client][piece.bucket], piece)
        self._channel.irecv(client, piece.index, part, lambda: self.feed(m.GradientReceived(client, piece)))

    def _broadcast(self, piece: Piece, step: int) -> None:
        def done() -> None:
            self._recorder.mark("broadcast", piece.bucket, step)
            self.feed(m.BroadcastDone(piece))

        self._channel.ibcast(piece.bucket, self._rank, _part(self._weights[piece.bucket], piece), done)
