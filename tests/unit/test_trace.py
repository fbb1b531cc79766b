"""The timeline."""

from __future__ import annotations

import json

from mpipipe.trace import Mark, Recorder


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


def test_a_listener_hears_every_mark_although_none_is_kept():
    recorder = Recorder(keep=False)
    heard: list[Mark] = []
    recorder.listen(heard.append)
    assert recorder.active
    recorder.mark("reduced", 1, 2)
    assert [(m.kind, m.bucket, m.step, m.peer) for m in heard] == [("reduced", 1, 2, -1)]
    assert recorder.marks == []


def test_a_timeline_is_written_one_mark_a_line_into_a_folder_that_is_made(tmp_path):
    recorder = Recorder(keep=True)
    recorder.mark("ready", 0, 0)
    recorder.mark("sent", 0, 0, peer=0)
    path = recorder.write(str(tmp_path / "some" / "folder"), rank=3)
    assert path == tmp_path / "some" / "folder" / "rank-3.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["rank"], line["kind"], line["peer"]) for line in lines] == [(3, "ready", -1), (3, "sent", 0)]
    assert [line["time"] for line in lines] == [mark.time for mark in recorder.marks]
