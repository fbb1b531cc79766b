"""The plain wire format: a bucket's elements as they are in memory, one after the other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of a dtype's name; ``bfloat16`` is ml_dtypes's, as in TensorFlow."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def encode(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decode(data: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """A flat array over the same bytes: the inverse of :func:`encode`, up to the shape."""
    return data.view(dtype_of(dtype))
