"""The engines: they feed a machine with what happens on the wire and in the training step, and do what it says.

An engine has one thread, which alone touches its machine. Everybody else only puts events into its queue. What arrives
and what must be sent are bytes here; TensorFlow is on the other side of two callbacks.

The copies on a rank, for each byte of the model and step. Client, out: one, by which the training step puts a bucket's
gradients and their headers one after the other (narrowed instead of copied again, where the wire is narrow). Client,
in: one out of the buffer that MPI filled into the bucket's place (or widened), for receives are posted before it is
known what comes; TensorFlow takes that place over as the tensor that the training step waits for. Server, in: none, the
buffers that MPI filled are summed where they are, into what TensorFlow takes over as the tensor that the optimizer
waits for. Server, out: one, by which the updated elements are put behind their header; it is sent to every client from
there.

What travels by rows (see :mod:`mpipipe.wire.rows`) is copied once more on either side: into its parts, and out of them.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpipipe.errors import DisagreementError, ProtocolError
from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.server import ServerMachine
from mpipipe.trace import Kind, Recorder
from mpipipe.transport.base import Buffer, Channel, aligned, hold
from mpipipe.wire import formats, header, reduce, rows
from mpipipe.wire.feedback import Feedback
from mpipipe.wire.header import HEADER_BYTES

# What an engine calls with the number of a bucket or unit and its bytes, which it leaves to whoever is called.
Deliver = Callable[[int, Buffer], None]

# Receives posted for each peer: at a client enough for the automatic credit, so that MPI needs no copy of what
# comes; at the server no more than it takes to have one while the other is being posted again, for what is posted can
# still be filled when a client is to pause.
_CLIENT_RECEIVES, _SERVER_RECEIVES = 5, 2


@dataclass(frozen=True, slots=True)
class Wiring:
    """How an engine is connected: its plan, its channel, and what the ranks have agreed on.

    ``wire`` and ``wire_weights`` are formats (see :mod:`mpipipe.wire.formats`) of gradients and of weights.
    ``average`` is "clients" where every client's gradient counts the same, "samples" where it counts by the samples
    behind it. ``sum_rows``: see ``summed`` of :func:`mpipipe.wire.rows.mean`. ``overlap`` is false where nothing of a
    step is sent before its backward pass is over. ``survive`` is true where clients may be lost and the others go on.
    ``number`` is the session's.
    """

    plan: Plan
    channel: Channel
    recorder: Recorder
    credit_bytes: int
    wire: str = "plain"
    wire_weights: str = "plain"
    average: str = "clients"
    sum_rows: bool = True
    overlap: bool = True
    survive: bool = False
    number: int = 0


def _zeros(nbytes: int) -> Buffer:
    buffer = aligned(nbytes)
    buffer[:] = 0
    return buffer


class _Countdown:
    """Calls a function when it has been called itself a number of times, from any threads."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left, self._done = count, done
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            done = not self._left
        if done:
            self._done()


# What an engine calls with a step and the buckets of it that each of some ranks owes.
OnIdle = Callable[[int, Mapping[int, Collection[int]]], None]


