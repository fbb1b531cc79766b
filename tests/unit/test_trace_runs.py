"""Runs that never were: marks made by hand and by a small model of a network, for the tests of the timeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpipipe.trace import Mark, Recorder, write

LAYERS = ("embedding", "conv_1", "conv_2", "conv_3", "attention/query", "attention/value", "dense", "logits")
NBYTES = (4_000_000, 300_000, 600_000, 1_200_000, 1_000_000, 1_000_000, 3_000_000, 200_000)


def export(marks: list[Mark], layers: Any = (), nbytes: Any = ()) -> dict[str, Any]:
    """What a rank that made these marks would export."""
    recorder = Recorder(keep=True)
    recorder._kept = [(m.time, m.kind, m.bucket, m.step, m.peer, m.piece, m.session) for m in marks]
    if layers:
        recorder.describe(0, layers, nbytes)
    return json.loads(json.dumps(recorder.export()))


def simulate(
    steps: int = 6,
    clients: int = 3,
    layers: tuple[str, ...] = LAYERS,
    nbytes: tuple[int, ...] = NBYTES,
    forward: float = 0.1,
    bandwidth: float = 150e6,
    piece: int = 500_000,
    slow: dict[int, float] | None = None,
    loss: bool = True,
) -> dict[int, list[Mark]]:
    """The marks of all ranks of a run in which rank 0 serves, by rank.

    Each client has a link to the server of its own, each way; pieces go one after the other, least bucket first. The
    backward pass takes twice the time of the forward pass, and each layer an equal part of both.

    Args:
        slow: by client, how many times as long it computes.
    """
    count = len(layers)
    marks: dict[int, list[Mark]] = {rank: [] for rank in range(clients + 1)}

    def mark(rank: int, time: float, kind: Any, *rest: int) -> None:
        marks[rank].append(Mark(time, kind, *rest))

    pieces: list[tuple[int, int]] = []
    for bucket, size in enumerate(nbytes):
        pieces += [(bucket, min(piece, size - at)) for at in range(0, size, piece)]
    there = {client: [0.01] * count for client in range(1, clients + 1)}  # when each bucket's weights are in
    free = dict.fromkeys(range(1, clients + 1), 0.01)  # when each client can begin its next step
    for step in range(steps):
        arrived: dict[int, dict[int, float]] = {number: {} for number in range(len(pieces))}
        for client in range(1, clients + 1):
            layer = forward * (slow or {}).get(client, 1.0) / count
            now = free[client]
            mark(client, now, "step", -1, step)
            for bucket in range(count):
                now = max(now, there[client][bucket])
                if step:
                    mark(client, now + 1e-4, "assigned", bucket, step - 1)
                now += layer
            if loss:
                mark(client, now, "loss", -1, step)
            ready = {}
            for bucket in reversed(range(count)):
                now += 2 * layer
                ready[bucket] = now
                mark(client, now, "ready", bucket, step)
                mark(client, now + 5e-5, "queued", bucket, step)
            free[client] = now + 0.004
            todo, link = set(range(len(pieces))), 0.0
            while todo:
                link = max(link, min(ready[pieces[number][0]] for number in todo))
                number = min(number for number in todo if ready[pieces[number][0]] <= link)
                todo.remove(number)
                bucket, size = pieces[number]
                mark(client, link + 1e-4, "started", bucket, step, 0, number)
                link += size / bandwidth
                mark(0, link, "received", bucket, step, client, number)
                mark(client, link + 2e-4, "sent", bucket, step, 0, number)
                arrived[number][client] = link
        updated = {}
        for number, (bucket, size) in enumerate(pieces):
            summed = max(arrived[number].values()) + size / 4e9
            mark(0, summed, "reduced", bucket, step, -1, number)
            updated[number] = summed + size / 1e9
            mark(0, updated[number], "updated", bucket, step, -1, number)
        todo, link = set(updated), 0.0
        while todo:
            link = max(link, min(updated[number] for number in todo))
            number = min(number for number in todo if updated[number] <= link)
            todo.remove(number)
            bucket, size = pieces[number]
            link += size / bandwidth
            for client in there:
                mark(client, link, "received", bucket, step, 0, number)
                mark(0, link + 2e-4, "broadcast", bucket, step, client, number)
                there[client][bucket] = link if bucket != pieces[number - 1][0] else max(link, there[client][bucket])
    return marks


def write_run(folder: Any, marks: dict[int, list[Mark]], layers: Any = LAYERS, nbytes: Any = NBYTES) -> Path:
    """Write a run's timeline, each rank with a clock of its own."""
    exports = {}
    for rank, own in marks.items():
        ahead = 1000.0 * rank
        there = [replace(mark, time=mark.time + ahead) for mark in own]
        exports[rank] = export(there, layers, nbytes), -ahead
    return write(folder, exports)
