"""Gradient accumulation at a client: the gradients of several training steps go onto the wire as one, their sum.

The arithmetic is that of Keras's ``gradient_accumulation_steps``: a sum in the gradients' own dtype, in the order of
the steps. It is divided by their number where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.protocol.plan import Bucket
from mpipipe.wire import header, plain
from mpipipe.wire.header import HEADER_BYTES


class Accumulator:
    """Sums images of gradients (see :func:`header.message_of`), each bucket's for itself.

    Args:
        buckets: the plan's.
        steps: how many gradients of a bucket make one.
        done: how many of the first such sum belong to steps that were done before, and are not in it.
    """

    def __init__(self, buckets: Sequence[Bucket], steps: int, done: int = 0) -> None:
        self._buckets = buckets
        self._steps = steps
        self._count = [done % steps] * len(buckets)
        self._sums: dict[int, NDArray[np.uint8]] = {}

    def add(self, bucket: int, image: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Add a bucket's next gradient; returns the image of the sum when it is the last one, else None.

        ``image`` is left as it is; the header of what is returned is that of the last gradient.
        """
        self._count[bucket] += 1
        last = self._count[bucket] == self._steps
        total = self._sums.pop(bucket, None)
        if total is None:
            total = image.copy()
        else:
            for ours, theirs in zip(self._elements(bucket, total), self._elements(bucket, image), strict=True):
                ours += theirs
        if not last:
            self._sums[bucket] = total
            return None
        self._count[bucket] = 0
        for piece in self._buckets[bucket].pieces:
            head = header.message_of(image, self._buckets[bucket].pieces, piece)[:HEADER_BYTES]
            header.message_of(total, self._buckets[bucket].pieces, piece)[:HEADER_BYTES] = head
        return total

    def _elements(self, bucket: int, image: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The elements of each piece, as views."""
        of = self._buckets[bucket]
        return [
            header.message_of(image, of.pieces, piece)[HEADER_BYTES:].view(plain.dtype_of(of.dtype))
            for piece in of.pieces
        ]
