"""Priority and credit: which piece goes next, and how many bytes are under way; and that nobody falls behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import plan_of

from mpipipe.errors import ProtocolError
from mpipipe.protocol.messages import AskFor, Pause, Resume
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.schedule import Pacer, SendWindow

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


# ------------------------------------------------------------------------------------------------------------- hurrying


def order_after(window: SendWindow, going: Piece) -> list[Piece]:
    """What goes after a piece that is under way alone, until nothing waits."""
    order = [going]
    for piece in order:
        order += window.done(piece)
    assert window.idle
    return order[1:]


def test_what_is_in_a_hurry_goes_before_all_that_waits():
    plan = plan_of([KIB_IN_FLOATS, KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    urgent, less_urgent, *large = plan.pieces
    window = SendWindow(1024)
    (going,) = push(window, plan, 2)
    push(window, plan, 1)
    window.hurry(reversed(large[:3]))
    assert push(window, plan, 0) == []
    assert order_after(window, going) == [large[1], large[2], urgent, less_urgent, large[3]]


def test_a_piece_that_fits_into_the_credit_when_it_is_hurried_goes_at_once():
    plan = plan_of([KIB_IN_FLOATS, 2 * KIB_IN_FLOATS, KIB_IN_FLOATS])
    going, large, small = plan.pieces
    window = SendWindow(2048)
    assert [push(window, plan, bucket) for bucket in range(3)] == [[going], [], []]
    assert window.hurry([small]) == [small]
    assert window.done(going) == [] and window.done(small) == [large]


def test_a_piece_that_does_not_wait_cannot_be_hurried_and_is_no_more_urgent_when_it_waits_the_next_time():
    plan = plan_of([KIB_IN_FLOATS] * 4)
    window = SendWindow(1024)
    first, second, third, fourth = plan.pieces
    assert window.push([third], 2) == [third]
    assert window.push([fourth], 3) == []
    window.hurry([first, second, third])  # the last of them is under way
    assert order_after(window, third) == [fourth]
    window.hurry([fourth])
    assert window.push([fourth], 3) == [fourth]
    assert window.push([third, second, first], 2) == []
    assert order_after(window, fourth) == [first, second, third]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_piece_that_was_in_a_hurry_goes_once_and_is_not_so_in_its_next_step(times):
    plan = plan_of([KIB_IN_FLOATS] * 3)
    window = SendWindow(1024)
    first, second, third = plan.pieces
    for _ in range(3):
        assert window.push([first], 0) == [first]
        assert window.push([third], 2) == window.push([second], 1) == []
        assert order_after(window, first) == [second, third]
        assert window.push([first], 0) == [first]
        assert window.push([second], 1) == window.push([third], 2) == []
        for _ in range(times):
            window.hurry([third])
        assert order_after(window, first) == [third, second]


# ----------------------------------------------------------------------------------------------------------- one by one


def test_one_by_one_lets_one_piece_go_at_a_time_and_the_end_of_it_lets_more_go():
    plan = plan_of([8 * KIB_IN_FLOATS], piece_bytes=1024)
    window, pieces = SendWindow(3 * 1024), plan.pieces
    assert push(window, plan, 0) == list(pieces[:3])
    assert window.one_by_one(True) == window.one_by_one(True) == []
    assert window.done(pieces[0]) == window.done(pieces[1]) == []
    assert window.done(pieces[2]) == [pieces[3]]
    assert window.done(pieces[3]) == [pieces[4]]
    assert window.one_by_one(False) == [pieces[5], pieces[6]]
    assert window.one_by_one(False) == []
    assert window.done(pieces[4]) == [pieces[7]]


def test_the_first_piece_goes_at_once_also_one_by_one():
    plan = plan_of([KIB_IN_FLOATS] * 2)
    window = SendWindow(2048)
    assert window.one_by_one(True) == []
    assert push(window, plan, 1) == [plan.pieces[1]]
    assert push(window, plan, 0) == []
    assert window.one_by_one(False) == [plan.pieces[0]]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    credit=st.integers(1024, 6000),
    seed=st.integers(0, 2**32),
)
def test_every_piece_goes_once_each_time_the_most_hurried_first_and_the_backlog_is_what_has_not_arrived(
    sizes, credit, seed
):
    plan = plan_of(sizes, piece_bytes=1024)
    window, choose = SendWindow(credit), random.Random(seed)
    waiting: set[Piece] = set()
    hurried: set[Piece] = set()
    under_way: list[Piece] = []
    pushed: Counter[int] = Counter()
    gone: Counter[int] = Counter()
    one_by_one = False

    def urgency(piece: Piece) -> tuple[int, int]:
        return -1 if piece in hurried else plan.buckets[piece.bucket].priority, piece.index

    for left in range(100, -1, -1):
        what = choose.choice(["push", "hurry", "done", "done", "turn"]) if left else "done"
        started: list[Piece] = []
        if what == "push":
            bucket = choose.choice(plan.buckets)
            if not waiting & set(bucket.pieces):
                waiting.update(bucket.pieces)
                pushed.update(piece.index for piece in bucket.pieces)
                started = push(window, plan, bucket.index)
        elif what == "hurry":
            some = choose.sample(plan.pieces, choose.randint(1, len(plan.pieces)))
            hurried |= waiting & set(some)
            started = window.hurry(some)
        elif what == "turn":
            one_by_one = choose.random() < 0.5
            started = window.one_by_one(one_by_one)
        while True:
            for piece in started:
                assert piece == min(waiting, key=urgency)
                waiting.discard(piece)
                hurried.discard(piece)
                under_way.append(piece)
                gone[piece.index] += 1
                assert len(under_way) == 1 or not one_by_one
                assert sum(p.nbytes for p in under_way) <= credit or len(under_way) == 1
            if waiting:
                total = sum(p.nbytes for p in under_way) + min(waiting, key=urgency).nbytes
                assert under_way and (one_by_one or total > credit), "something waits for nothing"
            assert window.backlog == sum(piece.nbytes for piece in (*waiting, *under_way))
            assert window.idle == (window.backlog == 0)
            if what != "done" or not under_way:
                break
            started = window.done(under_way.pop(choose.randrange(len(under_way))))
            what = "done" if not left else "once"
    assert window.idle and gone == pushed


# --------------------------------------------------------------------------------------------------------- side by side

FAR = 1 << 30  # bytes ahead that nobody ever is


def come(pacer: Pacer, client: int, pieces: Iterable[Piece], step: int = 0) -> list[Pause | Resume | AskFor]:
    """Pieces come from a client, one after the other: all that is to be done about it."""
    return [command for piece in pieces for command in pacer.received(client, piece, step)]


def are_reduced(pacer: Pacer, pieces: Iterable[Piece], clients: Iterable[int] = (1, 2)) -> list[Pause | Resume]:
    return [command for piece in pieces for command in pacer.reduced(piece, clients)]


def test_nobody_pauses_where_nobody_is_known_to_be_sending():
    plan = plan_of([KIB_IN_FLOATS] * 4 + [4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2, 3], 0)
    *small, large = plan.buckets
    assert come(pacer, 2, large.pieces) == [], "the only one that is known to be sending"
    for bucket in small:
        assert come(pacer, 1, bucket.pieces) == []
    assert come(pacer, 3, small[0].pieces) == []


def test_a_client_pauses_when_it_is_ahead_of_another_by_more_than_the_slack_and_goes_on_when_it_is_not():
    plan = plan_of([6 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    assert come(pacer, 2, plan.pieces[:1]) == []
    assert come(pacer, 1, plan.pieces[:2]) == [], "it is ahead by the slack"
    assert come(pacer, 1, plan.pieces[2:3]) == [Pause(1)]
    assert come(pacer, 1, plan.pieces[3:4]) == [], "it pauses already"
    assert are_reduced(pacer, plan.pieces[:1]) == [], "both are as far as they were from each other"
    assert come(pacer, 2, plan.pieces[1:2]) == []
    assert come(pacer, 2, plan.pieces[2:3]) == [Resume(1)]
    assert come(pacer, 1, plan.pieces[4:5]) == [Pause(1)]


def test_a_piece_that_comes_twice_is_an_error():
    plan = plan_of([2 * KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    come(pacer, 1, plan.buckets[1].pieces)
    with pytest.raises(ProtocolError, match="rank 1 has sent more pieces of bucket 1 in step 0 than it has"):
        come(pacer, 1, plan.buckets[1].pieces[:1])


def test_a_client_pauses_for_the_one_that_has_sent_least():
    plan = plan_of([8 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2, 3], 2048)
    for count in range(3):
        assert come(pacer, 1, plan.pieces[count : count + 1]) == come(pacer, 2, plan.pieces[count : count + 1]) == []
    assert come(pacer, 3, plan.pieces[:1]) == []
    assert come(pacer, 1, plan.pieces[3:4]) == [Pause(1)]
    assert come(pacer, 2, plan.pieces[3:5]) == [Pause(2)]
    assert come(pacer, 3, plan.pieces[1:2]) == [Resume(1)]
    assert come(pacer, 3, plan.pieces[2:3]) == [Resume(2)]


def test_nobody_goes_on_pausing_for_a_client_that_has_sent_all_of_a_bucket_and_may_be_computing():
    plan = plan_of([2 * KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    small, large = (bucket.pieces for bucket in plan.buckets)
    assert come(pacer, 1, large) == []
    assert come(pacer, 2, small[:1]) == [Pause(1)]
    assert come(pacer, 2, small[1:]) == [Resume(1)]


def test_a_client_is_not_behind_by_the_steps_in_which_it_took_no_part():
    plan = plan_of([4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    for step in range(3):
        assert come(pacer, 1, plan.pieces, step) == are_reduced(pacer, plan.pieces, [1]) == []
    assert come(pacer, 2, plan.pieces[:1], 3) == come(pacer, 1, plan.pieces[:2], 3) == []
    assert come(pacer, 1, plan.pieces[2:3], 3) == [Pause(1)]


def test_a_client_goes_on_when_what_it_was_ahead_by_is_reduced():
    plan = plan_of([4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    assert come(pacer, 2, plan.pieces[:1]) == come(pacer, 1, plan.pieces[:2]) == []
    assert come(pacer, 1, plan.pieces[2:3]) == [Pause(1)]
    assert pacer.reduced(plan.pieces[1], [1]) == [Resume(1)]


def test_a_client_pauses_for_another_one_as_soon_as_that_is_known_to_be_sending():
    plan = plan_of([2 * KIB_IN_FLOATS, KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer = Pacer(plan, [1, 2], 1024)
    first, single, large = (bucket.pieces for bucket in plan.buckets)
    assert come(pacer, 1, large) == come(pacer, 2, single) == []
    assert come(pacer, 2, first[:1]) == [Pause(1)]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=5),
    divisor=st.integers(1, 4),
    clients=st.integers(1, 4),
    slack=st.integers(0, 4000),
    late=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_there_is_always_progress_and_when_all_is_reduced_it_is_as_in_the_beginning(
    sizes, divisor, clients, slack, late, seed
):
    plan = plan_of(sizes, piece_bytes=1024 * divisor)
    pacer, fresh = Pacer(plan, range(1, clients + 1), slack), Pacer(plan, range(1, clients + 1), slack)
    choose = random.Random(seed)
    paused: dict[int, int] = {}  # how many pieces still come from each client that pauses
    log: list[tuple[str, int, Piece]] = []
    said: list[object] = []

    def do(commands: Iterable[Pause | Resume | AskFor]) -> None:
        for command in commands:
            said.append(command)
            if isinstance(command, Pause):
                assert command.client not in paused
                paused[command.client] = late
            elif isinstance(command, Resume):
                del paused[command.client]

    def check() -> None:
        ahead = {c: sum(p.nbytes for p in plan.pieces if c in arrived[p.index]) for c in sent}
        partial = {
            client
            for client, pieces in sent.items()
            for bucket in plan.buckets
            if 0 < len(pieces & set(bucket.pieces)) < len(bucket.pieces)
        }
        least = min((ahead[client] for client in partial), default=FAR)
        assert set(paused) == {client for client in sent if ahead[client] > least + slack}
        assert not partial or partial - set(paused), "all that are known to be sending pause"

    sent: dict[int, set[Piece]] = {client: set() for client in range(1, clients + 1)}
    arrived: dict[int, set[int]] = {piece.index: set() for piece in plan.pieces}
    to_send = {client: choose.sample(plan.pieces, len(plan.pieces)) for client in sent}
    while any(to_send.values()) or any(arrived.values()):
        may_come = [client for client in sent if to_send[client] and paused.get(client, 1) > 0]
        complete = [p for p in plan.pieces if len(arrived[p.index]) == clients]
        assert may_come or complete, "everybody waits"
        if complete and (not may_come or choose.random() < 0.3):
            piece = choose.choice(complete)
            arrived[piece.index] = set()
            log.append(("reduced", 0, piece))
            do(pacer.reduced(piece, sent))
        else:
            client = choose.choice(may_come)
            piece = to_send[client].pop()
            sent[client].add(piece)
            arrived[piece.index].add(client)
            paused.update({client: paused[client] - 1} if client in paused else {})
            log.append(("received", client, piece))
            do(pacer.received(client, piece, 0))
        check()
    assert not paused
    for step, other in ((0, fresh), (1, pacer), (2, pacer)):
        again: list[object] = []
        for what, client, piece in log:
            again += other.received(client, piece, step) if what == "received" else other.reduced(piece, sent)
        assert again == [replace(c, step=step) if isinstance(c, AskFor) else c for c in said]


# --------------------------------------------------------------------------------------------------------------- asking


def two_buckets() -> tuple[Pacer, tuple[Piece, ...], tuple[Piece, ...]]:
    plan = plan_of([2 * KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    urgent, large = plan.buckets
    return Pacer(plan, [1, 2], FAR), urgent.pieces, large.pieces


def test_a_client_that_turns_away_is_asked_for_what_others_have_sent_once_and_for_more_when_it_has_come():
    pacer, urgent, large = two_buckets()
    assert come(pacer, 1, large[:3]) == come(pacer, 2, large[:1]) == []
    assert come(pacer, 2, urgent[:1]) == [AskFor(2, large[2], 0)]
    assert come(pacer, 1, large[3:]) == [], "it has been asked already"
    assert come(pacer, 2, large[1:3]) == []
    assert come(pacer, 2, urgent[1:]) == [AskFor(2, large[3], 0)]
    assert come(pacer, 2, large[3:]) == []


def test_a_client_that_has_turned_away_is_asked_when_others_send_more_than_it_has():
    pacer, urgent, large = two_buckets()
    assert come(pacer, 2, [large[0], urgent[0]]) == []
    assert come(pacer, 1, large[:1]) == [], "it has sent that"
    assert come(pacer, 1, large[1:2]) == [AskFor(2, large[1], 0)]
    assert come(pacer, 1, large[2:]) == [], "it has been asked already"


def test_a_client_is_not_asked_for_a_bucket_from_which_it_has_not_turned_away():
    pacer, urgent, large = two_buckets()
    assert come(pacer, 1, large) == []
    assert come(pacer, 2, urgent) == [], "it has not begun with the other one"
    assert come(pacer, 2, large[:2]) == [], "it is at it"
    assert come(pacer, 1, urgent) == []


def test_nobody_is_asked_for_what_nobody_has_sent():
    pacer, urgent, large = two_buckets()
    assert come(pacer, 2, [large[0], urgent[0], large[1], urgent[1]]) == []
    assert come(pacer, 1, [large[0], large[1], urgent[0], urgent[1]]) == []


def test_a_bucket_of_one_piece_is_nothing_to_turn_to():
    plan = plan_of([KIB_IN_FLOATS, 4 * KIB_IN_FLOATS], piece_bytes=1024)
    pacer, (small, *large) = Pacer(plan, [1, 2], FAR), plan.pieces
    assert come(pacer, 1, large) == come(pacer, 2, [large[0], small, large[1]]) == []


def test_a_client_is_asked_anew_for_the_next_gradient_and_only_for_what_has_come_of_that():
    pacer, urgent, large = two_buckets()
    for step in range(3):
        assert come(pacer, 1, large[:3], step) == []
        assert come(pacer, 2, [large[0], urgent[0]], step) == [AskFor(2, large[2], step)]
        assert come(pacer, 2, large[1:], step) == come(pacer, 2, urgent[1:], step) == []
        assert come(pacer, 1, [*large[3:], *urgent], step) == []
        assert are_reduced(pacer, (*urgent, *large)) == []


def test_a_client_is_asked_for_the_step_that_the_bucket_is_in_and_not_for_that_of_the_one_it_has_turned_to():
    pacer, urgent, large = two_buckets()
    come(pacer, 1, urgent)
    come(pacer, 2, urgent)
    are_reduced(pacer, urgent)
    assert come(pacer, 1, large[:3]) == come(pacer, 2, large[:1]) == []
    assert come(pacer, 2, urgent[:1], step=1) == [AskFor(2, large[2], 0)]
