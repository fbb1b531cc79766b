"""Whole training runs over the in-process network, with plain SGD in numpy in place of Keras."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, run_ranks

from mpipipe.engine import ClientEngine, ServerEngine
from mpipipe.errors import DisagreementError
from mpipipe.protocol import messages as m
from mpipipe.protocol.plan import Plan, VariableSpec, make_plan
from mpipipe.trace import Recorder
from mpipipe.transport.base import Buffer, Channel, Done
from mpipipe.transport.inproc import Network
from mpipipe.wire import plain, reduce

RATE = np.float32(0.1)
SECONDS = 20.0


def mixed_plan(piece_bytes: int = 1 << 20) -> Plan:
    """Five buckets, two of them of 16-bit floats."""
    variables = [
        VariableSpec("a/kernel", (30, 10), "float32"),
        VariableSpec("b/kernel", (700,), "bfloat16"),
        VariableSpec("c/kernel", (1, 1), "float32"),
        VariableSpec("d/kernel", (17, 31), "float32"),
        VariableSpec("e/kernel", (600,), "float16"),
    ]
    return make_plan(variables, [True] * 5, piece_bytes=piece_bytes, fuse_bytes=0, max_buckets=100)


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


def one_after_the_other(plan: Plan, phases: list[list[int]]) -> list[bytes]:
    """What training must come to: one process, gradients summed in rank order. ``phases`` are steps by client."""
    weights, step = first_weights(plan), 0
    for phase in phases:
        for own in range(max(phase)):
            taking_part = [client for client, steps in enumerate(phase, start=1) if steps > own]
            for bucket, value in enumerate(weights):
                gradients = [gradient_of(client, step, value) for client in taking_part]
                wide = gradients[0].astype(np.float32)
                for gradient in gradients[1:]:
                    wide = wide + gradient.astype(np.float32)
                mean = (wide / np.float32(len(gradients))).astype(value.dtype)
                weights[bucket] = sgd(value, mean)
            step += 1
    return [value.tobytes() for value in weights]


class Run:
    """A server and clients that train by SGD, each in a thread of its own."""

    def __init__(self, plan: Plan, phases: list[list[int]], seed: int | None, credit: int = 1 << 20) -> None:
        self.plan, self.phases = plan, phases
        self.network = Network(len(phases[0]) + 1, seed=seed)
        self.recorders = [Recorder(keep=True) for _ in self.network.transports]
        self._credit = credit
        self.tails: dict[int, list[int]] = {}  # by client: buckets that it took over at the end of each phase

    def train(self) -> dict[int, list[bytes]]:
        """The final weights by rank."""
        clients = range(1, self.network.size)
        functions: dict[int, Any] = {client: lambda c=client: self._client(c) for client in clients}
        try:
            return run_ranks({0: self._server, **functions}, SECONDS)
        finally:
            self.network.close()

    def _server(self) -> list[bytes]:
        transport, plan = self.network.transports[0], self.plan
        weights = first_weights(plan)

        def hand_over(bucket: int, mean: Buffer) -> None:
            weights[bucket] = sgd(weights[bucket], plain.decode(mean, plan.buckets[bucket].dtype))
            engine.updated(bucket, plain.encode(weights[bucket]))

        def tell(client: int, step: int) -> None:
            transport.send_control(client, {"follow": step})

        channel = transport.open_channel(len(plan.buckets))
        clients = list(range(1, self.network.size))
        engine = ServerEngine(plan, channel, self.recorders[0], self._credit, clients, hand_over, tell)
        engine.start()
        transport.on_control(lambda source, message: engine.feed(m.ClientLeft(source, message["left"])))
        total = 0
        for phase in self.phases:
            while engine.wait_step(timeout=SECONDS):
                total += 1
            assert not engine.step_waits
            engine.open_phase()
            for client in clients:
                transport.send_control(client, {"steps": total})
            assert total == sum(max(p) for p in self.phases[: self.phases.index(phase) + 1])
        engine.close()
        return [value.tobytes() for value in weights]

    def _client(self, rank: int) -> list[bytes]:
        transport, plan = self.network.transports[rank], self.plan
        weights = first_weights(plan)
        delivered: list[queue.Queue[bytes]] = [queue.Queue() for _ in plan.buckets]
        answers: queue.Queue[int] = queue.Queue()
        channel = transport.open_channel(len(plan.buckets))

        def deliver(bucket: int, data: Buffer) -> None:
            delivered[bucket].put(data.tobytes())

        engine = ClientEngine(plan, channel, self.recorders[rank], self._credit, deliver)

        def on_control(_: int, message: dict[str, int]) -> None:
            if "follow" in message:
                engine.feed(m.StepToFollow(message["follow"]))
            else:
                answers.put(message["steps"])

        def take_over(bucket: int, data: bytes) -> None:
            weights[bucket] = plain.decode(np.frombuffer(data, np.uint8), plan.buckets[bucket].dtype)

        transport.on_control(on_control)
        step = 0
        for phase in self.phases:
            for _ in range(phase[rank - 1]):
                for bucket in reversed(range(len(plan.buckets))):
                    engine.gradient(bucket, plain.encode(gradient_of(rank, step, weights[bucket])))
                for bucket in range(len(plan.buckets)):
                    take_over(bucket, delivered[bucket].get())
                step += 1
            assert engine.settle() == step
            transport.send_control(0, {"left": step})
            step = answers.get()
            assert engine.settle(step) == step
            followed = engine.take_followed()
            for bucket, data in followed.items():
                take_over(bucket, data.tobytes())
            self.tails.setdefault(rank, []).append(len(followed))
            assert engine.take_followed() == {}
        engine.close()
        assert all(waiting.empty() for waiting in delivered)
        return [value.tobytes() for value in weights]


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_weights_are_those_of_a_sequential_run_bit_for_bit_whatever_the_order_of_delivery(seed):
    plan, phases = mixed_plan(), [[4, 4, 4]]
    weights = Run(plan, phases, seed).train()
    assert [weights[rank] for rank in range(4)] == [one_after_the_other(plan, phases)] * 4


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("credit", [1024, 1 << 20])
def test_the_size_of_the_messages_and_the_credit_change_no_bit(seed, credit):
    plan, phases = mixed_plan(piece_bytes=256), [[3, 3, 3]]
    assert len(plan.pieces) > 2 * len(plan.buckets)
    weights = Run(plan, phases, seed, credit).train()
    assert [weights[rank] for rank in range(4)] == [one_after_the_other(plan, phases)] * 4


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_clients_with_fewer_steps_end_with_the_weights_of_the_others(seed):
    plan, phases = mixed_plan(piece_bytes=512), [[1, 4, 2], [3, 0, 3]]
    run = Run(plan, phases, seed)
    weights = run.train()
    assert [weights[rank] for rank in range(4)] == [one_after_the_other(plan, phases)] * 4
    assert run.tails == {1: [5, 0], 2: [0, 5], 3: [5, 0]}


def test_one_client_trains_as_sgd_does():
    plan, phases = mixed_plan(), [[5]]
    assert Run(plan, phases, seed=0).train()[1] == one_after_the_other(plan, phases)


def test_the_timeline_has_every_bucket_of_every_step():
    plan = mixed_plan()
    run = Run(plan, [[2, 2]], seed=0)
    run.train()
    everything = {(bucket.index, step) for bucket in plan.buckets for step in range(2)}
    server, client = run.recorders[0].marks, run.recorders[1].marks
    for kind in ("reduced", "updated", "broadcast"):
        assert {(mark.bucket, mark.step) for mark in server if mark.kind == kind} == everything
    for kind in ("ready", "sent", "received"):
        assert {(mark.bucket, mark.step) for mark in client if mark.kind == kind} == everything
    assert {mark.peer for mark in server if mark.kind == "received"} == {1, 2}
    for bucket, step in everything:
        times = [next(k.time for k in server if (k.kind, k.bucket, k.step) == (kind, bucket, step))
                 for kind in ("received", "reduced", "updated", "broadcast")]  # fmt: skip
        assert times == sorted(times)


# --------------------------------------------------------------------------------- engines, on a channel that can halt


class HaltingChannel(Channel):
    """Keeps what it is given. A broadcast halts the engine's thread until it is let through."""

    def __init__(self) -> None:
        self.entered, self.let_through = threading.Event(), threading.Event()
        self.broadcasts: list[Done] = []

    def isend(self, dest: int, tag: int, buffer: Buffer, done: Done) -> None:
        done()

    def irecv(self, source: int, tag: int, buffer: Buffer, done: Done) -> None:
        pass

    def ibcast(self, lane: int, root: int, buffer: Buffer, done: Done) -> None:
        self.entered.set()
        self.let_through.wait()
        self.broadcasts.append(done)


