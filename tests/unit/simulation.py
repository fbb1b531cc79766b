"""One server machine and its clients on a network that delivers in any order that MPI allows, and checks as it goes.

MPI promises the order of messages of one sender under one tag, and of control messages between two ranks. Everything
else is drawn at random: whatever can happen next is in one pool, from which a seeded generator takes. What the sender
and the receiver learn of a message, they learn independently of each other.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.server import ServerMachine

Action = Callable[[], None]
Message = tuple[int, bool]  # its step, and whether it only asks for the piece

# When a client's training loop has a bucket's next gradient: when the bucket's weights are in; when all weights are
# in, as a training step that reads all of them at once does; or one step ahead of the weights, where a gradient does
# not depend on them (a step ends when all weights of the one before it have been taken).
Pace = Literal["bucket", "step", "early"]
PACES: tuple[Pace, ...] = ("bucket", "step", "early")


class Window:
    """What may be seen of one rank's sending to another: credit, urgency, and that nothing waits without a reason."""

    def __init__(self, plan: Plan, credit_bytes: int) -> None:
        self._plan, self._credit = plan, credit_bytes
        self.waiting: set[Piece] = set()
        self.under_way: list[Piece] = []
        self.hurried: set[Piece] = set()  # of those that wait
        self.one_by_one = False  # since the last event, and still
        self.turning = False  # whether that changes with the event that is being handled

    @property
    def backlog(self) -> int:
        return sum(piece.nbytes for piece in (*self.waiting, *self.under_way))

    def _urgency(self, piece: Piece) -> tuple[int, int]:
        return -1 if piece in self.hurried else self._plan.buckets[piece.bucket].priority, piece.index

    def ready(self, pieces: Iterable[Piece]) -> None:
        """These pieces may be sent."""
        for piece in pieces:
            assert piece not in self.waiting, f"{piece} is to be sent for another step before it was for the last"
            self.waiting.add(piece)

    def begin(self, piece: Piece) -> None:
        """One of them is."""
        assert piece in self.waiting, f"{piece} is sent before it is ready, or twice"
        first = min(self.waiting, key=self._urgency)
        assert piece is first, f"{piece} overtakes {first}, which is more urgent"
        self.waiting.remove(piece)
        self.hurried.discard(piece)
        self.under_way.append(piece)
        total = sum(piece.nbytes for piece in self.under_way)
        assert total <= self._credit or len(self.under_way) == 1, f"{total} bytes under way: {self.under_way}"
        assert not self.one_by_one or self.turning or len(self.under_way) == 1, f"not one by one: {self.under_way}"

    def hurry(self, pieces: Iterable[Piece]) -> None:
        """The receiver asks for these pieces."""
        self.hurried |= self.waiting & set(pieces)

    def end(self, piece: Piece) -> None:
        """It has arrived."""
        self.under_way.remove(piece)

    def check(self) -> None:
        """Whatever may go has gone."""
        if self.waiting:
            first = min(self.waiting, key=self._urgency)
            total = sum(piece.nbytes for piece in self.under_way)
            may_go = not self.one_by_one and total + first.nbytes <= self._credit
            assert self.under_way and not may_go, f"{first} waits for nothing"


class SimulatedClient:
    """A client: its machine, its training loop, and what it must see."""

    def __init__(self, world: Simulation, rank: int, steps: list[int]) -> None:
        self.rank, self.steps = rank, steps
        self.machine = ClientMachine(world.plan, world.credit_bytes, overlap=world.overlap)
        self.sending = Window(world.plan, world.credit_bytes)  # its gradients
        self.receiving = Window(world.plan, world.credit_bytes)  # its weights: the server's side
        self.phase = 0
        count = len(world.plan.buckets)
        self.computing = [False] * count  # buckets whose next gradient is yet to be handed to the machine
        self.computed = [0] * count  # gradients made in this phase, by bucket
        self.done = [0] * count  # weights delivered in this phase, by bucket
        self.step = [0] * count  # the step that each bucket is in
        self.early: set[int] = set()  # buckets whose gradient is ready before their weights
        self.held: list[int] = []  # buckets whose gradients wait for the others', without overlap
        self.delivered: list[list[int]] = [[] for _ in range(count)]  # the steps of the weights, by bucket
        self.arriving: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # (step, piece) of the next weights
        self.left = False
        self.ended = False


