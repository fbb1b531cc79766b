"""From 32-bit floats to 16-bit ones and back, many at a time.

A 16-bit float is seen here as its *code*, the unsigned integer of the same bits. numpy casts to and from float16 one
element at a time, in software in its wheels for x86, and raises a flag for each that is subnormal there, as small
gradients are: 0.04 GB/s, where :func:`to_fp16` makes 1 GB/s of whatever it is given. (GB of float32 a second.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FP16_VALUES = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_bf16(values: NDArray[np.float32], codes: NDArray[np.uint16]) -> None:
    """Round finite values to the nearest bfloat16, ties to even. The code of any other value is undefined.

    A bfloat16 is the upper half of a float32. Adding just less than half of the last place that is kept, and one more
    where that place is odd, carries into the upper half exactly where the value has to be rounded up.
    """
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    codes[:] = rounded


def from_bf16(codes: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    """The values of all codes, infinities and NaN included, exactly."""
    np.left_shift(codes, 16, out=values.view(np.uint32), dtype=np.uint32)


def to_fp16(values: NDArray[np.float32], codes: NDArray[np.uint16]) -> None:
    """Round values between -65504 and 65504 to the nearest float16, ties to even. Any other's code is undefined.

    The processor does the rounding. Let ``2**e <= |x| < 2**(e + 1)``: the last place of ``2**(e + 13) + |x|`` is worth
    ``2**(e - 10)``, as it is in a float16, and the lowest bits of the sum say how many of them ``|x|`` is rounded to.
    An ``e`` that is held at -14 gives the subnormal numbers. This is the "magic" addition of F. Giesen's
    ``float_to_half_fast3_rtne`` (2012, public domain), used for every exponent in place of the least only.
    """
    bits = values.view(np.int32)
    sums = np.bitwise_and(bits, 0x7FFFFFFF)  # |x| until the magic is added
    magic = np.bitwise_and(sums, 0x7F800000)
    np.maximum(magic, (-14 + 127) << 23, out=magic)
    # A code is the number of places and (e + 14) * 2**10. What is added to the places below is the magic's exponent,
    # shifted from bit 23 to bit 10: (e + 13 + 127) * 2**10. In the 16 bits of a code that is 2**11 too little.
    magic += (13 << 23) + (1 << 11)
    absolute = sums.view(np.float32)
    absolute += magic.view(np.float32)
    magic >>= 13
    sums += magic
    sign = np.right_shift(bits, 16, out=magic)
    sign &= 0x8000
    sums += sign
    codes[:] = sums


def from_fp16(codes: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    """The values of all codes, infinities and NaN included, exactly."""
    np.take(_FP16_VALUES, codes, out=values, mode="clip")  # the default mode makes a copy of out
