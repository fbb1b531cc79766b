"""One server machine and its clients on a network that delivers in any order that MPI allows, and checks as it goes.

MPI promises the order of messages of one sender under one tag, of the broadcasts of one communicator (here: of one
bucket), and of control messages between two ranks. Everything else is drawn at random: whatever can happen next is in
one pool, from which a seeded generator takes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from mpipipe.protocol import messages as m
from mpipipe.protocol.client import ClientMachine
from mpipipe.protocol.plan import Plan
from mpipipe.protocol.server import ServerMachine

Action = Callable[[], None]


class Credit:
    """The bytes under way at one rank, never above the credit but for a piece that is alone."""

    def __init__(self, credit_bytes: int) -> None:
        self._credit = credit_bytes
        self.under_way: list[m.Piece] = []

    def begin(self, piece: m.Piece) -> None:
        self.under_way.append(piece)
        total = sum(piece.nbytes for piece in self.under_way)
        assert total <= self._credit or len(self.under_way) == 1, f"{total} bytes under way: {self.under_way}"

    def end(self, piece: m.Piece) -> None:
        self.under_way.remove(piece)


class SimulatedClient:
    """A client: its machine, its training loop, and what it must see."""

    def __init__(self, world: Simulation, rank: int, steps: list[int]) -> None:
        self.rank, self.steps = rank, steps
        self.machine = ClientMachine(world.plan, world.credit_bytes)
        self.credit = Credit(world.credit_bytes)
        self.phase = 0
        count = len(world.plan.buckets)
        self.begun = [0] * count  # gradients made in this phase, by bucket
        self.own_done = [0] * count  # own weights delivered in this phase, by bucket
        self.delivered: list[list[int]] = [[] for _ in range(count)]  # the steps of the weights, by bucket
        self.arriving: list[list[int]] = [[] for _ in range(count)]  # the steps of the pieces of the next weights
        self.left = False
        self.target: int | None = None  # after it has left: the steps that the phase has had, once it is told
        self.ended = False


class Simulation:
    """A run.

    Args:
        plan: the buckets.
        steps: for each client (rank 1, 2, ...) its number of steps in each phase.
        credit_bytes: how much may be under way per rank and direction.
        seed: of the order of everything.
        lockstep: whether a client begins a step only when all its weights are in, as a training step that reads all
            of them at once does; else each bucket goes on by itself.
        departing: whether clients, after the last phase, end their scripts instead of leaving the phase.
    """

    def __init__(
        self,
        plan: Plan,
        steps: list[list[int]],
        credit_bytes: int,
        seed: int,
        *,
        lockstep: bool = False,
        departing: bool = False,
    ) -> None:
        self.plan, self.credit_bytes, self.lockstep, self.departing = plan, credit_bytes, lockstep, departing
        self.random = random.Random(seed)
        self.phases = len(steps[0])
        self.clients = {rank: SimulatedClient(self, rank, own) for rank, own in enumerate(steps, start=1)}
        self.server = ServerMachine(plan, self.clients, credit_bytes)
        self.credit = Credit(credit_bytes)
        # The first step of each phase, and who takes part in each step, as it must come out.
        self.starts = [0]
        self.participants: list[tuple[int, ...]] = []
        for phase in range(self.phases):
            longest = max(client.steps[phase] for client in self.clients.values())
            for step in range(longest):
                self.participants.append(tuple(r for r, c in self.clients.items() if c.steps[phase] > step))
            self.starts.append(self.starts[-1] + longest)

        # The network.
        self._pool: list[Action] = []
        self._sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by (client, tag): the step of the data
        self._posted: Counter[tuple[int, int]] = Counter()  # receives, by (client, tag)
        self._broadcast: list[list[tuple[int, int]]] = [[] for _ in plan.buckets]  # (tag, step) in the root's order
        self._receivers: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by (client, bucket): tags in order
        self._taken: Counter[tuple[int, int]] = Counter()  # broadcasts taken, by (client, bucket)
        self._control: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # by (source, dest)
        self._held: Callable[[int, int, int], bool] = lambda *_: False
        self._waiting_actions: list[Action] = []

        # What the server holds and what it has done.
        self._buffers: dict[tuple[int, int], int] = {}  # by (client, tag): the step of the gradient that is in it
        self._versions = [-1] * len(plan.buckets)  # the step of each bucket's newest weights
        self.reduced: Counter[tuple[int, int]] = Counter()
        self.steps_begun: list[int] = []
        self.phases_ended: list[int] = []
        self.told: dict[int, list[int]] = {rank: [] for rank in self.clients}
        self.failures: list[str] = []

        self._carry_out(self.server.start())
        for client in self.clients.values():
            self._train(client)

    # ------------------------------------------------------------------------------------------------- going through

    def hold(self, which: Callable[[int, int, int], bool]) -> None:
        """From now on keep back every gradient (client, bucket, step) for which this is true."""
        self._held = which

    def release(self) -> None:
        """Let everything go that was kept back."""
        self._held = lambda *_: False
        self._pool += self._waiting_actions
        self._waiting_actions = []

    def run(self) -> None:
        """Let happen, in random order, all that can happen; ends also where the server has failed."""
        while self._pool and not self.failures:
            chosen = self.random.randrange(len(self._pool))
            self._pool[chosen], self._pool[-1] = self._pool[-1], self._pool[chosen]
            self._pool.pop()()

    def check_the_end(self) -> None:
        """Nothing is left over, and everything has happened exactly once."""
        total = self.starts[-1]
        buckets = range(len(self.plan.buckets))
        assert all(client.ended for client in self.clients.values()), f"hangs: {self.where()}"
        assert self.steps_begun == (list(range(total)) if buckets else [])
        assert self.phases_ended == self.starts[1:]
        assert self.reduced == Counter({(bucket, step): 1 for bucket in buckets for step in range(total)})
        assert self.server.waiting_for() == {}
        assert not self.credit.under_way
        for rank, client in self.clients.items():
            assert client.machine.between_steps and client.machine.steps == total
            assert client.delivered == [list(range(total)) for _ in buckets]
            assert not client.credit.under_way
            assert self.told[rank] == [s for s, taking_part in enumerate(self.participants) if rank not in taking_part]
        assert not any(self._sent.values()) and not any(self._receivers.values()) and not any(self._control.values())
        assert self._posted == {(rank, piece.index): 1 for rank in self.clients for piece in self.plan.pieces}

    def where(self) -> str:
        """Where everybody stands."""
        clients = {
            rank: (c.phase, c.begun, [c.machine.step_of(b) for b in range(len(self.plan.buckets))], c.left)
            for rank, c in self.clients.items()
        }
        owed = self.server.waiting_for()
        return f"clients (phase, begun, step by bucket, left): {clients}; the server waits for {owed}"

    # ---------------------------------------------------------------------------------------------------- the clients

    def _train(self, client: SimulatedClient) -> None:
        """Make possible whatever the client's training loop can do now."""
        if client.left or client.ended:
            return
        wanted = client.steps[client.phase]
        slowest = min(client.own_done, default=wanted)
        for bucket, begun in enumerate(client.begun):
            ready = slowest if self.lockstep else client.own_done[bucket]
            if begun < wanted and begun == ready:
                client.begun[bucket] += 1
                self._make_ready(client, bucket, self.starts[client.phase] + begun)
        if slowest == wanted and client.machine.between_steps:
            self._leave(client)

    def _make_ready(self, client: SimulatedClient, bucket: int, step: int) -> None:
        def ready() -> None:
            if self._held(client.rank, bucket, step):
                self._waiting_actions.append(ready)
            else:
                self._feed_client(client, m.GradientReady(bucket))

        self._pool.append(ready)

    def _leave(self, client: SimulatedClient) -> None:
        client.left = True
        steps = client.machine.steps
        last = client.phase == self.phases - 1
        kind = m.ClientDeparted if last and self.departing else m.ClientLeft
        if kind is m.ClientDeparted:
            client.ended = True
        self._say(client.rank, 0, lambda: self._feed_server(kind(client.rank, steps)))

    def _follow_to_the_end(self, client: SimulatedClient) -> None:
        """After the phase's answer: go on with the next one once all weights are in."""
        if client.target is None or not client.machine.between_steps or client.machine.steps < client.target:
            return
        assert client.machine.steps == client.target
        client.target = None
        client.phase += 1
        if client.phase == self.phases:
            client.ended = True
            return
        client.left = False
        client.begun = [0] * len(client.begun)
        client.own_done = [0] * len(client.own_done)
        self._train(client)

    def _feed_client(self, client: SimulatedClient, event: m.ClientEvent) -> None:
        for command in client.machine.handle(event):
            if isinstance(command, m.SendGradient):
                self._send(client, command.piece, command.step)
            elif isinstance(command, m.ReceiveWeights):
                self._receivers[client.rank, command.piece.bucket].append(command.piece.index)
                self._match_broadcast(client.rank, command.piece.bucket)
            else:
                assert isinstance(command, m.DeliverWeights)
                self._deliver(client, command)
        self._train(client)
        self._follow_to_the_end(client)

    def _deliver(self, client: SimulatedClient, command: m.DeliverWeights) -> None:
        bucket, step = command.bucket, command.step
        pieces = self.plan.buckets[bucket].pieces
        assert client.arriving[bucket] == [step] * len(pieces), "the weights are of another step"
        client.arriving[bucket] = []
        client.delivered[bucket].append(step)
        assert command.followed == (client.rank not in self.participants[step])
        if not command.followed:
            client.own_done[bucket] += 1

    # ----------------------------------------------------------------------------------------------------- the server

    def _feed_server(self, event: m.ServerEvent) -> None:
        self._carry_out(self.server.handle(event))

    def _carry_out(self, commands: list[m.ServerCommand]) -> None:
        for command in commands:
            if isinstance(command, m.PostReceive):
                self._post_receive(command.client, command.piece)
            elif isinstance(command, m.StepBegan):
                self.steps_begun.append(command.step)
            elif isinstance(command, m.Reduce):
                self._reduce(command)
            elif isinstance(command, m.Broadcast):
                self._start_broadcast(command.piece, command.step)
            elif isinstance(command, m.TellToFollow):
                self._tell_to_follow(command.client, command.step)
            elif isinstance(command, m.PhaseEnded):
                self._end_phase(command.steps)
            else:
                assert isinstance(command, m.Fail)
                self.failures.append(command.message)

    def _post_receive(self, client: int, piece: m.Piece) -> None:
        assert (client, piece.index) not in self._buffers, "a receive is posted into a buffer that is still in use"
        self._posted[client, piece.index] += 1
        assert self._posted[client, piece.index] == 1, "two receives into one buffer"
        self._match_gradient(client, piece)

    def _reduce(self, command: m.Reduce) -> None:
        bucket, step = command.bucket, command.step
        assert command.clients == self.participants[step], f"bucket {bucket} of step {step}: {command.clients}"
        self.reduced[bucket, step] += 1
        assert self.reduced[bucket, step] == 1
        for client in command.clients:
            for piece in self.plan.buckets[bucket].pieces:
                assert self._buffers[client, piece.index] == step, "a gradient of another step is summed"

        def summed() -> None:
            for client in command.clients:
                for piece in self.plan.buckets[bucket].pieces:
                    del self._buffers[client, piece.index]
            self._feed_server(m.Reduced(bucket))
            self._pool.append(updated)

        def updated() -> None:
            assert self._versions[bucket] == step - 1, "updates of a bucket are not in order"
            self._versions[bucket] = step
            self._feed_server(m.Updated(bucket))

        self._pool.append(summed)

    def _tell_to_follow(self, client: int, step: int) -> None:
        self.told[client].append(step)
        self._say(0, client, lambda: self._feed_client(self.clients[client], m.StepToFollow(step)))

    def _end_phase(self, steps: int) -> None:
        self.phases_ended.append(steps)
        phase = len(self.phases_ended) - 1
        assert phase < self.phases and steps == self.starts[phase + 1], "the phase ended after other steps"
        assert not self.credit.under_way, "the phase ended before all weights were sent"
        assert all(self.reduced[bucket.index, step] for bucket in self.plan.buckets for step in range(steps))
        if self.departing and phase == self.phases - 1:
            return
        self._feed_server(m.PhaseOpened())
        for client in self.clients.values():
            self._say(0, client.rank, lambda c=client: self._answer_phase(c, steps))

    def _answer_phase(self, client: SimulatedClient, steps: int) -> None:
        client.target = steps
        self._follow_to_the_end(client)

    # ---------------------------------------------------------------------------------------------------- the network

    def _send(self, client: SimulatedClient, piece: m.Piece, step: int) -> None:
        client.credit.begin(piece)
        self._sent[client.rank, piece.index].append(step)
        self._match_gradient(client.rank, piece)

        def left() -> None:
            client.credit.end(piece)
            self._feed_client(client, m.GradientSent(piece))

        # A small message has left before anybody receives it, a large one after.
        self._pool.append(left)

    def _match_gradient(self, client: int, piece: m.Piece) -> None:
        key = (client, piece.index)
        if not (self._posted[key] and self._sent[key]):
            return
        self._posted[key] -= 1
        if not self._posted[key]:
            del self._posted[key]
        step = self._sent[key].popleft()

        def arrive() -> None:
            self._buffers[key] = step
            self._feed_server(m.GradientReceived(client, piece))

        self._pool.append(arrive)

    def _start_broadcast(self, piece: m.Piece, step: int) -> None:
        self.credit.begin(piece)
        assert self._versions[piece.bucket] == step, "the weights that are sent are of another step"
        self._broadcast[piece.bucket].append((piece.index, step))

        def left() -> None:
            self.credit.end(piece)
            self._feed_server(m.BroadcastDone(piece))

        self._pool.append(left)
        for rank in self.clients:
            self._match_broadcast(rank, piece.bucket)

    def _match_broadcast(self, client: int, bucket: int) -> None:
        key = (client, bucket)
        while self._receivers[key] and self._taken[key] < len(self._broadcast[bucket]):
            tag, step = self._broadcast[bucket][self._taken[key]]
            assert self._receivers[key].popleft() == tag, "ranks start the broadcasts of a bucket in different order"
            self._taken[key] += 1
            self._pool.append(lambda tag=tag, step=step: self._weights_arrive(self.clients[client], tag, step))

    def _weights_arrive(self, client: SimulatedClient, tag: int, step: int) -> None:
        piece = self.plan.pieces[tag]
        client.arriving[piece.bucket].append(step)
        self._feed_client(client, m.WeightsReceived(piece))

    def _say(self, source: int, dest: int, action: Action) -> None:
        """A control message: those between two ranks arrive in order."""
        self._control[source, dest].append(action)
        self._pool.append(lambda: self._control[source, dest].popleft()())


def play(*args: Any, **kwargs: Any) -> Simulation:
    """A whole run, to its end."""
    world = Simulation(*args, **kwargs)
    world.run()
    return world
