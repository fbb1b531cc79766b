"""Gradients of several training steps that go onto the wire as their sum."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import image_of, plan_of

from mpipipe.protocol.plan import Bucket, Plan
from mpipipe.wire import header, plain
from mpipipe.wire.accumulate import Accumulator
from mpipipe.wire.header import HEADER_BYTES

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64"]


def values_of(bucket: Bucket, number: int) -> np.ndarray:
    rng = np.random.default_rng([bucket.index, number])
    dtype = plain.dtype_of(bucket.dtype)
    return (rng.normal(size=bucket.nbytes // dtype.itemsize) * 10).astype(dtype)


def image(bucket: Bucket, number: int, samples: int = 0) -> np.ndarray:
    return image_of(bucket.pieces, number, plain.encode(values_of(bucket, number)), samples)


def total(bucket: Bucket, numbers: range) -> np.ndarray:
    """The sum in the dtype of the gradients, in the order of the steps."""
    values = [values_of(bucket, number) for number in numbers]
    result = values[0].copy()
    for value in values[1:]:
        result += value
    return result


def assert_is_the_sum(plan: Plan, bucket: int, numbers: range, result: np.ndarray | None) -> None:
    assert result is not None
    of = plan.buckets[bucket]
    assert result.tobytes() == image_of(of.pieces, numbers[-1], plain.encode(total(of, numbers))).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_only_the_last_of_so_many_gradients_gives_an_image_that_of_their_sum(steps, piece_bytes, dtype):
    plan = plan_of([700], piece_bytes, dtype)
    assert (len(plan.pieces) > 1) == (piece_bytes == 1024)
    accumulator = Accumulator(plan.buckets, steps)
    for start in range(0, 3 * steps, steps):
        for number in range(start, start + steps - 1):
            assert accumulator.add(0, image(plan.buckets[0], number)) is None
        last = accumulator.add(0, image(plan.buckets[0], start + steps - 1))
        assert_is_the_sum(plan, 0, range(start, start + steps), last)


def test_the_headers_of_all_pieces_are_those_of_the_last_gradient():
    plan = plan_of([8, 1000], piece_bytes=1024)
    bucket = plan.buckets[1]
    assert len(bucket.pieces) == 4
    accumulator = Accumulator(plan.buckets, 3)
    images = [image(bucket, number, samples=100 + number) for number in range(3)]
    result = [accumulator.add(1, each) for each in images][-1]
    assert result is not None
    for piece in bucket.pieces:
        message = header.message_of(result, bucket.pieces, piece)
        assert header.read(message) == (2, piece.index) and header.samples(message) == 102
        assert message.nbytes == HEADER_BYTES + piece.nbytes


@pytest.mark.parametrize("done,missing", [(0, 4), (1, 3), (3, 1), (4, 4), (6, 2), (8, 4)])
def test_of_the_first_sum_what_was_done_before_is_not_waited_for(done, missing):
    plan = plan_of([5, 5])
    accumulator = Accumulator(plan.buckets, 4, done)
    for bucket in (0, 1):
        for number in range(missing - 1):
            assert accumulator.add(bucket, image(plan.buckets[bucket], number)) is None
        last = accumulator.add(bucket, image(plan.buckets[bucket], missing - 1))
        assert_is_the_sum(plan, bucket, range(missing), last)
        # The next one is of all of them again.
        for number in range(3):
            assert accumulator.add(bucket, image(plan.buckets[bucket], number)) is None
        assert_is_the_sum(plan, bucket, range(4), accumulator.add(bucket, image(plan.buckets[bucket], 3)))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_images_that_are_given_are_left_as_they_are_and_may_be_used_again_at_once(steps):
    plan = plan_of([300], piece_bytes=1024)
    accumulator, results = Accumulator(plan.buckets, steps), []
    for number in range(2 * steps):
        given = image(plan.buckets[0], number)
        before = given.tobytes()
        results.append(accumulator.add(0, given))
        assert given.tobytes() == before
        given[:] = 0xAB  # as the training step may, once it was taken
    assert_is_the_sum(plan, 0, range(steps), results[steps - 1])
    assert_is_the_sum(plan, 0, range(steps, 2 * steps), results[-1])


def test_buckets_are_summed_each_for_itself():
    plan = plan_of([10, 600, 3], piece_bytes=1024)
    accumulator = Accumulator(plan.buckets, 2)
    order = [(2, 0), (1, 0), (2, 1), (2, 2), (0, 0), (1, 1), (2, 3), (0, 1)]
    results = {(bucket, n): accumulator.add(bucket, image(plan.buckets[bucket], n)) for bucket, n in order}
    for (bucket, number), result in results.items():
        if number % 2:
            assert_is_the_sum(plan, bucket, range(number - 1, number + 1), result)
        else:
            assert result is None


def test_infinities_and_nan_arrive_in_the_sum():
    plan = plan_of([4])
    accumulator = Accumulator(plan.buckets, 2)
    first, second = (np.array(v, np.float32) for v in ([np.inf, 1, np.nan, 1], [1, -np.inf, 1, 2]))
    assert accumulator.add(0, image_of(plan.pieces, 0, plain.encode(first))) is None
    result = accumulator.add(0, image_of(plan.pieces, 1, plain.encode(second)))
    assert result is not None
    np.testing.assert_array_equal(result[HEADER_BYTES:].view(np.float32), [np.inf, -np.inf, np.nan, 3.0])
