"""The numbers of the timeline, on steps made by hand whose answers are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace_chrome import runs
from test_trace_runs import simulate

from mpipipe.timeline.analysis import Numbers, analyse
from mpipipe.timeline.clients import client_steps
from mpipipe.timeline.intervals import difference, intersection, length, near, union
from mpipipe.timeline.run import Run, TimelineError
from mpipipe.trace import Mark

PERIOD = 1.0  # seconds from one step to the next, in the runs below

Event = tuple[Any, ...]  # (rank, seconds after the start of its step, kind, bucket[, peer[, piece]])


def repeated(events: list[Event], steps: int = 6) -> Run:
    """A run of the same step again and again; ``assigned`` happens in the step after the one that it is of."""
    marks: dict[int, list[Mark]] = {}
    for step in range(steps):
        for rank, time, kind, *rest in events:
            of, at = (step - 1, step) if kind == "assigned" else (step, step)
            if of >= 0:
                bucket, *others = rest or [-1]
                marks.setdefault(rank, []).append(Mark(at * PERIOD + time, kind, bucket, of, *others))
    return Run({rank: sorted(own, key=lambda mark: mark.time) for rank, own in marks.items()}, {})


def one_client(numbers: Numbers, rank: int = 1) -> Any:
    return next(client for client in numbers.clients if client.rank == rank)


def causes(numbers: Numbers, rank: int = 1) -> dict[tuple[str, int], float]:
    """Seconds by cause and rank, of one step."""
    client = one_client(numbers, rank)
    return {key: seconds / len(numbers.steps) for key, seconds in client.causes.items() if seconds > 1e-9}


# Two layers; forward to 0.2, backward to 1.0, and the next step begins at once. What the network carries is in by then,
# but for the second layer's weights (bucket 1, whose gradient this odd model computes last): they come at 0.05 of the
# next step, while its first layer computes.
HIDDEN = [
    (1, 0.0, "step"), (1, 0.2, "loss"), (1, 0.6, "ready", 0), (1, 1.0, "ready", 1),
    (1, 0.8, "received", 0, 0), (1, 1.05, "received", 1, 0), (1, 0.0, "assigned", 0), (1, 0.05, "assigned", 1),
]  # fmt: skip


def test_all_is_hidden_where_the_client_computes_all_the_time():
    numbers = analyse(repeated(HIDDEN))
    assert list(numbers.steps) == [2, 3, 4]  # the first two warm up; nobody knows where the last one ends
    assert numbers.hidden == pytest.approx(dict.fromkeys([2, 3, 4], 1.0))
    assert numbers.step_seconds == pytest.approx(dict.fromkeys([2, 3, 4], PERIOD))
    client = one_client(numbers)
    assert (client.computing, client.waiting, client.between) == pytest.approx((1.0, 0.0, 0.0))
    assert client.mostly_for is None


# The same without overlap: both gradients are there at 0.5, both weights at 0.9, and the next forward pass waits for
# them from its beginning at 0.5, which is 0 of its own step.
EXPOSED = [
    (1, 0.0, "step"), (1, 0.4, "assigned", 0), (1, 0.4, "assigned", 1), (1, 0.7, "loss"),
    (1, 1.0, "ready", 0), (1, 1.0, "ready", 1), (1, 1.4, "received", 0, 0), (1, 1.4, "received", 1, 0),
]  # fmt: skip


def test_nothing_is_hidden_where_the_client_waits_for_all_of_it():
    numbers = analyse(repeated(EXPOSED))
    assert numbers.hidden == pytest.approx(dict.fromkeys([2, 3, 4], 0.0))
    client = one_client(numbers)
    assert (client.computing, client.waiting, client.between) == pytest.approx((0.6, 0.4, 0.0))


def test_communication_between_the_steps_is_not_hidden():
    events = [
        (1, 0.0, "step"), (1, 0.0, "assigned", 0), (1, 0.2, "loss"),
        (1, 0.5, "ready", 0), (1, 0.8, "received", 0, 0),
    ]  # fmt: skip
    numbers = analyse(repeated(events))
    assert numbers.hidden[2] == pytest.approx(0.0)
    assert one_client(numbers).between == pytest.approx(0.5)


# One layer, two clients. Rank 1 has its gradient at 0.5 and begins its next step at once, which waits until 0.9: its
# own gradient was on the way until 0.55, rank 2 computed until 0.7 and sent until 0.75, the server worked until 0.8,
# and the weights came at 0.9.
STRAGGLER = [
    (1, -0.5, "step"), (1, -0.1, "assigned", 0), (1, 0.2, "loss"), (1, 0.5, "ready", 0), (1, 0.9, "received", 0, 0),
    (2, -0.3, "step"), (2, -0.1, "assigned", 0), (2, 0.4, "loss"), (2, 0.7, "ready", 0), (2, 0.9, "received", 0, 0),
    (0, 0.55, "received", 0, 1), (0, 0.75, "received", 0, 2), (0, 0.76, "reduced", 0), (0, 0.8, "updated", 0),
    (0, 0.9, "broadcast", 0, 1), (0, 0.9, "broadcast", 0, 2),
]  # fmt: skip


def test_a_client_that_waits_for_another_one_names_it_and_says_where_the_weights_were():
    numbers = analyse(repeated(STRAGGLER))
    assert causes(numbers, 1) == pytest.approx(
        {
            ("own way in", 1): 0.05,
            ("backward", 2): 0.15,
            ("way in", 2): 0.05,
            ("server", 0): 0.05,
            ("way out", 0): 0.1,
        }
    )
    assert one_client(numbers, 1).mostly_for == (2, pytest.approx(0.2 / 0.4))
    assert one_client(numbers, 1).share("way out") == pytest.approx(0.25)


def test_the_straggler_itself_waits_for_nobody_else():
    assert causes(analyse(repeated(STRAGGLER)), 2) == pytest.approx(
        {("own way in", 2): 0.05, ("server", 0): 0.05, ("way out", 0): 0.1}
    )


def test_the_server_says_how_long_it_was_idle_and_which_client_came_last():
    (server,) = analyse(repeated(STRAGGLER)).servers
    assert (server.working, server.gathering, server.idle) == pytest.approx((0.05, 0.2, 0.75))
    assert server.mostly_for == (2, 1.0, pytest.approx(0.2))


def test_the_forward_pass_waits_in_the_middle_where_only_a_later_layer_is_late():
    # Both layers take 0.2 s of a forward pass that ends at 0.5; the second one's weights are there at 0.3 only.
    events = [
        (1, 0.0, "step"), (1, 0.0, "assigned", 0), (1, 0.3, "assigned", 1), (1, 0.5, "loss"),
        (1, 0.75, "ready", 1), (1, 1.0, "ready", 0), (1, 1.0, "received", 0, 0), (1, 1.3, "received", 1, 0),
    ]  # fmt: skip
    step = client_steps(repeated(events).timeline(0), 1)[3]
    (wait,) = step.waits
    assert (wait.bucket, wait.start, wait.end) == (1, pytest.approx(3.2), pytest.approx(3.3))
    assert length(step.computing) == pytest.approx(0.9)


def test_a_layer_that_computes_longer_backward_is_taken_to_compute_longer_forward_too():
    # The first layer has 3/4 of the backward pass, so 0.3 s of the 0.4 s that the forward pass computes.
    events = [
        (1, 0.0, "step"), (1, 0.0, "assigned", 0), (1, 0.4, "assigned", 1), (1, 0.5, "loss"),
        (1, 0.6, "ready", 1), (1, 0.9, "ready", 0), (1, 0.9, "received", 0, 0), (1, 1.4, "received", 1, 0),
    ]  # fmt: skip
    (wait,) = client_steps(repeated(events).timeline(0), 1)[3].waits
    assert (wait.start, wait.end) == (pytest.approx(3.3), pytest.approx(3.4))


def test_where_all_weights_are_assigned_together_the_one_that_came_last_is_waited_for():
    events = [
        (1, 0.0, "step"), (1, 0.3, "assigned", 0), (1, 0.3, "assigned", 1), (1, 0.5, "loss"),
        (1, 0.75, "ready", 1), (1, 1.0, "ready", 0), (1, 1.1, "received", 0, 0), (1, 1.3, "received", 1, 0),
    ]  # fmt: skip
    (wait,) = client_steps(repeated(events).timeline(0), 1)[3].waits
    assert (wait.bucket, wait.start, wait.end) == (1, pytest.approx(3.0), pytest.approx(3.3))


def test_a_late_mark_of_an_assignment_is_no_waiting_when_all_weights_were_in():
    late = [(*event[:1], 0.19, *event[2:]) if event[2:] == ("assigned", 1) else event for event in HIDDEN]
    assert one_client(analyse(repeated(late))).waiting == pytest.approx(0.0)


def test_without_marks_of_the_loss_the_forward_pass_ends_at_the_first_gradient():
    events = [event for event in HIDDEN if event[2] != "loss"]
    step = client_steps(repeated(events).timeline(0), 1)[3]
    assert (step.start, step.loss, step.end) == pytest.approx((3.0, 3.6, 4.0))


def test_without_marks_of_its_steps_a_loop_begins_one_when_it_has_ended_the_one_before():
    events = [event for event in STRAGGLER if event[2] not in ("step", "loss")]
    steps = client_steps(repeated(events).timeline(0), 1)
    assert sorted(steps) == [1, 2, 3, 4, 5]
    assert (steps[3].start, steps[3].loss, steps[3].end) == pytest.approx((2.5, 3.5, 3.5))
    assert steps[3].waiting == pytest.approx(0.4)


def test_without_marks_of_the_server_a_wait_has_no_known_cause():
    client_only = [event for event in STRAGGLER if event[0] == 1]
    assert causes(analyse(repeated(client_only))) == {("unknown", -1): pytest.approx(0.4)}


def test_an_update_of_several_pieces_counts_for_each_of_them():
    # Pieces 4 and 5 are updated together, and so are 6 and 7, which come last; the first one has the mark.
    events = [
        (1, -0.5, "step"), (1, -0.1, "assigned", 0), (1, 0.2, "loss"), (1, 0.5, "ready", 0),
        *[(0, time, "received", 0, 1, piece) for piece, time in ((4, 0.55), (5, 0.55), (6, 0.6), (7, 0.6))],
        *[(0, 0.61, "reduced", 0, -1, piece) for piece in (4, 5, 6, 7)],
        (0, 0.62, "updated", 0, -1, 4), (0, 0.7, "updated", 0, -1, 6),
        *[(1, time, "received", 0, 0, piece) for piece, time in ((4, 0.65), (5, 0.65), (6, 0.9), (7, 0.9))],
    ]  # fmt: skip
    run = repeated(events)
    timeline = run.timeline(0)
    assert [timeline.update_of(0, 2, piece) for piece in (4, 5, 6, 7)] == pytest.approx([2.62, 2.62, 2.7, 2.7])
    assert causes(analyse(run)) == pytest.approx({("own way in", 1): 0.1, ("server", 0): 0.1, ("way out", 0): 0.2})


def test_updates_marked_with_no_piece_count_from_when_a_piece_was_summed():
    marks = [
        *[(0, time, "reduced", 0, -1, piece) for piece, time in ((0, 0.1), (1, 0.3))],
        (0, 0.2, "updated", 0), (0, 0.4, "updated", 0),
    ]  # fmt: skip
    timeline = repeated(marks).timeline(0)
    assert [timeline.update_of(0, 2, piece) for piece in (0, 1)] == pytest.approx([2.2, 2.4])


def test_the_two_slowest_steps_at_the_start_do_not_count():
    made = simulate(steps=7)
    numbers = analyse(Run(made, {}))
    assert list(numbers.steps) == [2, 3, 4, 5]
    assert list(analyse(Run(made, {}), only=1).steps) == [1]


def test_a_run_of_two_steps_is_counted_from_its_beginning():
    assert list(analyse(Run(simulate(steps=2), {})).steps) == [0]


def test_the_median_step_is_one_that_was_counted():
    numbers = Numbers([2, 3, 4], {2: 0.5, 3: 0.9, 4: 0.6}, {}, [], [])
    assert numbers.median_step == 4


@pytest.mark.parametrize(
    ("run", "session", "only", "reason"),
    [
        (Run({}, {}), 0, None, "no marks of optimizer 0"),
        (Run(simulate(steps=1), {}), 0, None, "no complete step"),
        (Run(simulate(steps=4), {}), 0, 3, "no complete step 3: there are 0 to 2"),
        (Run(simulate(steps=4), {}), 1, None, r"no marks of optimizer 1 \(there are: 0\)"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(run, session, only, reason):
    with pytest.raises(TimelineError, match=reason):
        analyse(run, session, only)


def test_what_another_optimizer_computes_hides_communication_too():
    # The second optimizer's step goes on from 0.5 to 0.9, while the first one's gradient is under way.
    marks = []
    for session, start, end in ((0, 0.0, 0.5), (1, 0.5, 0.9)):
        events = [
            (1, start, "step"), (1, start + 0.2, "loss"), (1, end, "ready", 0), (1, 0.9, "received", 0, 0),
            (1, start, "assigned", 0),
        ]  # fmt: skip
        marks += [replace(mark, session=session) for mark in repeated(events).marks[1]]
    run = Run({1: sorted(marks, key=lambda mark: mark.time)}, {})
    assert analyse(run).hidden[2] == pytest.approx(1.0)


def test_a_simulated_run_finds_the_client_that_was_made_slow():
    numbers = analyse(Run(simulate(slow={3: 1.5}, forward=0.1), {}))
    assert [client.computing for client in numbers.clients] == pytest.approx([0.3, 0.3, 0.45])
    assert all(one_client(numbers, rank).mostly_for[0] == 3 for rank in (1, 2))
    assert numbers.servers[0].mostly_for[:2] == (3, 1.0)


@settings(deadline=None)
@given(runs)
def test_whatever_is_marked_there_are_numbers_or_a_reason_for_none(made):
    run = Run({rank: sorted(own, key=lambda mark: mark.time) for rank, own in made.items()}, {})
    try:
        numbers = analyse(run)
    except TimelineError as error:
        assert str(error)
        return
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in numbers.hidden.values())
    assert numbers.median_step in numbers.steps
    for client in numbers.clients:
        assert min(client.computing, client.waiting, client.between) >= 0
        assert all(math.isfinite(seconds) and seconds >= 0 for seconds in client.causes.values())
    for server in numbers.servers:
        assert min(server.working, server.gathering, server.idle) >= 0


cells = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6)


@given(cells, cells)
def test_sets_of_seconds_behave_as_sets(one, other):
    def of(intervals):
        return {cell for start, end in intervals for cell in range(start, end)}

    a, b = union(one), union(other)
    assert of(a) == of(one) and length(a) == len(of(one))
    assert of(intersection(a, b)) == of(one) & of(other)
    assert length(difference(a, b)) == len(of(one) - of(other))
    assert list(near(a, 3, 7)) == [(start, end) for start, end in a if end > 3 and start < 7]
