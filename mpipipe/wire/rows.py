"""Rows of a table, such as an embedding: only those that have a gradient, or have changed, travel.

Some *rows* are written as their number n (int64), their indices (n int64) and their elements. On the wire they go in
*parts* that fit into the buffers that are posted for pieces: each is the total number of rows, the number of rows in
this part (int64 both), their indices and their elements. Parts of one piece may come in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mpipipe.wire import plain, reduce

Bytes = NDArray[np.uint8]

INDEX_BYTES = 8
COUNT_BYTES = 8
PART_BYTES = 2 * COUNT_BYTES


def write(indices: NDArray[np.int64], elements: NDArray[np.uint8]) -> Bytes:
    """Rows, from indices of shape (n,) and the elements' bytes, of shape (n, bytes of a row)."""
    count = np.array([len(indices)], dtype=np.int64)
    return np.concatenate([count.view(np.uint8), indices.view(np.uint8), elements.reshape(-1)])


def read(rows: Bytes, row_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Indices of shape (n,), and the elements' bytes of shape (n, row_bytes): views.

    Raises:
        ValueError: the length does not agree with the number of rows.
    """
    if rows.nbytes < COUNT_BYTES:
        raise ValueError(f"{rows.nbytes} bytes are no rows")
    count = int(rows[:COUNT_BYTES].view(np.int64)[0])
    if count < 0 or rows.nbytes != COUNT_BYTES + count * (INDEX_BYTES + row_bytes):
        raise ValueError(f"{rows.nbytes} bytes are not {count} rows of {row_bytes} bytes")
    return _fields(rows[COUNT_BYTES:], count, row_bytes)


def none() -> Bytes:
    """No rows at all."""
    return np.zeros(COUNT_BYTES, np.uint8)


def parts(rows: Bytes, row_bytes: int, part_bytes: int) -> Iterator[list[Bytes]]:
    """The parts to send, each no longer than ``part_bytes`` and as a list of arrays to be put one after the other.

    There is at least one, without rows where there are none.

    Raises:
        ValueError: not even one row fits into a part.
    """
    indices, elements = read(rows, row_bytes)
    most = (part_bytes - PART_BYTES) // (INDEX_BYTES + row_bytes)
    if most < 1:
        raise ValueError(f"a row of {row_bytes} bytes does not fit into {part_bytes} bytes")
    for start in range(0, max(len(indices), 1), most):
        some, of_them = indices[start : start + most], elements[start : start + most]
        head = np.array([len(indices), len(some)], dtype=np.int64)
        yield [head.view(np.uint8), some.view(np.uint8), of_them.reshape(-1)]


class Gathering:
    """The parts of one piece that have come so far.

    Attributes:
        parts: what was added; the buffers are the caller's.
    """

    def __init__(self, row_bytes: int) -> None:
        self.parts: list[Bytes] = []
        self._row_bytes = row_bytes
        self._total: int | None = None
        self._missing = 0

    def add(self, part: Bytes) -> bool:
        """Add a part, in a buffer that may be longer; returns whether all rows are there now.

        Raises:
            ValueError: the part does not belong to the others.
        """
        total, count = (int(n) for n in part[:PART_BYTES].view(np.int64))
        if self._total is None:
            self._total = self._missing = total
        if total != self._total or not 0 <= count <= self._missing:
            raise ValueError(f"a part with {count} rows of {total} where {self._missing} of {self._total} are missing")
        if part.nbytes < PART_BYTES + count * (INDEX_BYTES + self._row_bytes):
            raise ValueError(f"{part.nbytes} bytes as a part with {count} rows")
        self.parts.append(part)
        self._missing -= count
        return not self._missing

    def rows(self) -> Bytes:
        """All rows that have come, in new memory."""
        fields = [
            _fields(part[PART_BYTES:], int(part[COUNT_BYTES:PART_BYTES].view(np.int64)[0]), self._row_bytes)
            for part in self.parts
        ]
        return write(np.concatenate([i for i, _ in fields]), np.concatenate([e for _, e in fields]))


def mean(
    gradients: Sequence[Bytes],
    dtype: str,
    row_bytes: int,
    weights: Sequence[int] | None = None,
    *,
    summed: bool,
) -> Bytes:
    """The mean of gradients that are the sums of rows, in which an index may be there more than once.

    16-bit floats are worked on in float32 and rounded once.

    Args:
        gradients: rows.
        dtype: the name of the elements' dtype.
        row_bytes: bytes of a row.
        weights: how much each gradient counts, as for :func:`mpipipe.wire.reduce.mean`.
        summed: whether to add up, in the order given, what has the same index. No gradient has an index twice then. If
            not, the mean has all rows of all gradients, one gradient after the other, each as it counts: just what one
            gradient over all samples would have, for an optimizer that does not treat the sum as it does the rows.
    """
    weights = reduce.unlike(weights)
    used = [n for n in range(len(gradients)) if weights is None or weights[n]]  # what comes from no samples may be NaN
    read_all = [read(gradients[n], row_bytes) for n in used]
    element = plain.dtype_of(dtype)
    wide = reduce.wide_of(element)
    indices = np.concatenate([i for i, _ in read_all])
    values = [np.ascontiguousarray(e).view(element).astype(wide, copy=False) for _, e in read_all]
    if weights is not None:
        values = [v * np.asarray(weights[n], dtype=wide) for n, v in zip(used, values, strict=True)]
    if summed:
        indices, places = np.unique(indices, return_inverse=True)
        total = np.zeros((len(indices), row_bytes // element.itemsize), wide)
        at = 0
        for own in values:
            total[places[at : at + len(own)]] += own
            at += len(own)
    else:
        total = np.concatenate(values)
    total /= np.asarray(len(gradients) if weights is None else sum(weights), dtype=wide)
    return write(indices, total.astype(element, copy=False).view(np.uint8))


def is_finite(data: Bytes, dtype: str, row_bytes: int) -> bool:
    """Whether all elements of rows are finite."""
    return reduce.is_finite(np.ascontiguousarray(read(data, row_bytes)[1]).reshape(-1), dtype)


def _fields(data: Bytes, count: int, row_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    cut = count * INDEX_BYTES
    indices = data[:cut].view(np.int64)
    return indices, data[cut : cut + count * row_bytes].reshape(count, row_bytes)
