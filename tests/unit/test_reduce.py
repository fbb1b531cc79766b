"""The mean of gradients that were encoded for the wire."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.wire import formats, plain, reduce

HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
NARROW = ["bf16", "fp16"]
WIDE = ["float32", "float64"]
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
SIZES = [0, 1, 7, formats.BLOCK, formats.BLOCK + 3]


def gradients(dtype: str, number: int, size: int = 50) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (number, size)
    return list((rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 3, shape)).astype(plain.dtype_of(dtype)))


def encode(form: str, array: np.ndarray) -> np.ndarray:
    out = np.empty(formats.encoded_bytes(form, array.dtype.name, array.nbytes), np.uint8)
    formats.encode(form, array.dtype.name, plain.encode(array), out)
    return out


def mean(arrays: list[np.ndarray], form: str = "plain", weights: list[int] | None = None) -> np.ndarray:
    name = arrays[0].dtype.name
    return plain.decode(reduce.mean([encode(form, array) for array in arrays], name, form, weights=weights), name)


def mean_by_the_formula(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The mean in as few words as numpy has for it, on whole arrays."""
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total += array.astype(wide, copy=False)
    if len(arrays) > 1:
        total /= np.asarray(len(arrays), dtype=wide)
    return total.astype(dtype, copy=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_plain_gradients_is_that_of_the_formula_bit_by_bit(dtype, number, size):
    arrays = gradients(dtype, number, size)
    assert mean(arrays).tobytes() == mean_by_the_formula(arrays, arrays[0].dtype).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_so_is_that_of_infinities_nan_and_sums_beyond_the_range(dtype):
    most = float(ml_dtypes.finfo(plain.dtype_of(dtype)).max)
    rows = [[np.inf, np.inf, np.nan, most, most, -0.0], [1.0, -np.inf, 1.0, most, -most, -0.0], [most] * 6]
    with np.errstate(all="ignore"):
        arrays = [np.array(row).astype(plain.dtype_of(dtype)) for row in rows]
        expected = mean_by_the_formula(arrays, arrays[0].dtype)
        # As float64: numpy does not see a NaN of bfloat16 with ml_dtypes 0.3.
        np.testing.assert_array_equal(mean(arrays).astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("form", NARROW)
def test_narrowed_gradients_are_summed_in_their_own_dtype(form, dtype, number, size):
    arrays = gradients(dtype, number, size)
    arrived = [plain.encode(array).view(dtype).astype(np.float32).astype(HALF[form]).astype(dtype) for array in arrays]
    result = mean(arrays, form)
    assert result.dtype == np.dtype(dtype)
    assert result.tobytes() == mean_by_the_formula(arrived, np.dtype(dtype)).tobytes()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-60000, 60000, width=32), min_size=4, max_size=4), min_size=1, max_size=8),
    form=st.sampled_from(formats.FORMATS),
)
def test_the_mean_is_that_of_float64_but_for_the_rounding_on_the_wire_and_of_the_sum(rows, form):
    arrays = [np.array(row, np.float32) for row in rows]
    exact = np.mean(np.array(rows, np.float64), axis=0)
    absolute = np.mean(np.abs(np.array(rows, np.float64)), axis=0)
    wire = {"plain": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}[form]
    least = {"plain": 0.0, "bf16": 2.0**-134, "fp16": 2.0**-25}[form]
    bound = absolute * (wire + len(rows) * 2.0**-23) + least + 2.0**-149
    assert (np.abs(mean(arrays, form) - exact) <= bound).all()


@pytest.mark.parametrize("form", formats.FORMATS)
def test_the_order_of_the_sum_is_the_order_given(form):
    arrays = [np.array([value], np.float32) for value in (2.0**-12, 32768.0, -32768.0)]  # exact in every format
    assert mean(arrays, form)[0] == 0.0
    assert mean(arrays[::-1], form)[0] == np.float32(2.0**-12) / np.float32(3.0)


def test_the_mean_is_not_rounded_to_the_16_bits_of_the_wire():
    arrays = [np.array([value], np.float32) for value in (65504.0, 65504.0, 65504.0, 32.0)]
    assert mean(arrays, "fp16")[0] == (3 * 65504.0 + 32.0) / 4
    arrays = [np.array([value], np.float32) for value in (1.0, 1.0 + 2.0**-7)]
    assert mean(arrays, "bf16")[0] == 1.0 + 2.0**-8


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(WIDE)))
def test_what_travels_plain_has_the_same_mean_in_every_format(form, dtype):
    arrays = gradients(dtype, 3)
    assert mean(arrays, form).tobytes() == mean(arrays).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("number", [1, 3])
def test_the_mean_goes_where_it_is_wanted_and_the_parts_are_left_as_they_are(form, dtype, number):
    arrays = gradients(dtype, number)
    parts = [encode(form, array) for array in arrays]
    before = [part.tobytes() for part in parts]
    buffer = np.full(arrays[0].nbytes + 64, 0xAA, np.uint8)
    out = buffer[16 : 16 + arrays[0].nbytes]
    assert reduce.mean(parts, dtype, form, out) is out
    new = reduce.mean(parts, dtype, form)
    assert new.tobytes() == out.tobytes() and new.dtype == np.uint8 and new.shape == out.shape
    assert not any(np.shares_memory(new, part) for part in parts)
    assert [part.tobytes() for part in parts] == before
    assert set(buffer[:16]) | set(buffer[16 + out.nbytes :]) == {0xAA}


