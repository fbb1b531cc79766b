"""Queues between the TensorFlow graph and an engine.

One queue a bucket carries what the graph takes. What the graph gives goes into one queue for all buckets, read by one
thread: each bucket enqueues through a handle of its own, because ``tf.function`` orders operations by the handle that
they use, and a gradient may not wait for the one that was traced before it. Queue operations are asynchronous kernels:
a graph that waits in one holds neither a thread nor the GIL. Everything travels as bytes, which is a cast without a
copy in both directions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpipipe.keras import compat
from mpipipe.protocol.plan import Bucket, Plan, item_bytes
from mpipipe.transport.base import Buffer

# A bucket gives a gradient (or weights) and, on a timeline, a mark a step; no rank is ever two steps ahead.
_CAPACITY_PER_BUCKET = 4


class Bridge:
    """The queues of one optimizer.

    Args:
        plan: the buckets.
        variables: by the position that the plan gives them.
        on_data: called with a bucket and its bytes when the graph has given them.
        on_mark: called with a bucket for which :meth:`mark` was run.
    """

    def __init__(
        self,
        plan: Plan,
        variables: Sequence[Any],
        on_data: Callable[[int, Buffer], None],
        on_mark: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self._variables = [compat.native(variable) for variable in variables]
        self._on_data, self._on_mark = on_data, on_mark
        count = len(plan.buckets)
        with tf.init_scope(), tf.device("CPU"):
            self._given = tf.queue.FIFOQueue(_CAPACITY_PER_BUCKET * count + 1, [tf.int32, tf.uint8])
            # Two handles a bucket, for data and for marks: neither may wait for the other.
            self._handles = [tf.identity(self._given.queue_ref) for _ in range(2 * count)]
            self._taken = [tf.queue.FIFOQueue(2, [tf.uint8]) for _ in range(count)]
        self._thread = threading.Thread(target=self._run, name="mpipipe-bridge", daemon=True)
        self._thread.start()

    def variables_of(self, bucket: Bucket) -> list[Any]:
        """The variables of a bucket, as ``tf.Variable``."""
        return [self._variables[position] for position in bucket.variables]

    def give(self, bucket: Bucket, tensors: Sequence[Any]) -> None:
        """In the graph: hand over one tensor for each of a bucket's variables, as soon as all of them are there."""
        flat = [tf.reshape(tf.cast(tensor, bucket.dtype), [-1]) for tensor in tensors]
        whole = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        self._enqueue(bucket.index, bucket.index, tf.reshape(tf.bitcast(whole, tf.uint8), [-1]))

    def mark(self, bucket: Bucket, after: Sequence[Any]) -> None:
        """In the graph: report that these operations are done."""
        count = len(self.plan.buckets)
        with tf.control_dependencies([operation for operation in after if operation is not None]):
            self._enqueue(count + bucket.index, -1 - bucket.index, tf.zeros([0], tf.uint8))

    def take(self, bucket: Bucket) -> list[Any]:
        """In the graph: wait for a bucket's next bytes; returns a tensor for each of its variables."""
        data = self._taken[bucket.index].dequeue()
        if (item := item_bytes(bucket.dtype)) > 1:
            data = tf.reshape(data, [-1, item])
        flat = tf.bitcast(data, tf.as_dtype(bucket.dtype))
        variables = self.variables_of(bucket)
        parts = tf.split(flat, [variable.shape.num_elements() for variable in variables])
        return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]

    def put(self, bucket: int, data: Buffer) -> None:
        """From any thread: bytes for the graph to take. They are copied before this returns."""
        with tf.device("CPU"):
            self._taken[bucket].enqueue(tf.constant(data))

    def assign(self, bucket: int, data: Buffer) -> None:
        """Outside the graph: set a bucket's variables from bytes."""
        self.put(bucket, data)
        taken = self.plan.buckets[bucket]
        for variable, value in zip(self.variables_of(taken), self.take(taken), strict=True):
            variable.assign(value)

    def close(self) -> None:
        """End the thread."""
        self._given.enqueue((np.int32(len(self.plan.buckets)), np.zeros(0, np.uint8)))
        self._thread.join()

    def _enqueue(self, handle: int, code: int, data: Any) -> None:
        tf.raw_ops.QueueEnqueueV2(handle=self._handles[handle], components=[tf.constant(code, tf.int32), data])

    def _run(self) -> None:
        while True:
            code, data = self._given.dequeue()
            bucket = int(code)
            if bucket == len(self.plan.buckets):
                return
            if bucket < 0:
                self._on_mark(-1 - bucket)
            else:
                # The array is a view that keeps the tensor alive.
                self._on_data(bucket, np.asarray(memoryview(data)))
