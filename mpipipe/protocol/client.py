"""What a client does: send each gradient when it is ready, take each bucket's new weights when they come."""

from __future__ import annotations

from collections.abc import Iterable

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import (
    ClientCommand,
    ClientEvent,
    DeliverWeights,
    GradientReady,
    GradientSent,
    ReceiveWeights,
    SendGradient,
    StepToFollow,
    WeightsReceived,
)
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import SendWindow


class ClientMachine:
    """The client's rules, as a machine that is fed events. State is changed by :meth:`handle` alone."""

    def __init__(self, plan: Plan, credit_bytes: int) -> None:
        self._plan = plan
        self._window = SendWindow(plan, credit_bytes)
        count = len(plan.buckets)
        # The step whose weights each bucket receives next. Every bucket's weights arrive once a step, in step order.
        self._step = [0] * count
        # Pieces of that step's weights still to come; 0 where the receive has not been posted.
        self._missing = [0] * count
        # Whether that step is the client's own (its training step waits for the weights) or one that it follows.
        self._followed = [False] * count
        # Steps to follow that have been announced but not yet begun, because the one before is still arriving.
        self._to_follow = [0] * count

    @property
    def steps(self) -> int:
        """The number of steps done, own and followed.

        Raises:
            ProtocolError: some buckets are further than others, so that no number would be true.
        """
        if not self.between_steps:
            raise ProtocolError(f"the client is in the middle of a step: steps by bucket {self._step}")
        return self._step[0] if self._step else 0

    def step_of(self, bucket: int) -> int:
        """The step whose weights a bucket receives next."""
        return self._step[bucket]

    @property
    def between_steps(self) -> bool:
        """Whether every bucket has received its weights of the same step, and nothing is under way."""
        return len(set(self._step)) <= 1 and not any(self._missing) and not any(self._to_follow) and self._window.idle

    def handle(self, event: ClientEvent) -> list[ClientCommand]:
        """Take one event; returns what to do, in order.

        Raises:
            ProtocolError: the event cannot happen in this state.
        """
        if isinstance(event, GradientReady):
            return self._gradient_ready(event.bucket)
        if isinstance(event, WeightsReceived):
            return self._weights_received(event.piece.bucket)
        if isinstance(event, GradientSent):
            return self._send(self._window.done(event.piece))
        if isinstance(event, StepToFollow):
            return self._step_to_follow(event.step)
        raise ProtocolError(f"a client does not know the event {event}")

    def _gradient_ready(self, bucket: int) -> list[ClientCommand]:
        if self._missing[bucket]:
            raise ProtocolError(f"bucket {bucket} has a new gradient before its weights of step {self._step[bucket]}")
        # The receive is posted first: it can only be late for the server's broadcast if the gradient is late too.
        return self._receive(bucket, followed=False) + self._send(self._window.push(bucket))

    def _step_to_follow(self, step: int) -> list[ClientCommand]:
        commands: list[ClientCommand] = []
        for bucket, current in enumerate(self._step):
            if step != current + (self._missing[bucket] > 0) + self._to_follow[bucket]:
                raise ProtocolError(f"told to follow step {step} when bucket {bucket} is at step {current}")
            if self._missing[bucket]:
                self._to_follow[bucket] += 1
            else:
                commands += self._receive(bucket, followed=True)
        return commands

    def _weights_received(self, bucket: int) -> list[ClientCommand]:
        if not self._missing[bucket]:
            raise ProtocolError(f"bucket {bucket} has received more weights than its step {self._step[bucket]} has")
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return []
        commands: list[ClientCommand] = [DeliverWeights(bucket, self._step[bucket], self._followed[bucket])]
        self._step[bucket] += 1
        if self._to_follow[bucket]:
            self._to_follow[bucket] -= 1
            commands += self._receive(bucket, followed=True)
        return commands

    def _receive(self, bucket: int, *, followed: bool) -> list[ClientCommand]:
        pieces = self._plan.buckets[bucket].pieces
        self._missing[bucket] = len(pieces)
        self._followed[bucket] = followed
        return [ReceiveWeights(piece) for piece in pieces]

    def _send(self, pieces: Iterable[Piece]) -> list[ClientCommand]:
        return [SendGradient(piece, self._step[piece.bucket]) for piece in pieces]
