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
from mpipipe.protocol.plan import Bucket, Unit, item_bytes
from mpipipe.transport.base import Buffer
from mpipipe.wire import header, rows

# A slot gives a gradient (or weights) and, on a timeline, a mark a step; no rank is ever two steps ahead.
_CAPACITY_PER_SLOT = 4

# What the graph has given: a slot's number, the step, an image (see mpipipe.wire.header).
OnData = Callable[[int, int, Buffer], None]


class Bridge:
    """The queues of one optimizer.

    Args:
        slots: a client's buckets or the server's units, by number.
        variables: by the position that the plan gives them.
        step: the step of what is given next, a ``tf.Variable`` of int64: it goes into every header. It is made before
            any graph is traced, for a ``tf.function`` is traced twice where a variable is made in it.
        samples: the number of samples behind what is given next, such a variable too, which goes there as well; None
            where nobody wants to know it.
        on_data: called when the graph has given a slot's image.
        on_mark: called with a mark's number (see :meth:`mark`) and the step.
    """

    def __init__(
        self,
        slots: Sequence[Bucket | Unit],
        variables: Sequence[Any],
        step: Any,
        samples: Any,
        on_data: OnData,
        on_mark: Callable[[int, int], None] = lambda number, step: None,
    ) -> None:
        self.slots = slots
        self._slot_of = {slot.pieces[0].index: slot.index for slot in slots}
        self._variables = [compat.native(variable) for variable in variables]
        self._step, self._samples = step, samples
        self._on_data, self._on_mark = on_data, on_mark
        with tf.init_scope(), tf.device("CPU"):
            # Whatever is given begins with a header: a slot's image with that of its first piece.
            self._given = tf.queue.FIFOQueue(_CAPACITY_PER_SLOT * len(slots) + 4, [tf.uint8])
            self._handles = [tf.identity(self._given.queue_ref) for _ in slots]
            self._taken = [tf.queue.FIFOQueue(2, [tf.uint8]) for _ in slots]
        self._thread = threading.Thread(target=self._run, name="mpipipe-bridge", daemon=True)
        self._thread.start()

    def variables_of(self, slot: Bucket | Unit) -> list[Any]:
        """The variables of a slot, as ``tf.Variable``."""
        return [self._variables[region.variable] for region in slot.regions]

    def give(self, slot: Bucket | Unit, tensors: Sequence[Any], *, sum_rows: bool = False) -> None:
        """In the graph: hand over one tensor for each of a slot's regions, as soon as all of them are there.

        Of a slot that travels by rows it is ``tf.IndexedSlices``; ``sum_rows`` adds up what has the same index.
        """
        if slot.row_bytes:
            (slices,) = tensors
            fields = _rows(tf.cast(slices.indices, tf.int64), tf.cast(slices.values, slot.dtype), sum_rows)
            _enqueue(self._handles[slot.index], tf.concat([*self._headers(slot), *fields], axis=0))
            return
        contents = [_bytes(tf.cast(tensor, slot.dtype)) for tensor in tensors]
        parts = []
        for head, of_piece in zip(self._headers(slot), _cut(slot, contents), strict=True):
            parts += [head, *of_piece]
        _enqueue(self._handles[slot.index], tf.concat(parts, axis=0))

    def end_step(self, ends: Any = True) -> None:
        """In the graph: what is given from here on belongs to the next step, if it ``ends``."""
        self._step.assign_add(tf.cast(ends, tf.int64), read_value=False)

    @property
    def steps(self) -> int:
        """Steps given so far."""
        return int(self._step)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._step.assign(steps)

    def mark(self, number: Any, after: Sequence[Any]) -> None:
        """In the graph: report a number from 1 on, or a tensor of int64, when these operations are done."""
        with tf.init_scope(), tf.device("CPU"):
            handle = tf.identity(self._given.queue_ref)  # of its own: it may not wait for other marks
        with tf.control_dependencies([operation for operation in after if operation is not None]):
            head = tf.stack([self._step.read_value(), -tf.convert_to_tensor(number, tf.int64)])
            _enqueue(handle, _bytes(head))

    def take(self, slot: Bucket | Unit, shapes: Sequence[Any]) -> list[Any]:
        """In the graph: wait for a slot's next elements; returns a tensor of a given shape for each region.

        Of a slot that travels by rows it is ``tf.IndexedSlices``.
        """
        data = _dequeue(self._taken[slot.index].queue_ref)
        item = item_bytes(slot.dtype)
        if slot.row_bytes:
            return [_slices(data, tf.as_dtype(slot.dtype), item, tf.TensorShape(shapes[0]))]
        if len(shapes) > 1:
            parts = tf.split(data, [region.size * item for region in slot.regions])
        else:
            parts = [data]
        dtype = tf.as_dtype(slot.dtype)
        tensors = []
        for part, shape in zip(parts, shapes, strict=True):
            tensors.append(tf.bitcast(tf.reshape(part, [*shape, item] if item > 1 else shape), dtype))
        return tensors

    def put(self, slot: int, data: Buffer) -> None:
        """From any thread: elements for the graph to take. Nobody may write to them any more.

        They are not made a tensor by ``tf.constant``, which copies once to be safe and again what is not aligned.
        """
        with tf.device("CPU"):
            _enqueue(self._taken[slot].queue_ref, data)

    def close(self) -> None:
        """End the thread."""
        self._given.enqueue(np.zeros(0, np.uint8))
        self._thread.join()

    def _headers(self, slot: Bucket | Unit) -> Any:
        """The headers of a slot's pieces."""
        # See mpipipe.wire.header: the number and the samples share 8 bytes, of which samples are the upper half.
        numbers = np.array([[0, piece.index] for piece in slot.pieces], dtype=np.int64)
        samples = tf.constant(0, tf.int64)
        if self._samples is not None:
            samples = tf.bitwise.left_shift(self._samples.read_value(), tf.constant(32, tf.int64))
        values = tf.constant(numbers) + tf.stack([self._step.read_value(), samples])
        heads = tf.reshape(tf.bitcast(values, tf.uint8), [len(slot.pieces), header.HEADER_BYTES])
        return tf.unstack(heads)

    def _run(self) -> None:
        queue = self._given.queue_ref
        while True:
            data = _dequeue(queue)
            image = np.asarray(memoryview(data))  # a view that keeps the tensor alive
            if not image.size:
                return
            step, number = header.read(image)
            if number < 0:
                self._on_mark(-number, step)
            else:
                self._on_data(self._slot_of[number], step, image)


