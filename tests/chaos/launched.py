"""Real mpirun jobs to which something happens, from a seeded schedule, and how each has to end."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.mpi.harness import ROOT, launcher_of

SCRIPT = Path(__file__).parent / "script.py"
EVERY = 7
STEPS = 60  # of a run with 3 clients: 4 epochs of 15
LIMIT = 75.0  # seconds for one launch; those of a fault are far shorter, but a machine may be busy


@dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    seed: int
    kind: str
    mpi: str
    ok: bool
    detail: str
    seconds: float


@dataclass
class Launch:
    """One mpirun, to its end."""

    returncode: int
    output: str
    ended: float  # by the clock of time.time
    left_behind: list[str] = field(default_factory=list)

    @property
    def weights(self) -> dict[int, str]:
        """See :func:`weights_in`."""
        return weights_in(self.output)

    @property
    def after_fault(self) -> float:
        """Seconds from the last fault to the end."""
        return self.ended - max(map(float, re.findall(r"FAULT ([\d.]+)", self.output)))


def weights_in(output: str) -> dict[int, str]:
    """A checksum of each rank's weights, of those that have trained to the end, from what the script has printed."""
    return {int(r): crc for r, crc in re.findall(r"DONE (\d+) (\d+)", output)}


def launch(
    mpi: str,
    folder: Path,
    faults: str = "",
    *,
    ranks: int = 4,
    survive: bool = False,
    env: dict[str, str] | None = None,
    meanwhile: Callable[[subprocess.Popen[str], list[str]], None] | None = None,
) -> Launch:
    """Run the script; ``meanwhile`` is called with the launcher and the growing list of lines once it is under way."""
    launcher, environ = launcher_of(mpi)
    mark = f"mpipipe-chaos-{uuid.uuid4().hex}"
    environ |= {
        "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CHAOS": faults,
        "MPIPIPE_TEST_LIMIT": str(LIMIT - 10), "MPIPIPE_STALL_WARNING": "1", "MPIPIPE_STALL_ABORT": "6", "MARK": mark,
        "MPIPIPE_PIECE_BYTES": "1024", **(env or {}),
    }  # fmt: skip
    options = ["--with-ft", "ulfm"] if survive else []
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [*launcher, *options, "-np", str(ranks), sys.executable, str(SCRIPT), str(folder), str(EVERY)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None

    def read(stream: Any) -> None:
        lines.extend(iter(stream.readline, ""))

    reader = threading.Thread(target=read, args=[process.stdout], daemon=True)
    reader.start()
    deadline = time.monotonic() + LIMIT
    if meanwhile is not None:
        while "UNDER WAY" not in "".join(lines) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        meanwhile(process, lines)
    try:
        process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        lines.append(f"NOT DONE after {LIMIT} s\n")
        os.killpg(process.pid, signal.SIGTERM)
    ended = time.time()
    left = _wait_until_gone(mark, shared)
    reader.join(5)
    return Launch(process.wait(10), "".join(lines), ended, left)


def _wait_until_gone(mark: str, shared: set[str]) -> list[str]:
    """What a job has left: processes with its mark (which are ended) and files in shared memory."""
    deadline = time.monotonic() + 4
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return [f"process {pid}" for pid in left] + sorted(set(os.listdir("/dev/shm")) - shared)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and "Z" not in _state(entry):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


@cache
def reference(state: bool) -> str:
    """The weights of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        done = launch("openmpi", Path(folder) / "checkpoints", env={"CHAOS_STATE": "1"} if state else None)
    assert done.returncode == 0 and len(set(done.weights.values())) == 1 and len(done.weights) == 4, done.output
    return done.weights[0]


class Run:
    """One run: what happens and what must come of it. Methods named ``kind_...`` are the kinds."""

    def __init__(self, seed: int, mpi: str, folder: Path) -> None:
        self.random = random.Random(seed)
        self.mpi, self.folder = mpi, folder
        self.problems: list[str] = []
        self.output = ""

    def launch(self, faults: str = "", **arguments: Any) -> Launch:
        done = launch(self.mpi, self.folder, faults, **arguments)
        self.output += done.output + f"-- exit {done.returncode}\n"
        self.check(not done.left_behind, f"left behind: {done.left_behind}")
        self.check("NOT DONE" not in done.output, "it hung")
        return done

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def check_ended(self, done: Launch, seconds: float, *said: str) -> None:
        """The job has ended non-zero soon after the fault, and this has been said."""
        self.check(done.returncode != 0, "it ended with 0")
        self.check(done.after_fault < seconds, f"it ended {done.after_fault:.1f} s after the fault")
        for what in said:
            self.check(re.search(what, done.output) is not None, f"nothing was said like {what!r}")

    def check_goes_on(self, state: bool = False) -> Launch:
        """The same script, started again, ends with the weights of a run that was not broken off."""
        again = self.launch(env={"CHAOS_STATE": "1"} if state else None)
        self.check(again.returncode == 0, f"started again it ended with {again.returncode}")
        self.check("going on from" in again.output, "started again it did not go on")
        self.check(set(again.weights.values()) == {reference(state)}, f"it ended with other weights: {again.weights}")
        return again

    def step(self, least: int = 10, most: int = 40) -> int:
        return self.random.randint(least, most)

    def death(self) -> str:
        return self.random.choice(["die", "die-soon"])

    # Under an MPI that survives.

    def kind_some_clients_die(self) -> None:
        dying = self.random.sample([1, 2, 3], self.random.randint(1, 2))
        at = self.step()
        steps = {rank: at if self.random.random() < 0.3 else self.step() for rank in dying}
        done = self.launch(",".join(f"{rank}:{step}:{self.death()}" for rank, step in steps.items()), survive=True)
        left = {0, 1, 2, 3} - set(dying)
        self.check(set(done.weights) == left, f"ranks {sorted(done.weights)} were done, not {sorted(left)}")
        self.check(len(set(done.weights.values())) == 1, f"weights differ: {done.weights}")
        for rank in dying:
            said = rf"rank {rank} is lost in step \d+: its process has died; [12] of 3 clients go on"
            self.check(len(re.findall(said, done.output)) == 1, f"the loss of rank {rank} was not said once")

    def kind_all_clients_die(self) -> None:
        at = self.step()
        faults = ",".join(f"{rank}:{at + self.random.randint(0, 3)}:{self.death()}" for rank in (1, 2, 3))
        done = self.launch(faults, survive=True)
        self.check_ended(done, 10, r"no client is left; saved to .*mpipipe")
        self.check(any(self.folder.glob("*.mpipipe")), "there is no checkpoint")
        # Some steps were done without some clients, so the weights are not those of a run to which nothing happens.
        again = self.launch()
        self.check(again.returncode == 0 and "going on from" in again.output, "started again it did not go on")
        self.check(len(again.weights) == 4 and len(set(again.weights.values())) == 1, f"weights: {again.weights}")

    def kind_the_server_dies_and_clients_would_survive(self) -> None:
        done = self.launch(f"0:{self.step()}:{self.death()}", survive=True)
        self.check_ended(done, 10, r"\[mpipipe [123]\] the server \(rank 0\) is lost: its process has died")
        self.check_goes_on()

    def kind_a_client_is_stopped_for_good_and_the_others_survive(self) -> None:
        def let_it_die(process: subprocess.Popen[str], lines: list[str]) -> None:
            _wait_for(lines, "rank 2 is lost", process)
            _kill(lines, 2)

        done = self.launch(f"2:{self.step()}:stop", survive=True, meanwhile=let_it_die)
        self.check(set(done.weights) == {0, 1, 3}, f"ranks {sorted(done.weights)} were done")
        said = (
            r"rank 2 is lost in step \d+: waiting for \d+ s: rank 2, which has not answered for \d+ s, (owes|has not)"
        )
        self.check(re.search(said, done.output) is not None, "it was not said why")

    # On any.

    def kind_a_client_dies(self) -> None:
        self.check_ended(self.launch(f"{self.step() % 3 + 1}:{self.step()}:{self.death()}"), 10)

    def kind_the_server_dies(self) -> None:
        state = self.random.random() < 0.5
        done = self.launch(f"0:{self.step()}:{self.death()}", env={"CHAOS_STATE": "1"} if state else None)
        self.check_ended(done, 10)
        self.check_goes_on(state)

    def kind_a_client_is_stopped_for_a_while(self) -> None:
        rank = self.random.randint(1, 3)

        def let_go(process: subprocess.Popen[str], lines: list[str]) -> None:
            _wait_for(lines, "FAULT", process)
            time.sleep(3.5)
            os.kill(_pid(lines, rank), signal.SIGCONT)

        done = self.launch(f"{rank}:{self.step()}:{self.random.choice(['stop', 'stop-soon'])}", meanwhile=let_go)
        self.check(done.returncode == 0, f"it ended with {done.returncode}")
        self.check(set(done.weights.values()) == {reference(False)}, f"it ended with other weights: {done.weights}")
        self.check(f"s: rank {rank}" in done.output, "nobody was said to be waited for")

    def kind_a_client_is_stopped_for_good(self) -> None:
        rank = self.random.randint(1, 3)

        def let_go(process: subprocess.Popen[str], lines: list[str]) -> None:
            _wait_for(lines, "ending the run on all ranks", process)
            _kill(lines, rank)  # no launcher can end a process that is stopped before this one is

        done = self.launch(f"{rank}:{self.step()}:stop", meanwhile=let_go)
        said = rf"waiting for \d+ s: rank {rank}, which has not answered for \d+ s, .*: ending the run on all ranks"
        self.check_ended(done, 20, said)

    def kind_a_client_is_slow(self) -> None:
        rank = self.random.randint(1, 3)
        done = self.launch(f"{rank}:{self.step()}:dawdle", env={"MPIPIPE_STALL_ABORT": "2"})
        self.check(done.returncode == 0, f"it ended with {done.returncode}")
        self.check(set(done.weights.values()) == {reference(False)}, f"it ended with other weights: {done.weights}")
        said = rf"rank {rank}, which is alive \(its script is at script.py:\d+, in dawdle\)"
        self.check(re.search(said, done.output) is not None, "it was not said that it is alive, and where")

    def kind_a_callback_raises(self) -> None:
        rank = self.random.randint(0, 3)
        done = self.launch(f"{rank}:{self.step()}:fail")
        self.check_ended(done, 10, rf"\[mpipipe {rank}\] ZeroDivisionError: the user's own mistake")
        first = re.search(r"\[mpipipe \d\] (Traceback|.*Error|rank|this)", done.output)
        self.check(first is not None and first[0].startswith(f"[mpipipe {rank}] Traceback"), f"first came {first}")

    def kind_a_rank_exits(self) -> None:
        rank = self.random.randint(0, 3)
        self.check_ended(
            self.launch(f"{rank}:{self.step()}:leave"), 10, rf"\[mpipipe {rank}\] this rank's script ended"
        )

    def kind_terminated(self) -> None:
        def terminate(process: subprocess.Popen[str], lines: list[str]) -> None:
            time.sleep(self.random.uniform(0, 0.5))
            lines.append(f"FAULT {time.time():.3f}\n")
            process.send_signal(signal.SIGTERM)

        before = set(self.folder.glob("*.mpipipe"))
        self.check_ended(self.launch(meanwhile=terminate), 5)
        self.check(set(self.folder.glob("*.mpipipe")) != before, "there is no checkpoint")
        self.check_goes_on()

    def kind_interrupted(self) -> None:
        def interrupt(process: subprocess.Popen[str], lines: list[str]) -> None:
            time.sleep(self.random.uniform(0, 0.5))
            lines.append(f"FAULT {time.time():.3f}\n")
            process.send_signal(signal.SIGINT)

        self.check_ended(self.launch(meanwhile=interrupt), 5)

    def kind_checkpoints_are_corrupt(self) -> None:
        self.check_ended(self.launch(f"0:{self.step(30)}:die"), 10)
        newest = sorted(self.folder.glob("*.mpipipe"))[-1]
        data = bytearray(newest.read_bytes())
        if self.random.random() < 0.5:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        else:
            del data[self.random.randrange(len(data)) :]
        newest.write_bytes(data)
        again = self.check_goes_on()
        self.check(again.output.count(f"{newest} cannot be used") == 1, "the corrupt one was not said")

    def kind_the_disk_is_full(self) -> None:
        with _small_disk(self.folder):
            done = self.launch()
        self.check(done.returncode == 0, f"it ended with {done.returncode}")
        self.check(set(done.weights.values()) == {reference(False)}, f"it ended with other weights: {done.weights}")
        self.check("no checkpoint was written" in done.output, "it was not said")


SURVIVING = (
    "some_clients_die", "all_clients_die", "the_server_dies_and_clients_would_survive", "some_clients_die",
    "a_client_is_stopped_for_good_and_the_others_survive",
)  # fmt: skip
OTHERS = tuple(
    name.removeprefix("kind_") for name in vars(Run) if name.startswith("kind_") and name[5:] not in SURVIVING
)
# Every kind comes, one after the other; what happens in it, when and to whom, follows from the seed.
KINDS = (*SURVIVING, *OTHERS)


def run(seed: int) -> Outcome:
    """The run of a seed."""
    kind = KINDS[seed % len(KINDS)]
    # Only Open MPI survives; the other kinds come on both by turns.
    mpi = "openmpi" if kind in SURVIVING or seed // len(KINDS) % 2 == 0 else "mpich"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        one = Run(seed, mpi, Path(folder) / "checkpoints")
        getattr(one, f"kind_{kind}")()
    detail = "; ".join(one.problems)
    if detail:
        detail += "\n" + one.output[-6000:]
    return Outcome(seed, kind, mpi, not one.problems, detail, time.monotonic() - start)


def _pid(lines: list[str], rank: int) -> int:
    return int(re.findall(rf"PID {rank} (\d+)", "".join(lines))[0])


def _kill(lines: list[str], rank: int) -> None:
    try:
        os.kill(_pid(lines, rank), signal.SIGKILL)
    except ProcessLookupError:
        pass


def _wait_for(lines: list[str], what: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 40
    while what not in "".join(lines) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def _small_disk(folder: Path) -> Any:
    """A folder that is soon full; without the right to mount one, one that cannot be made."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "none", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    else:
        folder.rmdir()
        folder.write_text("not a folder")
        yield
        folder.unlink()
