"""Priority and credit: which piece goes next, and how many bytes are under way."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of

from mpipipe.protocol.schedule import SendWindow

KIB_IN_FLOATS = 256


def test_what_fits_into_the_credit_goes_at_once():
    plan = plan_of([KIB_IN_FLOATS] * 3)
    window = SendWindow(plan, 3 * 1024)
    assert [window.push(bucket) for bucket in range(3)] == [list(bucket.pieces) for bucket in plan.buckets]


def test_what_does_not_fit_waits_until_something_has_left():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    window = SendWindow(plan, 1024)
    first, second = plan.pieces
    assert window.push(0) == [first]
    assert window.push(1) == []
    assert window.done(first) == [second]


def test_of_those_that_wait_the_one_needed_first_goes_first_whatever_the_order_of_coming():
    plan = plan_of([KIB_IN_FLOATS] * 4)
    window = SendWindow(plan, 1024)
    (going,) = window.push(3)
    for bucket in (2, 0, 1):
        assert window.push(bucket) == []
    order = []
    while not window.idle:
        started = window.done(going)
        if started:
            (going,) = started
            order.append(going.bucket)
    assert order == [0, 1, 2]


def test_an_urgent_bucket_overtakes_the_rest_of_a_large_one():
    plan = plan_of([KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    window = SendWindow(plan, 1024)
    (going,) = window.push(1)
    window.push(0)
    assert [piece.bucket for piece in window.done(going)] == [0]


def test_pieces_of_one_bucket_go_in_their_order():
    plan = plan_of([8 * KIB_IN_FLOATS], piece_bytes=1024)
    window = SendWindow(plan, 3 * 1024)
    order = window.push(0)
    for piece in order:
        order += window.done(piece)
    assert order == list(plan.pieces)


def test_a_piece_larger_than_the_credit_goes_alone():
    plan = plan_of([KIB_IN_FLOATS, 4 * KIB_IN_FLOATS, KIB_IN_FLOATS])
    window = SendWindow(plan, 1024)
    small, large, last = plan.pieces
    assert window.push(0) == [small]
    assert window.push(1) == [] and window.push(2) == []
    assert window.done(small) == [large]
    assert window.done(large) == [last]


def test_a_window_is_idle_only_when_nothing_waits_and_nothing_is_under_way():
    plan = plan_of([KIB_IN_FLOATS])
    window = SendWindow(plan, 1024)
    assert window.idle
    (piece,) = window.push(0)
    assert not window.idle
    window.done(piece)
    assert window.idle


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    piece_bytes=st.integers(1024, 4096),
    credit=st.integers(1024, 20_000),
    seed=st.integers(0, 2**32),
)
def test_the_credit_is_kept_nothing_is_lost_and_nothing_urgent_is_passed_over(sizes, piece_bytes, credit, seed):
    plan = plan_of(sizes, piece_bytes=piece_bytes)
    window = SendWindow(plan, credit)
    pushed, under_way, waiting, gone = [], [], set(), []
    choose = random.Random(seed)
    while len(gone) < len(plan.pieces) - choose.randint(0, 3) or not pushed:
        can_push = [bucket for bucket in range(len(sizes)) if bucket not in pushed]
        options = len(can_push) + len(under_way)
        number = choose.randrange(options)
        if number < len(can_push):
            bucket = can_push[number]
            pushed.append(bucket)
            waiting.update(plan.buckets[bucket].pieces)
            started = window.push(bucket)
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