# ------------------------------------------------------------------------------------------------------------- weighted

WEIGHTS = {2: [3, 1], 3: [32, 7, 32], 7: [1, 0, 3, 4, 5, 100000, 7]}


def weighted_mean_by_the_formula(arrays: list[np.ndarray], weights: list[int], dtype: np.dtype) -> np.ndarray:
    """As :func:`mean_by_the_formula`, with each array so many times."""
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    total = np.zeros(arrays[0].size, wide)
    for array, weight in zip(arrays, weights, strict=True):
        total += array.astype(wide, copy=False) * wide.type(weight)
    total /= wide.type(sum(weights))
    return total.astype(dtype, copy=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weighted_mean_of_plain_gradients_is_that_of_the_formula_bit_by_bit(dtype, number, size):
    arrays, weights = gradients(dtype, number, size), WEIGHTS[number]
    expected = weighted_mean_by_the_formula(arrays, weights, arrays[0].dtype)
    assert mean(arrays, weights=weights).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("form", NARROW)
def test_narrowed_gradients_have_their_weighted_mean_in_their_own_dtype(form, dtype, number, size):
    arrays, weights = gradients(dtype, number, size), WEIGHTS[number]
    arrived = [plain.encode(array).view(dtype).astype(np.float32).astype(HALF[form]).astype(dtype) for array in arrays]
    result = mean(arrays, form, weights)
    assert result.dtype == np.dtype(dtype)
    assert result.tobytes() == weighted_mean_by_the_formula(arrived, weights, np.dtype(dtype)).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("weight", [0, 1, 32])
def test_equal_weights_are_as_none_bit_by_bit(form, dtype, number, weight):
    arrays = gradients(dtype, number, formats.BLOCK + 3)
    assert mean(arrays, form, [weight] * number).tobytes() == mean(arrays, form).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", formats.FORMATS)
def test_a_gradient_from_no_samples_counts_nothing_even_if_it_is_nan(form, dtype, bad):
    arrays = gradients(dtype, 3)
    arrays[1][:] = bad
    result = mean(arrays, form, [2, 0, 3])
    assert result.tobytes() == mean([arrays[0], arrays[2]], form, [2, 3]).tobytes()
    assert np.isfinite(result.astype(np.complex128)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", formats.FORMATS)
def test_a_gradient_that_alone_has_samples_is_the_mean(form, dtype):
    first, second = gradients(dtype, 2)
    one = mean([second], form).astype(np.complex128)
    np.testing.assert_allclose(mean([first, second], form, [0, 32]).astype(np.complex128), one, rtol=1e-6)


@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weighted_mean_goes_where_it_is_wanted_and_the_parts_are_left_as_they_are(form, dtype):
    parts = [encode(form, array) for array in gradients(dtype, 3)]
    before = [part.tobytes() for part in parts]
    out = np.full(gradients(dtype, 1)[0].nbytes, 0xAA, np.uint8)
    assert reduce.mean(parts, dtype, form, out, [1, 2, 3]) is out
    assert out.tobytes() == reduce.mean(parts, dtype, form, weights=[1, 2, 3]).tobytes()
    assert [part.tobytes() for part in parts] == before


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-60000, 60000, width=32), min_size=4, max_size=4), min_size=2, max_size=6),
    data=st.data(),
)
def test_the_weighted_mean_is_that_over_all_samples(rows, data):
    weights = data.draw(st.lists(st.integers(0, 5000), min_size=len(rows), max_size=len(rows)).filter(any))
    exact = np.average(np.array(rows, np.float64), axis=0, weights=weights)
    absolute = np.average(np.abs(np.array(rows, np.float64)), axis=0, weights=weights)
    result = mean([np.array(row, np.float32) for row in rows], weights=weights)
    assert (np.abs(result - exact) <= absolute * (len(rows) + 2) * 2.0**-23 + 2.0**-120).all()


def test_weights_are_needed_for_every_part():
    parts = [plain.encode(np.zeros(2, np.float32))] * 3
    with pytest.raises(ValueError):
        reduce.mean(parts, "float32", weights=[1, 2])


def test_lengths_that_do_not_agree_are_refused():
    two, three = (plain.encode(np.zeros(n, np.float32)) for n in (2, 3))
    for parts in ([two, three], [three, two], [two, two[:4]]):
        with pytest.raises(ValueError, match="bytes of float32 take"):
            reduce.mean(parts, "float32")
    with pytest.raises(ValueError, match="12 bytes of float32 take 6 bytes in bf16, not 8"):
        reduce.mean([two, two], "float32", "bf16", np.zeros(12, np.uint8))
    with pytest.raises(ValueError, match="no wire format"):
        reduce.mean([two], "float32", "int8")
