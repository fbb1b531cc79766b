"""The file of the timeline: Chrome's trace events, and what is wrong with a file that is none."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace_runs import LAYERS, NBYTES, export, simulate, write_run

from mpipipe.timeline import chrome
from mpipipe.timeline.run import TimelineError
from mpipipe.trace import KINDS, Mark, write

marks = st.builds(
    lambda time, kind, bucket, step, peer, piece, session: Mark(
        time / 1e6, kind, -1 if kind in ("step", "loss") else bucket, step, peer, piece, session
    ),
    st.integers(0, 2000),
    st.sampled_from(KINDS),
    st.integers(0, 2),
    st.integers(-1, 4),
    st.integers(-1, 2),
    st.integers(-1, 3),
    st.integers(0, 1),
)
runs = st.dictionaries(st.integers(0, 3), st.lists(marks, max_size=60), max_size=3)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> dict:
    return json.loads(write_run(tmp_path_factory.mktemp("run") / "made", simulate()).read_text())


def named(trace: dict, what: str) -> dict:
    """The metadata of processes or threads, by their numbers."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == what]
    return {(event["pid"], event.get("tid")): event["args"] for event in events}


def test_every_event_is_metadata_or_complete_and_has_what_the_format_asks_for(trace):
    assert next(iter(trace)) == "displayTimeUnit" and trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert event["pid"] > 0 and event.get("tid", 1) > 0  # Perfetto takes 0 for the idle task
        if event["ph"] == "X":
            assert type(event["ts"]) is int and type(event["dur"]) is int
            assert event["ts"] >= 0 and event["dur"] > 0 and event["args"]["step"] >= 0


def test_a_rank_is_a_process_and_says_what_it_does(trace):
    names = [args["name"] for args in named(trace, "process_name").values()]
    assert names == ["rank 0 (server)", "rank 1 (client)", "rank 2 (client)", "rank 3 (client)"]
    assert [args["sort_index"] for args in named(trace, "process_sort_index").values()] == [0, 1, 2, 3]


def test_a_layer_is_a_row_in_the_order_of_the_forward_pass_under_that_of_the_steps(trace):
    rows = defaultdict(list)
    for (process, _), args in named(trace, "thread_name").items():
        rows[process].append(args["name"])
    for process, names in rows.items():
        layers = [name for name in names if "(" not in name]
        assert layers == [*(["step"] if process > 1 else []), *LAYERS]
    order = [args["sort_index"] for args in named(trace, "thread_sort_index").values()]
    assert order == sorted(order)


def test_a_thread_has_its_number_for_itself_in_the_whole_file(trace):
    threads = [thread for _, thread in named(trace, "thread_name")]
    assert len(set(threads)) == len(threads)
    assert not set(threads) & {process for process, _ in named(trace, "process_name")}


def test_the_rows_show_every_phase_and_the_forward_and_backward_passes(trace):
    seen = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"forward", "backward", "wait to send", "send", "receive", "assign", "gather", "update", "broadcast"} <= seen
    assert any(name.startswith("wait for ") for name in seen)


