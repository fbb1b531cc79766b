"""The mean of the clients' gradients, bit for bit the same whatever the order of their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.wire import plain


def mean(parts: Sequence[NDArray[np.uint8]], dtype: str) -> NDArray[np.uint8]:
    """Sum encoded arrays of one dtype in the order given, divide by their number; returns new bytes.

    16-bit floats are summed in float32 and rounded once, at the end.
    """
    arrays = [plain.decode(part, dtype) for part in parts]
    wide = np.dtype(np.float32) if arrays[0].dtype.itemsize == 2 else arrays[0].dtype
    total: NDArray[Any] = arrays[0].astype(wide)
    for array in arrays[1:]:
        total += array.astype(wide, copy=False)
    if len(arrays) > 1:
        total /= np.asarray(len(arrays), dtype=wide)
    return plain.encode(total.astype(arrays[0].dtype, copy=False))
