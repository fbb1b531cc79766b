"""Whole training runs over the in-process network, with plain SGD in numpy in place of Keras."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, dense, image_of, image_of_rows, plan_of, run_ranks

from mpipipe.engine import ClientEngine, OnIdle, ServerEngine, Wiring
from mpipipe.errors import DisagreementError, ProtocolError
from mpipipe.protocol import messages as m
from mpipipe.protocol.plan import Plan, VariableSpec, make_plan
from mpipipe.trace import Recorder
from mpipipe.transport.base import Buffer, Channel, Done, OnMessage
from mpipipe.transport.inproc import Network
from mpipipe.wire import formats, header, plain, reduce, rows
from mpipipe.wire.feedback import Feedback
from mpipipe.wire.header import HEADER_BYTES

RATE = np.float32(0.1)
SECONDS = 30.0
POISON = 0xAB  # what is written into memory that must not be looked at any more


def mixed_plan(piece_bytes: int = 1 << 20, divisible: bool = False) -> Plan:
    """Five buckets, two of them of 16-bit floats."""
    variables = [
        VariableSpec("a/kernel", (30, 10), "float32"),
        VariableSpec("b/kernel", (700,), "bfloat16"),
        VariableSpec("c/kernel", (1, 1), "float32"),
        VariableSpec("d/kernel", (17, 31), "float32"),
        VariableSpec("e/kernel", (600,), "float16"),
    ]
    return make_plan(variables, [True] * 5, piece_bytes=piece_bytes, fuse_bytes=0, max_buckets=100, divisible=divisible)


def first_weights(plan: Plan) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [
        random.normal(size=b.nbytes // plain.dtype_of(b.dtype).itemsize).astype(plain.dtype_of(b.dtype))
        for b in plan.buckets
    ]


def gradient_of(client: int, step: int, weights: np.ndarray) -> np.ndarray:
    """Depends on everything: the client, the step and the weights that it has then."""
    noise = np.random.default_rng([client, step, weights.size]).normal(size=weights.size)
    return (np.tanh(weights.astype(np.float32)) + noise.astype(np.float32) * client).astype(weights.dtype)


def sgd(weights: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    return (weights.astype(np.float32) - RATE * gradient.astype(np.float32)).astype(weights.dtype)


# ----------------------------------------------------------------------------------------------- one after the other


class OnTheWire:
    """What comes out of a wire at its other end."""

    def __init__(self, plan: Plan, form: str) -> None:
        self._plan, self._form = plan, form
        self._feedback: dict[tuple[int, int], Feedback] = {}

    def weights(self, value: np.ndarray) -> np.ndarray:
        name, data = value.dtype.name, plain.encode(value)
        code = np.empty(formats.encoded_bytes(self._form, name, data.nbytes), np.uint8)
        formats.encode(self._form, name, data, code)
        return self._decoded(code, value)

    def gradient(self, client: int, bucket: int, value: np.ndarray) -> np.ndarray:
        name, data, codes = value.dtype.name, plain.encode(value), []
        for piece in self._plan.buckets[bucket].pieces:
            feedback = self._feedback.setdefault((client, piece.index), Feedback(self._form, name, piece.nbytes))
            codes.append(np.empty(formats.encoded_bytes(self._form, name, piece.nbytes), np.uint8))
            feedback.encode(data[piece.offset : piece.offset + piece.nbytes], codes[-1])
        return self._decoded(np.concatenate(codes), value)

    def _decoded(self, code: np.ndarray, like: np.ndarray) -> np.ndarray:
        out = np.empty(like.nbytes, np.uint8)
        formats.decode(self._form, like.dtype.name, code, out)
        return plain.decode(out, like.dtype.name)


def one_after_the_other(
    plan: Plan, phases: list[list[int]], wire: str = "plain", wire_weights: str = "plain", blind: bool = False
) -> list[bytes]:
    """What training must come to: one process, gradients summed in rank order. ``phases`` are steps by client."""
    server, step = first_weights(plan), 0
    gradients_wire, weights_wire = OnTheWire(plan, wire), OnTheWire(plan, wire_weights)
    for phase in phases:
        theirs = list(server)
        for own in range(max(phase)):
            taking_part = [client for client, steps in enumerate(phase, start=1) if steps > own]
            for bucket, value in enumerate(server):
                seen = np.zeros_like(value) if blind else theirs[bucket]
                gradients = [gradients_wire.gradient(c, bucket, gradient_of(c, step, seen)) for c in taking_part]
                wide = gradients[0].astype(np.float32)
                for gradient in gradients[1:]:
                    wide = wide + gradient.astype(np.float32)
                mean = (wide / np.float32(len(gradients))).astype(value.dtype)
                server[bucket] = sgd(value, mean)
                theirs[bucket] = weights_wire.weights(server[bucket])
            step += 1
    return [value.tobytes() for value in server]


# ------------------------------------------------------------------------------------------------- on several ranks


class Watched(Channel):
    """A channel that spoils what was given back, so that nothing right comes of using it, and counts what is out."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.out: dict[int, Buffer] = {}  # buffers with a message that nobody has given back, by address

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        self._channel.isend(dest, tag, buffer, done)

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        self._channel.irecv(source, tag, buffer, done)

    def listen(self, source: int, nbytes: int, depth: int, on_message: OnMessage) -> None:
        def arrived(buffer: Buffer) -> None:
            with self._lock:
                assert buffer.ctypes.data not in self.out, "a buffer is filled again before it was given back"
                self.out[buffer.ctypes.data] = buffer
            on_message(buffer)

        self._channel.listen(source, nbytes, depth, arrived)

    def release(self, buffer: Buffer) -> None:
        with self._lock:
            assert self.out.pop(buffer.ctypes.data).size == buffer.size, "a part of a buffer is given back"
        buffer[:] = POISON
        self._channel.release(buffer)

    def pause(self, source: int) -> None:
        self._channel.pause(source)

    def resume(self, source: int) -> None:
        self._channel.resume(source)

    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        raise AssertionError("the other channel listens")


