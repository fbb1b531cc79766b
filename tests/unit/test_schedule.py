"""Priority and credit: which piece goes next, and how many bytes are under way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of

from mpipipe.errors import ProtocolError
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import SendWindow

KIB_IN_FLOATS = 256


def push(window: SendWindow, plan: Plan, bucket: int) -> list[Piece]:
    """All pieces of a bucket are ready."""
    return window.push(plan.buckets[bucket].pieces, plan.buckets[bucket].priority)


def test_what_fits_into_the_credit_goes_at_once():
    plan = plan_of([KIB_IN_FLOATS] * 3)
    window = SendWindow(3 * 1024)
    assert [push(window, plan, bucket) for bucket in range(3)] == [list(bucket.pieces) for bucket in plan.buckets]


def test_what_does_not_fit_waits_until_something_has_arrived():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    window = SendWindow(1024)
    first, second = plan.pieces
    assert push(window, plan, 0) == [first]
    assert push(window, plan, 1) == []
    assert window.done(first) == [second]


def test_of_those_that_wait_the_one_needed_first_goes_first_whatever_the_order_of_coming():
    plan = plan_of([KIB_IN_FLOATS] * 4)
    window = SendWindow(1024)
    (going,) = push(window, plan, 3)
    for bucket in (2, 0, 1):
        assert push(window, plan, bucket) == []
    order = []
    while not window.idle:
        started = window.done(going)
        if started:
            (going,) = started
            order.append(going.bucket)
    assert order == [0, 1, 2]


def test_an_urgent_bucket_overtakes_the_rest_of_a_large_one():
    plan = plan_of([KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    window = SendWindow(1024)
    (going,) = push(window, plan, 1)
    push(window, plan, 0)
    assert [piece.bucket for piece in window.done(going)] == [0]


def test_priority_is_what_is_given_and_not_the_order_of_pieces():
    plan = plan_of([KIB_IN_FLOATS] * 3)
    window = SendWindow(1024)
    first, second, third = plan.pieces
    assert window.push([first], 5) == [first]
    assert window.push([second], 2) == window.push([third], 1) == []
    assert window.done(first) == [third]
    assert window.done(third) == [second]


def test_pieces_of_one_bucket_go_in_their_order_also_if_they_become_ready_one_by_one():
    plan = plan_of([8 * KIB_IN_FLOATS], piece_bytes=1024)
    window = SendWindow(3 * 1024)
    order = push(window, plan, 0)
    for piece in order:
        order += window.done(piece)
    assert order == list(plan.pieces)
    order = []
    for piece in reversed(plan.pieces):
        order += window.push([piece], 0)
    for piece in order:
        order += window.done(piece)
    assert [piece.index for piece in order] == [7, 6, 5, 0, 1, 2, 3, 4]


def test_a_small_piece_does_not_pass_an_urgent_one_that_does_not_fit():
    plan = plan_of([2 * KIB_IN_FLOATS, KIB_IN_FLOATS, KIB_IN_FLOATS])
    window = SendWindow(2048)
    large, small, going = plan.pieces
    assert push(window, plan, 2) == [going]
    assert push(window, plan, 0) == push(window, plan, 1) == []
    assert window.done(going) == [large]
    assert window.done(large) == [small]


def test_a_piece_larger_than_the_credit_goes_alone():
    plan = plan_of([KIB_IN_FLOATS, 4 * KIB_IN_FLOATS, KIB_IN_FLOATS])
    window = SendWindow(1024)
    small, large, last = plan.pieces
    assert push(window, plan, 0) == [small]
    assert push(window, plan, 1) == [] and push(window, plan, 2) == []
    assert window.done(small) == [large]
    assert window.done(large) == [last]


def test_a_window_is_idle_only_when_nothing_waits_and_nothing_is_under_way():
    plan = plan_of([KIB_IN_FLOATS])
    window = SendWindow(1024)
    assert window.idle
    (piece,) = push(window, plan, 0)
    assert not window.idle
    window.done(piece)
    assert window.idle


def test_a_piece_may_be_under_way_again_before_it_is_known_to_have_arrived_and_counts_twice_then():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    window = SendWindow(2048)
    piece, other = plan.pieces
    assert push(window, plan, 0) == push(window, plan, 0) == [piece]
    assert push(window, plan, 1) == []
    assert window.done(piece) == [other]
    assert window.done(piece) == [] and not window.idle
    window.done(other)
    assert window.idle


def test_what_is_not_under_way_cannot_arrive():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    window = SendWindow(1024)
    first, second = plan.pieces
    push(window, plan, 0)
    push(window, plan, 1)
    with pytest.raises(ProtocolError, match="piece 1 of bucket 1"):  # it waits
        window.done(second)
    assert window.done(first) == [second]
    with pytest.raises(ProtocolError, match="piece 0 of bucket 0"):
        window.done(first)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    piece_bytes=st.integers(1024, 4096),
    credit=st.integers(1024, 20_000),
    seed=st.integers(0, 2**32),
)
def test_the_credit_is_kept_nothing_is_lost_and_nothing_urgent_is_passed_over(sizes, piece_bytes, credit, seed):
    plan = plan_of(sizes, piece_bytes=piece_bytes)
    window = SendWindow(credit)
    pushed, under_way, waiting, gone = [], [], set(), []
    choose = random.Random(seed)
    while len(gone) < len(plan.pieces) - choose.randint(0, 3) or not pushed:
        can_push = [bucket for bucket in range(len(sizes)) if bucket not in pushed]
        number = choose.randrange(len(can_push) + len(under_way))
        if number < len(can_push):
            bucket = can_push[number]
            pushed.append(bucket)
            waiting.update(plan.buckets[bucket].pieces)
            started = push(window, plan, bucket)
        else:
            started = window.done(under_way.pop(number - len(can_push)))
        for piece in started:
            assert piece == min(waiting, key=lambda p: (plan.buckets[p.bucket].priority, p.index))
            waiting.discard(piece)
            under_way.append(piece)
            gone.append(piece)
            assert sum(p.nbytes for p in under_way) <= credit or len(under_way) == 1
        assert under_way or not waiting, "something waits although nothing is under way"
    while under_way:
        started = window.done(under_way.pop())
        under_way += started
        gone += started
    assert window.idle
    assert sorted(p.index for p in gone) == sorted(p.index for b in pushed for p in plan.buckets[b].pieces)
