"""Ranks as threads of one process, with a deadline, and small models for them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpipipe.protocol.plan import Piece, Plan, VariableSpec, make_plan
from mpipipe.wire import header
from mpipipe.wire.header import HEADER_BYTES


class Ranks:
    """Runs one function per rank in threads, and fails with where each rank stands if they do not end in time.

    A rank's outcome is what its function returned, or the exception that it raised.
    """

    def __init__(self, functions: dict[int, Callable[[], Any]]) -> None:
        self.outcomes: dict[int, Any] = {}
        self._threads = {
            rank: threading.Thread(target=self._run, args=(rank, function), name=f"rank-{rank}", daemon=True)
            for rank, function in functions.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, rank: int, function: Callable[[], Any]) -> None:
        try:
            self.outcomes[rank] = function()
        except BaseException as error:
            self.outcomes[rank] = error

    def join(self, seconds: float, only: set[int] | None = None) -> dict[int, Any]:
        """Outcomes by rank, once those named (all of them without names) have ended."""
        deadline = time.monotonic() + seconds
        for rank, thread in self._threads.items():
            if only is None or rank in only:
                thread.join(max(0.0, deadline - time.monotonic()))
        late = [r for r, thread in self._threads.items() if thread.is_alive() and (only is None or r in only)]
        if late:
            pytest.fail(f"not done after {seconds} s: {self._where(late)}", pytrace=False)
        return dict(self.outcomes)

    def _where(self, late: list[int]) -> str:
        frames = sys._current_frames()
        lines = [f"ranks {late}"]
        for rank, thread in self._threads.items():
            if thread.is_alive() and thread.ident in frames:
                stack = traceback.extract_stack(frames[thread.ident])
                ours = [entry for entry in stack if "threading.py" not in entry.filename][-3:]
                lines.append(f"rank {rank} is in " + " > ".join(f"{e.name}:{e.lineno} `{e.line}`" for e in ours))
            else:
                lines.append(f"rank {rank} ended with {self.outcomes.get(rank)!r}")
        return "\n".join(lines)


def run_ranks(functions: dict[int, Callable[[], Any]], seconds: float = 20.0) -> dict[int, Any]:
    """What each rank's function returns; the first exception of a rank, or of a thread of its own, is raised."""
    errors: list[BaseException | None] = []
    hook, threading.excepthook = threading.excepthook, lambda arguments: errors.append(arguments.exc_value)
    try:
        ranks = Ranks(functions)
        deadline = time.monotonic() + seconds
        while len(ranks.outcomes) < len(functions) and time.monotonic() < deadline:
            failed = [o for o in [*list(ranks.outcomes.values()), *errors] if isinstance(o, BaseException)]
            if failed:  # the others may wait for it for ever
                raise failed[0]
            time.sleep(0.002)
        outcomes = ranks.join(max(0.1, deadline - time.monotonic()))
    finally:
        threading.excepthook = hook
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def dense(name: str, inputs: int, outputs: int, dtype: str = "float32") -> list[VariableSpec]:
    """The variables of a dense layer."""
    return [VariableSpec(f"{name}/kernel", (inputs, outputs), dtype), VariableSpec(f"{name}/bias", (outputs,), dtype)]


def plan_of(sizes: list[int], piece_bytes: int = 1 << 20, dtype: str = "float32", *, divisible: bool = False) -> Plan:
    """A plan with one bucket for each number of elements."""
    variables = [VariableSpec(f"layer_{i}/kernel", (size,), dtype) for i, size in enumerate(sizes)]
    return make_plan(
        variables,
        [True] * len(sizes),
        piece_bytes=piece_bytes,
        fuse_bytes=0,
        max_buckets=1000,
        divisible=divisible,
    )


def image_of(pieces: Sequence[Piece], step: int, data: NDArray[np.uint8], samples: int = 0) -> NDArray[np.uint8]:
    """The image of consecutive pieces whose elements are ``data``: their messages, one after the other."""
    assert data.nbytes == sum(piece.nbytes for piece in pieces)
    messages = []
    for piece in pieces:
        start = piece.offset - pieces[0].offset
        message = np.empty(HEADER_BYTES + piece.nbytes, np.uint8)
        header.write(message, step, piece.index, samples)
        message[HEADER_BYTES:] = data[start : start + piece.nbytes]
        messages.append(message)
    return np.concatenate(messages)


def image_of_rows(piece: Piece, step: int, data: NDArray[np.uint8], samples: int = 0) -> NDArray[np.uint8]:
    """The image of a piece of which rows travel: a header, and the rows, however many there are."""
    image = np.concatenate([np.empty(HEADER_BYTES, np.uint8), data])
    header.write(image, step, piece.index, samples)
    return image