def small_plan() -> Plan:
    return make_plan([VariableSpec("a/w", (4,), "float32")], [True], piece_bytes=1024, fuse_bytes=0, max_buckets=1)


def test_settle_waits_for_steps_to_follow_that_the_engine_is_only_just_beginning():
    channel = HaltingChannel()
    engine = ClientEngine(small_plan(), channel, Recorder(keep=False), 1024, lambda *_: None)
    engine.feed(m.StepToFollow(0))
    assert channel.entered.wait(SECONDS)
    ranks = Ranks({1: lambda: engine.settle(1)})
    time.sleep(0.1)
    assert ranks.outcomes == {}, "it has not waited"
    channel.let_through.set()
    while not channel.broadcasts:
        time.sleep(0.001)
    channel.broadcasts.pop()()
    assert ranks.join(SECONDS) == {1: 1}


def test_settle_counts_gradients_that_the_engine_has_not_seen_yet():
    channel = HaltingChannel()
    engine = ClientEngine(small_plan(), channel, Recorder(keep=False), 1024, lambda *_: None)
    engine.gradient(0, np.zeros(16, np.uint8))
    channel.let_through.set()
    ranks = Ranks({1: engine.settle})
    while not channel.broadcasts:
        time.sleep(0.001)
    assert ranks.outcomes == {}
    channel.broadcasts.pop()()
    assert ranks.join(SECONDS) == {1: 1}


