"""Events that the machines take and commands that they give.

A machine has one method, ``handle(event) -> list[command]``. Whoever drives it (see :mod:`mpipipe.engine`) turns what
happens on the wire and in the training step into events, and carries out the commands, in order. Steps are counted
from 0, over the whole life of an optimizer; a *phase* is a run of steps (an epoch, or a custom loop) at whose end all
clients meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mpipipe.protocol.plan import Piece

# ---------------------------------------------------------------------------------------------- events at the server


@dataclass(frozen=True, slots=True)
class GradientReceived:
    """A piece of a client's gradient is in; ``step`` is what the client wrote on it."""

    client: int
    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """The clients' gradients of a piece have been summed; their buffers are free."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class Updated:
    """The optimizer has updated a unit; its new weights can be sent. ``step`` is what the optimizer wrote on them."""

    unit: int
    step: int


@dataclass(frozen=True, slots=True)
class WeightsSent:
    """A piece of new weights has arrived at a client."""

    client: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """A client has ended its part of the phase after ``steps`` steps in all."""

    client: int
    steps: int


@dataclass(frozen=True, slots=True)
class ClientDeparted:
    """A client's script has ended after ``steps`` steps in all: it does not train any more."""

    client: int
    steps: int


@dataclass(frozen=True, slots=True)
class ClientLost:
    """A client's process has died, or is given up: nothing more comes from it and nothing reaches it."""

    client: int


@dataclass(frozen=True, slots=True)
class PhaseOpened:
    """The clients that had left may take part again, from the step on that the others have come to."""


# --------------------------------------------------------------------------------------------- commands to the server


@dataclass(frozen=True, slots=True)
class StepBegan:
    """At least one client is in this step, so that it will be completed."""

    step: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum a piece of the gradients of these clients, in this order, and average it."""

    piece: Piece
    step: int
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """All of a unit's gradient is averaged: let the optimizer update it."""

    unit: int
    step: int


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Start sending a piece of new weights to a client."""

    client: int
    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class AskFor:
    """Tell a client to send its pieces of a bucket next, up to this one: others' are in and wait for them."""

    client: int
    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A client is too far ahead of others: take nothing more from it for now."""

    client: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Take messages of a paused client again."""

    client: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget a piece of a lost client's gradient: it is not counted."""

    client: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class MustRedo:
    """A client that was lost in the middle of this step is in some of its updates: it will be done again."""

    step: int


@dataclass(frozen=True, slots=True)
class Redo:
    """Do all of a step's updates again, from what was before it, with the gradients of these clients alone.

    Where there are none, the step is not to be: what was before it stays.
    """

    step: int
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReduced:
    """Every piece of a step has been summed: its gradients are not needed any more."""

    step: int


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """All clients have left and all their steps are done."""

    steps: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on: end it everywhere with this message."""

    message: str


# ---------------------------------------------------------------------------------------------- events at the client


@dataclass(frozen=True, slots=True)
class GradientReady:
    """The training step has computed a bucket's gradient; ``step`` is what it wrote on it."""

    bucket: int
    step: int


@dataclass(frozen=True, slots=True)
class GradientSent:
    """A piece of a gradient has arrived at the server."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class WeightsReceived:
    """A piece of a bucket's new weights is in; ``step`` is what the server wrote on it."""

    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class AskedFor:
    """The server waits for this piece of the bucket, and for those before it, while others may wait."""

    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """This client has the weights of so many steps, some of which the others did without it."""

    steps: int


# --------------------------------------------------------------------------------------------- commands to the client


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Start sending a piece."""

    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class DeliverWeights:
    """A bucket's new weights are complete: the training step may have them."""

    bucket: int
    step: int


ServerEvent: TypeAlias = (
    GradientReceived | Reduced | Updated | WeightsSent | ClientLeft | ClientDeparted | ClientLost | PhaseOpened
)
ServerCommand: TypeAlias = (
    StepBegan | Reduce | HandOver | SendWeights | AskFor | Pause | Resume | Discard | MustRedo | Redo | StepReduced
    | PhaseEnded | Fail
)  # fmt: skip
ClientEvent: TypeAlias = GradientReady | GradientSent | WeightsReceived | AskedFor | CaughtUp
ClientCommand: TypeAlias = SendGradient | DeliverWeights