class Run:
    """A server and clients that train by SGD, each in a thread of its own.

    Args:
        plan: the buckets.
        phases: the clients' steps in each.
        seed: of the order of delivery, and of the order in which the server's updates come.
        blind: whether gradients do not depend on the weights. Each is then made before the weights of the last step
            are taken.
        **wiring: what else to give to :class:`Wiring`.
    """

    def __init__(
        self, plan: Plan, phases: list[list[int]], seed: int | None, *, blind: bool = False, **wiring: Any
    ) -> None:
        self.plan, self.phases, self.blind = plan, phases, blind
        self.network = Network(len(phases[0]) + 1, seed=seed)
        self.recorders = [Recorder(keep=True) for _ in self.network.transports]
        self.channels = [Watched(transport.open_channel()) for transport in self.network.transports]
        self._random = random.Random(seed)
        self._wiring = {"credit_bytes": 1 << 20, **wiring}
        self._weights = first_weights(plan)  # the server's
        self.bytes_sent: dict[int, int] = {}
        self.caught_up: dict[int, list[int]] = {client: [] for client in range(1, self.network.size)}

    def train(self) -> dict[int, list[bytes]]:
        """The final weights by rank."""
        clients = range(1, self.network.size)
        functions: dict[int, Any] = {client: lambda c=client: self._client(c) for client in clients}
        try:
            return run_ranks({0: self._server, **functions}, SECONDS)
        finally:
            self.network.close()

    def wiring(self, rank: int) -> Wiring:
        return Wiring(self.plan, self.channels[rank], self.recorders[rank], **self._wiring)

    def _update(self, handed: queue.Queue[Any], engine: Any) -> None:
        """Like TensorFlow: the server's updates, in any order of those that could be."""
        pending: list[tuple[int, int, Any]] = []
        while True:
            try:
                pending.append(handed.get(block=not pending))
                if pending[-1] is None:
                    return
                continue
            except queue.Empty:
                pass
            number, step, mean = pending.pop(self._random.randrange(len(pending)))
            unit = self.plan.units[number]
            item, start = plain.dtype_of(unit.dtype).itemsize, unit.pieces[0].offset
            part = slice(start // item, (start + unit.nbytes) // item)
            new = sgd(self._weights[unit.bucket][part], plain.decode(mean, unit.dtype))
            self._weights[unit.bucket][part] = new
            engine().updated(number, step, image_of(unit.pieces, step, plain.encode(new)))

    def _server(self) -> list[bytes]:
        transport, plan, clients = self.network.transports[0], self.plan, list(range(1, self.network.size))
        handed: queue.Queue[Any] = queue.Queue()
        steps = [0] * len(plan.units)

        def hand_over(unit: int, mean: Buffer) -> None:
            assert mean.nbytes == plan.units[unit].nbytes
            handed.put((unit, steps[unit], mean.copy()))
            mean[:] = POISON
            steps[unit] += 1

        engine = ServerEngine(self.wiring(0), clients, hand_over)
        updating = threading.Thread(target=self._update, args=(handed, lambda: engine), daemon=True)
        updating.start()
        engine.start()
        transport.on_control(lambda source, message: engine.feed(m.ClientLeft(source, message["left"])))
        total = 0
        for number, phase in enumerate(self.phases, start=1):
            while engine.wait_step(timeout=SECONDS):
                total += 1
            assert not engine.step_waits
            assert total == sum(max(p) for p in self.phases[:number])
            engine.open_phase()
            for client, steps_done in zip(clients, phase, strict=True):
                behind = steps_done < max(phase) or self._wiring.get("wire_weights", "plain") != "plain"
                transport.send_control(client, {"steps": total, "catch_up": behind})
        engine.close()
        handed.put(None)
        updating.join()
        self.bytes_sent[0] = engine.bytes_sent
        return [value.tobytes() for value in self._weights]

    def _client(self, rank: int) -> list[bytes]:
        transport, plan = self.network.transports[rank], self.plan
        weights = first_weights(plan)
        delivered: list[queue.Queue[bytes]] = [queue.Queue() for _ in plan.buckets]
        answers: queue.Queue[dict[str, Any]] = queue.Queue()

        def deliver(bucket: int, data: Buffer) -> None:
            delivered[bucket].put(data.tobytes())
            data[:] = POISON

        def make(step: int) -> list[Buffer]:
            images = []
            for bucket in reversed(plan.buckets):
                seen = np.zeros_like(weights[bucket.index]) if self.blind else weights[bucket.index]
                data = plain.encode(gradient_of(rank, step, seen))
                images.append(image_of(bucket.pieces, step, data))
                engine.gradient(bucket.index, step, images[-1])
            return images

        def take() -> None:
            for bucket in plan.buckets:
                data = np.frombuffer(delivered[bucket.index].get(timeout=SECONDS), np.uint8)
                weights[bucket.index] = plain.decode(data, bucket.dtype)

        engine = ClientEngine(self.wiring(rank), deliver)
        transport.on_control(lambda _, message: answers.put(message))
        step = 0
        for phase in self.phases:
            images: list[Buffer] = []
            own = phase[rank - 1]
            for number in range(own):
                images += make(step + number)
                if number and self.blind:
                    take()  # the weights of the step before
                if not self.blind:
                    take()
            if own and self.blind:
                take()
            step += own
            assert engine.settle() == step
            for image in images:
                image[:] = POISON  # all has been sent
            transport.send_control(0, {"left": step})
            answer = answers.get(timeout=SECONDS)
            if answer["catch_up"]:
                weights = [value.copy() for value in self._weights]
                step = answer["steps"]
                engine.caught_up(step)
                self.caught_up[rank].append(step)
            assert engine.settle() == step == answer["steps"]
        engine.close()
        self.bytes_sent[rank] = engine.bytes_sent
        assert all(waiting.empty() for waiting in delivered)
        return [value.tobytes() for value in weights]


def assert_bit_for_bit(run: Run, *forms: str) -> None:
    """All ranks have the weights of a sequential run, and no buffer is lost."""
    weights = run.train()
    expected = one_after_the_other(run.plan, run.phases, *forms, blind=run.blind)
    for rank in range(run.network.size):
        assert weights[rank] == expected, f"rank {rank}"
    assert not any(channel.out for channel in run.channels)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_weights_are_those_of_a_sequential_run_bit_for_bit_whatever_the_order_of_delivery(seed):
    assert_bit_for_bit(Run(mixed_plan(), [[4, 4, 4]], seed))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("credit", [1024, 1 << 20])
@pytest.mark.parametrize("divisible", [False, True])
def test_the_size_of_the_messages_and_of_the_units_and_the_credit_change_no_bit(seed, credit, divisible):
    plan = mixed_plan(piece_bytes=256, divisible=divisible)
    assert len(plan.pieces) > 2 * len(plan.buckets)
    assert_bit_for_bit(Run(plan, [[3, 3, 3]], seed, credit_bytes=credit))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_clients_with_fewer_steps_go_on_with_the_weights_of_the_others(seed):
    run = Run(mixed_plan(piece_bytes=512, divisible=bool(seed)), [[1, 4, 2], [3, 0, 3], [2, 2, 2]], seed)
    assert_bit_for_bit(run)
    assert run.caught_up == {1: [4], 2: [7], 3: [4]}


@pytest.mark.parametrize("seed", [0, 1])
def test_without_overlap_training_comes_to_the_same(seed):
    assert_bit_for_bit(Run(mixed_plan(piece_bytes=256), [[3, 2], [1, 1]], seed, overlap=False, credit_bytes=1024))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("wire", ["plain", "bf16"])
@pytest.mark.parametrize("credit", [1024, 1 << 20])
def test_gradients_that_depend_on_no_weights_may_be_a_step_ahead_of_them(seed, wire, credit):
    run = Run(mixed_plan(piece_bytes=256), [[4, 4]], seed, blind=True, credit_bytes=credit, wire=wire)
    assert_bit_for_bit(run, wire)


def test_one_client_trains_as_sgd_does():
    assert_bit_for_bit(Run(mixed_plan(), [[5]], seed=0))


# -------------------------------------------------------------------------------------------------------- narrow wires

NARROW = [("bf16", "plain"), ("plain", "bf16"), ("fp16", "fp16"), ("bf16", "fp16")]


@pytest.mark.parametrize("wire,wire_weights", NARROW)
@pytest.mark.parametrize("divisible", [False, True])
def test_narrow_wires_change_what_is_sent_and_nothing_else(wire, wire_weights, divisible):
    plan = mixed_plan(piece_bytes=512, divisible=divisible)
    run = Run(plan, [[3, 2], [2, 2]], seed=1, wire=wire, wire_weights=wire_weights, credit_bytes=1024)
    assert_bit_for_bit(run, wire, wire_weights)


@pytest.mark.parametrize("wire,wire_weights", [("plain", "plain"), *NARROW])
def test_narrow_wires_take_half_the_bytes_but_for_headers(wire, wire_weights):
    plan = plan_of([700, 100], piece_bytes=1024)
    run = Run(plan, [[3, 3]], seed=0, wire=wire, wire_weights=wire_weights)
    run.train()
    headers = HEADER_BYTES * len(plan.pieces)
    gradients = plan.nbytes // (1 if wire == "plain" else 2)
    weights = plan.nbytes // (1 if wire_weights == "plain" else 2)
    assert run.bytes_sent == {
        0: 2 * 3 * (weights + headers),
        1: 3 * (gradients + headers),
        2: 3 * (gradients + headers),
    }


# ------------------------------------------------------------------------- rows, averages over samples, exact buckets


class Given:
    """A server and clients whose gradients are given; the weights that come back are minus their mean, bit by bit.

    Args:
        plan: the buckets, each of them one unit.
        gradients: the elements (or rows) of each bucket, by step and client.
        samples: the samples behind them, by step and client.
        seed: of the order of delivery.
        **wiring: what else to give to :class:`Wiring`.
    """

    def __init__(
        self,
        plan: Plan,
        gradients: list[list[list[Buffer]]],
        samples: list[list[int]] | None = None,
        seed: int | None = 0,
        **wiring: Any,
    ) -> None:
        assert len(plan.units) == len(plan.buckets)
        self.plan, self.gradients = plan, gradients
        self.samples = samples or [[0] * len(of_step) for of_step in gradients]
        self.network = Network(len(gradients[0]) + 1, seed=seed)
        self.channels = [Watched(transport.open_channel()) for transport in self.network.transports]
        recorder = Recorder(keep=False)
        self._wirings = [Wiring(plan, channel, recorder, **{"credit_bytes": 1 << 20, **wiring})
                         for channel in self.channels]  # fmt: skip
        self.means: list[list[bytes]] = [[] for _ in plan.buckets]  # by bucket and step
        self.bytes_sent: list[int] = []  # by rank

    def train(self) -> list[list[list[bytes]]]:
        """What each client was given, by client, bucket and step."""
        clients = list(range(1, self.network.size))
        server = ServerEngine(self._wirings[0], clients, self._hand_over)
        self._server = server
        server.start()
        engines: list[Any] = [server]

        def client(rank: int) -> list[list[bytes]]:
            delivered: list[queue.Queue[bytes]] = [queue.Queue() for _ in self.plan.buckets]
            engine = ClientEngine(self._wirings[rank], lambda bucket, data: delivered[bucket].put(data.tobytes()))
            engines.append(engine)
            got: list[list[bytes]] = [[] for _ in self.plan.buckets]
            for step, of_step in enumerate(self.gradients):
                for bucket in reversed(self.plan.buckets):
                    data, samples = of_step[rank - 1][bucket.index], self.samples[step][rank - 1]
                    engine.gradient(bucket.index, step, self._image(bucket.index, step, data, samples))
                for bucket in self.plan.buckets:
                    got[bucket.index].append(delivered[bucket.index].get(timeout=SECONDS))
            assert engine.settle() == len(self.gradients)
            assert all(waiting.empty() for waiting in delivered)
            return got

        try:
            outcomes = run_ranks({rank: lambda r=rank: client(r) for rank in clients}, SECONDS)
        finally:
            for engine in engines:
                engine.close()
            self.network.close()
        assert not any(channel.out for channel in self.channels), "a buffer is lost"
        by_thread = {engine._channel: engine.bytes_sent for engine in engines}
        self.bytes_sent = [by_thread[channel] for channel in self.channels]
        return [outcomes[rank] for rank in clients]

    def _image(self, bucket: int, step: int, data: Buffer, samples: int = 0) -> Buffer:
        pieces = self.plan.buckets[bucket].pieces
        if self.plan.buckets[bucket].row_bytes:
            return image_of_rows(pieces[0], step, data, samples)
        return image_of(pieces, step, data, samples)

    def _hand_over(self, number: int, mean: Buffer) -> None:
        step = len(self.means[number])
        self.means[number].append(mean.tobytes())
        self._server.updated(number, step, self._image(number, step, negative(self.plan, number, mean)))


def negative(plan: Plan, bucket: int, data: Buffer) -> Buffer:
    """Minus the elements, of the same rows."""
    dtype, row_bytes = plan.buckets[bucket].dtype, plan.buckets[bucket].row_bytes
    if not row_bytes:
        return plain.encode(-plain.decode(data, dtype))
    indices, elements = rows.read(data, row_bytes)
    return rows.write(indices, (-np.ascontiguousarray(elements).view(plain.dtype_of(dtype))).view(np.uint8))


def table_plan(piece_bytes: int = 1 << 20, dtype: str = "float32", **alone: Any) -> Plan:
    """A bucket of rows of 5 elements, and two of layers."""
    variables = [
        VariableSpec("t/embeddings", (400, 5), dtype),
        *dense("a", 8, 8),
        VariableSpec("b/w", (90,), "float32"),
    ]
    alone = {"rows": [0], **alone}
    return make_plan(variables, [True] * 4, piece_bytes=piece_bytes, fuse_bytes=0, max_buckets=99, **alone)


def some_rows(count: int, seed: int, dtype: str = "float32", *, repeated: bool = False) -> Buffer:
    rng = np.random.default_rng([count, seed])
    values = rng.normal(size=(count, 5)).astype(plain.dtype_of(dtype))
    indices = rng.integers(0, 400, count) if repeated else rng.permutation(400)[:count]
    return rows.write(indices.astype(np.int64), values.view(np.uint8))


def some_gradients(plan: Plan, counts: list[list[int]], **rows_of: Any) -> list[list[list[Buffer]]]:
    """Gradients of all buckets, for numbers of rows by step and client."""

    def of_bucket(bucket: Any, count: int, seed: int) -> Buffer:
        if bucket.row_bytes:
            return some_rows(count, seed, bucket.dtype, **rows_of)
        return plain.encode(np.random.default_rng(seed).normal(size=bucket.nbytes // 4).astype(np.float32))

    return [
        [[of_bucket(bucket, count, 100 * step + client) for bucket in plan.buckets] for client, count in enumerate(own)]
        for step, own in enumerate(counts)
    ]


def expected_means(run: Given, *, weighted: bool = False, summed: bool = True) -> list[list[bytes]]:
    """By bucket and step, on a plain wire."""
    means: list[list[bytes]] = [[] for _ in run.plan.buckets]
    for of_step, samples in zip(run.gradients, run.samples, strict=True):
        weights = samples if weighted else None
        for number, bucket in enumerate(run.plan.buckets):
            parts = [of_client[number] for of_client in of_step]
            if bucket.row_bytes:
                mean = rows.mean(parts, bucket.dtype, bucket.row_bytes, weights, summed=summed)
            else:
                mean = reduce.mean(parts, bucket.dtype, weights=weights)
            means[number].append(mean.tobytes())
    return means


def assert_means_arrive(run: Given, **expected: Any) -> None:
    """They are handed over at the server, and what was made of them reaches every client."""
    delivered, means = run.train(), expected_means(run, **expected)
    assert run.means == means
    new = [[negative(run.plan, bucket, np.frombuffer(mean, np.uint8)).tobytes() for mean in of_bucket]
           for bucket, of_bucket in enumerate(means)]  # fmt: skip
    for client, got in enumerate(delivered, start=1):
        assert got == new, f"client {client}"


def parts_bytes(plan: Plan, count: int) -> int:
    """Bytes on the wire of so many rows of the first bucket."""
    row_bytes = plan.buckets[0].row_bytes
    longest = max(max(piece.nbytes for piece in plan.pieces), rows.PART_BYTES + 8 + row_bytes)
    parts = max(1, -(-count // ((longest - rows.PART_BYTES) // (8 + row_bytes))))
    return parts * (HEADER_BYTES + rows.PART_BYTES) + count * (8 + row_bytes)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("piece_bytes", [64, 1024, 1 << 20])
def test_gradients_of_rows_are_averaged_and_the_new_rows_reach_every_client(seed, dtype, piece_bytes):
    plan = table_plan(piece_bytes, dtype)
    assert [bucket.row_bytes > 0 for bucket in plan.buckets] == [True, False, False]
    assert_means_arrive(
        Given(plan, some_gradients(plan, [[30, 200, 1], [0, 5, 0], [0, 0, 0], [400, 3, 90]]), seed=seed)
    )


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("settings", [{"credit_bytes": 1024}, {"overlap": False}, {"wire": "fp16"}])
def test_rows_arrive_with_whatever_settings(seed, settings):
    plan = table_plan(1024)
    run = Given(plan, some_gradients(plan, [[30, 200], [0, 5], [400, 3]]), seed=seed, **settings)
    delivered = run.train()
    means = expected_means(run)
    assert run.means[0] == means[0]
    new = [negative(plan, 0, np.frombuffer(mean, np.uint8)).tobytes() for mean in means[0]]
    assert [got[0] for got in delivered] == [new, new]


@pytest.mark.parametrize("summed", [False, True])
def test_rows_are_summed_at_the_server_only_where_the_optimizer_allows_it(summed):
    plan = table_plan(1024)
    run = Given(plan, some_gradients(plan, [[30, 200], [7, 0]], repeated=not summed), sum_rows=summed)
    assert_means_arrive(run, summed=summed)
    counts = [len(rows.read(np.frombuffer(mean, np.uint8), 20)[0]) for mean in run.means[0]]
    assert (counts == [230, 7]) != summed


@pytest.mark.parametrize("piece_bytes", [64, 1024, 1 << 20])
def test_the_bytes_sent_are_those_of_the_rows_that_travel(piece_bytes):
    plan, counts = table_plan(piece_bytes), [[30, 200], [0, 5], [100, 100]]
    run = Given(plan, some_gradients(plan, counts))
    run.train()
    back = [len(rows.read(np.frombuffer(mean, np.uint8), 20)[0]) for mean in run.means[0]]
    others = sum(bucket.nbytes + HEADER_BYTES * len(bucket.pieces) for bucket in plan.buckets[1:])
    assert run.bytes_sent == [
        2 * (sum(parts_bytes(plan, count) for count in back) + 3 * others),
        *(sum(parts_bytes(plan, of_step[client]) for of_step in counts) + 3 * others for client in (0, 1)),
    ]
    if piece_bytes == 1 << 20:  # one part, and the rest in proportion
        own = run.bytes_sent[1] - 3 * others
        assert own == 3 * (HEADER_BYTES + rows.PART_BYTES) + (30 + 0 + 100) * (8 + 20)
    if piece_bytes == 64:  # of which a row takes most: the longest message decides
        assert parts_bytes(plan, 200) == 200 * 28 + 200 * (HEADER_BYTES + rows.PART_BYTES)


def test_a_row_that_is_longer_than_a_piece_travels_in_a_message_of_its_own():
    (variable,) = [VariableSpec("t/embeddings", (20, 500), "float32")]
    plan = make_plan([variable], [True], piece_bytes=1024, fuse_bytes=0, max_buckets=9, rows=[0])
    values = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32).view(np.uint8)
    run = Given(plan, [[[rows.write(np.array([7, 0, 19]), values)], [rows.none()]]])
    assert_means_arrive(run)
    assert run.bytes_sent[1] == 3 * (HEADER_BYTES + rows.PART_BYTES + 8 + 2000)
    assert run.bytes_sent[2] == HEADER_BYTES + rows.PART_BYTES


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("average", ["clients", "samples"])
def test_gradients_count_by_the_samples_in_their_headers_where_they_are_to(seed, average):
    plan = table_plan(256)
    samples = [[32, 7, 32], [1, 0, 3], [5, 5, 5]]
    run = Given(plan, some_gradients(plan, [[30, 200, 1], [0, 5, 9], [4, 4, 4]]), samples, seed, average=average)
    assert expected_means(run, weighted=True) != expected_means(run)
    assert_means_arrive(run, weighted=average == "samples")


@pytest.mark.parametrize("wire", ["plain", "bf16", "fp16"])
def test_a_gradient_without_samples_does_not_count_even_if_it_is_nan(wire):
    plan = table_plan(256)
    gradients = some_gradients(plan, [[5, 9]])
    nan = [rows.write(np.arange(9), np.full((9, 5), np.nan, np.float32).view(np.uint8))]
    nan += [np.full(bucket.nbytes // 4, np.nan, np.float32).view(np.uint8) for bucket in plan.buckets[1:]]
    run = Given(plan, [[gradients[0][0], nan]], [[4, 0]], average="samples", wire=wire)
    run.train()
    assert run.means[0][0] == rows.mean([gradients[0][0][0]], "float32", 20, summed=True).tobytes()
    for number in (1, 2):
        mean = np.frombuffer(run.means[number][0], np.float32)
        np.testing.assert_allclose(mean, gradients[0][0][number].view(np.float32), rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("wire,wire_weights", [("bf16", "plain"), ("plain", "fp16"), ("bf16", "bf16")])
def test_an_exact_bucket_travels_plain_on_a_narrow_wire(wire, wire_weights):
    plan = table_plan(256, rows=[], exact=[3])
    assert [bucket.exact for bucket in plan.buckets] == [False, False, True] and len(plan.buckets[2].pieces) == 2
    value = 1.0 + 2.0**-20  # which 16 bits cannot hold
    gradients = [[[np.full(b.nbytes // 4, value, np.float32).view(np.uint8) for b in plan.buckets]] * 2]
    run = Given(plan, gradients, wire=wire, wire_weights=wire_weights)
    delivered = run.train()

    def means(number: int) -> set[float]:
        return set(np.frombuffer(run.means[number][0], np.float32).tolist())

    def weights(number: int) -> set[float]:
        return {x for client in delivered for x in np.frombuffer(client[number][0], np.float32).tolist()}

    sent = 1.0 if wire != "plain" else value
    assert [means(0), means(1), means(2)] == [{sent}, {sent}, {value}]
    assert [weights(0), weights(1), weights(2)] == [{-1.0}, {-1.0}, {-value}]

    def nbytes(form: str) -> int:
        narrowed = sum(bucket.nbytes for bucket in plan.buckets[:2]) // (1 if form == "plain" else 2)
        return narrowed + plan.buckets[2].nbytes + HEADER_BYTES * len(plan.pieces)

    assert run.bytes_sent == [2 * nbytes(wire_weights), nbytes(wire), nbytes(wire)]


# --------------------------------------------------------------------------------------------------------- the timeline


def test_the_timeline_has_every_piece_of_every_step():
    plan = mixed_plan(piece_bytes=512, divisible=True)
    run = Run(plan, [[2, 2]], seed=0, number=3)
    run.train()
    pieces = {(piece.bucket, step, piece.index) for piece in plan.pieces for step in range(2)}
    server, client = run.recorders[0].marks, run.recorders[1].marks
    for kind in ("reduced", "updated", "broadcast"):
        assert {(mark.bucket, mark.step, mark.piece) for mark in server if mark.kind == kind} == pieces
    for kind in ("started", "sent", "received"):
        assert {(mark.bucket, mark.step, mark.piece) for mark in client if mark.kind == kind} == pieces
    for kind in ("ready", "queued"):
        assert {(mark.bucket, mark.step) for mark in client if mark.kind == kind} == {p[:2] for p in pieces}
    for kind in ("received", "broadcast"):
        assert {mark.peer for mark in server if mark.kind == kind} == {1, 2}
    assert {mark.session for mark in (*server, *client)} == {3}
    for bucket, step, piece in pieces:
        times = [next(k.time for k in server if (k.kind, k.bucket, k.step, k.piece) == (kind, bucket, step, piece))
                 for kind in ("received", "reduced", "updated", "broadcast")]  # fmt: skip
        assert times == sorted(times)
        times = [next(k.time for k in client if (k.kind, k.bucket, k.step) == (kind, bucket, step)
                 and k.piece in (piece, -1)) for kind in ("ready", "queued", "started", "received")]  # fmt: skip
        assert times == sorted(times)


def test_without_overlap_nothing_of_a_step_is_sent_before_all_of_it_is_ready():
    run = Run(mixed_plan(piece_bytes=512), [[3]], seed=0, overlap=False)
    run.train()
    marks = run.recorders[1].marks
    for step in range(3):
        ready = max(mark.time for mark in marks if (mark.kind, mark.step) == ("ready", step))
        assert min(mark.time for mark in marks if (mark.kind, mark.step) == ("started", step)) >= ready


def test_weights_are_marked_as_assigned_in_the_step_that_they_are_of():
    plan = plan_of([4, 4])
    with Wire(plan) as wire:
        client = wire.client()
        client.gradient(1, 0, image_of(plan.buckets[1].pieces, 0, np.zeros(16, np.uint8)))
        wire.weights(1, 0)
        assert wire.delivered.get(timeout=SECONDS)[0] == 1
        client.assigned(1)
        (mark,) = [mark for mark in wire.recorder.marks if mark.kind == "assigned"]
        assert (mark.bucket, mark.step) == (1, 0)


# ------------------------------------------------------------------------- one engine, and the test at its other end


class Wire:
    """A rank with an engine, and others that send and receive whatever a test wants."""

    def __init__(self, plan: Plan, size: int = 2, **network: Any) -> None:
        self.plan = plan
        self.network = Network(size, **network)
        self.channels = [transport.open_channel() for transport in self.network.transports]
        self.recorder = Recorder(keep=True)
        self.delivered: queue.Queue[tuple[int, bytes]] = queue.Queue()  # weights at a client, means at a server
        self.came: queue.Queue[tuple[int, int, bytes]] = queue.Queue()  # (step, piece, elements) at the other end
        self.engine: Any = None

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.network.close()
        if self.engine is not None:
            self.engine.feed(None)  # ends its thread, if that is still there

    def _wiring(self, rank: int, **settings: Any) -> Wiring:
        return Wiring(self.plan, self.channels[rank], self.recorder, **{"credit_bytes": 1 << 20, **settings})

    def _deliver(self, number: int, data: Buffer) -> None:
        self.delivered.put((number, data.tobytes()))

    def client(self, **settings: Any) -> ClientEngine:
        """An engine on rank 1; rank 0 takes what it sends."""
        self.channels[0].listen(1, 1 << 16, 4, self._arrived)
        self.engine = ClientEngine(self._wiring(1, **settings), self._deliver)
        return self.engine

    def server(self, on_idle: OnIdle = lambda step, owing: None, **settings: Any) -> Any:
        """An engine on rank 0; rank 1 takes what it sends to it."""
        self.channels[1].listen(0, 1 << 16, 4, self._arrived)
        clients = list(range(1, self.network.size))
        self.engine = ServerEngine(self._wiring(0, **settings), clients, self._deliver, on_idle)
        self.engine.start()
        return self.engine

    def _arrived(self, message: Buffer) -> None:
        step, piece = header.read(message)
        nbytes = self.plan.pieces[piece].nbytes
        self.came.put((step, piece, message[HEADER_BYTES : HEADER_BYTES + nbytes].tobytes()))

    def send(self, source: int, dest: int, piece: int, step: int, data: Buffer | None = None) -> None:
        """Send a piece, written to be of a step."""
        nbytes = self.plan.pieces[piece].nbytes if piece < len(self.plan.pieces) else 4
        message = np.zeros(HEADER_BYTES + nbytes, np.uint8)
        header.write(message, step, piece)
        if data is not None:
            message[HEADER_BYTES:] = data
        self.channels[source].isend(dest, piece, message, lambda: None)

    def weights(self, bucket: int, step: int) -> None:
        """Send a bucket's weights to the client."""
        for piece in self.plan.buckets[bucket].pieces:
            self.send(0, 1, piece.index, step)


@pytest.fixture
def caught(monkeypatch):
    """Errors that end a thread."""
    errors: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", errors.put)

    def get() -> BaseException:
        error = errors.get(timeout=SECONDS)
        assert error.thread.name.startswith("mpipipe-")
        return error.exc_value

    return get


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_weights_of_another_step_end_the_run_with_a_protocol_error(caught, step):
    plan = plan_of([4])
    with Wire(plan) as wire:
        wire.client().gradient(0, 0, image_of(plan.pieces, 0, np.zeros(16, np.uint8)))
        wire.weights(0, step)
        error = caught()
        assert isinstance(error, ProtocolError) and f"step {step}" in str(error)
        assert wire.delivered.empty()


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_a_gradient_of_another_step_ends_the_run_with_a_protocol_error(caught, step):
    with Wire(plan_of([4])) as wire:
        wire.server()
        wire.send(1, 0, 0, step)
        error = caught()
        assert isinstance(error, ProtocolError) and f"step {step}" in str(error) and "rank 1" in str(error)
        assert wire.delivered.empty()


def test_an_update_of_another_step_ends_the_run_with_a_protocol_error(caught):
    plan = plan_of([4])
    with Wire(plan) as wire:
        server = wire.server()
        wire.send(1, 0, 0, 0)
        wire.delivered.get(timeout=SECONDS)
        server.updated(0, 1, image_of(plan.pieces, 1, np.zeros(16, np.uint8)))
        error = caught()
        assert isinstance(error, ProtocolError) and "step 1" in str(error)


def test_a_gradient_that_comes_twice_ends_the_run_with_a_protocol_error(caught):
    with Wire(plan_of([4]), size=3) as wire:
        wire.server()
        wire.send(1, 0, 0, 0)
        wire.send(1, 0, 0, 0)
        error = caught()
        assert isinstance(error, ProtocolError) and "rank 1" in str(error) and "twice" in str(error)


@pytest.mark.parametrize("piece", [1, 30000])
def test_a_piece_that_the_plan_does_not_have_ends_the_run_with_a_protocol_error(caught, piece):
    with Wire(plan_of([4])) as wire:
        wire.server()
        wire.send(1, 0, piece, 0)
        error = caught()
        assert isinstance(error, ProtocolError) and "rank 1" in str(error)


@pytest.mark.parametrize("total,count", [(2, 3), (-1, 0), (400, 100)])
def test_a_part_of_rows_that_cannot_be_ends_the_run_with_a_protocol_error(caught, total, count):
    with Wire(table_plan(1024)) as wire:
        wire.server()
        part = np.zeros(1024, np.uint8)
        part[: rows.PART_BYTES] = np.array([total, count], np.int64).view(np.uint8)
        wire.send(1, 0, 0, 0, part)
        error = caught()
        assert isinstance(error, ProtocolError) and "rank 1 has sent of piece 0" in str(error)
        assert f"a part with {count} rows" in str(error)
        assert wire.delivered.empty()


def test_rows_that_come_twice_end_the_run_with_a_protocol_error(caught):
    with Wire(table_plan(1024), size=3) as wire:
        wire.server()
        for _ in range(2):
            wire.send(1, 0, 0, 0)
        error = caught()
        assert isinstance(error, ProtocolError) and "rank 1" in str(error) and "twice" in str(error)


def test_nothing_is_handed_over_before_the_last_part_of_the_rows_has_come():
    plan, data = table_plan(1024), some_rows(60, 0)
    parts = [np.concatenate(fields) for fields in rows.parts(data, 20, 1024)]
    assert len(parts) == 2
    with Wire(plan) as wire:
        wire.server()
        messages = [image_of_rows(plan.pieces[0], 0, part) for part in parts]
        arrived = threading.Event()
        wire.channels[1].isend(0, 0, messages[0], arrived.set)
        assert arrived.wait(SECONDS)
        with pytest.raises(queue.Empty):
            wire.delivered.get(timeout=0.1)
        wire.channels[1].isend(0, 0, messages[1], lambda: None)
        expected = rows.mean([data], "float32", 20, summed=True).tobytes()
        assert wire.delivered.get(timeout=SECONDS) == (0, expected)


def test_a_run_that_cannot_go_on_ends_on_the_engines_thread_with_an_error_that_says_why(caught):
    with Wire(plan_of([4]), size=3) as wire:
        wire.server().feed(m.ClientDeparted(1, 0))
        wire.send(2, 0, 0, 0)
        error = caught()
        assert isinstance(error, DisagreementError) and "rank 1 ended after 0 steps" in str(error)


def test_a_gradient_that_is_ready_before_the_last_one_has_left_does_not_take_its_place():
    plan = plan_of([1024], piece_bytes=1024)
    with Wire(plan) as wire:
        client = wire.client(credit_bytes=1024)  # one piece at a time
        gradients = [np.full(1024, step + 1, np.float32) for step in range(2)]
        for step, gradient in enumerate(gradients):
            client.gradient(0, step, image_of(plan.pieces, step, plain.encode(gradient)))
        for step, gradient in enumerate(gradients):
            got = [wire.came.get(timeout=SECONDS) for _ in plan.pieces]
            assert got == [
                (step, piece.index, plain.encode(gradient)[piece.offset : piece.offset + piece.nbytes].tobytes())
                for piece in plan.pieces
            ]
            wire.weights(0, step)
        assert client.settle() == 2


def test_the_mean_that_is_handed_over_is_summed_in_rank_order():
    parts = [np.array([0.1, 1e8, -3, 5], np.float32), np.array([0.2, -1e8, 4, 7], np.float32)]
    with Wire(plan_of([4]), size=3, seed=0) as wire:
        wire.server()
        for client in (2, 1):
            wire.send(client, 0, 0, 0, plain.encode(parts[client - 1]))
        expected = reduce.mean([plain.encode(part) for part in parts], "float32").tobytes()
        assert wire.delivered.get(timeout=SECONDS) == (0, expected)


def test_an_urgent_gradient_overtakes_what_waits_for_credit():
    plan = plan_of([4, 4 * 256], piece_bytes=1024)
    held = {1, 2}
    with Wire(plan, hold=lambda source, dest, tag: tag in held) as wire:
        client = wire.client(credit_bytes=2048)
        for bucket in reversed(plan.buckets):
            client.gradient(bucket.index, 0, image_of(bucket.pieces, 0, np.zeros(bucket.nbytes, np.uint8)))
        wait_until(lambda: [m.bucket for m in wire.recorder.marks if m.kind == "queued"] == [1, 0])
        held.clear()
        wire.network.look_again()
        wait_until(lambda: wire.came.qsize() == len(plan.pieces))
        marks = wire.recorder.marks
    assert [mark.piece for mark in marks if mark.kind == "started"] == [1, 2, 0, 3, 4]
    under_way = 0
    for mark in marks:
        if mark.kind in ("started", "sent"):
            under_way += plan.pieces[mark.piece].nbytes * (1 if mark.kind == "started" else -1)
            assert under_way <= 2048


def test_a_client_that_takes_none_of_its_weights_does_not_hold_up_another():
    plan = plan_of([4, 4 * 256], piece_bytes=1024, divisible=True)
    held = {2}
    with Wire(plan, size=3, hold=lambda source, dest, tag: dest in held) as wire:
        server = wire.server(credit_bytes=1024)
        wire.channels[2].listen(0, 1 << 16, 4, lambda message: late.put(header.read(message)))
        late: queue.Queue[tuple[int, int]] = queue.Queue()
        for client in (1, 2):
            for piece in plan.pieces:
                wire.send(client, 0, piece.index, 0)
        for _ in plan.units:
            number, data = wire.delivered.get(timeout=SECONDS)
            server.updated(number, 0, image_of(plan.units[number].pieces, 0, np.frombuffer(data, np.uint8)))
        got = [wire.came.get(timeout=SECONDS)[:2] for _ in plan.pieces]
        assert sorted(got) == [(0, piece.index) for piece in plan.pieces]
        assert late.empty()
        held.clear()
        wire.network.look_again()
        assert sorted(late.get(timeout=SECONDS) for _ in plan.pieces) == sorted(got)


def test_a_client_that_is_asked_for_pieces_sends_them_next():
    plan, held = plan_of([4, 1024], piece_bytes=1024), {True}
    small, *large = plan.pieces
    with Wire(plan, hold=lambda source, dest, tag: source == 1 and bool(held)) as wire:
        client, come = wire.client(credit_bytes=1024), threading.Event()
        for bucket in (1, 0):
            data = np.zeros(plan.buckets[bucket].nbytes, np.uint8)
            client.gradient(bucket, 0, image_of(plan.buckets[bucket].pieces, 0, data))
        wire.channels[0].isend(1, large[2].index, header.question(0, large[2].index), come.set)
        assert come.wait(SECONDS)
        held.clear()
        wire.network.look_again()
        order = [wire.came.get(timeout=SECONDS)[:2] for _ in plan.pieces]
        assert order == [(0, piece.index) for piece in (*large[:3], small, large[3])]


def test_a_server_asks_a_client_that_has_turned_away_for_what_another_one_has_sent():
    plan = plan_of([512, 1024], piece_bytes=1024)
    first, second = plan.buckets[0].pieces[0], plan.buckets[1].pieces[0]
    with Wire(plan, size=3) as wire:
        wire.server()
        for piece in (second, first):
            wire.send(1, 0, piece.index, 0)
        for piece in plan.buckets[1].pieces[:2]:
            wire.send(2, 0, piece.index, 0)
        step, number, _ = wire.came.get(timeout=SECONDS)
        assert (step, -1 - number) == (0, plan.buckets[1].pieces[1].index)


def test_a_server_takes_nothing_more_of_a_client_that_is_far_ahead_until_the_other_has_caught_up():
    plan = plan_of([30 * 256], piece_bytes=1024)
    with Wire(plan, size=3, delay=0.01) as wire:
        wire.server(credit_bytes=2048)
        wire.send(1, 0, 0, 0)
        sent = threading.Semaphore(0)
        for piece in plan.pieces:
            message = image_of([piece], 0, np.zeros(piece.nbytes, np.uint8))
            wire.channels[2].isend(0, piece.index, message, sent.release)
        time.sleep(0.6)  # twice as long as it takes to take everything
        come = 0
        while sent.acquire(blocking=False):
            come += 1
        assert 0 < come < len(plan.pieces) // 2
        for piece in plan.pieces[1:]:
            wire.send(1, 0, piece.index, 0)
        assert wire.delivered.get(timeout=SECONDS)[0] == 0
        for _ in range(len(plan.pieces) - come):
            assert sent.acquire(timeout=SECONDS)


def test_a_server_to_which_nothing_comes_says_every_second_who_owes_what():
    owing: queue.Queue[tuple[int, dict[int, list[int]]]] = queue.Queue()
    with Wire(plan_of([4, 4]), size=3) as wire:
        wire.server(on_idle=lambda step, owed: owing.put((step, owed)))
        wire.send(1, 0, 1, 0)
        assert owing.get(timeout=SECONDS) == (0, {1: [0], 2: [0, 1]})
        wire.send(2, 0, 1, 0)
        found = owing.get(timeout=SECONDS)
        while found == (0, {1: [0], 2: [0, 1]}):  # it has been said more than once
            found = owing.get(timeout=SECONDS)
        assert found == (0, {}), "something happens: nobody is said to owe anything until it is quiet again"
        assert owing.get(timeout=SECONDS) == (0, {1: [0], 2: [0]})


def test_the_server_learns_of_steps_and_of_the_end_of_the_phase_in_order():
    with Wire(plan_of([4])) as wire:
        server = wire.server()
        assert server.wait_step(timeout=0.01) is None
        wire.send(1, 0, 0, 0)
        wait_until(lambda: server.step_waits)
        assert server.wait_step(timeout=SECONDS) is True and not server.step_waits
        assert wire.delivered.get(timeout=SECONDS)[0] == 0
        server.updated(0, 0, image_of(wire.plan.pieces, 0, np.zeros(16, np.uint8)))
        wire.came.get(timeout=SECONDS)
        server.feed(m.ClientLeft(1, 1))
        assert server.wait_step(timeout=SECONDS) is False
        assert server.wait_step(timeout=SECONDS) is False, "the phase has ended, and nobody opened another one"
        server.open_phase()
        assert server.wait_step(timeout=0.01) is None
        wire.send(1, 0, 0, 1)
        assert server.wait_step(timeout=SECONDS) is True


# ------------------------------------------------------------------------------------------------------------ settling


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class HaltingChannel(Channel):
    """A channel on which nothing comes. Sending halts the engine's thread until it is let through."""

    def __init__(self) -> None:
        self.entered, self.let_through = threading.Event(), threading.Event()
        self.on_message: OnMessage = lambda buffer: None
        self.sent: list[Done] = []

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        self.entered.set()
        self.let_through.wait()
        self.sent.append(done)

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        raise AssertionError("engines listen")

    def listen(self, source: int, nbytes: int, depth: int, on_message: OnMessage) -> None:
        self.on_message = on_message

    def release(self, buffer: Buffer) -> None:
        pass

    def _post(self, source: int, buffer: Buffer, done: Done) -> None:
        raise AssertionError("nothing comes")


def test_settle_waits_for_gradients_that_the_engine_has_not_seen_yet_and_until_everything_has_arrived():
    channel, plan = HaltingChannel(), plan_of([4])
    engine = ClientEngine(Wiring(plan, channel, Recorder(keep=False), 1024), lambda *_: None)
    assert engine.settle() == 0
    engine.gradient(0, 0, image_of(plan.pieces, 0, np.zeros(16, np.uint8)))
    ranks = Ranks({1: engine.settle})
    assert channel.entered.wait(SECONDS)
    assert ranks.outcomes == {}
    channel.let_through.set()
    channel.on_message(image_of(plan.pieces, 0, np.zeros(16, np.uint8)))  # the weights are in
    wait_until(lambda: bool(channel.sent))
    time.sleep(0.05)
    assert ranks.outcomes == {}, "it has not waited until the gradient had arrived"
    channel.sent.pop()()
    assert ranks.join(SECONDS) == {1: 1}
    engine.close()


def test_a_client_that_has_caught_up_goes_on_from_there():
    channel, plan = HaltingChannel(), plan_of([4])
    engine = ClientEngine(Wiring(plan, channel, Recorder(keep=False), 1024), lambda *_: None)
    engine.caught_up(7)
    assert engine.settle() == 7
    channel.let_through.set()
    engine.gradient(0, 7, image_of(plan.pieces, 7, np.zeros(16, np.uint8)))
    wait_until(lambda: bool(channel.sent))
    engine.close()