class _Engine(ABC):
    """What both engines share.

    ``on_idle`` is called on the engine's thread when nothing has happened for a second, with what is awaited; and, if
    that was something, once more with nothing when something happens again.
    """

    def __init__(self, wiring: Wiring, incoming: str, outgoing: str, on_idle: OnIdle) -> None:
        self.plan = wiring.plan
        self._on_idle = on_idle
        self._was_idle = False  # whether it has been called with something
        self._wiring = wiring
        self._channel = wiring.channel
        self._incoming, self._outgoing = incoming, outgoing
        self._part_bytes = self._longest(outgoing)  # so long may a part of a piece be that travels by rows
        # Bytes of pieces sent, headers included, over the whole life.
        self.bytes_sent = 0
        # Of pieces that travel by rows, what has come so far, by piece and rank.
        self._gathering: dict[tuple[int, int], tuple[rows.Gathering, list[Buffer]]] = {}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpipipe-engine", daemon=True)

    def feed(self, event: Any) -> None:
        """Hand in an event, from any thread."""
        self._events.put(event)

    def close(self) -> None:
        """Stop the engine's thread after the events handed in so far."""
        self._events.put(None)
        self._thread.join()

    def _listen(self, source: int, depth: int) -> None:
        """Have everything that comes from a rank put into the queue of events."""
        nbytes = HEADER_BYTES + self._longest(self._incoming)
        self._channel.listen(source, nbytes, depth, lambda buffer: self.feed((source, buffer)))

    def _longest(self, form: str) -> int:
        """Bytes behind the header of the longest message."""
        return max((self._wire_bytes(piece, form) for piece in self.plan.pieces), default=0)

    def _wire_bytes(self, piece: Piece, form: str) -> int:
        bucket = self.plan.buckets[piece.bucket]
        if bucket.row_bytes:
            return max(piece.nbytes, rows.PART_BYTES + rows.INDEX_BYTES + bucket.row_bytes)
        return formats.encoded_bytes(self._form(piece, form), bucket.dtype, piece.nbytes)

    def _form(self, piece: Piece, form: str) -> str:
        """The wire format of a piece, where most have a given one."""
        return "plain" if self.plan.buckets[piece.bucket].exact else form

    def _elements(self, message: Buffer, piece: Piece) -> Buffer:
        """The encoded elements in a message that has come."""
        return message[HEADER_BYTES : HEADER_BYTES + self._wire_bytes(piece, self._incoming)]

    def _known(self, source: int, number: int) -> Piece:
        """The piece of a number that a rank has sent."""
        if not 0 <= number < len(self.plan.pieces):
            raise ProtocolError(f"rank {source} has sent a message that is none of the plan's pieces")
        return self.plan.pieces[number]

    def _is_narrow(self, piece: Piece) -> bool:
        return formats.narrows(self._form(piece, self._outgoing), self.plan.buckets[piece.bucket].dtype)

    def _narrow_message(self, piece: Piece, wide: Buffer, encode: Callable[[Buffer], None]) -> Buffer:
        """A message of a piece with the header of the wide one, whose elements ``encode`` writes."""
        message = np.empty(HEADER_BYTES + self._wire_bytes(piece, self._outgoing), dtype=np.uint8)
        message[:HEADER_BYTES] = wide[:HEADER_BYTES]
        encode(message[HEADER_BYTES:])
        return message

    def _by_rows(self, piece: Piece, image: Buffer) -> list[Buffer]:
        """The messages of a piece of which rows travel; its image is a header and the rows."""
        row_bytes = self.plan.buckets[piece.bucket].row_bytes
        parts = rows.parts(image[HEADER_BYTES:], row_bytes, self._part_bytes)
        return [np.concatenate([image[:HEADER_BYTES], *fields]) for fields in parts]

    def _gathered(self, source: int, piece: Piece, message: Buffer) -> Buffer | None:
        """Take a message of a piece of which rows travel: the piece's image once all of them have come."""
        key, row_bytes = (piece.index, source), self.plan.buckets[piece.bucket].row_bytes
        gathering, messages = self._gathering.setdefault(key, (rows.Gathering(row_bytes), []))
        messages.append(message)
        try:
            complete = gathering.add(message[HEADER_BYTES:])
        except ValueError as error:
            raise ProtocolError(f"rank {source} has sent of piece {piece.index} {error}") from None
        if not complete:
            return None
        image = np.concatenate([message[:HEADER_BYTES], gathering.rows()])
        for taken in messages:
            self._channel.release(taken)
        del self._gathering[key]
        return image

    def _isend(self, dest: int, piece: Piece, messages: list[Buffer], done: Callable[[], None]) -> None:
        self.bytes_sent += sum(message.size for message in messages)
        each = done if len(messages) == 1 else _Countdown(len(messages), done)
        for message in messages:
            self._channel.isend(dest, piece.index, message, each)

    def _mark(self, kind: Kind, bucket: int, step: int, peer: int = -1, piece: int = -1) -> None:
        self._wiring.recorder.mark(kind, bucket, step, peer, piece, self._wiring.number)

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                step, awaited = self._awaited()
                self._was_idle = bool(awaited)
                self._on_idle(step, awaited)
                continue
            if event is None:
                return
            if self._was_idle:
                self._was_idle = False
                self._on_idle(self._awaited()[0], {})
            self._handle(event)

    @abstractmethod
    def _awaited(self) -> tuple[int, Mapping[int, Collection[int]]]:
        """The present step, and the buckets of it that each rank owes for which this one waits."""

    @abstractmethod
    def _handle(self, event: Any) -> None: ...