class Simulation:
    """A run.

    Args:
        plan: the buckets.
        steps: for each client (rank 1, 2, ...) its number of steps in each phase.
        credit_bytes: how much may be under way from one rank to another.
        seed: of the order of everything.
        pace: of the clients' training loops.
        overlap: see :class:`ClientMachine`.
        departing: the clients that, after the last phase, end their scripts instead of leaving the phase.
        inexact: whether clients catch up at the end of a phase that they have done to its end too, as they do where
            the weights were sent in a narrow format.
        posted: how many messages of a client still come when it is to pause.
    """

    def __init__(
        self,
        plan: Plan,
        steps: list[list[int]],
        credit_bytes: int,
        seed: int,
        *,
        pace: Pace = "bucket",
        overlap: bool = True,
        departing: Collection[int] = (),
        inexact: bool = False,
        posted: int = 0,
    ) -> None:
        self.plan, self.credit_bytes, self.pace, self.overlap = plan, credit_bytes, pace, overlap
        self.departing, self._inexact, self._posted = departing, inexact, posted
        self.random = random.Random(seed)
        self.phases = len(steps[0])
        self.clients = {rank: SimulatedClient(self, rank, own) for rank, own in enumerate(steps, start=1)}
        self.server = ServerMachine(plan, self.clients, credit_bytes)
        # The first step of each phase, and who takes part in each step, as it must come out.
        self.starts = [0]
        self.participants: list[tuple[int, ...]] = []
        for phase in range(self.phases):
            longest = max(client.steps[phase] for client in self.clients.values())
            for step in range(longest):
                self.participants.append(tuple(r for r, c in self.clients.items() if c.steps[phase] > step))
            self.starts.append(self.starts[-1] + longest)

        # The network. Messages by (source, dest, tag), each with its step: sent, and taken and not yet noticed.
        self._pool: list[Action] = []
        self._sent: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self._taken: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self._control: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # by (source, dest)
        self._held: Callable[[str, int, int, int], bool] = lambda *_: False
        self._waiting_actions: list[Action] = []
        # For each client that is to pause: how many of its messages still come, and what happens after the pause.
        self._still_come: dict[int, int] = {}
        self._put_off: dict[int, list[Action]] = {}
        self._changed_steps: Callable[[Any], int] = lambda event: 0
        self.events = 0

        # What the server holds and what it has done.
        self._buffers: dict[tuple[int, int], int] = {}  # by (client, piece): the step of the gradient that is in it
        self._versions = [-1] * len(plan.units)  # the step of each unit's newest weights
        self.counted: Counter[tuple[int, int, int]] = Counter()  # gradients by (client, piece, step)
        self.reduced: Counter[tuple[int, int]] = Counter()  # by (piece, step)
        self.updated: list[list[int]] = [[] for _ in plan.units]  # the steps of each unit
        self.steps_begun: list[int] = []
        self.phases_ended: list[int] = []
        self.caught_up: dict[int, list[int]] = {rank: [] for rank in self.clients}
        self.pauses = 0
        self.asked: set[tuple[int, int, int]] = set()  # (client, piece, step)
        self.failures: list[str] = []

        for client in self.clients.values():
            self._train(client)

    # ------------------------------------------------------------------------------------------------- going through

    def hold(self, which: Callable[[str, int, int, int], bool]) -> None:
        """From now on keep back every ("gradient" or "weights", client, bucket, step) for which this is true.

        A gradient is kept from being ready, weights (and questions: "question") are kept on their way to the client.
        """
        self._held = which

    def release(self) -> None:
        """Let everything go that was kept back."""
        self._held = lambda *_: False
        self._pool += self._waiting_actions
        self._waiting_actions = []

    def falsify(self, change: Callable[[Any], int]) -> None:
        """Change the step of every event that has one, by this much; but for questions, which may be old."""
        self._changed_steps = change

    def run(self) -> None:
        """Let happen, in random order, all that can happen; ends also where the server has failed."""
        while self._pool and not self.failures:
            chosen = self.random.randrange(len(self._pool))
            self._pool[chosen], self._pool[-1] = self._pool[-1], self._pool[chosen]
            self._pool.pop()()

    def check_the_end(self) -> None:
        """Nothing is left over, and everything has happened exactly once."""
        total = self.starts[-1] if self.plan.buckets else 0
        steps, pieces = range(total), range(len(self.plan.pieces))
        assert all(client.ended for client in self.clients.values()), f"hangs: {self.where()}"
        assert self.steps_begun == list(steps)
        assert self.phases_ended == (self.starts[1:] if self.plan.buckets else [0] * self.phases)
        assert self.reduced == Counter({(piece, step): 1 for piece in pieces for step in steps})
        assert self.updated == [list(steps) for _ in self.plan.units]
        assert self.counted == Counter(
            {(c, p, step): 1 for step in steps for c in self.participants[step] for p in pieces}
        )
        assert self.server.waiting_for() == {}
        for rank, client in self.clients.items():
            own = [step for step in steps if rank in self.participants[step]]
            assert client.machine.between_steps
            assert client.machine.steps == total
            assert client.delivered == [own for _ in self.plan.buckets]
            for window in (client.sending, client.receiving):
                assert not window.waiting and not window.under_way
        assert not any(self._sent.values()) and not any(self._taken.values()) and not any(self._control.values())
        assert not self._buffers and not self._still_come and not self._put_off

    def where(self) -> str:
        """Where everybody stands."""
        clients = {
            rank: (c.phase, c.computed, [c.machine.step_of(b) for b in range(len(self.plan.buckets))], c.left)
            for rank, c in self.clients.items()
        }
        owed = self.server.waiting_for()
        return f"clients (phase, computed, step by bucket, left): {clients}; the server waits for {owed}"

    # ---------------------------------------------------------------------------------------------------- the clients

    def _train(self, client: SimulatedClient) -> None:
        """Make possible whatever the client's training loop can do now."""
        if client.left or client.ended:
            return
        wanted = client.steps[client.phase] if self.plan.buckets else 0
        slowest = min(client.done, default=wanted)
        for bucket, computed in enumerate(client.computed):
            reached = {"bucket": client.done[bucket], "step": slowest, "early": slowest + 1}[self.pace]
            if computed < wanted and computed <= reached and not client.computing[bucket]:
                client.computing[bucket] = True
                self._pool.append(lambda b=bucket, c=computed: self._compute(client, b, c))
        if slowest == wanted and client.machine.between_steps:
            self._leave(client)

    def _compute(self, client: SimulatedClient, bucket: int, number: int) -> None:
        step = self.starts[client.phase] + number
        if self._held("gradient", client.rank, bucket, step):
            self._waiting_actions.append(lambda: self._compute(client, bucket, number))
            return
        client.computing[bucket] = False
        client.computed[bucket] += 1
        if client.step[bucket] == step:
            self._may_be_sent(client, bucket)
        else:
            client.early.add(bucket)
        self._feed_client(client, m.GradientReady(bucket, step))

    def _may_be_sent(self, client: SimulatedClient, bucket: int) -> None:
        """A bucket's gradient is ready and its old weights are in."""
        client.held.append(bucket)
        if self.overlap or len(client.held) == len(self.plan.buckets):
            client.sending.ready(piece for held in client.held for piece in self.plan.buckets[held].pieces)
            client.held.clear()

    def _leave(self, client: SimulatedClient) -> None:
        client.left = True
        steps = client.machine.steps
        departs = client.phase == self.phases - 1 and client.rank in self.departing
        client.ended = departs
        kind = m.ClientDeparted if departs else m.ClientLeft
        self._say(client.rank, 0, lambda: self._feed_server(kind(client.rank, steps)))

    def _answer_phase(self, client: SimulatedClient, steps: int) -> None:
        if client.machine.steps < steps or self._inexact:
            self.caught_up[client.rank].append(steps)
            client.step = [steps] * len(client.step)
            self._feed_client(client, m.CaughtUp(steps))
        assert not self.plan.buckets or client.machine.steps == steps
        client.phase += 1
        if client.phase == self.phases:
            client.ended = True
            return
        client.left = False
        client.computed = [0] * len(client.computed)
        client.done = [0] * len(client.done)
        self._train(client)

    def _feed_client(self, client: SimulatedClient, event: m.ClientEvent) -> None:
        self.events += 1
        if isinstance(event, m.GradientSent):
            client.sending.end(event.piece)
        elif isinstance(event, m.AskedFor) and event.step == client.step[event.piece.bucket]:
            pieces = self.plan.buckets[event.piece.bucket].pieces
            client.sending.hurry(piece for piece in pieces if piece.index <= event.piece.index)
        for command in client.machine.handle(self._falsified(event)):
            if isinstance(command, m.SendGradient):
                assert command.step == client.step[command.piece.bucket]
                client.sending.begin(command.piece)
                self._send(client.rank, 0, command.piece, (command.step, False))
            else:
                assert isinstance(command, m.DeliverWeights)
                self._deliver(client, command.bucket, command.step)
        client.sending.check()
        self._train(client)

    def _deliver(self, client: SimulatedClient, bucket: int, step: int) -> None:
        pieces = self.plan.buckets[bucket].pieces
        assert sorted(client.arriving[bucket]) == [(step, piece.index) for piece in pieces]
        assert self._takes_part(client, step)
        client.arriving[bucket] = []
        client.delivered[bucket].append(step)
        client.done[bucket] += 1
        client.step[bucket] = step + 1
        if bucket in client.early:
            client.early.discard(bucket)
            self._may_be_sent(client, bucket)

    # ----------------------------------------------------------------------------------------------------- the server

    def _feed_server(self, event: m.ServerEvent) -> None:
        self.events += 1
        if isinstance(event, m.GradientReceived):
            buffer = event.client, event.piece.index
            assert buffer not in self._buffers, "a gradient has come before the last one was reduced"
            self._buffers[buffer] = event.step
        elif isinstance(event, m.WeightsSent):
            self.clients[event.client].receiving.end(event.piece)
        elif isinstance(event, m.Updated):
            for client in self._served():
                if self._takes_part(client, event.step):
                    client.receiving.ready(self.plan.units[event.unit].pieces)
        self._share()
        for command in self.server.handle(self._falsified(event)):
            self._carry_out(command)
        for client in self._served():
            client.receiving.check()
        if isinstance(event, m.ClientLeft | m.ClientDeparted):
            assert event.client not in self.server.waiting_for(), "the server waits for a client that has gone"

    def _served(self) -> list[SimulatedClient]:
        """The clients that the server still has."""
        return list(self.clients.values())

    def _takes_part(self, client: SimulatedClient, step: int) -> bool:
        """Whether a client that the server still has is to take part in a step."""
        return client.rank in self.participants[step]

    def _share(self) -> None:
        """Clients that have got half a credit more than another one get their weights one by one."""
        windows = [client.receiving for client in self._served()]
        most = max((window.backlog for window in windows), default=0)
        for window in windows:
            one_by_one = window.backlog < most - self.credit_bytes // 2
            window.turning, window.one_by_one = window.one_by_one != one_by_one, one_by_one

    def _carry_out(self, command: m.ServerCommand) -> None:
        if isinstance(command, m.StepBegan):
            self.steps_begun.append(command.step)
        elif isinstance(command, m.Reduce):
            self._reduce(command)
        elif isinstance(command, m.HandOver):
            self._hand_over(command.unit, command.step)
        elif isinstance(command, m.SendWeights):
            unit = self.plan.unit_of[command.piece.index]
            assert self._versions[unit] == command.step, "weights of another step than the newest are sent"
            self.clients[command.client].receiving.begin(command.piece)
            self._send(0, command.client, command.piece, (command.step, False))
        elif isinstance(command, m.AskFor):
            self._ask(command)
        elif isinstance(command, m.Pause):
            assert command.client not in self._still_come, "a client that pauses is to pause"
            self.pauses += 1
            self._still_come[command.client] = self._posted
        elif isinstance(command, m.Resume):
            del self._still_come[command.client]  # it has paused
            self._pool += self._put_off.pop(command.client, [])
        elif isinstance(command, m.PhaseEnded):
            self._end_phase(command.steps)
        else:
            assert isinstance(command, m.Fail)
            self.failures.append(command.message)

    def _ask(self, command: m.AskFor) -> None:
        pieces = self.plan.buckets[command.piece.bucket].pieces
        assert command.step == min(self.server.step_of(piece) for piece in pieces), "of another step than the present"
        come = {client.rank: self._come(client.rank, pieces, command.step) for client in self._served()}
        assert 0 < come[command.client] < max(come.values()), f"rank {command.client} has sent as much as others"
        assert command.piece == pieces[max(come.values()) - 1]
        question = command.client, command.piece.index, command.step
        assert question not in self.asked, "a question is asked twice"
        self.asked.add(question)
        self._send(0, command.client, command.piece, (command.step, True))

    def _come(self, client: int, pieces: Iterable[Piece], step: int) -> int:
        """How many of these pieces have come from a client, those included that have been summed."""
        return sum(
            self.counted[client, piece.index, step] or self._buffers.get((client, piece.index)) == step
            for piece in pieces
        )

    def _reduce(self, command: m.Reduce) -> None:
        piece, step = command.piece, command.step
        assert command.clients == self.participants[step], f"{piece} of step {step}: {command.clients}"
        self.reduced[piece.index, step] += 1
        for client in command.clients:
            assert self._buffers[client, piece.index] == step, "a gradient of another step is summed"
            self.counted[client, piece.index, step] += 1

        def summed() -> None:
            for client in command.clients:
                del self._buffers[client, piece.index]
            self._feed_server(m.Reduced(piece))

        self._pool.append(summed)

    def _hand_over(self, unit: int, step: int) -> None:
        for piece in self.plan.units[unit].pieces:
            assert self.reduced[piece.index, step] == 1, "a gradient is handed over of which a piece is missing"

        def updated() -> None:
            assert self._versions[unit] == step - 1, "the updates of a unit are not in order"
            self._versions[unit] = step
            self.updated[unit].append(step)
            self._feed_server(m.Updated(unit, step))

        self._pool.append(updated)

    def _end_phase(self, steps: int) -> None:
        self.phases_ended.append(steps)
        phase = len(self.phases_ended) - 1
        assert phase < self.phases
        assert steps == self.starts[phase + 1] or not self.plan.buckets, "the phase ended after other steps"
        assert not any(c.receiving.waiting or c.receiving.under_way for c in self.clients.values())
        assert all(version == steps - 1 for version in self._versions), "the phase ended before all was updated"
        if all(client.ended for client in self.clients.values()):
            return
        self._feed_server(m.PhaseOpened())
        for client in self.clients.values():
            if not client.ended:
                self._say(0, client.rank, lambda c=client: self._answer_phase(c, steps))

    # ---------------------------------------------------------------------------------------------------- the network

    def _send(self, source: int, dest: int, piece: Piece, message: Message) -> None:
        key = source, dest, piece.index
        self._sent[key].append(message)
        self._pool.append(lambda: self._match(key, piece))

    def _match(self, key: tuple[int, int, int], piece: Piece) -> None:
        """A message meets a receive: from now on both sides may notice, in any order."""
        source, dest, _ = key
        step, asks = self._sent[key][0]
        if source == 0 and self._held("question" if asks else "weights", dest, piece.bucket, step):
            self._waiting_actions.append(lambda: self._match(key, piece))
            return
        if self._pauses(source, lambda: self._match(key, piece)):
            return
        self._taken[key].append(self._sent[key].popleft())

        def received() -> None:
            if self._pauses(source, received):
                return
            if source in self._still_come:
                self._still_come[source] -= 1
            step, asks = self._taken[key].popleft()
            if dest == 0:
                self._feed_server(m.GradientReceived(source, piece, step))
            elif asks:
                self._feed_client(self.clients[dest], m.AskedFor(piece, step))
            else:
                client = self.clients[dest]
                client.arriving[piece.bucket].append((step, piece.index))
                self._feed_client(client, m.WeightsReceived(piece, step))

        def sent() -> None:
            if source == 0:
                self._feed_server(m.WeightsSent(dest, piece))
            else:
                self._feed_client(self.clients[source], m.GradientSent(piece))

        self._pool += [received] if asks else [received, sent]

    def _pauses(self, source: int, action: Action) -> bool:
        """Whether a rank pauses; what would have happened then does so after the pause."""
        if self._still_come.get(source, 1) > 0:
            return False
        self._put_off.setdefault(source, []).append(action)
        return True

    def _say(self, source: int, dest: int, action: Action) -> None:
        """A control message: those between two ranks arrive in order."""
        self._control[source, dest].append(action)
        self._pool.append(lambda: self._control[source, dest].popleft()())

    def _falsified(self, event: Any) -> Any:
        has_step = hasattr(event, "step") and not isinstance(event, m.AskedFor)
        change = self._changed_steps(event) if has_step else 0
        return replace(event, step=event.step + change) if change else event


def play(*args: Any, **kwargs: Any) -> Simulation:
    """A whole run, to its end."""
    world = Simulation(*args, **kwargs)
    world.run()
    return world
