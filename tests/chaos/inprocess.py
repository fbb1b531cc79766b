"""Whole training runs of threads in one process, to which something happens, from a seeded schedule.

The ranks are real contexts, sessions, engines and watches over the in-process network; in place of Keras there is SGD
in numpy. Gradients do not depend on the weights, and no two sets of clients have the same mean: from a step's update
it can be read off whose gradients are in it, and the whole run can be done again in plain numpy.

usage: python -m tests.chaos.inprocess [RUNS] [FIRST SEED]
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpipipe import engine as engines
from mpipipe.config import Config
from mpipipe.context import Context
from mpipipe.engine import ServerEngine
from mpipipe.errors import DisagreementError, MpipipeError
from mpipipe.logs import logger
from mpipipe.protocol.plan import VariableSpec
from mpipipe.session import SERVER
from mpipipe.transport.inproc import Network, _Posted
from mpipipe.watch import Watch
from mpipipe.wire import header, plain
from mpipipe.wire.header import HEADER_BYTES
from tests.unit.ranks import image_of

LIMIT = 10.0  # seconds for one run
TICK = 0.006  # of the clock by which a watch sees a second go by
STALL = 25  # ticks after which a rank may be given up: more than all holds and interruptions of a run together
PATIENCE = 0.03  # seconds after which an engine is idle

RATE = np.float32(2.0**-6)
RULES = {"average": "clients", "gradient_accumulation_steps": 1}

TRAINED, ENDED = "trained", "ended with a message"
# What a survivor may end with although others could go on: it has nobody to go on with, or nothing to go on from.
ALONE = ("no client is left", "is lost before training began")

# How a run may end to which a fault has happened: where the others survive the loss of a rank, and where they do not.
# Whoever survives may also end with what is in ALONE. Where there are several faults, each may have its way.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "order": ({TRAINED}, {TRAINED}),  # whatever MPI does not promise to keep in order overtakes
    "delay": ({TRAINED}, {TRAINED}),  # every message takes a while
    "hold": ({TRAINED}, {TRAINED}),  # one message is long under way
    "interrupt": ({TRAINED}, {TRAINED}),  # nothing gets through for a while
    "slow": ({TRAINED}, {TRAINED}),  # a client's script does something else for long, and then its gradients come late
    "shorter": ({TRAINED}, {TRAINED}),  # a client ends its phases after fewer steps
    "kill": ({TRAINED}, {ENDED}),  # a client's process is gone
    "kill-all": ({ENDED}, {ENDED}),
    "stop": ({TRAINED}, {ENDED}),  # a client neither says nor takes anything any more
    "stuck": ({TRAINED}, {ENDED}),  # a client's script hangs in the middle of a step
    "raise": ({ENDED}, {ENDED}),  # a client's script raises
    "depart": ({ENDED}, {ENDED}),  # a client's script ends without optimizer.finish()
    "truncated": ({ENDED}, {ENDED}),  # of a message's header only a part comes
    "garbled": ({ENDED}, {ENDED}),  # a message's header says something else
}
LOSSES = ("kill", "kill-all", "stop", "stuck")


@dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    seed: int
    faults: list[str]
    outcome: str
    ok: bool
    detail: str
    seconds: float


@dataclass
class Fault:
    """Something that happens to a client, at a number of its messages or in one of its steps."""

    kind: str
    rank: int
    at: int
    step: int
    ticks: int
    fired: bool = False

    def __str__(self) -> str:
        return f"{self.kind} (rank {self.rank}, message {self.at}, step {self.step}, {self.ticks} ticks)"


Ended = SystemExit  # where a process would be gone; threads that end with it say nothing


class Unruly(Network):
    """A network that tells of every message before it takes it, and can be held up."""

    def __init__(self, run: Run, size: int, **settings: Any) -> None:
        self.run = run
        self.interrupted = False
        self.frozen: set[int] = set()
        self.held: dict[Any, float] = {}  # until which tick, by key
        super().__init__(size, **settings)

    def send(self, key: tuple[int, ...], posted: _Posted) -> None:
        self._end_the_dead(key[1])
        super().send(key, self.run.on_message(key, posted))
        self.let_go()

    def receive(self, key: tuple[int, ...], posted: _Posted) -> None:
        super().receive(key, posted)
        self.let_go()

    def let_go(self) -> None:
        """Where the network is closed: let nobody wait for it."""
        if not self._closed:
            return
        with self._lock:
            waiting = [
                posted for each in (self._sends, self._receives) for of_key in each.values() for posted in of_key
            ]
            self._sends.clear()
            self._receives.clear()
        for posted in waiting:
            posted.done()

    def post_control(self, source: int, dest: int, message: dict[str, Any]) -> None:
        self._end_the_dead(source)
        if message["kind"] not in ("ask", "here"):  # there are as many of those as the time allows
            self.run.on_event(source, dest)
            self._end_the_dead(source)
        if message["kind"] == "lost":  # what is said before somebody is forgotten does arrive
            if not {dest} & (self._dead | self.frozen):
                with suppress(Ended):
                    self._handlers[dest](source, message)
            return
        super().post_control(source, dest, message)
        if message["kind"] == "depart" and source not in self.frozen:
            self.run.departed.add(source)

    def quiet(self) -> bool:
        """Whether every control message that can arrive has."""
        with self._lock:
            gone = self._dead | self.frozen
            return self.interrupted or not any(
                messages for ends, messages in self._control.items() if not gone & {*ends} and ends[1] in self._handlers
            )

    def _end_the_dead(self, source: int) -> None:
        if source in self.run.killed:
            raise Ended

    def _possible(self) -> Any:
        return [] if self.interrupted else super()._possible()

    def _held(self, key: Any) -> bool:
        return key in self.held or bool(self.frozen & {*key[1:3]})

    def _deliver(self, key: tuple[int, ...]) -> Any:
        (self._receives[key] or self._listening[key[:3]])[0].buffer[:] = 0xAB  # what was in that memory before
        return super()._deliver(key)

    def _deliver_control(self, source: int, dest: int) -> Any:
        if dest in self.frozen or source in self.frozen:
            return [self._control[source, dest].clear]
        return [partial(_unless_ended, act) for act in super()._deliver_control(source, dest)]

    def _tell_news(self) -> Any:
        return [partial(_unless_ended, act) for act in super()._tell_news()]


def _unless_ended(act: Callable[[], None]) -> None:
    with suppress(Ended):
        act()


class _Hasty(queue.SimpleQueue):  # type: ignore[type-arg]
    """What waits a second here waits less."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block, timeout and min(timeout, PATIENCE))


