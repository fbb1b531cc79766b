"""The recorder of the timeline, and the comparison of clocks."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.trace import KINDS, Kind, Mark, Recorder, clock_offset


def test_nothing_is_kept_where_nobody_wants_it():
    recorder = Recorder(keep=False)
    recorder.mark("ready", 0, 0)
    assert not recorder.active and recorder.marks == []


def test_marks_are_kept_in_order_with_rising_times():
    recorder = Recorder(keep=True)
    for step in range(3):
        recorder.mark("sent", 4, step, peer=0)
    assert [(m.kind, m.bucket, m.step, m.peer) for m in recorder.marks] == [("sent", 4, step, 0) for step in range(3)]
    assert [m.time for m in recorder.marks] == sorted(m.time for m in recorder.marks)


def test_a_mark_has_no_peer_no_piece_and_the_first_optimizer_unless_it_says_so():
    recorder = Recorder(keep=True)
    recorder.mark("step", -1, 3)
    recorder.mark("received", 2, 3, 1, 17, 4)
    first, second = recorder.marks
    assert (first.peer, first.piece, first.session) == (-1, -1, 0)
    assert second == Mark(second.time, "received", 2, 3, peer=1, piece=17, session=4)


def test_a_listener_hears_every_mark_although_none_is_kept():
    recorder = Recorder(keep=False)
    heard: list[Mark] = []
    recorder.listen(heard.append)
    assert recorder.active
    recorder.mark("reduced", 1, 2)
    assert [(m.kind, m.bucket, m.step, m.peer) for m in heard] == [("reduced", 1, 2, -1)]
    assert recorder.marks == []


def test_a_listener_and_the_timeline_get_the_same_marks():
    recorder = Recorder(keep=True)
    heard: list[Mark] = []
    recorder.listen(heard.append)
    recorder.mark("reduced", 1, 2, piece=3)
    assert recorder.marks == heard


def test_an_export_is_what_json_can_hold_and_short():
    recorder = Recorder(keep=True)
    recorder.mark("step", -1, 0)
    recorder.mark("sent", 3, 0, peer=0, piece=5)
    recorder.mark("ready", 1, 0, session=2)
    recorder.describe(0, ["conv", "dense"], [400, 800])
    export = recorder.export()
    assert json.loads(json.dumps(export)) == export
    assert export["sessions"] == {"0": {"layers": ["conv", "dense"], "nbytes": [400, 800]}}
    rows = [[KINDS[row[1]], *row[2:]] for row in export["marks"]]
    assert rows == [["step", -1, 0], ["sent", 3, 0, 0, 5], ["ready", 1, 0, -1, -1, 2]]
    times = [export["origin"] + row[0] for row in export["marks"]]
    assert times == pytest.approx([mark.time * 1e6 for mark in recorder.marks], abs=1)


def test_an_export_without_marks_is_one_too():
    assert Recorder(keep=True).export() == {"origin": 0, "marks": [], "sessions": {}}


def test_every_bucket_that_has_a_name_has_a_size():
    with pytest.raises(ValueError, match="2 names but 1 sizes"):
        Recorder(keep=True).describe(0, ["a", "b"], [1])


def test_kinds_can_be_listed():
    assert KINDS == get_args(Kind) and "step" in KINDS and "assigned" in KINDS


def test_the_sample_with_the_shortest_round_trip_gives_the_offset():
    # The server's clock is 100 s ahead. The second message took as long there as back; the others did not.
    samples = [(0.0, 100.9, 1.0), (2.0, 102.05, 2.1), (3.0, 103.01, 3.5)]
    offset, uncertainty = clock_offset(samples)
    assert offset == pytest.approx(100.0) and uncertainty == pytest.approx(0.05)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1)), min_size=1),
)
def test_the_true_offset_is_never_further_away_than_the_uncertainty(true, ways):
    samples = [(before, before + there + true, before + there + back) for before, there, back in ways]
    offset, uncertainty = clock_offset(samples)
    assert abs(offset - true) <= uncertainty + 1e-8
    assert uncertainty <= min((after - before) / 2 for before, _, after in samples)


@pytest.mark.parametrize(("samples", "reason"), [([], "no samples"), ([(2.0, 0.0, 1.0)], "before it was sent")])
def test_clocks_cannot_be_compared_by_nothing_or_by_nonsense(samples, reason):
    with pytest.raises(ValueError, match=reason):
        clock_offset(samples)
