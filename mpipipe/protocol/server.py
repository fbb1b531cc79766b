"""What the server does: wait for a piece from every client, average it, update its unit, send that to all.

Synchronous mode: a step has one gradient of each client that takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import (
    ClientDeparted,
    ClientLeft,
    Fail,
    GradientReceived,
    HandOver,
    PhaseEnded,
    PhaseOpened,
    Reduce,
    Reduced,
    SendWeights,
    ServerCommand,
    ServerEvent,
    StepBegan,
    Updated,
    WeightsSent,
)
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import Pacer, SendWindow


class ServerMachine:
    """The server's rules, as a machine that is fed events. State is changed by :meth:`handle` alone.

    A client takes part in a step unless it has left before it. A step that one client has begun is completed with all
    that take part in it, piece by piece, whatever the order in which gradients arrive. Each client has a credit of its
    own: one that is slow to take its weights holds up nobody else's. See ``Pacer`` for what keeps them side by side.
    """

    def __init__(self, plan: Plan, clients: Iterable[int], credit_bytes: int) -> None:
        self._plan = plan
        # All clients, in rank order: the order of summation.
        self._clients = tuple(sorted(clients))
        self._windows = {client: SendWindow(credit_bytes) for client in self._clients}
        self._slack_bytes = credit_bytes // 2  # by how much one client may be ahead of another
        self._pacer = Pacer(plan, self._clients, self._slack_bytes)
        # The step for which each piece gathers gradients. It advances when the piece is reduced.
        self._gathering = [0] * len(plan.pieces)
        # The clients whose gradient of that step is in.
        self._arrived: list[set[int]] = [set() for _ in plan.pieces]
        # Pieces whose gradients are being summed.
        self._reducing: set[int] = set()
        # Pieces of each unit still to be reduced before it can be updated, and the step that it is updated in next.
        self._unreduced = [len(unit.pieces) for unit in plan.units]
        self._updating = [0] * len(plan.units)
        # The first step in which a client that has left takes no part.
        self._left: dict[int, int] = {}
        # Clients whose script has ended. All of them have left.
        self._departed: set[int] = set()
        # Steps announced as begun: every step below this number.
        self._began = 0
        # Whether the end of the phase has been announced.
        self._ended = False

    def step_of(self, piece: Piece) -> int:
        """The step for which a piece gathers gradients."""
        return self._gathering[piece.index]

    def waiting_for(self) -> dict[int, list[int]]:
        """For each client, the buckets of steps already begun of which it still owes something."""
        owed: dict[int, set[int]] = {}
        for piece in self._plan.pieces:
            if self._gathering[piece.index] < self._began:
                for client in self._missing(piece):
                    owed.setdefault(client, set()).add(piece.bucket)
        return {client: sorted(buckets) for client, buckets in owed.items()}

    def handle(self, event: ServerEvent) -> list[ServerCommand]:
        """Take one event; returns what to do, in order.

        Raises:
            ProtocolError: the event cannot happen in this state.
        """
        if isinstance(event, GradientReceived):
            return self._gradient_received(event.client, event.piece, event.step)
        if isinstance(event, Reduced):
            return self._reduced(event.piece)
        if isinstance(event, Updated):
            return self._updated(event.unit, event.step)
        if isinstance(event, WeightsSent):
            started = self._windows[event.client].done(event.piece)
            return self._send(event.client, started) + self._share() + self._end_of_phase()
        if isinstance(event, ClientLeft):
            return self._client_left(event.client, event.steps)
        if isinstance(event, ClientDeparted):
            return self._client_departed(event.client, event.steps)
        if isinstance(event, PhaseOpened):
            if not self._ended:
                raise ProtocolError("a phase was opened before the one before had ended")
            self._left = {client: step for client, step in self._left.items() if client in self._departed}
            self._ended = False
            return []
        raise ProtocolError(f"a server does not know the event {event}")

    def _gradient_received(self, client: int, piece: Piece, step: int) -> list[ServerCommand]:
        expected = self._gathering[piece.index]
        what = f"piece {piece.index} of bucket {piece.bucket} of step {step}"
        if client not in self._clients:
            raise ProtocolError(f"rank {client}, which is no client, sent {what}")
        if step != expected or piece.index in self._reducing or client in self._arrived[piece.index]:
            raise ProtocolError(f"rank {client} sent {what} while the server gathers step {expected} of it")
        if step >= self._left.get(client, step + 1):
            raise ProtocolError(f"rank {client} sent {what} after it had left")
        self._arrived[piece.index].add(client)
        commands: list[ServerCommand] = [*self._pacer.received(client, piece, step)]
        if step == self._began:
            self._began += 1
            commands.append(StepBegan(step))
            commands += self._departed_are_missed(step)
        return commands + self._reduce_if_complete(piece)

    def _takes_part(self, client: int, step: int) -> bool:
        return step < self._left.get(client, step + 1)

    def _missing(self, piece: Piece) -> list[int]:
        """The clients that take part in the piece's step and have not sent it."""
        step, arrived = self._gathering[piece.index], self._arrived[piece.index]
        return [client for client in self._clients if client not in arrived and self._takes_part(client, step)]

    def _reduce_if_complete(self, piece: Piece) -> list[ServerCommand]:
        arrived = self._arrived[piece.index]
        if not arrived or piece.index in self._reducing or self._missing(piece):
            return []
        self._reducing.add(piece.index)
        return [Reduce(piece, self._gathering[piece.index], tuple(sorted(arrived)))]

    def _reduced(self, piece: Piece) -> list[ServerCommand]:
        if piece.index not in self._reducing:
            raise ProtocolError(f"piece {piece.index} was reduced without being asked for")
        self._reducing.discard(piece.index)
        commands: list[ServerCommand] = [*self._pacer.reduced(piece, self._arrived[piece.index])]
        self._arrived[piece.index] = set()
        self._gathering[piece.index] += 1
        unit = self._plan.unit_of[piece.index]
        self._unreduced[unit] -= 1
        if not self._unreduced[unit]:
            commands.append(HandOver(unit, self._updating[unit]))
        return commands

    def _updated(self, unit: int, step: int) -> list[ServerCommand]:
        if self._unreduced[unit] or step != self._updating[unit]:
            raise ProtocolError(f"unit {unit} was updated in step {step}, but is to be in step {self._updating[unit]}")
        pieces = self._plan.units[unit].pieces
        self._unreduced[unit] = len(pieces)
        self._updating[unit] += 1
        priority = self._plan.buckets[pieces[0].bucket].priority
        commands: list[ServerCommand] = []
        for client in self._clients:
            if self._takes_part(client, step):
                commands += self._send(client, self._windows[client].push(pieces, priority))
        return commands + self._share() + self._end_of_phase()

    def _share(self) -> list[ServerCommand]:
        """Give more of the outgoing link to clients that have got less of it: TCP alone lets the shares drift apart.

        The others still get one piece at a time, so that a client that takes nothing holds nobody up.
        """
        most = max(window.backlog for window in self._windows.values())
        commands: list[ServerCommand] = []
        for client, window in self._windows.items():
            commands += self._send(client, window.one_by_one(window.backlog < most - self._slack_bytes))
        return commands

    def _send(self, client: int, pieces: Iterable[Piece]) -> list[ServerCommand]:
        return [SendWeights(client, piece, self._updating[self._plan.unit_of[piece.index]] - 1) for piece in pieces]

    def _client_left(self, client: int, steps: int) -> list[ServerCommand]:
        if client not in self._clients:
            raise ProtocolError(f"rank {client}, which is no client, left")
        if client in self._left:
            raise ProtocolError(f"rank {client} left twice")
        for piece in self._plan.pieces:
            step = self._gathering[piece.index]
            if step >= steps and client in self._arrived[piece.index]:
                raise ProtocolError(
                    f"rank {client} left before step {steps} but sent bucket {piece.bucket} of step {step}"
                )
        self._left[client] = steps
        commands: list[ServerCommand] = []
        for piece in self._plan.pieces:
            commands += self._reduce_if_complete(piece)
        return commands + self._end_of_phase()

    def _client_departed(self, client: int, steps: int) -> list[ServerCommand]:
        self._departed.add(client)
        commands = [] if client in self._left else self._client_left(client, steps)
        return commands + self._departed_are_missed(self._began - 1)

    def _departed_are_missed(self, step: int) -> list[ServerCommand]:
        """A step without a client whose script has ended cannot be: nobody told it to wait, it has old weights."""
        gone = sorted(client for client in self._departed if self._left[client] <= step)
        if not gone:
            return []
        ranks = " and ".join(f"rank {client}" for client in gone)
        return [
            Fail(
                f"{ranks} ended after {self._left[gone[0]]} steps without optimizer.finish(), but other clients go on "
                f"with step {step + 1}: give every client the same number of steps, or call "
                "optimizer.finish(model) after the loop on every rank"
            )
        ]

    def _end_of_phase(self) -> list[ServerCommand]:
        """All clients have left, and every step that one of them took part in is updated and has arrived."""
        if self._ended or len(self._left) < len(self._clients):
            return []
        if any(step < self._began for step in self._updating) or not all(w.idle for w in self._windows.values()):
            return []
        self._ended = True
        return [PhaseEnded(self._began)]
