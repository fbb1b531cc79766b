"""What the server does: wait for a bucket from every client, update that bucket, send it to all. Synchronous mode."""

from __future__ import annotations

from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import (
    Broadcast,
    BroadcastDone,
    ClientDeparted,
    ClientLeft,
    Fail,
    GradientReceived,
    PhaseEnded,
    PhaseOpened,
    PostReceive,
    Reduce,
    Reduced,
    ServerCommand,
    ServerEvent,
    StepBegan,
    TellToFollow,
    Updated,
)
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import SendWindow


class ServerMachine:
    """The server's rules, as a machine that is fed events. State is changed by :meth:`handle` alone.

    A client takes part in a step unless it has left before it. A step that one client has begun is completed with all
    that take part in it, bucket by bucket, whatever the order in which gradients arrive.
    """

    def __init__(self, plan: Plan, clients: Iterable[int], credit_bytes: int) -> None:
        self._plan = plan
        # All clients, in rank order: the order of summation.
        self._clients = tuple(sorted(clients))
        self._window = SendWindow(plan, credit_bytes)
        count = len(plan.buckets)
        # The step for which each bucket gathers gradients. It advances when the bucket is reduced.
        self._gathering = [0] * count
        # The step whose update each bucket awaits; never ahead of gathering, at most one behind.
        self._updating = [0] * count
        # Pieces of the gathered step that are in, by client.
        self._arrived: list[dict[int, int]] = [{} for _ in range(count)]
        # Buckets whose gradients are being summed: their buffers are in use, no receive is posted.
        self._reducing: set[int] = set()
        # The first step in which a client that has left takes no part.
        self._left: dict[int, int] = {}
        # Clients whose script has ended. All of them have left.
        self._departed: set[int] = set()
        # Steps announced as begun: every step below this number.
        self._began = 0
        # Steps for which those that have left have been told to follow: every step below this number.
        self._announced = 0
        # Pieces being broadcast or waiting for credit.
        self._broadcasting = 0
        # Whether the end of the phase has been announced.
        self._ended = False

    def start(self) -> list[ServerCommand]:
        """The receives to be ready before any client begins."""
        return [PostReceive(client, piece) for piece in self._plan.pieces for client in self._clients]

    def step_of(self, bucket: int) -> int:
        """The step for which a bucket gathers gradients."""
        return self._gathering[bucket]

    def waiting_for(self) -> dict[int, list[int]]:
        """For each client, the buckets of steps already begun that it still owes."""
        owed: dict[int, list[int]] = {}
        for bucket, step in enumerate(self._gathering):
            if step < self._began:
                for client in self._missing(bucket):
                    owed.setdefault(client, []).append(bucket)
        return owed

    def handle(self, event: ServerEvent) -> list[ServerCommand]:
        """Take one event; returns what to do, in order.

        Raises:
            ProtocolError: the event cannot happen in this state.
        """
        if isinstance(event, GradientReceived):
            return self._gradient_received(event.client, event.piece)
        if isinstance(event, Reduced):
            return self._reduced(event.bucket)
        if isinstance(event, Updated):
            return self._updated(event.bucket)
        if isinstance(event, BroadcastDone):
            started = self._window.done(event.piece)
            self._broadcasting -= 1
            return self._send(started) + self._end_of_phase()
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

    def _gradient_received(self, client: int, piece: Piece) -> list[ServerCommand]:
        bucket = piece.bucket
        step = self._gathering[bucket]
        if client not in self._clients:
            raise ProtocolError(f"rank {client}, which is no client, sent bucket {bucket}")
        if bucket in self._reducing:
            raise ProtocolError(f"rank {client} sent bucket {bucket} while no receive was posted for it")
        if step >= self._left.get(client, step + 1):
            raise ProtocolError(f"rank {client} sent bucket {bucket} of step {step} after it had left")
        arrived = self._arrived[bucket]
        arrived[client] = arrived.get(client, 0) + 1
        if arrived[client] > len(self._plan.buckets[bucket].pieces):
            raise ProtocolError(f"rank {client} sent bucket {bucket} of step {step} twice")
        commands: list[ServerCommand] = []
        if step == self._began:
            self._began += 1
            commands.append(StepBegan(step))
            commands += self._departed_are_missed(step)
        return commands + self._reduce_if_complete(bucket)

    def _missing(self, bucket: int) -> list[int]:
        """The clients that take part in the bucket's step and have not sent all of it."""
        whole, step = len(self._plan.buckets[bucket].pieces), self._gathering[bucket]
        return [
            client
            for client in self._clients
            if step < self._left.get(client, step + 1) and self._arrived[bucket].get(client, 0) < whole
        ]

    def _reduce_if_complete(self, bucket: int) -> list[ServerCommand]:
        arrived = self._arrived[bucket]
        if not arrived or bucket in self._reducing or self._missing(bucket):
            return []
        step = self._gathering[bucket]
        commands: list[ServerCommand] = []
        if step == self._announced:
            # Whoever is not in by now has left: a client that takes part has sent this bucket.
            self._announced += 1
            commands += [TellToFollow(client, step) for client in self._clients if client not in arrived]
        self._reducing.add(bucket)
        clients = tuple(client for client in self._clients if client in arrived)
        return [*commands, Reduce(bucket, step, clients)]

    def _reduced(self, bucket: int) -> list[ServerCommand]:
        if bucket not in self._reducing:
            raise ProtocolError(f"bucket {bucket} was reduced without being asked for")
        self._reducing.discard(bucket)
        senders = self._arrived[bucket]
        self._arrived[bucket] = {}
        self._gathering[bucket] += 1
        # Receives of those that sent nothing are still posted.
        pieces = self._plan.buckets[bucket].pieces
        return [PostReceive(client, piece) for client in self._clients if client in senders for piece in pieces]

    def _updated(self, bucket: int) -> list[ServerCommand]:
        if self._updating[bucket] >= self._gathering[bucket]:
            raise ProtocolError(f"bucket {bucket} was updated twice in step {self._updating[bucket]}")
        self._broadcasting += len(self._plan.buckets[bucket].pieces)
        self._updating[bucket] += 1
        return self._send(self._window.push(bucket))

    def _send(self, pieces: Iterable[Piece]) -> list[ServerCommand]:
        return [Broadcast(piece, self._updating[piece.bucket] - 1) for piece in pieces]

    def _client_left(self, client: int, steps: int) -> list[ServerCommand]:
        if client not in self._clients:
            raise ProtocolError(f"rank {client}, which is no client, left")
        if client in self._left:
            raise ProtocolError(f"rank {client} left twice")
        for bucket, step in enumerate(self._gathering):
            if step >= steps and self._arrived[bucket].get(client):
                raise ProtocolError(f"rank {client} left before step {steps} but sent bucket {bucket} of step {step}")
        self._left[client] = steps
        commands: list[ServerCommand] = []
        for bucket in range(len(self._plan.buckets)):
            commands += self._reduce_if_complete(bucket)
        return commands + self._end_of_phase()

    def _client_departed(self, client: int, steps: int) -> list[ServerCommand]:
        self._departed.add(client)
        commands = [] if client in self._left else self._client_left(client, steps)
        return commands + self._departed_are_missed(self._began - 1)

    def _departed_are_missed(self, step: int) -> list[ServerCommand]:
        """A step without a client whose script has ended cannot be: nobody told it to wait, it cannot follow."""
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
        """All clients have left, and every step that one of them took part in is updated and sent."""
        if self._ended or len(self._left) < len(self._clients) or self._broadcasting:
            return []
        if any(step < self._began for step in self._updating):
            return []
        self._ended = True
        return [PhaseEnded(self._began)]