class ClientEngine(_Engine):
    """A client's engine.

    Args:
        wiring: see :class:`Wiring`.
        deliver: called with each bucket's new weights, on the engine's thread.
        on_idle: see :class:`_Engine`; the server owes new weights.
        server: the rank that owns the buckets.
    """

    def __init__(
        self,
        wiring: Wiring,
        deliver: Deliver,
        on_idle: OnIdle = lambda step, owing: None,
        server: int = 0,
    ) -> None:
        super().__init__(wiring, wiring.wire_weights, wiring.wire, on_idle)
        self._machine = ClientMachine(self.plan, wiring.credit_bytes, overlap=wiring.overlap)
        self._deliver = deliver
        self._server = server
        # Images by bucket and step, each until all of it is sent; and how many pieces of each bucket's oldest one are.
        self._gradients: list[dict[int, Buffer]] = [{} for _ in self.plan.buckets]
        self._sent = [0] * len(self.plan.buckets)
        self._feedback: dict[int, Feedback] = {}  # by piece
        self._weights: dict[int, Buffer] = {}  # of buckets that have come in part
        self._delivered = [-1] * len(self.plan.buckets)  # the last step whose weights went to the training step
        self._changed = threading.Condition()
        self._unhandled = 0  # events handed in and not yet handled
        self._settled: int | None = 0  # steps done, or None in the middle of one; as of the last event handled
        self._thread.start()
        self._listen(server, _CLIENT_RECEIVES)

    def feed(self, event: Any) -> None:
        """Hand in an event, from any thread."""
        with self._changed:
            self._unhandled += 1
            self._events.put(event)

    def gradient(self, bucket: int, step: int, image: Buffer) -> None:
        """A bucket's gradient is ready; ``image`` (see :func:`header.message_of`) must stay untouched until sent."""
        self._mark("ready", bucket, step)
        self.feed((bucket, step, image))

    def assigned(self, bucket: int) -> None:
        """The training step has put the weights that were last delivered into the variables."""
        self._mark("assigned", bucket, self._delivered[bucket])

    @property
    def in_step(self) -> bool:
        """Whether some, but not all, of a step has been done."""
        return self._settled is None

    def settle(self) -> int:
        """Wait until nothing is under way; returns how many steps are done."""
        with self._changed:
            while self._unhandled or self._settled is None:
                self._changed.wait(timeout=1.0)  # in slices, so that an interrupt gets through
            return self._settled

    def caught_up(self, steps: int) -> None:
        """This client has come by the weights of so many steps in another way."""
        self.feed(m.CaughtUp(steps))
        self.settle()

    def _handle(self, event: Any) -> None:
        if isinstance(event, tuple) and len(event) == 3:
            bucket, step, image = event
            self._gradients[bucket][step] = image
            self._mark("queued", bucket, step)
            event = m.GradientReady(bucket, step)
        elif isinstance(event, tuple):
            event = self._take(*event)
        elif isinstance(event, m.GradientSent):
            self._note_sent(event.piece.bucket)
        for command in self._machine.handle(event) if event is not None else ():
            if isinstance(command, m.SendGradient):
                self._send(command.piece, command.step)
            elif isinstance(command, m.DeliverWeights):
                self._delivered[command.bucket] = command.step
                self._deliver(command.bucket, self._weights.pop(command.bucket))
        with self._changed:
            self._unhandled -= 1
            self._settled = self._machine.steps if self._machine.between_steps else None
            self._changed.notify_all()

    def _awaited(self) -> tuple[int, Mapping[int, Collection[int]]]:
        step, buckets = self._machine.awaited()
        return step, {self._server: buckets} if buckets else {}

    def _take(self, source: int, message: Buffer) -> m.WeightsReceived | m.AskedFor | None:
        step, number = header.read(message)
        if number < 0:
            self._channel.release(message)
            return m.AskedFor(self._known(source, -1 - number), step)
        piece = self._known(source, number)
        bucket = self.plan.buckets[piece.bucket]
        if bucket.row_bytes:
            image = self._gathered(source, piece, message)
            if image is None:
                return None
            self._weights[bucket.index] = image[HEADER_BYTES:]
        else:
            if bucket.index not in self._weights:
                self._weights[bucket.index] = aligned(bucket.nbytes)
            into = self._weights[bucket.index][piece.offset : piece.offset + piece.nbytes]
            form = self._form(piece, self._incoming)
            formats.decode(form, bucket.dtype, self._elements(message, piece), into)
            self._channel.release(message)
        self._mark("received", piece.bucket, step, source, piece.index)
        return m.WeightsReceived(piece, step)

    def _send(self, piece: Piece, step: int) -> None:
        def done() -> None:
            self._mark("sent", piece.bucket, step, self._server, piece.index)
            self.feed(m.GradientSent(piece))

        bucket = self.plan.buckets[piece.bucket]
        image = self._gradients[piece.bucket].get(step)
        if image is None:
            raise ProtocolError(
                f"bucket {piece.bucket} has got weights of step {step - 1} before its gradient was sent"
            )
        if bucket.row_bytes:
            messages = self._by_rows(piece, image)
        else:
            message = header.message_of(image, bucket.pieces, piece)
            messages = [self._narrowed(piece, message) if self._is_narrow(piece) else message]
        self._mark("started", piece.bucket, step, self._server, piece.index)
        self._isend(self._server, piece, messages, done)

    def _note_sent(self, bucket: int) -> None:
        """One more piece of a bucket's oldest gradient has been sent; a younger one is not begun before all are."""
        self._sent[bucket] += 1
        if self._sent[bucket] == len(self.plan.buckets[bucket].pieces):
            self._sent[bucket] = 0
            del self._gradients[bucket][min(self._gradients[bucket])]

    def _narrowed(self, piece: Piece, message: Buffer) -> Buffer:
        dtype = self.plan.buckets[piece.bucket].dtype
        feedback = self._feedback.get(piece.index)
        if feedback is None:
            feedback = self._feedback[piece.index] = Feedback(self._outgoing, dtype, piece.nbytes)
        return self._narrow_message(piece, message, partial(feedback.encode, message[HEADER_BYTES:]))


