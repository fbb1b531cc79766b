"""The fastest step that a synchronous pipeline can have: the limit that measurements are held against.

A fluid model. Every client computes alike: layer l's forward pass takes ``forward[l]`` seconds and needs its new
weights, its backward pass takes ``backward[l]`` and releases its gradient. The busiest link needs ``wire[l]`` seconds
for layer l. It serves one layer at a time, can be taken from one and given to a more urgent one at any moment, at no
cost and with no latency, and a layer's weights are back when its share of the link is done (pieces flow through reduce,
update and broadcast). The most urgent layer is the one that the next forward pass needs first.

The larger of the computing time and of the wire's is below this limit and can in general not be reached: the first
layer's gradient comes last, and its weights are needed first.
"""

from __future__ import annotations

from collections.abc import Sequence


def wire_seconds(sizes: Sequence[float], rate: float, clients: int, who: str = "server") -> list[float]:
    """Seconds that the busiest link, in its busier direction, needs for each layer.

    Args:
        sizes: bytes of each layer.
        rate: bytes per second, a link and direction.
        clients: how many ranks train.
        who: "server", one rank that does not train and gets every client's gradients; or "all", an all-reduce of the
            ranks that train (a ring, or servers that all train, move the same).
    """
    factor = clients if who == "server" else 2 * (clients - 1) / clients
    return [factor * size / rate for size in sizes]


def fluid_step(
    forward: Sequence[float],
    backward: Sequence[float],
    wire: Sequence[float],
    *,
    urgent_first: bool = True,
    next_forward: bool = True,
    steps: int = 12,
) -> float:
    """Seconds per step of the fluid model, in the steady state.

    Args:
        forward: seconds of each layer's forward pass, first layer first.
        backward: seconds of each layer's backward pass, first layer first.
        wire: seconds of the busiest link for each layer.
        urgent_first: whether the link serves what is needed first, or what was made first.
        next_forward: whether a forward pass can begin with what is there, or waits for all weights. With both False
            this is plain overlap with the backward pass, as Horovod and DDP have it.
        steps: steps to play; the second half of them counts.
    """
    layers = range(len(forward))
    work = [("forward", layer) for layer in layers] + [("backward", layer) for layer in reversed(layers)]
    owed = [0.0] * len(forward)  # seconds of link time still owed to each layer
    fresh = [True] * len(forward)  # whether the layer's new weights are at the clients
    now, at, until, ends = 0.0, 0, -1.0, [0.0]  # until: when the computing under way ends, or negative
    while len(ends) <= steps:
        kind, layer = work[at]
        if until < 0 and (kind == "backward" or (fresh[layer] and (next_forward or all(fresh)))):
            until = now + (forward if kind == "forward" else backward)[layer]
        waiting = [other for other in layers if owed[other] > 0]
        served = -1 if not waiting else min(waiting) if urgent_first else max(waiting)
        then = min(([until] if until >= 0 else []) + ([now + owed[served]] if waiting else []))
        if waiting:
            owed[served] -= then - now
            if owed[served] < 1e-12:
                owed[served], fresh[served] = 0.0, True
        now = then
        if 0 <= until <= now:
            until, at = -1.0, at + 1
            if kind == "backward":
                owed[layer], fresh[layer] = wire[layer], wire[layer] == 0
            if at == len(work):
                at = 0
                ends.append(now)
    half = steps // 2
    return (ends[-1] - ends[half]) / (steps - half)


def straight_line(forward: Sequence[float], backward: Sequence[float], wire: Sequence[float]) -> float:
    """Seconds per step without any overlap: compute, send all, wait for all."""
    return sum(forward) + sum(backward) + sum(wire)