def test_a_run_that_cannot_go_on_ends_on_the_engines_thread_with_an_error_that_says_why(monkeypatch):
    caught: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", caught.put)
    engine = ServerEngine(
        small_plan(), HaltingChannel(), Recorder(keep=False), 1024, [1, 2], lambda *_: None, lambda *_: None
    )
    engine.start()
    engine.feed(m.ClientDeparted(1, 0))
    engine.feed(m.GradientReceived(2, engine.plan.pieces[0]))
    error = caught.get(timeout=SECONDS)
    assert error.exc_type is DisagreementError
    assert "rank 1 ended after 0 steps" in str(error.exc_value)
    assert error.thread.name.startswith("mpipipe-")


def test_the_mean_that_is_handed_over_is_in_rank_order_and_new_memory():
    handed: queue.Queue[tuple[int, bytes]] = queue.Queue()
    network = Network(3, seed=0)
    plan = small_plan()
    channels = [transport.open_channel(1) for transport in network.transports]
    engine = ServerEngine(
        plan, channels[0], Recorder(keep=False), 1024, [1, 2],
        lambda bucket, data: handed.put((bucket, data.tobytes())), lambda *_: None,
    )  # fmt: skip
    engine.start()
    parts = [np.array([0.1, 1e8, -3, 5], np.float32), np.array([0.2, -1e8, 4, 7], np.float32)]
    for channel, part in zip(channels[1:], parts, strict=True):
        channel.isend(0, 0, plain.encode(part), lambda: None)
    bucket, data = handed.get(timeout=SECONDS)
    assert (bucket, data) == (0, reduce.mean([plain.encode(part) for part in parts], "float32").tobytes())
    engine.close()
    network.close()