class ServerEngine(_Engine):
    """The server's engine.

    Args:
        wiring: see :class:`Wiring`.
        clients: the ranks that train.
        hand_over: called with each unit's mean gradient, on the engine's thread.
        on_nonfinite: called with a client, a bucket and a step for each piece of a gradient that is not finite, on the
            engine's thread; without it nobody looks.
        on_idle: see :class:`_Engine`; clients owe gradients.
    """

    def __init__(
        self,
        wiring: Wiring,
        clients: list[int],
        hand_over: Deliver,
        on_idle: OnIdle = lambda step, owing: None,
        on_nonfinite: Callable[[int, int, int], None] | None = None,
    ) -> None:
        super().__init__(wiring, wiring.wire, wiring.wire_weights, on_idle)
        self._machine = ServerMachine(self.plan, clients, wiring.credit_bytes, survive=wiring.survive)
        self._clients = clients
        self._hand_over = hand_over
        self._on_nonfinite = on_nonfinite
        self._arrived: list[dict[int, Buffer]] = [{} for _ in self.plan.pieces]  # messages, by piece and client
        self._means: dict[int, Buffer] = {}  # of units that are partly reduced
        self._weights: dict[int, Buffer] = {}  # images, by unit
        # Messages of the newest weights, by piece, where they are not in the image as they are.
        self._made: dict[int, list[Buffer]] = {}
        self._paused: set[int] = set()  # clients from which nothing is taken for now
        # True for each step begun, False for each end of a phase, in order.
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._begun = self._waited = 0  # steps put into that queue, and taken from it
        self._ended = False  # whether the end of the phase has been taken from it
        # Where clients may be lost: those that have been, and of the step that is being summed the gradients that
        # already are, by piece and client, and the units handed over.
        self._lost: set[int] = set()
        self._kept: list[dict[int, Buffer]] = [{} for _ in self.plan.pieces]
        self._handed: set[int] = set()
        # Steps that have to be done again, among them those that are not to be; and by unit the step of the newest
        # weights, and for (unit, step) how many results are still to come that do not count.
        self.redo_steps: set[int] = set()
        self.cancelled_steps: set[int] = set()
        self._updated = [-1] * len(self.plan.units)
        self._void: Counter[tuple[int, int]] = Counter()

    def start(self) -> None:
        """Post the receives and begin: from now on gradients are handed over."""
        self._thread.start()
        for client in self._clients:
            self._listen(client, _SERVER_RECEIVES)

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
    def steps_begun(self) -> int:
        """How many steps have begun in all."""
        return self._machine.began

    @property
    def step_waits(self) -> bool:
        """Whether a step has begun that nobody has waited for."""
        return self._begun > self._waited

    def updated(self, unit: int, step: int, image: Buffer) -> None:
        """The optimizer has updated a unit: the image of its new weights, which must stay untouched."""
        self.feed((unit, step, image))

    def _awaited(self) -> tuple[int, Mapping[int, Collection[int]]]:
        # It is not for those that pause that anybody waits.
        owing = {c: buckets for c, buckets in self._machine.waiting_for().items() if c not in self._paused}
        return self.steps_begun - 1, owing

    def _handle(self, event: Any) -> None:
        if isinstance(event, tuple) and len(event) == 3:
            event = self._take_weights(*event)
        elif isinstance(event, tuple):
            event = self._take(*event)
        elif isinstance(event, m.ClientLeft | m.ClientDeparted) and event.client in self._lost:
            return  # what it said before it was lost, on another way
        elif isinstance(event, m.ClientLost):
            self._lost.add(event.client)
            for key in [key for key in self._gathering if key[1] == event.client]:
                for message in self._gathering.pop(key)[1]:
                    self._channel.release(message)
        if event is None:
            return
        todo = deque(self._machine.handle(event))
        while todo:
            command = todo.popleft()
            self._execute(command)
            if isinstance(command, m.Reduce):
                todo.extend(self._machine.handle(m.Reduced(command.piece)))

    def _take_weights(self, unit: int, step: int, image: Buffer) -> m.Updated | None:
        if self._void[unit, step]:
            self._void[unit, step] -= 1
            return None
        self._weights[unit] = image
        for piece in self.plan.units[unit].pieces:
            self._made.pop(piece.index, None)
        if step == self._updated[unit] and step in self.redo_steps:
            return None  # the same, without a client that was lost: what is still to be sent is this
        self._updated[unit] = step
        self._mark("updated", self.plan.units[unit].bucket, step, piece=self.plan.units[unit].pieces[0].index)
        return m.Updated(unit, step)

    def _take(self, source: int, message: Buffer) -> m.GradientReceived | None:
        if source in self._lost:
            self._channel.release(message)
            return None
        step, number = header.read(message)
        piece = self._known(source, number)
        if self.plan.buckets[piece.bucket].row_bytes:
            image = self._gathered(source, piece, message)
            if image is None:
                return None
            message = image
        self._mark("received", piece.bucket, step, source, piece.index)
        if source in self._arrived[piece.index]:
            raise ProtocolError(f"rank {source} sent piece {piece.index} of bucket {piece.bucket} twice")
        self._arrived[piece.index][source] = message
        return m.GradientReceived(source, piece, step)

    def _execute(self, command: m.ServerCommand) -> None:
        if isinstance(command, m.Reduce):
            self._reduce(command.piece, command.step, command.clients)
        elif isinstance(command, m.HandOver):
            self._handed.add(command.unit)
            self._hand_over(command.unit, self._means.pop(command.unit))
        elif isinstance(command, m.SendWeights):
            self._send(command.client, command.piece, command.step)
        elif isinstance(command, m.AskFor):
            question = header.question(command.step, command.piece.index)
            self._channel.isend(command.client, command.piece.index, question, partial(hold, question))
        elif isinstance(command, m.Pause):
            self._paused.add(command.client)
            self._channel.pause(command.client)
        elif isinstance(command, m.Resume):
            self._paused.discard(command.client)
            self._channel.resume(command.client)
        elif isinstance(command, m.StepBegan):
            # A step that was not to be may be another one's: the server's loop has long ended it.
            self.redo_steps.discard(command.step)
            self.cancelled_steps.discard(command.step)
            self._begun += 1
            self._steps.put(True)
        elif isinstance(command, m.Discard):
            self._release(command.piece, [self._arrived[command.piece.index].pop(command.client)])
        elif isinstance(command, m.MustRedo):
            self.redo_steps.add(command.step)
            self._void.update((unit, command.step) for unit, step in enumerate(self._updated) if step < command.step)
        elif isinstance(command, m.Redo):
            self._redo(command.step, command.clients)
        elif isinstance(command, m.StepReduced):
            self._forget_step()
        elif isinstance(command, m.PhaseEnded):
            self._steps.put(False)
        elif isinstance(command, m.Fail):
            raise DisagreementError(command.message)

    def _redo(self, step: int, clients: tuple[int, ...]) -> None:
        """Hand over all of a step once more, with the gradients of these clients; of none, what lets it end."""
        if clients:
            for piece in self.plan.pieces:
                self._sum(piece, {client: self._kept[piece.index][client] for client in clients})
            for unit in self.plan.units:
                self._hand_over(unit.index, self._means.pop(unit.index))
            return
        self.cancelled_steps.add(step)
        self._updated = [min(updated, step - 1) for updated in self._updated]
        self._means.clear()
        for unit in self.plan.units:
            if unit.index not in self._handed:
                self._hand_over(unit.index, rows.none() if unit.row_bytes else _zeros(unit.nbytes))
        self._forget_step()

    def _forget_step(self) -> None:
        self._handed.clear()
        for piece, kept in zip(self.plan.pieces, self._kept, strict=True):
            self._release(piece, kept.values())
            kept.clear()

    def _release(self, piece: Piece, messages: Iterable[Buffer]) -> None:
        if not self.plan.buckets[piece.bucket].row_bytes:  # those have been already
            for message in messages:
                self._channel.release(message)

    def _reduce(self, piece: Piece, step: int, clients: tuple[int, ...]) -> None:
        arrived = self._arrived[piece.index]
        self._sum(piece, {client: arrived[client] for client in clients})
        self._look_for_nonfinite(piece, step, arrived)
        if self._wiring.survive:
            self._kept[piece.index].update(arrived)
        else:
            self._release(piece, arrived.values())
        arrived.clear()
        self._mark("reduced", piece.bucket, step, piece=piece.index)

    def _look_for_nonfinite(self, piece: Piece, step: int, arrived: dict[int, Buffer]) -> None:
        if self._on_nonfinite is None:
            return
        if self._is_finite(piece, self._mean_of(piece), "plain"):  # as no mean is that has anything else in it
            return
        form = self._form(piece, self._incoming)
        for client, message in arrived.items():
            by_rows = self.plan.buckets[piece.bucket].row_bytes
            part = message[HEADER_BYTES:] if by_rows else self._elements(message, piece)
            if not self._is_finite(piece, part, form):
                self._on_nonfinite(client, piece.bucket, step)

    def _is_finite(self, piece: Piece, part: Buffer, form: str) -> bool:
        bucket = self.plan.buckets[piece.bucket]
        if bucket.row_bytes:
            return rows.is_finite(part, bucket.dtype, bucket.row_bytes)
        return reduce.is_finite(part, bucket.dtype, form)

    def _mean_of(self, piece: Piece) -> Buffer:
        """Where the mean of a piece is, in its unit's."""
        number = self.plan.unit_of[piece.index]
        if self.plan.buckets[piece.bucket].row_bytes:
            return self._means[number]
        start = piece.offset - self.plan.units[number].pieces[0].offset
        return self._means[number][start : start + piece.nbytes]

    def _sum(self, piece: Piece, arrived: dict[int, Buffer]) -> None:
        """Put the mean of clients' gradients of a piece, in their order, into the unit's."""
        number, bucket = self.plan.unit_of[piece.index], self.plan.buckets[piece.bucket]
        by_samples = self._wiring.average == "samples"
        weights = [header.samples(message) for message in arrived.values()] if by_samples else None
        if bucket.row_bytes:
            gradients = [message[HEADER_BYTES:] for message in arrived.values()]
            summed = self._wiring.sum_rows
            self._means[number] = rows.mean(gradients, bucket.dtype, bucket.row_bytes, weights, summed=summed)
        else:
            if number not in self._means:
                self._means[number] = aligned(self.plan.units[number].nbytes)
            out = self._mean_of(piece)
            parts = [self._elements(message, piece) for message in arrived.values()]
            reduce.mean(parts, bucket.dtype, self._form(piece, self._incoming), out, weights)

    def _send(self, client: int, piece: Piece, step: int) -> None:
        def done(client: int, piece: Piece, step: int) -> None:
            self._mark("broadcast", piece.bucket, step, client, piece.index)
            self.feed(m.WeightsSent(client, piece))

        self._isend(client, piece, self._messages(piece), partial(done, client, piece, step))

    def _messages(self, piece: Piece) -> list[Buffer]:
        """The messages of a piece of the newest weights; what has to be made is made once for all clients."""
        unit, bucket = self.plan.units[self.plan.unit_of[piece.index]], self.plan.buckets[piece.bucket]
        narrow = self._is_narrow(piece)
        if not bucket.row_bytes and not narrow:
            return [header.message_of(self._weights[unit.index], unit.pieces, piece)]
        if piece.index not in self._made:
            if narrow:
                message = header.message_of(self._weights[unit.index], unit.pieces, piece)
                encode = partial(formats.encode, self._outgoing, bucket.dtype, message[HEADER_BYTES:])
                self._made[piece.index] = [self._narrow_message(piece, message, encode)]
            else:
                self._made[piece.index] = self._by_rows(piece, self._weights[unit.index])
        return self._made[piece.index]
