"""Signals end the run whatever the main thread does; those of forked processes do not."""

from __future__ import annotations

import subprocess
import sys

WATCHING = """
import os, signal, sys, threading, time
from mpipipe import signals
got = []
signals.watch(got.append)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WATCHING + program], capture_output=True, text=True, timeout=60)


def test_a_signal_is_told_while_the_main_thread_does_not_come_to_its_handler():
    done = run(
        "pid = os.getpid()\n"
        "def look():\n"
        "    os.kill(pid, signal.SIGTERM)\n"
        "    time.sleep(0.3)\n"
        "    os.write(1, b'told' if got == [signal.SIGTERM] else b'not told')\n"
        "    os._exit(0)\n"
        "threading.Timer(0.2, look).start()\n"
        "import ctypes\nctypes.CDLL(None).pause()\nctypes.CDLL(None).sleep(30)\n"  # in C, as in a graph
    )
    assert done.stdout == "told", done.stderr


def test_processes_that_are_ended_as_soon_as_they_are_forked_die_and_do_not_end_the_run():
    done = run(
        "def fork():\n"
        "    for _ in range(150):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            time.sleep(10)\n"
        "            os._exit(7)\n"
        "        os.kill(pid, signal.SIGTERM)\n"
        "        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM\n"
        "    print('all ended')\n"
        "thread = threading.Thread(target=fork)\n"
        "thread.start(); thread.join(); time.sleep(0.2)\nprint(got)\n"
    )
    assert done.stdout == "all ended\n[]\n", done.stdout + done.stderr


def test_a_handler_of_the_programs_own_is_left_alone():
    program = "import os, signal, time\nmine = lambda number, frame: None\nsignal.signal(signal.SIGTERM, mine)\n"
    program += WATCHING + "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.3)\n"
    program += "print(got, signal.getsignal(signal.SIGTERM) is mine)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] True\n", done.stderr
