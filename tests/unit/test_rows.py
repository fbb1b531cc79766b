"""Rows of a table on the wire, and the mean of gradients of rows."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.wire import plain, rows
from mpipipe.wire.rows import INDEX_BYTES, PART_BYTES, Gathering

COUNTS = st.integers(0, 60)
ROW_BYTES = st.integers(1, 40)


def any_rows(count: int, row_bytes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices and elements."""
    rng = np.random.default_rng([count, row_bytes, seed])
    return rng.integers(0, 2**62, count), rng.integers(0, 256, (count, row_bytes), np.uint8)


def parts_of(data: np.ndarray, row_bytes: int, part_bytes: int) -> list[np.ndarray]:
    return [np.concatenate(fields) for fields in rows.parts(data, row_bytes, part_bytes)]


def in_a_long_buffer(part: np.ndarray) -> np.ndarray:
    """As a receive leaves it, with what was there before behind it."""
    return np.concatenate([part, np.full(37, 0xAB, np.uint8)])


def gathered(parts: list[np.ndarray], row_bytes: int) -> np.ndarray:
    gathering = Gathering(row_bytes)
    complete = [gathering.add(part) for part in parts]
    assert complete == [False] * (len(parts) - 1) + [True]
    return gathering.rows()


def by_index(data: np.ndarray, row_bytes: int) -> list[tuple[int, bytes]]:
    indices, elements = rows.read(data, row_bytes)
    return sorted((int(index), of_it.tobytes()) for index, of_it in zip(indices, elements, strict=True))


# ------------------------------------------------------------------------------------------------------ on the wire


@settings(max_examples=60, deadline=None)
@given(count=COUNTS, row_bytes=ROW_BYTES)
def test_what_was_written_is_read_and_takes_so_many_bytes(count, row_bytes):
    indices, elements = any_rows(count, row_bytes)
    data = rows.write(indices, elements)
    assert data.dtype == np.uint8 and data.nbytes == 8 + count * (INDEX_BYTES + row_bytes)
    read_indices, read_elements = rows.read(data, row_bytes)
    assert read_indices.dtype == np.int64 and read_indices.tolist() == indices.tolist()
    assert read_elements.shape == (count, row_bytes) and read_elements.tobytes() == elements.tobytes()
    assert not count or np.shares_memory(read_elements, data)


def test_no_rows_at_all_are_rows():
    indices, elements = rows.read(rows.none(), 12)
    assert indices.shape == (0,) and elements.shape == (0, 12)
    assert rows.none().tobytes() == rows.write(*any_rows(0, 12)).tobytes()


