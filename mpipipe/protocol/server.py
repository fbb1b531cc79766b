"""What the server does: wait for a piece from every client, average it, update its unit, send that to all.

Synchronous mode: a step has one gradient of each client that takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import (
    ClientDeparted,
    ClientLeft,
    ClientLost,
    Discard,
    Fail,
    GradientReceived,
    HandOver,
    MustRedo,
    PhaseEnded,
    PhaseOpened,
    Redo,
    Reduce,
    Reduced,
    SendWeights,
    ServerCommand,
    ServerEvent,
    StepBegan,
    StepReduced,
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

    Where clients may be lost (``survive``), a client's gradient is in a step whole or not at all. One that is lost in
    the middle of a step may already be in some of its updates: all of them are then done again without it, once the
    others' gradients are in. Pieces of a step are summed only when all of the step before are, so that there is one
    step at most to do again.
    """

    def __init__(self, plan: Plan, clients: Iterable[int], credit_bytes: int, *, survive: bool = False) -> None:
        self._plan = plan
        self._survive = survive
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
        # Clients whose script has ended, and those that have been lost. All of them have left.
        self._departed: set[int] = set()
        self._lost: set[int] = set()
        # Pieces of a cancelled step that are still being summed.
        self._cancelled: set[int] = set()
        # The step whose pieces are being summed, its pieces that are not yet, and whether it has to be done again.
        self._open = 0
        self._unsummed = len(plan.pieces)
        self._must_redo = False
        # Steps announced as begun: every step below this number.
        self._began = 0
        # Whether the end of the phase has been announced.
        self._ended = False

    @property
    def began(self) -> int:
        """How many steps have begun."""
        return self._began

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
            if event.client in self._lost:
                return []
            started = self._windows[event.client].done(event.piece)
            return self._send(event.client, started) + self._share() + self._end_of_phase()
        if isinstance(event, ClientLeft):
            return self._client_left(event.client, event.steps)
        if isinstance(event, ClientDeparted):
            return self._client_departed(event.client, event.steps)
        if isinstance(event, ClientLost):
            return self._client_lost(event.client)
        if isinstance(event, PhaseOpened):
            if not self._ended:
                raise ProtocolError("a phase was opened before the one before had ended")
            gone = self._departed | self._lost
            self._left = {client: step for client, step in self._left.items() if client in gone}
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
        # Where clients may be lost, not before the step before is summed: there is one step at most that may not be.
        if step == self._began and (not self._survive or step == self._open):
            commands += self._begin()
        return commands + self._reduce_if_complete(piece)

    def _begin(self) -> list[ServerCommand]:
        step = self._began
        self._began += 1
        return [StepBegan(step), *self._departed_are_missed(step)]

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
        if self._survive and self._gathering[piece.index] > self._open:
            return []
        self._reducing.add(piece.index)
        return [Reduce(piece, self._gathering[piece.index], tuple(sorted(arrived)))]

    def _reduced(self, piece: Piece) -> list[ServerCommand]:
        if piece.index in self._cancelled:
            self._cancelled.discard(piece.index)
            return self._end_of_phase()
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
        self._unsummed -= 1
        if not self._unsummed:
            commands += self._step_reduced()
        return commands

    def _step_reduced(self) -> list[ServerCommand]:
        """All pieces of the open step are summed: open the next one."""
        step = self._open
        self._open += 1
        self._unsummed = len(self._plan.pieces)
        if not self._survive:
            return []
        commands: list[ServerCommand] = []
        if self._must_redo:
            commands.append(Redo(step, tuple(client for client in self._clients if self._takes_part(client, step))))
        self._must_redo = False
        commands.append(StepReduced(step))
        if any(self._arrived):
            commands += self._begin()
        for piece in self._plan.pieces:
            commands += self._reduce_if_complete(piece)
        return commands

    def _updated(self, unit: int, step: int) -> list[ServerCommand]:
        if self._unreduced[unit] or step != self._updating[unit]:
            raise ProtocolError(f"unit {unit} was updated in step {step}, but is to be in step {self._updating[unit]}")
        pieces = self._plan.units[unit].pieces
        self._unreduced[unit] = len(pieces)
        self._updating[unit] += 1
        priority = self._plan.buckets[pieces[0].bucket].priority
        commands: list[ServerCommand] = []
        for client, window in self._windows.items():
            if self._takes_part(client, step):
                commands += self._send(client, window.push(pieces, priority))
        return commands + self._share() + self._end_of_phase()

    def _share(self) -> list[ServerCommand]:
        """Give more of the outgoing link to clients that have got less of it: TCP alone lets the shares drift apart.

        The others still get one piece at a time, so that a client that takes nothing holds nobody up.
        """
        most = max((window.backlog for window in self._windows.values()), default=0)
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
        commands = self._cancel_if_deserted()
        for piece in self._plan.pieces:
            commands += self._reduce_if_complete(piece)
        return commands + self._end_of_phase()

    def _client_departed(self, client: int, steps: int) -> list[ServerCommand]:
        self._departed.add(client)
        commands = [] if client in self._left else self._client_left(client, steps)
        return commands + self._departed_are_missed(self._began - 1)

    def _client_lost(self, client: int) -> list[ServerCommand]:
        if client not in self._clients:
            raise ProtocolError(f"rank {client}, which is no client, was lost")
        if client in self._lost:
            return []
        self._lost.add(client)
        del self._windows[client]
        commands: list[ServerCommand] = [*self._pacer.remove(client)]
        if client in self._left:
            return commands + self._share() + self._end_of_phase()
        step, pieces = self._open, self._plan.pieces
        # Or are being summed: it is too late to take anything out.
        summed = [piece for piece in pieces if self._gathering[piece.index] > step or piece.index in self._reducing]
        waiting = [p for p in pieces if client in self._arrived[p.index] and p.index not in self._reducing]
        of_step = [piece for piece in waiting if self._gathering[piece.index] == step]
        # Nothing of the open step can have been summed without this client, so what has been has its gradients in it.
        whole = len(of_step) + len(summed) == len(pieces)
        self._left[client] = step + whole
        for piece in waiting:
            if self._gathering[piece.index] >= step + whole:
                self._arrived[piece.index].discard(client)
                commands.append(Discard(client, piece))
        if not whole and summed:
            if not self._must_redo:
                commands.append(MustRedo(step))
            self._must_redo = True
        commands += self._cancel_if_deserted()
        for piece in pieces:
            commands += self._reduce_if_complete(piece)
        return commands + self._share() + self._end_of_phase()

    def _cancel_if_deserted(self) -> list[ServerCommand]:
        """Where nobody is left in a step that has begun: have it as if it had not."""
        step = self._open
        if step >= self._began or any(self._takes_part(client, step) for client in self._clients):
            return []
        commands: list[ServerCommand] = [] if self._must_redo else [MustRedo(step)]
        self._must_redo = False
        self._began = step
        self._gathering = [step] * len(self._plan.pieces)
        self._arrived = [set() for _ in self._plan.pieces]  # what is left there is being summed
        for unit in self._plan.units:
            if self._updating[unit.index] >= step:  # others are still to be updated in the step before
                self._unreduced[unit.index] = len(unit.pieces)
                self._updating[unit.index] = step
        self._unsummed = len(self._plan.pieces)
        self._cancelled |= self._reducing
        self._reducing.clear()
        self._pacer.restart()
        return [*commands, Redo(step, ())]

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
        if self._ended or len(self._left) < len(self._clients) or self._cancelled:
            return []
        if any(step < self._began for step in self._updating) or not all(w.idle for w in self._windows.values()):
            return []
        self._ended = True
        return [PhaseEnded(self._began)]
