"""Error feedback: what the wire loses of a gradient is late, not lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.wire import formats, plain
from mpipipe.wire.feedback import Feedback

NARROW = ["bf16", "fp16"]
PRECISION = {"bf16": 2.0**-8, "fp16": 2.0**-11}
LEAST = {"bf16": 2.0**-134, "fp16": 2.0**-25}  # half of the least value above zero


class WithoutFeedback:
    """What there is to compare with: each gradient is encoded on its own."""

    def __init__(self, form: str, dtype: str, nbytes: int) -> None:
        self.form, self.dtype = form, dtype

    def encode(self, data: np.ndarray, out: np.ndarray) -> None:
        formats.encode(self.form, self.dtype, data, out)


def send(encoder, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """What arrives of one step's gradient after another."""
    arrived = []
    for gradient in gradients:
        data, name = plain.encode(gradient), gradient.dtype.name
        wire = np.empty(formats.encoded_bytes(encoder.form, name, data.nbytes), np.uint8)
        encoder.encode(data, wire)
        decoded = np.empty(data.nbytes, np.uint8)
        formats.decode(encoder.form, name, wire, decoded)
        arrived.append(decoded.view(gradient.dtype))
    return arrived


def worst_debt(kind: type, form: str, gradients: list[np.ndarray]) -> float:
    """How far the sum of what arrived is ever from the sum of the gradients, in errors that one step may make.

    That is half of the last place of what the step sends: of the gradient and of what is owed from the step before.
    """
    arrived = send(kind(form, gradients[0].dtype.name, gradients[0].nbytes), gradients)
    largest = np.maximum(np.abs(gradients).max(axis=0), np.abs(arrived).max(axis=0)).astype(np.float64)
    debt = np.cumsum(gradients, axis=0, dtype=np.float64) - np.cumsum(arrived, axis=0, dtype=np.float64)
    own_rounding = len(gradients) * np.finfo(gradients[0].dtype).eps * largest
    return float(((np.abs(debt).max(axis=0) - own_rounding) / (PRECISION[form] * largest + LEAST[form])).max())


def steps(dtype: str, number: int = 200, size: int = 64) -> list[np.ndarray]:
    """Gradients with a mean, as training has them, of sizes from 1e-9 to 10."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=size) * 10.0 ** rng.uniform(-9, 1, size)
    return [(mean * (1 + 0.1 * rng.normal(size=size))).astype(dtype) for _ in range(number)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", NARROW)
def test_the_sum_of_what_arrives_follows_the_sum_of_the_gradients_within_one_steps_rounding(form, dtype):
    assert worst_debt(Feedback, form, steps(dtype)) <= 1.01


@pytest.mark.parametrize("form", NARROW)
def test_without_feedback_it_does_not(form):
    assert worst_debt(WithoutFeedback, form, steps("float32")) > 10


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    form=st.sampled_from(NARROW),
)
def test_it_does_so_for_any_gradients(values, form):
    assert worst_debt(Feedback, form, [np.array([value], np.float32) for value in values]) <= 1.01


@pytest.mark.parametrize("form,gradient", [("bf16", 1 + 2.0**-9), ("fp16", 1e-8)])
def test_a_part_of_a_gradient_that_is_too_small_for_the_wire_arrives_once_it_has_added_up(form, gradient):
    gradients = [np.array([gradient], np.float32)] * 1000
    lost = np.sum(send(WithoutFeedback(form, "float32", 4), gradients), dtype=np.float64)
    kept = np.sum(send(Feedback(form, "float32", 4), gradients), dtype=np.float64)
    assert lost == round(gradient) * 1000
    assert abs(kept - gradient * 1000) <= 2.0**-7 * gradient + LEAST[form]


def test_the_rest_of_a_gradient_beyond_the_range_is_sent_in_the_next_steps():
    gradients = [np.array([value], np.float32) for value in (150000.0, 0.0, 0.0, 0.0)]
    assert [float(a[0]) for a in send(Feedback("fp16", "float32", 4), gradients)] == [65504.0, 65504.0, 18992.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_infinity_or_nan_is_sent_and_then_forgotten(form, dtype, bad):
    gradients = [np.array([0.3, value, 0.3], dtype) for value in (0.3, bad, 0.3, 0.3)]
    arrived = send(Feedback(form, dtype, gradients[0].nbytes), gradients)
    np.testing.assert_equal(float(arrived[1][1]), bad)
    fresh = send(Feedback(form, dtype, gradients[0].nbytes), gradients[2:])
    assert [a[1] for a in arrived[2:]] == [a[1] for a in fresh]
    # The elements beside it have not noticed.
    usual = send(Feedback(form, dtype, gradients[0].nbytes), [gradients[0]] * 4)
    assert [(a[0], a[2]) for a in arrived] == [(a[0], a[2]) for a in usual]


@pytest.mark.parametrize("form", NARROW)
def test_no_gradient_is_cause_for_a_floating_point_warning(form):
    most = np.finfo(np.float32).max
    gradients = [np.array([value, most, 1e-40], np.float32) for value in (np.inf, -np.inf, np.nan, most, most, -most)]
    with np.errstate(all="raise"):
        send(Feedback(form, "float32", 12), gradients)


@pytest.mark.parametrize(
    "form,dtype",
    [("plain", "float32"), ("plain", "float64"), ("bf16", "float16"), ("fp16", "bfloat16"), ("fp16", "complex64")],
)
def test_what_travels_plain_is_copied_and_nothing_is_kept(form, dtype):
    gradient = np.random.default_rng(0).normal(size=9).astype(plain.dtype_of(dtype))
    arrived = send(Feedback(form, dtype, gradient.nbytes), [gradient] * 3)
    assert {a.tobytes() for a in arrived} == {gradient.tobytes()}


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("size", [0, 1, 3, formats.BLOCK + 5])
def test_pieces_of_any_size_are_encoded_the_gradient_is_left_as_it_is(form, size):
    gradient = np.random.default_rng(0).normal(size=size).astype(np.float32)
    before = gradient.copy()
    first, second = send(Feedback(form, "float32", gradient.nbytes), [gradient, gradient])
    assert np.array_equal(gradient, before)
    np.testing.assert_array_equal(first, send(WithoutFeedback(form, "float32", 0), [gradient])[0])
    owed = send(WithoutFeedback(form, "float32", 0), [gradient + (gradient - first)])[0]
    np.testing.assert_array_equal(second, owed)


def test_every_piece_has_its_own_memory():
    gradient = [np.array([1e-8], np.float32)]
    one, other = Feedback("fp16", "float32", 4), Feedback("fp16", "float32", 4)
    assert [float(send(one, gradient)[0][0]) for _ in range(3)][-1] > 0 == float(send(other, gradient)[0][0])


@pytest.mark.parametrize("form", formats.FORMATS)
def test_a_wrong_length_is_refused_before_anything_is_remembered(form):
    gradient = np.array([0.3, 0.3], np.float32)
    encoder = Feedback(form, "float32", 8)
    for nbytes, encoded in ((4, formats.encoded_bytes(form, "float32", 8)), (8, 2), (8, 16)):
        with pytest.raises(ValueError, match="bytes"):
            encoder.encode(plain.encode(gradient)[:nbytes], np.zeros(encoded, np.uint8))
    expected = send(Feedback(form, "float32", 8), [gradient])[0]
    np.testing.assert_array_equal(send(encoder, [gradient])[0], expected)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="no wire format"):
        Feedback("int8", "float32", 4)