def test_a_bucket_of_one_piece_goes_through_its_phases_without_a_gap(tmp_path):
    times = {"ready": 1, "started": 2, "sent": 4, "received": 7, "assigned": 9}
    client = [Mark(time, kind, 0, 0, 0 if kind == "received" else -1) for kind, time in times.items()]
    server = [Mark(3.5, "received", 0, 0, 1), Mark(5, "reduced", 0, 0), Mark(6, "updated", 0, 0)]
    server.append(Mark(7.5, "broadcast", 0, 0, 1))
    path = write_run(tmp_path, {0: server, 1: client}, ("dense",), (4,))
    spans = [
        (event["pid"] - 1, event["name"], event["ts"] / 1e6 + 1, (event["ts"] + event["dur"]) / 1e6 + 1)
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert spans == [
        (0, "gather", 3.5, 5),
        (0, "update", 5, 6),
        (0, "broadcast", 6, 7.5),
        (1, "wait to send", 1, 2),
        (1, "send", 2, 4),
        (1, "at the server", 4, 6),
        (1, "receive", 6, 7),
        (1, "assign", 7, 9),
    ]


def test_the_clocks_of_all_ranks_become_one(tmp_path):
    server, client = [Mark(50.0, "updated", 0, 0)], [Mark(7.25, "received", 0, 0, 0)]
    write(tmp_path, {0: (export(server), 0.0), 1: (export(client), 43.0)})
    run = chrome.read(tmp_path / chrome.FILE)
    assert [mark.time for rank in (0, 1) for mark in run.marks[rank]] == [0.0, 0.25]


def test_what_was_written_is_read_again(tmp_path):
    made = simulate(steps=3)
    run = chrome.read(write_run(tmp_path, made))
    first = min(mark.time for own in made.values() for mark in own)
    for rank, own in made.items():
        own = sorted(own, key=lambda mark: mark.time)
        assert [mark.time for mark in run.marks[rank]] == pytest.approx([mark.time - first for mark in own], abs=3e-6)
        assert {(m.kind, m.bucket, m.step, m.peer, m.piece, m.session) for m in run.marks[rank]} == {
            (m.kind, m.bucket, m.step, m.peer, m.piece, m.session) for m in own
        }
    assert tuple(run.sessions[0][0]) == LAYERS and tuple(run.sessions[0][1]) == NBYTES


def test_several_optimizers_have_rows_of_their_own(tmp_path):
    own = [
        Mark(time, kind, 0, 0, session=session)
        for session in (0, 1)
        for time, kind in ((0.1, "ready"), (0.2, "received"), (0.3, "assigned"))
    ]
    names = named(json.loads(write_run(tmp_path, {1: own}, ("dense",), (4,)).read_text()), "thread_name").values()
    assert {"name": "optimizer 0: dense"} in names and {"name": "optimizer 1: bucket 0"} in names


@settings(deadline=None, max_examples=60)
@given(runs)
def test_whatever_is_marked_no_two_events_of_a_row_cover_each_other_in_part(tmp_path_factory, made):
    path = write_run(tmp_path_factory.mktemp("run"), made, ("a", "b", "c"), (4, 8, 8))
    rows = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], -event["dur"]))
    for row in rows.values():
        open_until: list[int] = []
        for start, negative in sorted(row):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1]
            open_until.append(start - negative)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(TimelineError, match="No such file"):
        chrome.read(tmp_path / chrome.FILE)


GOOD = {"format": 1, "kinds": list(KINDS), "sessions": {}, "ranks": {}}
BAD = {
    "": "not JSON",
    "{": "not JSON",
    "[" * 100_000: "not JSON",
    '{"mpipipe": ' + "9" * 5000 + "}": "not JSON",
    "[]": "not written by mpipipe",
    '{"traceEvents": []}': "not written by mpipipe",
    json.dumps({"mpipipe": {**GOOD, "format": 2}}): "its format is 2",
    json.dumps({"mpipipe": {**GOOD, "kinds": ["lunch"]}}): "no list of kinds",
    json.dumps({"mpipipe": {**GOOD, "ranks": []}}): "is not an object",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"one": []}}}): "rank 'one' is not a number",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": 3}}}): "and not a list of marks",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": [[0, 0, -1]]}}}): r"rank 1 has \[0, 0, -1\], which is no mark",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": [[0, 0, -1, True]]}}}): "which is no mark",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": [[0, 11, 0, 0]]}}}): "which is no mark",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": [[10**400, 2, 0, 0]]}}}): "which is no mark",
    json.dumps({"mpipipe": {**GOOD, "ranks": {"1": [[0, 2, -1, 0]]}}}): "which is no mark",
    json.dumps({"mpipipe": {**GOOD, "sessions": {"0": {"layers": ["a"], "nbytes": []}}}}): "of the same length",
}


@pytest.mark.parametrize(("text", "reason"), BAD.items(), ids=range(len(BAD)))
def test_a_file_that_is_no_timeline_is_refused_with_the_reason(tmp_path, text, reason):
    path = tmp_path / chrome.FILE
    path.write_text(text)
    with pytest.raises(TimelineError, match=reason):
        chrome.read(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def refused_or_read(path: Path) -> None:
    try:
        chrome.read(path)
    except TimelineError as error:
        assert str(error).strip()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / chrome.FILE
    path.write_bytes(content)
    with pytest.raises(TimelineError, match="."):
        chrome.read(path)


@settings(deadline=None)
@given(st.data())
def test_a_timeline_with_anything_in_any_place_is_read_or_refused_with_a_reason(tmp_path_factory, data):
    whole = {
        "mpipipe": {
            "format": 1,
            "kinds": list(KINDS),
            "sessions": {"0": {"layers": ["a", "b"], "nbytes": [4, 8]}},
            "ranks": {"0": [[0, 7, 0, 0], [3, 8, 0, 0]], "1": [[1, 2, 0, 0], [2, 5, 0, 0, 0, 1, 0]]},
        }
    }
    place = whole
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    path = tmp_path_factory.mktemp("changed") / chrome.FILE
    path.write_text(json.dumps(whole))
    refused_or_read(path)