# A queue's own methods take twice as long, and these are called for every piece at the server.


def _enqueue(handle: Any, data: Any) -> None:
    tf.raw_ops.QueueEnqueueV2(handle=handle, components=[data])


def _dequeue(handle: Any) -> Any:
    return tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.uint8])[0]


def _bytes(tensor: Any) -> Any:
    """The bytes of a tensor, flat."""
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _rows(indices: Any, values: Any, summed: bool) -> list[Any]:
    """What :func:`mpipipe.wire.rows.write` writes."""
    if summed:
        indices, places = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return [_bytes(tf.reshape(tf.size(indices, out_type=tf.int64), [1])), _bytes(indices), _bytes(values)]


def _slices(data: Any, dtype: Any, item: int, shape: Any) -> Any:
    """The inverse: ``tf.IndexedSlices`` of a variable of a given shape."""
    count = tf.bitcast(data[: rows.COUNT_BYTES], tf.int64)
    cut = rows.COUNT_BYTES + rows.INDEX_BYTES * count
    indices = tf.bitcast(tf.reshape(data[rows.COUNT_BYTES : cut], [-1, rows.INDEX_BYTES]), tf.int64)
    elements = tf.reshape(data[cut:], tf.concat([[count], tf.constant([*shape[1:], item], tf.int64)], axis=0))
    values = tf.bitcast(elements, dtype)
    values.set_shape([None, *shape[1:]])
    return tf.IndexedSlices(values, indices, tf.constant(shape.as_list(), tf.int64))


def _cut(slot: Bucket | Unit, contents: Sequence[Any]) -> list[list[Any]]:
    """For each piece of a slot its parts, from the bytes of each region."""
    item, at = item_bytes(slot.dtype), slot.pieces[0].offset
    parts: list[list[Any]] = [[] for _ in slot.pieces]
    for region, content in zip(slot.regions, contents, strict=True):
        end = at + region.size * item
        lengths = [min(p.offset + p.nbytes, end) - max(p.offset, at) for p in slot.pieces]
        within = [number for number, length in enumerate(lengths) if length > 0]
        cuts = [content] if len(within) == 1 else tf.split(content, [lengths[number] for number in within])
        for number, cut in zip(within, cuts, strict=True):
            parts[number].append(cut)
        at = end
    return parts
