"""The mean of the clients' gradients, bit for bit the same whatever the order of their arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpipipe.wire import formats, plain

_FORM_OF = {"float16": "fp16", "bfloat16": "bf16"}  # their elements are what that format makes of float32


def mean(
    parts: Sequence[NDArray[np.uint8]],
    dtype: str,
    form: str = "plain",
    out: NDArray[np.uint8] | None = None,
    weights: Sequence[int] | None = None,
) -> NDArray[np.uint8]:
    """Sum encoded arrays of one dtype in the order given, divide by their number.

    16-bit floats are summed in float32 and rounded once, at the end; elements of any other dtype are summed in that
    dtype, however many bits they had on the wire.

    Args:
        parts: at least one; bytes of equal length, encoded in ``form``. They are left as they are.
        dtype: the name of the elements' dtype.
        form: the wire format of the parts.
        out: where to write the mean: as many bytes as the elements have in memory. It may not overlap with the parts.
        weights: how much each part counts: the number of samples behind it. Without them, or where no two differ, each
            counts the same.

    Returns:
        The mean, as bytes of elements of ``dtype``: ``out``, or new memory.

    Raises:
        ValueError: there is no such format, or the lengths do not agree.
    """
    element = plain.dtype_of(dtype)
    wide = wide_of(element)
    sent = np.dtype(np.uint16) if formats.narrows(form, dtype) else element
    size = parts[0].nbytes // sent.itemsize
    if out is None:
        out = np.empty(size * element.itemsize, np.uint8)
    for part in parts:
        formats.check_lengths(form, dtype, out.nbytes, part.nbytes)
    weights = unlike(weights)
    arrays, result = [part.view(sent) for part in parts], out.view(element)
    # What is summed as it is needs no memory besides the result; numpy is fastest in one go.
    step = max(size, 1) if sent == wide and weights is None else formats.BLOCK
    for start in range(0, size, step):
        block = slice(start, start + step)
        total = result[block] if wide == element else np.empty(result[block].size, wide)
        if weights is None:
            _mean([array[block] for array in arrays], dtype, form, total)
        else:
            _weighted_mean([array[block] for array in arrays], weights, dtype, form, total)
        if wide != element:
            result[block] = total
    return out


def is_finite(part: NDArray[np.uint8], dtype: str, form: str = "plain") -> bool:
    """Whether all elements are finite, of an array as for :func:`mean`."""
    element = plain.dtype_of(dtype)
    sent = np.dtype(np.uint16) if formats.narrows(form, dtype) else element
    return bool(np.isfinite(_widened(part.view(sent), dtype, form, wide_of(element))).all())


def wide_of(element: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which elements of a dtype are summed."""
    return np.dtype(np.float32) if element.itemsize == 2 else element


def unlike(weights: Sequence[int] | None) -> Sequence[int] | None:
    """The weights of a mean; None where no two differ, and each part counts the same."""
    return None if weights is None or len(set(weights)) == 1 else weights


def _mean(arrays: list[NDArray[Any]], dtype: str, form: str, total: NDArray[Any]) -> None:
    if len(arrays) == 1:
        total[:] = _widened(arrays[0], dtype, form, total.dtype)
        return
    first, second = (_widened(array, dtype, form, total.dtype) for array in arrays[:2])
    np.add(first, second, out=total)
    for array in arrays[2:]:
        total += _widened(array, dtype, form, total.dtype)
    total /= np.asarray(len(arrays), dtype=total.dtype)


def _weighted_mean(
    arrays: list[NDArray[Any]], weights: Sequence[int], dtype: str, form: str, total: NDArray[Any]
) -> None:
    total[:] = 0
    for array, weight in zip(arrays, weights, strict=True):
        if weight:  # what comes from no samples may be NaN
            total += _widened(array, dtype, form, total.dtype) * np.asarray(weight, dtype=total.dtype)
    total /= np.asarray(sum(weights), dtype=total.dtype)


def _widened(sent: NDArray[Any], dtype: str, form: str, wide: np.dtype[Any]) -> NDArray[Any]:
    """What was sent, in the dtype that it is summed in: the same array if that is its own."""
    if sent.dtype == wide:
        return sent
    values = np.empty(sent.size, wide)
    formats.decode(_FORM_OF.get(dtype, form), wide.name, sent.view(np.uint8), values.view(np.uint8))
    return values
