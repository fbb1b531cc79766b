"""Looks, once a second, at whom this rank waits for: says so when it takes long, and ends what will never end.

A rank that is waited for is asked whether it is there. Its transport's thread answers whatever its script does, so a
client that is slow (a validation of minutes, a callback that writes files) is told from one that is gone. The answer
says where its script is, and whether it is in the middle of a step.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpipipe.logs import logger

if TYPE_CHECKING:
    from mpipipe.context import Context

_PERIOD = 1.0  # seconds between looks
# Seconds of waiting after which the other rank is asked, and without an answer after which it counts as gone.
_ASK_AFTER = 3.0
_GONE_AFTER = 5.0

_OURS = str(Path(__file__).parent)
_LIBRARIES = (_OURS, sysconfig.get_paths()["stdlib"], "<")


@dataclass(slots=True)
class _Wait:
    """A wait for one thing of one rank: since when, and when it is said next."""

    what: str
    since: float
    due: float


class Watch:
    """One rank's.

    Args:
        context: the run; it says whom this rank waits for, and is told who is gone.
        clock: seconds, on any scale.
    """

    def __init__(self, context: Context, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._config = context.config
        self._clock = clock
        self._last = clock()
        self._waits: dict[int, _Wait] = {}
        self._asked: dict[int, float] = {}  # since when a rank is asked
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}  # its last answer, and when
        self._elsewhere: dict[int, float] = {}  # when it last was in no step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpipipe-watch", daemon=True)

    def start(self) -> None:
        """Look from now on, on a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more: the network is about to be closed."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def answered(self, rank: int, answer: dict[str, Any]) -> None:
        """A rank has answered. On the transport's thread."""
        self._answers[rank] = (self._clock(), answer)
        if not answer["in_step"]:
            self._elsewhere[rank] = self._clock()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            self.look()

    def look(self) -> None:
        """Look once."""
        now = self._clock()
        self._do_not_count(now - self._last - _PERIOD)
        self._last = now
        awaited = self._context.awaited()
        for rank in list(self._waits):
            if awaited.get(rank) != self._waits[rank].what:
                del self._waits[rank]
                self._asked.pop(rank, None)
        for rank, what in awaited.items():
            wait = self._waits.setdefault(rank, _Wait(what, now, now + self._config.stall_warning))
            waited = now - wait.since
            if waited + _PERIOD >= min(_ASK_AFTER, self._config.stall_warning or _ASK_AFTER):
                self._asked.setdefault(rank, now)
                self._context.transport.send_control(rank, {"kind": "ask"})
            said = f"waiting for {waited:.0f} s: rank {rank}{self._state(rank, now)} {what}"
            if self._config.stall_warning and now >= wait.due:
                wait.due = now + max(waited, self._config.stall_warning)
                logger.warning("%s", said)
            if self._config.stall_abort and self._is_hopeless(rank, now):
                self._context.give_up(rank, said)

    def _do_not_count(self, gap: float) -> None:
        """This process was stopped for a while: nobody could have reached it."""
        if gap < _GONE_AFTER:
            return
        for wait in self._waits.values():
            wait.since, wait.due = wait.since + gap, wait.due + gap
        self._asked = {rank: since + gap for rank, since in self._asked.items()}
        self._answers = {rank: (at + gap, answer) for rank, (at, answer) in self._answers.items()}
        self._elsewhere = {rank: at + gap for rank, at in self._elsewhere.items()}

    def _silence(self, rank: int, now: float) -> float:
        """Seconds for which a rank that is asked has not answered."""
        asked = self._asked.get(rank, now)
        return now - max(asked, self._answers[rank][0]) if rank in self._answers else now - asked

    def _is_hopeless(self, rank: int, now: float) -> bool:
        """Whether a rank is gone, or will not get out of its step. A script elsewhere may take as long as it likes."""
        answered, answer = self._answers.get(rank, (0.0, {"in_step": False}))
        if self._silence(rank, now) >= _GONE_AFTER:
            last = answered  # one that has answered until now may be about to answer again
        elif answer["in_step"]:
            # The time in which it was elsewhere does not count: what is awaited may be under way by now.
            last = self._elsewhere.get(rank, 0.0)
        else:
            return False
        return now - max(self._waits[rank].since, last) >= self._config.stall_abort

    def _state(self, rank: int, now: float) -> str:
        silence = self._silence(rank, now)
        if silence >= _GONE_AFTER:
            return f", which has not answered for {silence:.0f} s,"
        if rank not in self._answers:
            return ""
        where = self._answers[rank][1]["where"]
        return f", which is alive ({where}),"


def place() -> str:
    """Where the script is: the innermost line of the main thread that is not in a library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and "site-packages" not in name and "dist-packages" not in name:
            return f"its script is at {Path(name).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "its script has ended"
