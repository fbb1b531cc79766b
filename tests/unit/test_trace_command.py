"""``python -m mpipipe.trace``: what it prints, what it draws, and what it says where it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_trace_chrome import BAD, runs
from test_trace_runs import simulate, write_run

from mpipipe.timeline import command, picture
from mpipipe.timeline.analysis import analyse
from mpipipe.timeline.chrome import FILE, read
from mpipipe.timeline.run import TimelineError
from mpipipe.timeline.spans import Span, clusters, lanes

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_run(tmp_path / "timeline", simulate(slow={3: 1.15})).parent


@pytest.fixture
def no_matplotlib(monkeypatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """The exit code, and what was printed where."""
    code = command.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def size(path: Path) -> tuple[int, int]:
    """The width and the height of a PNG file."""
    head = path.read_bytes()[:24]
    assert head.startswith(PNG)
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_the_table_has_a_row_for_each_client_and_for_the_server(capsys, folder, no_matplotlib):
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "")
    assert "1 server, 3 clients, 8 layers or groups of layers (11.3 MB)" in out
    assert "counted: 3 steps, 2 to 4 (the first 2 are left out)" in out
    assert re.search(r"^step time +375\.\d ms$", out, re.MULTILINE)
    assert re.search(r"^communication hidden +\d+\.\d %$", out, re.MULTILINE)
    assert re.search(r"^rank 1 +300\.0 +71\.\d +4\.0 .* rank 3 \(\d+ %\)$", out, re.MULTILINE)
    assert re.search(r"^rank 3 +345\.0 .* itself \(\d+ %\)$", out, re.MULTILINE)
    assert re.search(r"^rank 0 +[\d.]+ +[\d.]+ +[\d.]+ +rank 3 \(100 %, by [\d.]+ ms\)$", out, re.MULTILINE)


def test_every_column_is_explained(capsys, folder, no_matplotlib):
    table, _, legend = run(capsys, folder)[1].partition("What the numbers mean")
    heads = [re.split(r" {2,}", line) for line in table.splitlines() if re.match("client |server ", line)]
    assert len(heads) == 2
    for name in ["step time", "communication hidden", *heads[0][1:], *heads[1][1:]]:
        assert re.search(rf"^ +{name} ", legend, re.MULTILINE), name


def test_one_step_can_be_looked_at_alone(capsys, folder, no_matplotlib):
    assert "counted: step 3 alone" in run(capsys, folder, "--step", 3)[1]


def test_another_optimizer_can_be_looked_at(capsys, tmp_path, no_matplotlib):
    made = simulate(steps=4, clients=1)
    for own in made.values():
        own += [type(mark)(mark.time, mark.kind, mark.bucket, mark.step, mark.peer, mark.piece, 1) for mark in own]
    write_run(tmp_path, made)
    assert "optimizer 1 of 2" in run(capsys, tmp_path, "--optimizer", 1)[1]
    code, _, err = run(capsys, tmp_path, "--optimizer", 2)
    assert code == 2 and "no marks of optimizer 2 (there are: 0, 1)" in err


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_malformed_file_gives_one_line_with_its_name_and_the_reason(capsys, tmp_path, text):
    (tmp_path / FILE).write_text(text)
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"mpipipe.trace: {tmp_path / FILE}: ") and err.count("\n") == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=100))
def test_any_bytes_give_one_line(capsys, tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    code, out, err = run(capsys, tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_folder_without_a_timeline_and_a_step_that_there_is_not_give_one_line(capsys, tmp_path, folder):
    assert run(capsys, tmp_path) == (2, "", f"mpipipe.trace: {tmp_path / FILE}: No such file or directory\n")
    code, out, err = run(capsys, folder, "--step", 99)
    assert (code, out) == (2, "") and err.endswith("it has no complete step 99: there are 0 to 4\n")


def test_without_matplotlib_the_table_is_printed_and_one_line_says_what_a_picture_needs(capsys, folder, no_matplotlib):
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "") and "step time" in out
    assert len(re.findall("^no picture: .*pip install matplotlib$", out, re.MULTILINE)) == 1
    assert not (folder / "step.png").exists()
    assert run(capsys, folder, "--picture", folder / "wanted.png")[0] == 2


def test_who_reads_the_first_lines_only_gets_no_traceback(folder):
    shell = f"'{sys.executable}' -m mpipipe.trace '{folder}' | head -n 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_it_runs_as_a_module_without_warnings_tensorflow_and_mpi(folder):
    code = (
        "import runpy, sys\n"
        "for name in ('tensorflow', 'keras', 'mpi4py', 'matplotlib'): sys.modules[name] = None\n"
        "runpy.run_module('mpipipe.trace', run_name='__main__', alter_sys=True)\n"
    )
    for command_line in (["-c", code, str(folder)], ["-W", "error", "-m", "mpipipe.trace", str(folder / "none")]):
        done = subprocess.run(
            [sys.executable, *command_line], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
        )
        if command_line[0] == "-c":
            assert (done.returncode, done.stderr) == (0, "") and "step time" in done.stdout
        else:
            missing = f"mpipipe.trace: {folder / 'none' / FILE}: No such file or directory\n"
            assert (done.returncode, done.stderr) == (2, missing)


def test_the_picture_is_a_png_file_beside_the_timeline_or_where_it_is_wanted(capsys, folder):
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "") and f"picture of step 2: {folder / 'step.png'}" in out
    few = size(folder / "step.png")
    assert run(capsys, folder, "--step", 3, "--picture", folder / "other.png")[0] == 0
    assert size(folder / "other.png") == few


def test_a_picture_that_cannot_be_written_gives_one_line(capsys, folder):
    pytest.importorskip("matplotlib")
    code, _, err = run(capsys, folder, "--picture", folder / "no" / "such" / "folder.png")
    assert code == 2 and err.startswith("mpipipe.trace: no picture in ") and err.count("\n") == 1


def test_a_picture_of_many_layers_and_ranks_stays_of_a_size_that_can_be_opened(tmp_path):
    pytest.importorskip("matplotlib")
    layers, nbytes = tuple(f"layer_{number}" for number in range(60)), (100_000,) * 60
    made = read(write_run(tmp_path, simulate(3, 7, layers, nbytes), layers, nbytes))
    picture.draw(made, analyse(made), 1, tmp_path / "step.png")
    width, height = size(tmp_path / "step.png")
    assert width < 2000 and height < 6000


def test_a_layer_may_be_called_anything(tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    names = ("$a_b$", "$", "\\frac{", "层", "x" * 200, "tab\there", "\ud800", "")
    made = read(write_run(tmp_path, simulate(4, 1, names), names))
    picture.draw(made, analyse(made), 2, tmp_path / "step.png")
    assert size(tmp_path / "step.png") and not list(recwarn)


@settings(deadline=None, max_examples=5)
@given(runs)
def test_whatever_is_marked_can_be_drawn_where_it_can_be_counted(tmp_path_factory, made):
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("run")
    marked = read(write_run(path, made, (), ()))
    try:
        numbers = analyse(marked)
    except TimelineError:
        return
    picture.draw(marked, numbers, numbers.median_step, path / "step.png")
    assert size(path / "step.png")


def test_phases_that_cover_each_other_get_lanes_of_their_own():
    first, second, third = (Span(phase, 0, 0, start, end) for phase, start, end in
                            (("send", 0.0, 2.0), ("receive", 1.0, 3.0), ("assign", 3.0, 4.0)))  # fmt: skip
    assert lanes([third, second, first]) == [(0, first), (1, second), (0, third)]
    assert clusters([third, second, first]) == [[first, second], [third]]
