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
    """A piece of a client's gradient is in its buffer."""

    client: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Reduced:
    """The clients' gradients of a bucket have been summed; their buffers are free."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The optimizer has updated a bucket; its new weights can be sent."""

    bucket: int


@dataclass(frozen=True, slots=True)
class BroadcastDone:
    """A piece's broadcast has left the server's buffer."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """A client has ended its part of the phase after ``steps`` steps in all; it still follows the others' weights."""

    client: int
    steps: int


@dataclass(frozen=True, slots=True)
class ClientDeparted:
    """A client's script has ended after ``steps`` steps in all: it can neither train nor follow any more."""

    client: int
    steps: int


@dataclass(frozen=True, slots=True)
class PhaseOpened:
    """The clients that had left may take part again."""


# --------------------------------------------------------------------------------------------- commands to the server


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Have a receive ready for a piece of a client's next gradient."""

    client: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class StepBegan:
    """At least one client is in this step, so that it will be completed."""

    step: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of these clients, in this order, average them, hand them to the optimizer."""

    bucket: int
    step: int
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Start the broadcast of a piece of new weights."""

    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class TellToFollow:
    """Let a client that has left know that this step goes on without it, so that it takes part in the broadcasts."""

    client: int
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
    """The training step has computed a bucket's gradient."""

    bucket: int


@dataclass(frozen=True, slots=True)
class GradientSent:
    """A piece of a gradient has left the client's buffer."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class WeightsReceived:
    """A piece of a bucket's new weights has arrived."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class StepToFollow:
    """The server goes through this step without this client."""

    step: int


# --------------------------------------------------------------------------------------------- commands to the client


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Start sending a piece."""

    piece: Piece
    step: int


@dataclass(frozen=True, slots=True)
class ReceiveWeights:
    """Take part in the broadcast of a piece."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class DeliverWeights:
    """A bucket's new weights are complete; ``followed`` where this client's training step does not wait for them."""

    bucket: int
    step: int
    followed: bool


ServerEvent: TypeAlias = (
    GradientReceived | Reduced | Updated | BroadcastDone | ClientLeft | ClientDeparted | PhaseOpened
)
ServerCommand: TypeAlias = PostReceive | StepBegan | Reduce | Broadcast | TellToFollow | PhaseEnded | Fail
ClientEvent: TypeAlias = GradientReady | GradientSent | WeightsReceived | StepToFollow
ClientCommand: TypeAlias = SendGradient | ReceiveWeights | DeliverWeights
