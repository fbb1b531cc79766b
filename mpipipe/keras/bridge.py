"""Queues between the TensorFlow graph and an engine.

A *slot* is a bucket on a client and a unit on the server. One queue a slot carries what the graph takes. What the graph
gives goes into one queue for all slots, read by one thread: each slot enqueues through a handle of its own, because
``tf.function`` orders operations by the handle that they use, and a gradient may not wait for the one that was traced
before it. Queue operations are asynchronous kernels: a graph that waits in one holds neither a thread nor the GIL.
Everything travels as bytes, which is a cast without a copy in both directions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpipipe.keras import compat
from mpipipe.protocol.plan import Bucket, Piece, Unit, item_bytes
from mpipipe.transport.base import Buffer

# A slot gives a gradient (or weights) and, on a timeline, a mark a step; no rank is ever two steps ahead.
_CAPACITY_PER_SLOT = 4

# What the graph has given: a slot's number, the step, an image (see mpipipe.wire.header).
OnData = Callable[[int, int, Buffer], None]


class Bridge:
    """The queues of one optimizer.

    Args:
        slots: a client's buckets or the server's units, by number.
        variables: by the position that the plan gives them.
        on_data: called when the graph has given a slot's image.
        on_mark: called with a mark's number (see :meth:`mark`) and the step.
    """

    def __init__(
        self,
        slots: Sequence[Bucket | Unit],
        variables: Sequence[Any],
        on_data: OnData,
        on_mark: Callable[[int, int], None] = lambda number, step: None,
    ) -> None:
        self.slots = slots
        self._variables = [compat.native(variable) for variable in variables]
        self._on_data, self._on_mark = on_data, on_mark
        with tf.init_scope(), tf.device("CPU"):
            # The step of what is given next; it goes into every header.
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._given = tf.queue.FIFOQueue(_CAPACITY_PER_SLOT * len(slots) + 4, [tf.int32, tf.int64, tf.uint8])
            self._handles = [tf.identity(self._given.queue_ref) for _ in slots]
            self._taken = [tf.queue.FIFOQueue(2, [tf.uint8]) for _ in slots]
        self._thread = threading.Thread(target=self._run, name="mpipipe-bridge", daemon=True)
        self._thread.start()

    def variables_of(self, slot: Bucket | Unit) -> list[Any]:
        """The variables of a slot, as ``tf.Variable``."""
        return [self._variables[region.variable] for region in slot.regions]

    def give(self, slot: Bucket | Unit, tensors: Sequence[Any]) -> None:
        """In the graph: hand over one tensor for each of a slot's regions, as soon as all of them are there."""
        contents = [_bytes(tf.cast(tensor, slot.dtype)) for tensor in tensors]
        step = self._step.read_value()
        parts = []
        for piece in slot.pieces:
            parts.append(_bytes(tf.stack([step, tf.constant(piece.index, tf.int64)])))
            parts += _cut(slot, contents, piece)
        self._enqueue(self._handles[slot.index], slot.index, step, tf.concat(parts, axis=0))

    def end_step(self) -> None:
        """In the graph: what is given from here on belongs to the next step."""
        self._step.assign_add(1)

    @property
    def steps(self) -> int:
        """Steps given so far."""
        return int(self._step)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._step.assign(steps)

    def mark(self, number: int, after: Sequence[Any]) -> None:
        """In the graph: report a number from 1 on when these operations are done."""
        with tf.init_scope(), tf.device("CPU"):
            handle = tf.identity(self._given.queue_ref)  # of its own: it may not wait for other marks
        with tf.control_dependencies([operation for operation in after if operation is not None]):
            self._enqueue(handle, -number, self._step.read_value(), tf.zeros([0], tf.uint8))

    def take(self, slot: Bucket | Unit) -> list[Any]:
        """In the graph: wait for a slot's next elements; returns a flat tensor for each of its regions."""
        data = self._taken[slot.index].dequeue()
        if (item := item_bytes(slot.dtype)) > 1:
            data = tf.reshape(data, [-1, item])
        flat = tf.bitcast(data, tf.as_dtype(slot.dtype))
        flat.set_shape([sum(region.size for region in slot.regions)])
        return [flat] if len(slot.regions) == 1 else list(tf.split(flat, [region.size for region in slot.regions]))

    def put(self, slot: int, data: Buffer) -> None:
        """From any thread: elements for the graph to take. They are copied before this returns."""
        with tf.device("CPU"):
            self._taken[slot].enqueue(tf.constant(data))

    def close(self) -> None:
        """End the thread."""
        self._given.enqueue((np.int32(len(self.slots)), np.int64(0), np.zeros(0, np.uint8)))
        self._thread.join()

    def _enqueue(self, handle: Any, code: int, step: Any, data: Any) -> None:
        tf.raw_ops.QueueEnqueueV2(handle=handle, components=[tf.constant(code, tf.int32), step, data])

    def _run(self) -> None:
        while True:
            code, step, data = self._given.dequeue()
            slot = int(code)
            if slot == len(self.slots):
                return
            if slot < 0:
                self._on_mark(-slot, int(step))
            else:
                # The array is a view that keeps the tensor alive.
                self._on_data(slot, int(step), np.asarray(memoryview(data)))


def _bytes(tensor: Any) -> Any:
    """The bytes of a tensor, flat."""
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _cut(slot: Bucket | Unit, contents: Sequence[Any], piece: Piece) -> list[Any]:
    """The parts of a piece, from the bytes of each region of a slot."""
    item = item_bytes(slot.dtype)
    start, at, parts = piece.offset - slot.pieces[0].offset, 0, []
    for region, content in zip(slot.regions, contents, strict=True):
        nbytes = region.size * item
        a, b = max(start - at, 0), min(start + piece.nbytes - at, nbytes)
        if a < b:
            parts.append(content if b - a == nbytes else content[a:b])
        at += nbytes
    return parts
