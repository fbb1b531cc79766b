"""When each bucket was ready, sent, received, reduced, updated, broadcast and assigned."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "ready",  # client: the gradient has been computed
    "sent",  # client: the gradient has left its buffer
    "received",  # server: a client's gradient is in; client: new weights are in
    "reduced",  # server: the gradients of all clients are summed
    "updated",  # server: the optimizer has updated the bucket
    "broadcast",  # server: the new weights have left their buffer
    "assigned",  # client: the variables hold the new weights
]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something happened to a bucket: seconds on this rank's monotonic clock, and the other rank, or -1 for none."""

    time: float
    kind: Kind
    bucket: int
    step: int
    peer: int


class Recorder:
    """Collects marks where somebody wants them, and costs one attribute look-up where nobody does."""

    def __init__(self, keep: bool) -> None:
        self.marks: list[Mark] = []
        self._keep = keep
        self._listeners: list[Callable[[Mark], None]] = []

    @property
    def active(self) -> bool:
        """Whether marks are wanted."""
        return self._keep or bool(self._listeners)

    def listen(self, listener: Callable[[Mark], None]) -> None:
        """Call ``listener(mark)`` for every mark from now on, on the thread on which it happens; be quick there."""
        self._listeners.append(listener)

    def mark(self, kind: Kind, bucket: int, step: int, peer: int = -1) -> None:
        """Note that something happened to a bucket, now."""
        if not self.active:
            return
        mark = Mark(time.monotonic(), kind, bucket, step, peer)
        if self._keep:
            self.marks.append(mark)
        for listener in self._listeners:
            listener(mark)

    def write(self, folder: str, rank: int) -> Path:
        """Write the marks of a rank as JSON lines; returns the file."""
        path = Path(folder) / f"rank-{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"rank": rank, **asdict(mark)}) + "\n" for mark in self.marks))
        return path
