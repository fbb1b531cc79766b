"""How a bucket looks on the wire, and how gradients are averaged."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.protocol.plan import _ITEM_BYTES
from mpipipe.wire import plain, reduce

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def random_array(dtype: str, size: int = 50, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).normal(size=size) * 10
    return data.astype(plain.dtype_of(dtype))


@pytest.mark.parametrize("dtype", sorted(_ITEM_BYTES))
def test_what_is_encoded_is_decoded_to_the_same_for_every_dtype_that_can_be_synchronised(dtype):
    array = random_array(dtype).reshape(5, 10)
    encoded = plain.encode(array)
    assert encoded.dtype == np.uint8 and encoded.shape == (array.size * _ITEM_BYTES[dtype],)
    decoded = plain.decode(encoded, dtype)
    assert decoded.dtype == array.dtype and decoded.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_any_shape_can_be_encoded(shape):
    array = np.ones(shape, np.float32)
    assert plain.decode(plain.encode(array), "float32").reshape(shape).tolist() == array.tolist()


def test_a_contiguous_array_is_not_copied():
    array = np.zeros((4, 5), np.float32)
    assert np.shares_memory(plain.encode(array), array)
    assert np.shares_memory(plain.decode(plain.encode(array), "float32"), array)


def test_an_array_in_another_order_of_memory_is_encoded_row_by_row():
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert plain.decode(plain.encode(array), "float32").tolist() == [0, 1, 2, 3, 4, 5]
    assert plain.decode(plain.encode(np.arange(6, dtype=np.int64)[::2]), "int64").tolist() == [0, 2, 4]


def test_bfloat16_is_the_one_that_tensorflow_uses():
    assert plain.dtype_of("bfloat16") == ml_dtypes.bfloat16 and plain.dtype_of("bfloat16").itemsize == 2


def mean(arrays: list[np.ndarray]) -> np.ndarray:
    name = arrays[0].dtype.name
    return plain.decode(reduce.mean([plain.encode(array) for array in arrays], name), name)


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_the_mean_is_the_sum_in_the_order_given_divided_by_the_number(dtype):
    arrays = [random_array(dtype, seed=seed) for seed in range(5)]
    wide = np.dtype(np.float32) if dtype in ("float16", "bfloat16") else arrays[0].dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = total + array.astype(wide)
    assert mean(arrays).tobytes() == (total / wide.type(5)).astype(arrays[0].dtype).tobytes()


def test_the_order_is_that_of_the_ranks_and_it_matters():
    arrays = [np.array([value], np.float32) for value in (1.0, 1e8, -1e8)]
    assert mean(arrays)[0] == 0.0
    assert mean(arrays[::-1])[0] == np.float32(1.0) / np.float32(3.0)
    assert len({float(mean(list(order))[0]) for order in itertools.permutations(arrays)}) > 1


@pytest.mark.parametrize("dtype,large", [("float16", 60000.0), ("bfloat16", 3e38)])
def test_16_bit_floats_are_summed_in_32_bits(dtype, large):
    small = np.array([1.0, 256.0], plain.dtype_of(dtype))
    assert mean([small] * 300).tolist() == [1.0, 256.0]  # in 16 bits the sum would stop growing at 256 (bfloat16)
    if dtype == "float16":
        assert mean([np.array([large], np.float16)] * 2).tolist() == [large]  # the sum is beyond float16


def test_16_bit_floats_are_rounded_once():
    one, eighth = (np.array([value], ml_dtypes.bfloat16) for value in (1.0, 2.0**-9))
    assert mean([one, eighth, eighth, eighth, eighth])[0] == ml_dtypes.bfloat16((1.0 + 4 * 2.0**-9) / 5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_mean_of_one_client_is_its_gradient_in_new_memory(dtype):
    array = random_array(dtype)
    part = plain.encode(array)
    result = reduce.mean([part], dtype)
    assert result.tobytes() == part.tobytes() and not np.shares_memory(result, part)


def test_the_parts_are_left_as_they_are():
    arrays = [random_array("float32", seed=seed) for seed in range(3)]
    before = [array.tobytes() for array in arrays]
    mean(arrays)
    assert [array.tobytes() for array in arrays] == before


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from(FLOATS),
)
def test_the_mean_depends_on_nothing_but_the_parts_and_their_order(values, dtype):
    with np.errstate(all="ignore"):
        arrays = [np.array(row).astype(plain.dtype_of(dtype)) for row in values]
        assert mean(arrays).tobytes() == mean([array.copy() for array in arrays]).tobytes()