@settings(max_examples=100, deadline=None)
@given(count=COUNTS, row_bytes=ROW_BYTES, more=st.integers(0, 500))
def test_parts_that_come_in_order_make_the_rows_again(count, row_bytes, more):
    data, part_bytes = rows.write(*any_rows(count, row_bytes)), PART_BYTES + INDEX_BYTES + row_bytes + more
    parts = parts_of(data, row_bytes, part_bytes)
    assert all(part.nbytes <= part_bytes for part in parts)
    most = (part_bytes - PART_BYTES) // (INDEX_BYTES + row_bytes)
    assert len(parts) == max(1, -(-count // most)), "there are more parts than it takes"
    assert sum(part.nbytes - PART_BYTES for part in parts) == data.nbytes - 8
    assert gathered(parts, row_bytes).tobytes() == data.tobytes()


@settings(max_examples=60, deadline=None)
@given(count=COUNTS, row_bytes=ROW_BYTES, more=st.integers(0, 200), seed=st.integers(0, 99))
def test_parts_may_come_in_any_order_and_in_buffers_that_are_longer(count, row_bytes, more, seed):
    data = rows.write(*any_rows(count, row_bytes))
    parts = [in_a_long_buffer(p) for p in parts_of(data, row_bytes, PART_BYTES + INDEX_BYTES + row_bytes + more)]
    random.Random(seed).shuffle(parts)
    assert by_index(gathered(parts, row_bytes), row_bytes) == by_index(data, row_bytes)


def test_without_rows_there_is_one_part_without_any():
    (part,) = parts_of(rows.none(), 12, PART_BYTES + INDEX_BYTES + 12)
    assert part.nbytes == PART_BYTES
    assert gathered([in_a_long_buffer(part)], 12).tobytes() == rows.none().tobytes()


def test_what_was_gathered_is_in_memory_of_its_own_and_the_buffers_are_there_to_be_given_back():
    data = rows.write(*any_rows(5, 4))
    buffers = [in_a_long_buffer(part) for part in parts_of(data, 4, PART_BYTES + 2 * (INDEX_BYTES + 4))]
    gathering = Gathering(4)
    for buffer in buffers:
        gathering.add(buffer)
    assert len(buffers) == 3 and all(a is b for a, b in zip(gathering.parts, buffers, strict=True))
    all_rows = gathering.rows()
    for buffer in buffers:
        buffer[:] = 0xAB
    assert all_rows.tobytes() == data.tobytes()


def test_the_rows_that_are_sent_in_parts_are_left_as_they_are():
    data = rows.write(*any_rows(9, 8))
    before = data.tobytes()
    gathered(parts_of(data, 8, 64), 8)
    assert data.tobytes() == before


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("room", [0, PART_BYTES, PART_BYTES + INDEX_BYTES + 11])
def test_a_row_that_does_not_fit_into_a_part_is_refused(count, room):
    with pytest.raises(ValueError, match=f"a row of 12 bytes does not fit into {room} bytes"):
        parts_of(rows.write(*any_rows(count, 12)), 12, room)


@pytest.mark.parametrize("by", [-1, 1, 8, 20])
def test_a_length_that_does_not_agree_with_the_number_of_rows_is_refused(by):
    data = rows.write(*any_rows(3, 12))
    with pytest.raises(ValueError, match="are not 3 rows of 12 bytes"):
        rows.read(np.resize(data, data.nbytes + by), 12)


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="are not 3 rows of 8 bytes"):
        rows.read(rows.write(*any_rows(3, 12)), 8)


def test_a_negative_number_of_rows_is_refused():
    # Its length would be the right one if nobody looked.
    with pytest.raises(ValueError, match="are not -1 rows"):
        rows.read(np.array([-1], np.int64).view(np.uint8), 0)


@pytest.mark.parametrize("nbytes", [1, 7])
def test_rows_that_are_cut_off_in_their_number_are_refused(nbytes):
    with pytest.raises(ValueError):
        rows.read(np.zeros(nbytes, np.uint8), 12)


def a_part(total: int, count: int, nbytes: int) -> np.ndarray:
    return np.concatenate([np.array([total, count], np.int64).view(np.uint8), np.zeros(nbytes, np.uint8)])


@pytest.mark.parametrize(
    "total,count,nbytes",
    [
        (2, 3, 60),  # more rows than there are in all
        (-1, 0, 60),
        (3, -1, 60),
        (2**62, 2**62, 60),
        (3, 2, 39),  # the last row is cut off
        (3, 2, 0),
    ],
)
def test_a_part_that_cannot_be_is_refused(total, count, nbytes):
    with pytest.raises(ValueError, match="a part with"):
        Gathering(12).add(a_part(total, count, nbytes))


@pytest.mark.parametrize("nbytes", [0, 5, 8, 15])
def test_a_part_that_is_cut_off_in_its_head_is_refused(nbytes):
    with pytest.raises(ValueError):
        Gathering(12).add(np.zeros(nbytes, np.uint8))


def test_a_part_with_more_rows_than_are_still_missing_is_refused():
    gathering = Gathering(12)
    assert not gathering.add(a_part(3, 2, 40))
    with pytest.raises(ValueError, match="a part with"):
        gathering.add(a_part(3, 2, 40))


# ------------------------------------------------------------------------------------------------------------- the mean

DTYPES = ["float16", "bfloat16", "float32", "float64"]
HEIGHT, WIDTH = 12, 3


def gradients_of(dtype: str, counts: list[int], repeated: bool, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Indices and values of so many rows each, of a table of ``HEIGHT`` rows."""
    rng = np.random.default_rng([*counts, seed])
    made = []
    for count in counts:
        values = rng.normal(size=(count, WIDTH)) * 10.0 ** rng.uniform(-3, 3, (count, WIDTH))
        indices = rng.integers(0, HEIGHT, count) if repeated else rng.permutation(HEIGHT)[:count]
        made.append((indices.astype(np.int64), values.astype(plain.dtype_of(dtype))))
    return made


def mean(
    gradients: list[tuple[np.ndarray, np.ndarray]], dtype: str, weights: list[int] | None = None, *, summed: bool
) -> tuple[np.ndarray, np.ndarray]:
    row_bytes = WIDTH * plain.dtype_of(dtype).itemsize
    data = [rows.write(indices, values.view(np.uint8)) for indices, values in gradients]
    before = [each.tobytes() for each in data]
    indices, elements = rows.read(rows.mean(data, dtype, row_bytes, weights, summed=summed), row_bytes)
    assert [each.tobytes() for each in data] == before, "the gradients have changed"
    return indices, np.ascontiguousarray(elements).view(plain.dtype_of(dtype))


def wide_of(dtype: str) -> np.dtype:
    return np.dtype(np.float32) if plain.dtype_of(dtype).itemsize == 2 else np.dtype(dtype)


def scattered(indices: np.ndarray, values: np.ndarray, wide: np.dtype) -> np.ndarray:
    """The gradient of the whole table."""
    table = np.zeros((HEIGHT, WIDTH), wide)
    np.add.at(table, indices, values.astype(wide))
    return table


def mean_by_the_formula(
    gradients: list[tuple[np.ndarray, np.ndarray]], dtype: str, weights: list[int] | None = None
) -> np.ndarray:
    """The mean of the gradients of the whole table, in the dtype that it is summed in."""
    wide = wide_of(dtype)
    total = np.zeros((HEIGHT, WIDTH), wide)
    for (indices, values), weight in zip(gradients, weights or [1] * len(gradients), strict=True):
        if weight:
            total += scattered(indices, values, wide) * wide.type(weight)
    return total / wide.type(sum(weights or [1] * len(gradients)))


COUNTS_BY_CLIENT = [[4], [5, 3], [HEIGHT, 0, 2], [0, 0], [6, 7, 8]]


@pytest.mark.parametrize("counts", COUNTS_BY_CLIENT)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_summed_mean_is_that_of_whole_tables_bit_by_bit_with_each_index_once(dtype, weighted, counts):
    weights = [3, 1, 4][: len(counts)] if weighted and len(counts) > 1 else None
    gradients = gradients_of(dtype, counts, repeated=False)
    indices, values = mean(gradients, dtype, weights, summed=True)
    assert indices.tolist() == sorted({int(i) for own, _ in gradients for i in own})
    expected = mean_by_the_formula(gradients, dtype, weights).astype(plain.dtype_of(dtype))
    assert values.tobytes() == expected[indices].tobytes()
    assert not np.delete(expected, indices, axis=0).any()


@pytest.mark.parametrize("counts", COUNTS_BY_CLIENT)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_that_is_not_summed_has_all_rows_of_all_clients_and_comes_to_the_same(dtype, weighted, counts):
    weights = [3, 1, 4][: len(counts)] if weighted and len(counts) > 1 else None
    gradients, wide = gradients_of(dtype, counts, repeated=True), wide_of(dtype)
    indices, values = mean(gradients, dtype, weights, summed=False)
    assert indices.tolist() == [int(i) for own, _ in gradients for i in own]
    scales = weights or [1] * len(counts)
    pairs = zip((own for _, own in gradients), scales, strict=True)
    parts = [own.astype(wide) * wide.type(scale) / wide.type(sum(scales)) for own, scale in pairs]
    assert values.tobytes() == np.concatenate(parts).astype(plain.dtype_of(dtype)).tobytes()
    precision = float(ml_dtypes.finfo(plain.dtype_of(dtype)).eps)
    absolute = mean_by_the_formula([(i, np.abs(v)) for i, v in gradients], dtype, weights)
    error = np.abs(scattered(indices, values, wide) - mean_by_the_formula(gradients, dtype, weights))
    assert (error <= absolute * 8 * precision + 1e-7).all()


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, HEIGHT), min_size=1, max_size=5),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_with_any_weights_the_summed_mean_is_that_of_whole_tables(counts, data, dtype, seed):
    numbers = st.lists(st.integers(0, 300), min_size=len(counts), max_size=len(counts))
    weights = data.draw(numbers.filter(any))
    gradients = gradients_of(dtype, counts, repeated=False, seed=seed)
    indices, values = mean(gradients, dtype, weights, summed=True)
    precision = float(ml_dtypes.finfo(plain.dtype_of(dtype)).eps)
    absolute = mean_by_the_formula([(i, np.abs(v)) for i, v in gradients], dtype, weights)
    error = np.abs(scattered(indices, values, wide_of(dtype)) - mean_by_the_formula(gradients, dtype, weights))
    assert (error <= absolute * 8 * precision + 1e-7).all()
    assert len(set(indices.tolist())) == len(indices)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0, 1, 7])
def test_equal_weights_are_as_none(dtype, summed, weight):
    gradients = gradients_of(dtype, [5, 0, 6], repeated=not summed)
    plainly, weighted = (mean(gradients, dtype, weights, summed=summed) for weights in (None, [weight] * 3))
    assert [array.tobytes() for array in plainly] == [array.tobytes() for array in weighted]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_from_no_samples_counts_nothing_even_if_it_is_nan(dtype, summed):
    gradients = gradients_of(dtype, [5, 4, 6], repeated=False)
    gradients[1][1][:] = np.nan
    indices, values = mean(gradients, dtype, [2, 0, 3], summed=summed)
    expected = mean([gradients[0], gradients[2]], dtype, [2, 3], summed=summed)
    assert (indices.tobytes(), values.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())
    assert np.isfinite(values.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32_and_rounded_once(dtype):
    number, eps = plain.dtype_of(dtype).type, float(ml_dtypes.finfo(plain.dtype_of(dtype)).eps)
    index = np.array([4], np.int64)
    columns = [[1.0, 3.0, 1.0], [eps / 4, 3.0, eps / 4], [eps / 4, 3.0, -1.0], [eps / 4, 3.0, eps / 4]]
    gradients = [(index, np.array([row], plain.dtype_of(dtype))) for row in columns]
    _, values = mean(gradients, dtype, summed=True)
    # One after the other, in 16 bits, 1 would stay 1.
    assert values.tolist() == [[number(0.25 + eps / 4), number(3.0), number(eps / 8)]]


def test_sums_beyond_the_range_of_float16_have_a_mean():
    gradients = [(np.array([0], np.int64), np.full((1, WIDTH), 65504.0, np.float16)) for _ in range(3)]
    for weights in (None, [1, 200, 3]):
        assert mean(gradients, "float16", weights, summed=True)[1].tolist() == [[65504.0] * WIDTH]


def test_gradients_are_added_in_the_order_given():
    index = np.array([2], np.int64)
    gradients = [(index, np.full((1, WIDTH), v, np.float32)) for v in (1e8, -1e8, 1.0)]
    assert mean(gradients, "float32", summed=True)[1].tolist() == [[np.float32(1) / 3] * WIDTH]
    assert mean(gradients[::-1], "float32", summed=True)[1].tolist() == [[0.0] * WIDTH]
