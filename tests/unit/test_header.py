"""What stands before the elements of a piece on the wire."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import image_of, plan_of

from mpipipe.wire import header
from mpipipe.wire.header import HEADER_BYTES


@pytest.mark.parametrize("step,piece", [(0, 0), (1, 32766), (2**62, 7), (-1, 3)])
def test_what_was_written_is_read(step, piece):
    message = np.full(HEADER_BYTES + 5, 9, np.uint8)
    header.write(message, step, piece)
    assert header.read(message) == (step, piece)
    assert message[HEADER_BYTES:].tolist() == [9] * 5, "the elements have changed"


def test_a_message_without_elements_has_a_header():
    message = np.zeros(HEADER_BYTES, np.uint8)
    header.write(message, 3, 4)
    assert header.read(message) == (3, 4)


@pytest.mark.parametrize("step,piece", [(0, 0), (1, 32766), (2**62, 7)])
def test_a_question_can_be_told_from_the_piece_that_it_asks_for(step, piece):
    message = header.question(step, piece)
    assert message.nbytes == HEADER_BYTES
    read_step, number = header.read(message)
    assert number < 0, "it reads as a piece"
    assert (read_step, -1 - number) == (step, piece)


def test_a_header_can_be_anywhere_in_memory():
    memory = np.zeros(3 * HEADER_BYTES, np.uint8)
    header.write(memory[3:], 12, 34)
    assert header.read(memory[3:]) == (12, 34)


@settings(max_examples=60, deadline=None)
@given(step=st.integers(-1, 2**62), piece=st.integers(0, 32766), samples=st.integers(0, header.MAX_SAMPLES))
def test_the_number_of_samples_is_read_and_leaves_step_and_piece_as_they_are(step, piece, samples):
    message = np.full(HEADER_BYTES + 5, 9, np.uint8)
    header.write(message, step, piece, samples=samples)
    assert header.samples(message) == samples and type(header.samples(message)) is int
    assert header.read(message) == (step, piece)
    assert message[HEADER_BYTES:].tolist() == [9] * 5, "the elements have changed"


@pytest.mark.parametrize("samples", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_any_number_of_samples_up_to_the_largest_can_be_written(samples):
    message = np.zeros(HEADER_BYTES, np.uint8)
    header.write(message, 3, 4, samples)
    assert header.samples(message) == samples and header.read(message) == (3, 4)
    assert header.MAX_SAMPLES == 2**32 - 1


@pytest.mark.parametrize("samples", [-1, header.MAX_SAMPLES + 1])
def test_no_other_number_of_samples_is_written_as_something_else(samples):
    with pytest.raises(struct.error):
        header.write(np.zeros(HEADER_BYTES, np.uint8), 3, 4, samples)


def test_without_a_number_of_samples_there_are_none():
    message = np.full(HEADER_BYTES, 9, np.uint8)
    header.write(message, 3, 4)
    assert header.samples(message) == header.samples(header.question(3, 4)) == 0


def test_elements_stay_aligned_for_every_dtype():
    assert HEADER_BYTES % 16 == 0


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=4), divisible=st.booleans(), step=st.integers(0, 9))
def test_the_messages_of_a_slot_are_found_in_its_image_without_a_copy(sizes, divisible, step):
    plan = plan_of(sizes, piece_bytes=1024, divisible=divisible)
    for slot in (*plan.buckets, *plan.units):
        data = np.random.default_rng(step).integers(0, 256, slot.nbytes, np.uint8)
        image = image_of(slot.pieces, step, data)
        start = slot.pieces[0].offset
        for piece in slot.pieces:
            message = header.message_of(image, slot.pieces, piece)
            assert header.read(message) == (step, piece.index)
            at = piece.offset - start
            assert message[HEADER_BYTES:].tobytes() == data[at : at + piece.nbytes].tobytes()
            assert np.shares_memory(message, image)
        assert image.nbytes == slot.nbytes + HEADER_BYTES * len(slot.pieces)
