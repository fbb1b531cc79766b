"""Gradients as 16-bit floats on the wire: what arrives of them, and what never does."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.protocol.plan import _ITEM_BYTES
from mpipipe.wire import formats, plain

HALF = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
LARGEST = {"bf16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), "fp16": 65504.0}
NORMAL = {"bf16": 2.0**-126, "fp16": 2.0**-14}  # the least value with full precision
PRECISION = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half of the last place of 8 and of 11 bits
NARROW = ["bf16", "fp16"]
WIDE = ["float32", "float64"]


def encode(form: str, array: np.ndarray) -> np.ndarray:
    """What is on the wire, as bytes."""
    data = plain.encode(array)
    out = np.full(formats.encoded_bytes(form, array.dtype.name, data.nbytes), 0xAA, np.uint8)
    formats.encode(form, array.dtype.name, data, out)
    return out


def sent(form: str, array: np.ndarray) -> np.ndarray:
    """What arrives."""
    out = np.full(array.nbytes, 0xAA, np.uint8)
    formats.decode(form, array.dtype.name, encode(form, array), out)
    return out.view(array.dtype)


def rounded(form: str, array: np.ndarray) -> np.ndarray:
    """What should arrive, from the casts of numpy and ml_dtypes."""
    with np.errstate(all="ignore"):
        inside = np.where(np.isfinite(array), np.clip(array, -LARGEST[form], LARGEST[form]), array)
        return inside.astype(np.float32).astype(HALF[form]).astype(array.dtype)


def every_float16_and_what_lies_between() -> np.ndarray:
    """All finite float16 values, the middles between neighbours, and the float32 next to either on both sides."""
    half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = np.sort(half[np.isfinite(half)])
    exact = np.concatenate([half, (half[1:] + half[:-1]) / 2])
    return np.concatenate([exact, *(np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf))])


def any_bits(dtype: str, seed: int = 0) -> np.ndarray:
    """Elements of random bits: every exponent, infinities and NaN, in more than one block."""
    nbytes = (formats.BLOCK + 1001) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype)


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_values_are_rounded_to_the_nearest_and_ties_to_even(form, dtype):
    for array in (any_bits("float32"), every_float16_and_what_lies_between()):
        with np.errstate(all="ignore"):
            array = array.astype(dtype)
        np.testing.assert_array_equal(sent(form, array), rounded(form, array))


@pytest.mark.parametrize("form", NARROW)
def test_float64_of_any_kind_is_rounded_by_way_of_float32(form):
    array = any_bits("float64")
    np.testing.assert_array_equal(sent(form, array), rounded(form, array))


@pytest.mark.parametrize("form", NARROW)
def test_the_bytes_on_the_wire_are_those_of_the_16_bit_floats(form):
    array = np.array([0.0, -0.0, 1.0, -1.5, 65504.0, 1e-6, -3e-8], np.float32)
    assert encode(form, array).tobytes() == array.astype(HALF[form]).tobytes()


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_a_value_that_16_bits_can_hold_arrives_as_it_is(form, dtype):
    with np.errstate(all="ignore"):
        every = np.arange(2**16, dtype=np.uint16).view(HALF[form]).astype(dtype)
    arrived = sent(form, every)
    np.testing.assert_array_equal(arrived, every)
    number = ~np.isnan(every)
    assert np.array_equal(np.signbit(arrived[number]), np.signbit(every[number]))


@settings(max_examples=200, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), form=st.sampled_from(NARROW))
def test_the_error_is_at_most_half_of_the_last_place(value, form):
    value = max(-LARGEST[form], min(value, LARGEST[form]))
    error = abs(float(sent(form, np.array([value], np.float32))[0]) - value)
    assert error <= PRECISION[form] * max(abs(value), NORMAL[form])


@pytest.mark.parametrize("form", NARROW)
def test_the_bound_of_the_error_is_nearly_reached(form):
    tie = 1 + PRECISION[form]
    assert sent(form, np.array([tie], np.float32))[0] == 1.0


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_finite_values_beyond_the_range_are_sent_as_the_largest_and_never_as_infinity(form, dtype):
    most = float(np.finfo(dtype).max)
    array = np.array([LARGEST[form] * 1.0001, -most, most, 1.0], dtype)
    largest = LARGEST[form]
    assert sent(form, array).tolist() == [largest, -largest, largest, 1.0]


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_infinities_and_nan_arrive_and_leave_their_neighbours_alone(form, dtype):
    array = np.array([1.0, np.inf, 0.5, -np.inf, np.nan, -2.0], dtype)
    np.testing.assert_array_equal(sent(form, array), array)


@pytest.mark.parametrize("form", NARROW)
def test_no_nan_becomes_a_number_whatever_its_bits(form):
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert np.isnan(sent(form, bits.view(np.float32))).all()
    bits = np.array([0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFF0000000000001], np.uint64)
    assert np.isnan(sent(form, bits.view(np.float64))).all()


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_no_value_is_cause_for_a_floating_point_warning(form, dtype):
    with np.errstate(all="raise"):
        sent(form, any_bits(dtype, seed=1))


@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 1001, formats.BLOCK - 1, formats.BLOCK, 2 * formats.BLOCK + 3])
def test_any_number_of_elements_can_be_sent(form, dtype, size):
    array = np.arange(size, dtype=dtype) % 251  # as many as every format can hold exactly
    assert encode(form, array).nbytes == size * (array.itemsize if form == "plain" else 2)
    assert sent(form, array).tolist() == array.tolist()


@pytest.mark.parametrize("form", formats.FORMATS)
@pytest.mark.parametrize("dtype", sorted(set(_ITEM_BYTES) - set(WIDE)))
def test_every_other_dtype_travels_plain_whatever_the_format(form, dtype):
    array = (np.random.default_rng(0).normal(size=31) * 100).astype(plain.dtype_of(dtype))
    assert not formats.narrows(form, dtype)
    assert formats.encoded_bytes(form, dtype, array.nbytes) == array.nbytes
    assert encode(form, array).tobytes() == array.tobytes() == sent(form, array).tobytes()


@pytest.mark.parametrize("dtype", WIDE)
def test_plain_is_the_bytes_themselves(dtype):
    array = any_bits(dtype)
    assert encode("plain", array).tobytes() == array.tobytes() == sent("plain", array).tobytes()


def test_what_is_narrowed_takes_two_bytes_an_element():
    assert [formats.encoded_bytes(form, "float32", 400) for form in formats.FORMATS] == [400, 200, 200]
    assert [formats.encoded_bytes(form, "float64", 400) for form in formats.FORMATS] == [400, 100, 100]


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", WIDE)
def test_parts_of_larger_buffers_are_encoded_in_place_and_nothing_beside_them_is_written(form, dtype):
    array = np.random.default_rng(0).normal(size=100).astype(dtype)
    source, wire, target = (np.full(2048, 0xAA, np.uint8) for _ in range(3))
    data = source[16 : 16 + array.nbytes]
    data[:] = plain.encode(array)
    before = source.copy()
    formats.encode(form, dtype, data, wire[48:248])
    formats.decode(form, dtype, wire[48:248], target[32 : 32 + array.nbytes])
    np.testing.assert_array_equal(target[32 : 32 + array.nbytes].view(dtype), rounded(form, array))
    assert np.array_equal(source, before)
    assert set(wire[:48]) | set(wire[248:]) | set(target[:32]) | set(target[32 + array.nbytes :]) == {0xAA}


@pytest.mark.parametrize("form", formats.FORMATS)
def test_a_buffer_of_another_length_is_refused_also_where_one_element_could_be_repeated(form):
    one, right = np.zeros(4, np.uint8), np.zeros(formats.encoded_bytes(form, "float32", 4), np.uint8)
    for wrong in (np.zeros(right.nbytes * 2, np.uint8), right[:-1]):
        with pytest.raises(ValueError, match=f"4 bytes of float32 take {right.nbytes} bytes in {form}, not"):
            formats.encode(form, "float32", one, wrong)
        with pytest.raises(ValueError, match=f"4 bytes of float32 take {right.nbytes} bytes in {form}, not"):
            formats.decode(form, "float32", wrong, one)


def test_an_unknown_format_is_refused_with_the_names_of_those_that_there_are():
    with pytest.raises(ValueError, match="no wire format 'int8'; there are plain, bf16, fp16"):
        formats.encoded_bytes("int8", "float32", 4)
    with pytest.raises(ValueError, match="no wire format"):
        formats.encode("int8", "complex64", np.zeros(8, np.uint8), np.zeros(8, np.uint8))