def gradient_of(client: int, step: int, bucket: int, size: int) -> np.ndarray:
    """Of the clients' gradients of an element, each is a power of two times the same."""
    same = 1 + ((step * 5 + bucket * 3 + np.arange(size)) % 7).astype(np.float32) / np.float32(8)
    return np.float32(2.0**client) * same


def mean_of(clients: tuple[int, ...], step: int, bucket: int, size: int) -> np.ndarray:
    total = gradient_of(clients[0], step, bucket, size)
    for client in clients[1:]:
        total = total + gradient_of(client, step, bucket, size)
    return total / np.float32(len(clients))


def sgd(weights: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return weights - RATE * mean


def copy_of(weights: list[np.ndarray]) -> list[np.ndarray]:
    return [one.copy() for one in weights]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return [a.tobytes() for a in one] == [b.tobytes() for b in other]


@dataclass
class Trainer:
    """What a rank has done."""

    weights: list[np.ndarray]
    step: int = 0
    # Weights after each step: at the server; at a client those that it got in the step itself.
    after: dict[int, list[np.ndarray]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the first step of each phase
    again: set[int] = field(default_factory=set)  # steps done again, or never done
    finished: bool = False


class Run:
    """One run.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = self.random = random.Random(seed)
        self.clients = draw.randint(2, 4)
        self.survives = draw.random() < 0.6
        sizes = [draw.choice([1, 7, 200, 257, 700, 1500]) for _ in range(draw.randint(2, 6))]
        sizes[draw.randrange(len(sizes))] = draw.choice([600, 1500])  # several pieces
        self.variables = [VariableSpec(f"layer_{i}/kernel", (size,), "float32") for i, size in enumerate(sizes)]
        phases = [draw.randint(3, 12)] if draw.random() < 0.5 else [draw.randint(2, 6), draw.randint(1, 6)]
        self.steps = {client: list(phases) for client in range(1, self.clients + 1)}  # by client and phase
        self.divisible, self.ahead = draw.random() < 0.5, draw.random() < 0.4
        self.faults = self._draw_faults()
        kinds = [fault.kind for fault in self.faults]
        for fault in self.faults:
            if fault.kind == "shorter":
                self.steps[fault.rank] = [draw.randint(0, steps) for steps in self.steps[fault.rank]]
        settings = {
            "piece_bytes": 1024, "fuse_bytes": 0, "credit_bytes": draw.choice([1024, 4096, 1 << 20]),
            "overlap": draw.random() < 0.8, "stall_warning": 0.0, "stall_abort": float(STALL),
        }  # fmt: skip
        config = Config(**settings)
        self.now = 0.0
        self.killed: set[int] = set()
        self.gone: set[int] = set()  # clients that the others can do without from now on: killed, stopped, stuck, alone
        self.departed: set[int] = set()
        self.messages: list[tuple[int, str]] = []  # with the rank that has said it
        self.disagreements: list[tuple[int, str]] = []  # of clients, which leave it to the server to say so
        self.alone: list[tuple[int, str]] = []  # said by ranks that have ended without the others
        self.concerned: set[int] = set()
        self.log: list[str] = []
        self.over = threading.Event()
        self._late: dict[int, int] = {}  # for how long the next message of a rank is held
        self._events: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.network = Unruly(
            self,
            self.clients + 1,
            seed=seed if "order" in kinds else None,
            delay=draw.choice([1e-4, 3e-4]) if "delay" in kinds else 0.0,
            survives=self.survives,
        )
        self.contexts = [Context(config, transport) for transport in self.network.transports]
        for context in self.contexts:
            context.watch = Watch(context, lambda: self.now)
            context.fail = partial(self._fail, context.rank)  # type: ignore[method-assign]
            context.abort = partial(self._fail, context.rank, "")  # type: ignore[method-assign]
            context.end_alone = partial(self._end_alone, context.rank)  # type: ignore[method-assign]
        self.trainers = [Trainer([self._first(i) for i in range(len(sizes))]) for _ in self.contexts]
        self.threads: dict[int, threading.Thread] = {}

    def _draw_faults(self) -> list[Fault]:
        draw, faults = self.random, []
        for kind in draw.sample(list(ALLOWED), draw.choice([0, 1, 1, 1, 2, 2, 3])):
            rank = draw.randint(1, self.clients)
            steps = sum(self.steps[rank])
            pieces = sum(-(-variable.nbytes // 1024) for variable in self.variables)
            # A few messages come before and after the steps; a message's number may be one that never comes.
            most = 12 + 2 * steps * pieces * (self.clients if kind == "kill-all" else 1)
            at = draw.randint(1, most) if draw.random() < 0.8 else draw.choice([*range(1, 7), *range(most - 10, most)])
            faults.append(Fault(kind, rank, at, draw.randrange(steps), draw.randint(2, 7)))
        if any(fault.kind == "slow" for fault in faults):
            for fault in faults:
                fault.ticks = min(fault.ticks, 3)  # whoever is waited for that long anyway may not be silent besides
        return faults

    def _first(self, bucket: int) -> np.ndarray:
        return np.random.default_rng(bucket).normal(size=self.variables[bucket].shape[0]).astype(np.float32)

    # --------------------------------------------------------------------------------------------- what happens when

    def on_event(self, source: int, dest: int) -> None:
        """Something is about to be sent; most faults happen now."""
        client = source or dest
        with self._lock:
            self._events[client] += 1
            self._events[SERVER] += 1
            due = [f for f in self.faults if not f.fired and self._is_due(f, client)]
            for fault in due:
                fault.fired = True
        for fault in due:
            if fault.kind == "kill":
                self._kill(fault.rank)
            elif fault.kind == "kill-all":
                for rank in range(1, self.clients + 1):
                    self._kill(rank)
            elif fault.kind == "stop":
                self._lose(fault.rank)
                self.network.frozen.add(fault.rank)
            elif fault.kind == "interrupt":
                self.network.interrupted, self._until = True, self.now + fault.ticks

    def _is_due(self, fault: Fault, client: int) -> bool:
        if fault.kind == "kill-all":
            return self._events[SERVER] >= fault.at
        return fault.kind in ("kill", "stop", "interrupt") and client == fault.rank and self._events[client] >= fault.at

    def on_message(self, key: tuple[int, ...], posted: _Posted) -> _Posted:
        """A message of a channel is about to be sent: what is sent in its place."""
        _, source, dest, _ = key
        self.on_event(source, dest)
        if source in self.killed:
            raise Ended
        with self._lock:
            due = [
                f
                for f in self.faults
                if f.kind in ("hold", "truncated", "garbled")
                and not f.fired
                and f.rank == (source or dest)
                and self._events[f.rank] >= f.at
                and (f.kind == "hold" or self._is_piece(key, posted))
            ]
            for fault in due:
                fault.fired = True
        if ticks := self._late.pop(source, 0):
            self.network.held[key] = self.now + ticks
        for fault in due:
            if fault.kind == "hold":
                self.network.held[key] = self.now + fault.ticks
            else:
                self.concerned |= {source, dest}
                buffer = posted.buffer.copy()
                said = header.read(buffer)
                if fault.kind == "truncated":
                    buffer = buffer[: self.random.randint(0, 11)]
                else:
                    self._garble(buffer)
                    self.log.append(f"rank {source} to rank {dest}: {said} has become {header.read(buffer)}")
                posted = _Posted(buffer, posted.done)
        return posted

    def _is_piece(self, key: tuple[int, ...], posted: _Posted) -> bool:
        """Whether a message is one of the steps, and no question: those are only hints."""
        return key[0] == 2 and posted.buffer.size > HEADER_BYTES

    def _garble(self, buffer: np.ndarray) -> None:
        pieces = len(self.contexts[SERVER]._sessions[0].plan.pieces)  # type: ignore[union-attr]
        step, piece = header.read(buffer)
        if self.random.random() < 0.4 or pieces == 1:
            other = self.random.choice([step - 1, step + 1, step ^ (1 << self.random.randrange(63)), -1 - step])
            header.write(buffer, other if abs(other) < 2**63 else -1, piece)
        else:
            others = [number for number in range(pieces) if number != piece]
            header.write(buffer, step, self.random.choice([*others, pieces, 2**31 - 1, -1 - pieces]))

    def _lose(self, rank: int) -> None:
        if rank not in self.departed:
            self.gone.add(rank)

    def _kill(self, rank: int) -> None:
        self._lose(rank)
        self.killed.add(rank)
        self.network.kill(rank)

    def _wait(self, ticks: float, rank: int) -> None:
        until = self.now + ticks
        while self.now < until:
            self._check(rank)
            time.sleep(TICK)

    def _check(self, rank: int) -> None:
        if self.over.is_set() or rank in self.killed:
            raise Ended

    def _fail(self, rank: int, message: str, code: int = 1) -> None:
        """In place of a rank's own: all processes are gone."""
        if rank not in self.killed and rank not in self.network.frozen and not self.over.is_set():
            self.messages.append((rank, message))
            self.over.set()
        raise Ended

    def _end_alone(self, rank: int, message: str) -> None:
        """In place of a rank's own: its process is gone."""
        self.alone.append((rank, message))
        self._kill(rank)
        raise Ended

    def _raised(self, rank: int, error: BaseException) -> None:
        if isinstance(error, Ended) or rank in self.killed or rank in self.network.frozen:
            return
        if isinstance(error, DisagreementError) and rank != SERVER:
            self.disagreements.append((rank, str(error)))
            return
        brief = isinstance(error, MpipipeError | ZeroDivisionError)
        text = str(error) if brief else "".join(traceback.format_exception(error))
        with suppress(Ended):
            self._fail(rank, text)

    def on_thread_exception(self, arguments: Any) -> None:
        """In place of the hook that every process installs."""
        deadline = time.monotonic() + 0.5  # an engine may be at work before anybody knows it
        while time.monotonic() < deadline:
            for context in self.contexts:
                for session in context._sessions:
                    if session.engine is not None and session.engine._thread is arguments.thread:
                        self._raised(context.rank, arguments.exc_value)
                        return
            if arguments.exc_type is Ended:
                return
            time.sleep(0.005)
        self.messages.append((-1, "".join(traceback.format_exception(arguments.exc_value))))
        self.over.set()

    # ------------------------------------------------------------------------------------------------------- ranks

    def _rank(self, rank: int) -> None:
        try:
            (self._server if rank == SERVER else self._client)(self.contexts[rank], self.trainers[rank])
            self.contexts[rank].finalize()
        except BaseException as error:
            self._raised(rank, error)

    def _server(self, context: Context, trainer: Trainer) -> None:
        session: Any = context.new_session()
        session.agree(self.variables, (), RULES, divisible=self.divisible, sum_rows=True)
        handed: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        session.open(lambda unit, mean: handed.put((unit, mean)))
        session.engine.start()
        waiting: dict[int, deque[Any]] = defaultdict(deque)
        draw = random.Random(self.seed)

        def update() -> None:
            """All of a step, in any order of those that could be."""
            pending = set(range(len(session.plan.units)))
            while pending:
                ready = [unit for unit in pending if waiting[unit]]
                try:
                    number, mean = handed.get(block=not ready, timeout=0.2)
                    waiting[number].append(mean)
                    continue
                except queue.Empty:
                    self._check(SERVER)
                if not ready:
                    continue
                number = draw.choice(ready)
                pending.discard(number)
                unit, mean = session.plan.units[number], plain.decode(waiting[number].popleft(), "float32")
                start = unit.pieces[0].offset // 4
                part = trainer.weights[unit.bucket][start : start + unit.nbytes // 4]
                part[:] = sgd(part, mean)
                image = image_of(unit.pieces, trainer.step, plain.encode(part.copy()))
                session.engine.updated(number, trainer.step, image)

        for _ in self.steps[1]:
            trainer.starts.append(trainer.step)
            while session.wait_step():
                before = copy_of(trainer.weights)
                update()
                if trainer.step in session.engine.redo_steps:
                    trainer.again.add(trainer.step)
                    trainer.weights = before
                    if trainer.step in session.engine.cancelled_steps:
                        continue
                    trainer.weights = copy_of(before)
                    update()
                trainer.after[trainer.step] = copy_of(trainer.weights)
                trainer.step += 1
            session.answer_phase(session.collect_phase([]), lambda: copy_of(trainer.weights))
        trainer.finished = True

    def _client(self, context: Context, trainer: Trainer) -> None:
        session: Any = context.new_session()
        rank = context.rank
        session.agree(self.variables, (), RULES)
        coming: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.variables]
        session.open(["whole"] * len(self.variables), False, lambda bucket, data: coming[bucket].put(data))
        mine = {f.kind: f for f in self.faults if f.rank == rank and f.kind in ("slow", "stuck", "raise", "depart")}
        own = taken = 0  # steps

        def act(*kinds: str) -> None:
            for kind in kinds:
                fault = mine.get(kind)
                if fault is None or fault.fired or own != fault.step:
                    continue
                fault.fired = True
                if kind == "slow":
                    self._wait(STALL + 6, rank)
                    self._late[rank] = fault.ticks
                elif kind == "stuck":
                    self._lose(rank)
                    self._wait(1000 * STALL, rank)
                elif kind == "raise":
                    raise ZeroDivisionError("the user's own mistake")
                else:
                    context.finalize()
                    raise Ended

        def make() -> None:
            for bucket in reversed(session.plan.buckets):
                gradient = gradient_of(rank, trainer.step, bucket.index, bucket.nbytes // 4)
                image = image_of(bucket.pieces, trainer.step, plain.encode(gradient))
                session.engine.gradient(bucket.index, trainer.step, image)
                act("stuck")
            trainer.step += 1

        def take() -> None:
            nonlocal taken
            for bucket, waiting in enumerate(coming):
                while True:
                    try:
                        trainer.weights[bucket] = plain.decode(waiting.get(timeout=0.2), "float32").copy()
                        break
                    except queue.Empty:
                        self._check(rank)
            trainer.after[taken] = copy_of(trainer.weights)
            taken += 1

        for steps in self.steps[rank]:
            trainer.starts.append(trainer.step)
            for number in range(steps):
                self._check(rank)
                act("slow", "raise", "depart")
                make()
                if number and self.ahead:
                    take()
                if not self.ahead:
                    take()
                own += 1
            if steps and self.ahead:
                take()
            act("depart", "raise")
            answer = session.end_phase([], logs={}, samples=0)
            if answer["catch_up"]:
                like = [np.zeros(variable.shape, np.float32) for variable in self.variables]
                trainer.weights = [array.copy() for array in session.receive_arrays(like)]
                session.engine.caught_up(answer["steps"])
                trainer.step = taken = answer["steps"]
        trainer.finished = True

    # ------------------------------------------------------------------------------------------------------ the run

    def train(self) -> Outcome:
        """Do it."""
        began = time.monotonic()
        with _hooks(self):
            for context in self.contexts:
                thread = threading.Thread(target=self._rank, args=[context.rank], daemon=True)
                self.threads[context.rank] = thread
                thread.start()
            hung = not self._watch(began + LIMIT)
            where = self._where() if hung else ""
            self._clean_up()
        problem = where or self._problem()
        outcome = "hung" if hung else ENDED if self.messages else TRAINED
        fired = [fault for fault in self.faults if fault.fired or fault.kind in ("order", "delay", "shorter")]
        detail = problem and "\n".join(
            [
                problem,
                f"clients {self.clients}, survives {self.survives}, steps {self.steps}, gone {self.gone}, "
                f"sizes {[v.shape[0] for v in self.variables]}, divisible {self.divisible}, ahead {self.ahead}",
                *map(str, self.faults),
                *(f"[{rank}] {text}" for rank, text in [*self.messages, *self.alone, *self.disagreements]),
                *self.log,
            ]
        )
        if not problem and self.messages:
            detail = f"[{self.messages[0][0]}] {self.messages[0][1]}"
        words = [fault.kind + (" (survived)" if fault.kind in LOSSES and self.survives else "") for fault in fired]
        return Outcome(self.seed, sorted(words), outcome, not problem, detail, time.monotonic() - began)

    def _watch(self, deadline: float) -> bool:
        """Have the time go by until the run is over; False if it does not come to that."""
        while time.monotonic() < deadline:
            left = [r for r, t in self.threads.items() if t.is_alive() and r not in self.gone and not self._is_still(r)]
            if self.over.wait(TICK) or not left:
                return True
            # As long as an answer is on its way, and would have been here in a second, there is no next one.
            while not self.network.quiet() and not self.over.is_set() and time.monotonic() < deadline:
                time.sleep(TICK / 4)
            self.now += 1
            with self.network._lock:
                if self.network.interrupted and self.now >= self._until:
                    self.network.interrupted = False
                for key in [key for key, until in list(self.network.held.items()) if until <= self.now]:
                    del self.network.held[key]
            self.network.look_again()
            for context in self.contexts:
                if not self._is_still(context.rank) and not context.watch._stopped.is_set():
                    with suppress(Ended):
                        context.watch.look()
        return False

    def _is_still(self, rank: int) -> bool:
        return rank in self.killed or rank in self.network.frozen

    def _where(self) -> str:
        """Where each rank stands."""
        frames, lines = sys._current_frames(), [f"not done after {LIMIT:.0f} s:"]
        for rank, thread in self.threads.items():
            stack = traceback.extract_stack(frames[thread.ident]) if thread.ident in frames else []
            ours = [entry for entry in stack if "threading.py" not in entry.filename][-3:]
            place = " > ".join(f"{entry.name}:{entry.lineno} `{entry.line}`" for entry in ours) or "ended"
            lines.append(f"rank {rank}: {place}; waits for {self.contexts[rank].awaited()}")
        return "\n".join(lines)

    def _clean_up(self) -> None:
        """Let go of all threads, wherever they wait, so that they end within a second or so."""
        self.over.set()
        self.network.close()
        self.network.let_go()
        for context in self.contexts:
            context._bye.set()
            for session in context._sessions:
                for rank in range(self.clients + 1):
                    session.inbox.end(rank)
                if session.engine is not None:
                    session.engine.feed(None)
                if isinstance(session.engine, ServerEngine):
                    session.engine._steps.put(False)
                elif session.engine is not None:
                    with session.engine._changed:
                        session.engine._unhandled = session.engine._settled = 0
                        session.engine._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- the check

    def _problem(self) -> str:
        """What is wrong with how the run has ended; empty if nothing is."""
        faults = [fault for fault in self.faults if fault.fired]
        may_train = all(self._may_train(fault) for fault in faults)
        if not self.messages:
            if self.disagreements:
                return "clients know of an error of which the server does not"
            if not may_train:
                return f"trained although {' and '.join(f.kind for f in faults if not self._may_train(f))}"
            return self._wrong_weights()
        expected = [fault for fault in faults if ENDED in ALLOWED[fault.kind][not self.survives]]
        losses = [fault for fault in faults if fault.kind in LOSSES]
        concerned = {rank for fault in [*expected, *losses] for rank in self._ranks(fault)}
        for rank, text in self.messages:
            named = rank in concerned or any(f"rank {r} " in text or f"rank {r}," in text for r in concerned)
            if not text or "Traceback" in text or not named:
                return f"a message that names nobody of {sorted(concerned)}: {text}"
            if not expected and not (losses and any(words in text for words in ALONE)):
                return f"ended although {[f.kind for f in faults]}: {text}"
        return ""

    def _ranks(self, fault: Fault) -> set[int]:
        if fault.kind == "kill-all":
            return set(range(1, self.clients + 1))
        return self.concerned if fault.kind in ("truncated", "garbled") else {fault.rank}

    def _may_train(self, fault: Fault) -> bool:
        if TRAINED in ALLOWED[fault.kind][not self.survives]:
            return True
        if fault.kind in ("kill", "stop", "kill-all"):
            return not self._ranks(fault) & self.gone  # it was done
        return bool(self.survives and fault.rank in self.gone)  # what it did does not matter any more

    def _wrong_weights(self) -> str:
        server = self.trainers[SERVER]
        if not server.finished:
            return "the server has not trained to the end"
        there = [client for client in self.steps if client not in self.gone]
        for client in there:
            if not self.trainers[client].finished or client in self.contexts[SERVER].lost:
                return f"rank {client} has not trained to the end"
            if not same(self.trainers[client].weights, server.weights):
                return f"rank {client} has other weights than the server"
        weights, left_out = [self._first(bucket) for bucket in range(len(self.variables))], set()
        starts = [*server.starts, server.step]
        for step in range(server.step):
            phase = max(p for p, start in enumerate(server.starts) if start <= step)
            taking = {client for client, steps in self.steps.items() if step - starts[phase] < steps[phase]}
            took = {client for client in self.steps if step in self.trainers[client].after}
            found = {self._contributors(b, step, w, server.after[step][b]) for b, w in enumerate(weights)}
            if len(found) != 1 or None in found:
                return f"the buckets of step {step} are of clients {found}"
            (inside,) = found
            assert inside is not None
            if not (taking & {*there} | taking & took) <= {*inside} <= taking - left_out:
                return f"step {step} is of clients {inside}; {taking} take part in it, {took} have got its weights"
            left_out |= taking - {*inside}
            weights = [sgd(w, mean_of(inside, step, b, w.size)) for b, w in enumerate(weights)]
            for client in took if step not in server.again else ():
                if not same(self.trainers[client].after[step], weights):
                    return f"rank {client} had other weights than the server after step {step}"
        for phase in range(len(server.starts)):
            longest = max((self.steps[client][phase] for client in there), default=0)
            if starts[phase + 1] - starts[phase] < longest:
                return f"phase {phase} has {starts[phase + 1] - starts[phase]} steps instead of {longest}"
        return "" if same(weights, server.weights) else "the weights are not those of the reference"

    def _contributors(self, bucket: int, step: int, before: np.ndarray, after: np.ndarray) -> tuple[int, ...] | None:
        """Whose mean gradient has brought a bucket from some weights to others."""
        clients = range(1, self.clients + 1)
        sets = itertools.chain.from_iterable(itertools.combinations(clients, n) for n in clients)
        fitting = [s for s in sets if np.array_equal(sgd(before, mean_of(s, step, bucket, before.size)), after)]
        return fitting[0] if len(fitting) == 1 else None


@contextmanager
def _hooks(run: Run) -> Iterator[None]:
    """What a process installs, for all ranks; and engines that are idle sooner."""
    hook, modules, propagate = threading.excepthook, engines.queue, logger.propagate
    handler = logging.Handler()
    handler.emit = lambda record: run.log.append(record.getMessage())  # type: ignore[method-assign]
    threading.excepthook = run.on_thread_exception
    engines.queue = SimpleNamespace(SimpleQueue=_Hasty, Empty=queue.Empty)  # type: ignore[assignment]
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        threading.excepthook, engines.queue, logger.propagate = hook, modules, propagate
        logger.removeHandler(handler)


def run(seed: int) -> Outcome:
    """The run of a seed."""
    return Run(seed).train()


def main(count: int = 200, first: int = 0) -> int:
    """The exit status: 0 if every run has ended as it has to."""
    tally: Counter[tuple[str, str]] = Counter()
    failed, began = 0, time.monotonic()
    for seed in range(first, first + count):
        outcome = run(seed)
        failed += not outcome.ok
        for word in outcome.faults or ["nothing"]:
            tally[word, outcome.outcome if outcome.ok else "NOT OK"] += 1
        if not outcome.ok:
            print(f"seed {seed}, {', '.join(outcome.faults)}: {outcome.outcome}: {outcome.detail}\n", flush=True)
    for (word, outcome_), times in sorted(tally.items()):
        print(f"{times:5d} {word}: {outcome_}")
    print(f"{count} runs, {failed} not ok, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
