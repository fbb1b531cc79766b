"""What a client does: send each gradient when it is ready, take each bucket's new weights when they come."""

from __future__ import annotations

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import (
    AskedFor,
    CaughtUp,
    ClientCommand,
    ClientEvent,
    DeliverWeights,
    GradientReady,
    GradientSent,
    SendGradient,
    WeightsReceived,
)
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import SendWindow


class ClientMachine:
    """The client's rules, as a machine that is fed events. State is changed by :meth:`handle` alone.

    Args:
        plan: the buckets.
        credit_bytes: how much may be under way to the server.
        overlap: without it no gradient of a step is sent before all are ready, as in training without a pipeline.
    """

    def __init__(self, plan: Plan, credit_bytes: int, *, overlap: bool = True) -> None:
        self._plan = plan
        self._overlap = overlap
        self._window = SendWindow(credit_bytes)
        count = len(plan.buckets)
        # The step that each bucket is in: that of its next gradient, or of the weights it waits for.
        self._step = [0] * count
        # Pieces of that step's weights still to come, by number; none before the gradient is ready.
        self._missing: list[set[int]] = [set() for _ in range(count)]
        # Buckets whose next gradient was ready before their weights had come. It cannot depend on those weights.
        self._early: set[int] = set()
        # Buckets whose gradients wait for those of all others, without overlap.
        self._held: list[int] = []

    @property
    def steps(self) -> int:
        """The number of steps done, or caught up with.

        Raises:
            ProtocolError: some buckets are further than others, so that no number would be true.
        """
        if not self.between_steps:
            raise ProtocolError(f"the client is in the middle of a step: steps by bucket {self._step}")
        return self._step[0] if self._step else 0

    def step_of(self, bucket: int) -> int:
        """The step that a bucket is in."""
        return self._step[bucket]

    @property
    def between_steps(self) -> bool:
        """Whether every bucket has received its weights of the same step, and nothing is under way."""
        return len(set(self._step)) <= 1 and not any(self._missing) and self._window.idle

    def awaited(self) -> tuple[int, list[int]]:
        """The step that waits for new weights, and the buckets whose weights are still to come; none while it computes.

        That is as long as some bucket's gradient is still to be handed in.
        """
        step = min(self._step, default=0)
        of_step = [bucket for bucket, its in enumerate(self._step) if its == step]
        return step, of_step if all(self._missing[bucket] for bucket in of_step) else []

    def handle(self, event: ClientEvent) -> list[ClientCommand]:
        """Take one event; returns what to do, in order.

        Raises:
            ProtocolError: the event cannot happen in this state.
        """
        if isinstance(event, GradientReady):
            return self._gradient_ready(event.bucket, event.step)
        if isinstance(event, WeightsReceived):
            return self._weights_received(event.piece, event.step)
        if isinstance(event, GradientSent):
            return self._send(self._window.done(event.piece))
        if isinstance(event, AskedFor):
            return self._asked_for(event.piece, event.step)
        if isinstance(event, CaughtUp):
            return self._caught_up(event.steps)
        raise ProtocolError(f"a client does not know the event {event}")

    def _gradient_ready(self, bucket: int, step: int) -> list[ClientCommand]:
        waits = bool(self._missing[bucket])
        expected = self._step[bucket] + waits
        if step != expected or bucket in self._early:
            raise ProtocolError(f"bucket {bucket} has a gradient of step {step} where one of step {expected} is next")
        if waits:
            self._early.add(bucket)
            return []
        return self._begin(bucket)

    def _begin(self, bucket: int) -> list[ClientCommand]:
        self._missing[bucket] = {piece.index for piece in self._plan.buckets[bucket].pieces}
        self._held.append(bucket)
        if not self._overlap and len(self._held) < len(self._plan.buckets):
            return []
        started = []
        for ready in sorted((self._plan.buckets[held] for held in self._held), key=lambda bucket: bucket.priority):
            started += self._window.push(ready.pieces, ready.priority)
        self._held.clear()
        return self._send(started)

    def _weights_received(self, piece: Piece, step: int) -> list[ClientCommand]:
        bucket = piece.bucket
        if step != self._step[bucket] or not self._missing[bucket]:
            what = "no" if not self._missing[bucket] else f"step {self._step[bucket]}'s"
            raise ProtocolError(f"bucket {bucket} has got weights of step {step} where it waits for {what} weights")
        if piece.index not in self._missing[bucket]:
            raise ProtocolError(f"bucket {bucket} has got its piece {piece.index} of step {step}'s weights twice")
        self._missing[bucket].discard(piece.index)
        if self._missing[bucket]:
            return []
        commands: list[ClientCommand] = [DeliverWeights(bucket, step)]
        self._step[bucket] += 1
        if bucket in self._early:
            self._early.discard(bucket)
            commands += self._begin(bucket)
        return commands

    def _asked_for(self, piece: Piece, step: int) -> list[ClientCommand]:
        if step != self._step[piece.bucket]:
            return []  # it has been answered long ago
        pieces = self._plan.buckets[piece.bucket].pieces
        return self._send(self._window.hurry(other for other in pieces if other.index <= piece.index))

    def _caught_up(self, steps: int) -> list[ClientCommand]:
        if steps < self.steps:
            raise ProtocolError(f"the client has done {self.steps} steps and cannot go back to {steps}")
        self._step = [steps] * len(self._step)
        return []

    def _send(self, pieces: list[Piece]) -> list[ClientCommand]:
        return [SendGradient(piece, self._step[piece.bucket]) for piece in pieces]
