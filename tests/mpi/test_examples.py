"""The examples train to the accuracy that the README promises, and print nothing without a rank's prefix."""

import re

from mpipipe.timeline import chrome
from tests.mpi.harness import ROOT, mpirun

KINDS = {0: {"received", "reduced", "updated", "broadcast"}, 1: {"ready", "sent", "received", "assigned"}}


def accuracy(job):
    assert job.returncode == 0, job.output
    return float(re.search(r"held-out accuracy ([\d.]+)", job.output)[1])


def assert_clients_prefix_their_lines(job):
    """Open MPI has put ``[job,rank]<stream>: `` before each line; what clients say begins with their rank."""
    tagged = re.findall(r"^\[[^\],]*,(\d+)\]<\w+>:? ?(.*)$", job.output, re.MULTILINE)
    assert any(rank == "0" for rank, _ in tagged), job.output
    for rank, text in tagged:
        assert rank == "0" or not text.strip() or text.startswith(f"[mpipipe {rank}]"), (rank, text)


def test_the_digits_reach_97_percent_and_every_bucket_is_on_the_timeline(tmp_path):
    timeline = tmp_path / "timeline"
    env = {"MPIPIPE_TIMELINE": str(timeline), "TF_CPP_MIN_LOG_LEVEL": ""}
    example = str(ROOT / "examples/train.py")
    job = mpirun("openmpi", 4, example, cwd=tmp_path, env=env, options=("--output", "tag"))
    assert_clients_prefix_their_lines(job)
    assert accuracy(job) >= 0.97
    assert (tmp_path / "model.keras").is_file()
    # Only the server draws Keras's progress bar.
    assert job.output.count("Epoch 1/12") == 1
    run = chrome.read(timeline / "trace.json")
    assert set(run.marks) == {0, 1, 2, 3}
    for rank, kinds in KINDS.items():
        marks = run.marks[rank]
        steps = {mark.step for mark in marks if mark.bucket >= 0}
        buckets = {mark.bucket for mark in marks if mark.bucket >= 0}
        assert steps == set(range(180)) and len(buckets) > 1
        for kind in kinds:
            found = {(mark.step, mark.bucket) for mark in marks if mark.kind == kind}
            assert found == {(step, bucket) for step in steps for bucket in buckets}, (rank, kind)
        assert rank == 0 or {"step", "loss"} <= {mark.kind for mark in marks}
    # Nobody receives what has not been sent, on the one clock: a piece arrives at the server after it was started.
    started = {(m.step, m.piece): m.time for m in run.marks[1] if m.kind == "started"}
    received = {(m.step, m.piece): m.time for m in run.marks[0] if m.kind == "received" and m.peer == 1}
    assert started.keys() == received.keys() and all(received[key] > started[key] - 1e-3 for key in started)


def test_the_custom_loop_reaches_97_percent(tmp_path):
    assert accuracy(mpirun("openmpi", 4, str(ROOT / "examples/custom_loop.py"), cwd=tmp_path)) >= 0.97


def test_the_custom_loop_alone(tmp_path):
    job = mpirun("openmpi", 1, str(ROOT / "examples/custom_loop.py"), "--epochs", "1", cwd=tmp_path)
    assert accuracy(job) > 0.5
