"""The watch, on a clock of its own: what it says of a rank that is waited for, and whom it gives up."""

import logging

import pytest

from mpipipe.config import Config
from mpipipe.logs import logger
from mpipipe.watch import Watch


class Run:
    """A rank that waits, the others that answer or do not, and the time."""

    def __init__(self, **settings):
        self.config = Config.make({}, **settings)
        self.transport = self
        self.now = 1000.0
        self.waits: dict[int, str] = {}
        self.places: dict[int, str] = {}  # where the scripts are of those that answer
        self.in_step: set[int] = set()
        self.asked: list[tuple[float, int]] = []
        self.given_up: list[tuple[float, int, str]] = []
        self.watch = Watch(self, lambda: self.now)

    def awaited(self):
        return dict(self.waits)

    def send_control(self, dest, message):
        assert message == {"kind": "ask"}
        self.asked.append((self.now - 1000, dest))
        if dest in self.places:
            self.watch.answered(dest, {"kind": "here", "where": self.places[dest], "in_step": dest in self.in_step})

    def give_up(self, rank, why):
        self.given_up.append((self.now - 1000, rank, why))
        self.waits.pop(rank)

    def go_on(self, seconds):
        for _ in range(round(seconds)):
            self.now += 1
            self.watch.look()


@pytest.fixture
def said():
    """Gives what has been said until then."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lambda: [record.getMessage() for record in records]
    logger.removeHandler(handler)


def test_a_wait_is_said_after_stall_warning_and_then_at_every_doubling(said):
    run = Run(stall_warning=30, stall_abort=0)
    run.waits, run.places = {2: "owes dense of step 7"}, {2: "its script is at train.py:3, in on_epoch_end"}
    run.go_on(500)
    assert [line.split()[2] for line in said()] == ["30", "60", "120", "240", "480"]
    alive = "rank 2, which is alive (its script is at train.py:3, in on_epoch_end), owes dense of step 7"
    assert said()[0] == f"waiting for 30 s: {alive}"


def test_a_short_wait_is_not_said_and_nobody_is_asked(said):
    run = Run()
    for _ in range(40):
        run.waits = {1: "owes dense of step 7"}
        run.go_on(2)
        run.waits = {}
        run.go_on(1)
    assert not said() and not run.asked


def test_another_wait_for_the_same_rank_begins_anew(said):
    run = Run(stall_warning=10)
    for step in range(5):
        run.waits = {1: f"owes dense of step {step}"}
        run.go_on(9)
    assert not said()


def test_a_rank_that_never_answers_is_given_up_after_stall_abort(said):
    run = Run(stall_warning=30, stall_abort=600)
    run.waits = {1: "owes dense of step 7", 3: "owes dense of step 7"}
    run.places, run.in_step = {3: "its script is at train.py:3, in call"}, set()
    run.go_on(2000)
    ((when, rank, why),) = run.given_up
    assert rank == 1 and 600 <= when <= 602
    assert why.startswith("waiting for 600 s: rank 1, which has not answered for 59")
    assert why.endswith("s, owes dense of step 7")


def test_a_rank_that_is_alive_between_steps_may_take_as_long_as_it_likes():
    run = Run(stall_abort=60)
    run.waits, run.places = {1: "has not begun step 7"}, {1: "its script is at train.py:3, in validate"}
    run.go_on(100_000)
    assert not run.given_up


def test_a_rank_that_is_stuck_in_a_step_is_given_up():
    run = Run(stall_abort=60)
    run.waits, run.places, run.in_step = {1: "owes dense of step 7"}, {1: "its script is at train.py:3, in call"}, {1}
    run.go_on(100)
    ((when, rank, why),) = run.given_up
    assert rank == 1 and 60 <= when <= 62 and "which is alive" in why


def test_the_time_between_steps_does_not_count_as_time_in_the_step():
    run = Run(stall_abort=60)
    run.waits, run.places = {1: "owes dense of step 7"}, {1: "its script is at train.py:3, in validate"}
    run.go_on(1000)
    run.in_step = {1}
    run.go_on(59)
    assert not run.given_up
    run.go_on(3)
    assert [rank for _, rank, _ in run.given_up] == [1]


def test_a_rank_that_falls_silent_after_a_long_validation_has_stall_abort_seconds_too():
    run = Run(stall_abort=60)
    run.waits, run.places = {1: "has not begun step 7"}, {1: "its script is at train.py:3, in validate"}
    run.go_on(1000)
    run.places = {}
    run.go_on(58)
    assert not run.given_up
    run.places = {1: "its script is at train.py:4, in validate"}
    run.go_on(1000)
    assert not run.given_up
    run.places = {}
    run.go_on(62)
    assert [rank for _, rank, _ in run.given_up] == [1]


def test_nobody_is_given_up_where_stall_abort_is_0_and_nothing_said_where_stall_warning_is(said):
    run = Run(stall_warning=0, stall_abort=0)
    run.waits = {1: "owes dense of step 7"}
    run.go_on(10_000)
    assert not run.given_up and not said()


def test_the_time_for_which_this_process_was_stopped_does_not_count(said):
    run = Run(stall_warning=30, stall_abort=60)
    run.waits = {1: "owes dense of step 7"}
    run.go_on(20)
    run.now += 5000  # nobody could have reached it meanwhile
    run.go_on(5)
    assert not run.given_up and not said()
    run.places = {1: "its script is at train.py:3, in call"}
    run.go_on(20)
    assert len(said()) == 1 and said()[0].startswith("waiting for 30 s: rank 1, which is alive")
    assert not run.given_up
