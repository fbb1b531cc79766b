"""SIGTERM and SIGINT: they end the run soon, whatever the main thread is doing.

Python calls a handler on the main thread, between two of its instructions. A rank that waits in TensorFlow for what
other ranks send does not come to one. So the number of each signal is also written to a pipe, by the interpreter's own
handler in C, and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

# Seconds that the main thread has to end by KeyboardInterrupt.
_PATIENCE = 1.0


def watch(on_signal: Callable[[int], None]) -> None:
    """Have ``on_signal`` called with SIGTERM or SIGINT, on a thread of its own.

    SIGINT is given to the main thread first, as KeyboardInterrupt. Signals for which the program has a handler of its
    own are left alone, and so are all where it reads them in the same way, or this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    ours = set()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        ours.add(signal.SIGINT)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        ours.add(signal.SIGTERM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    if signal.SIGTERM in ours:
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # the default would end this process at once

    def read() -> None:
        while number := os.read(reader, 1):
            if number[0] in ours:
                if number[0] == signal.SIGINT:
                    time.sleep(_PATIENCE)
                on_signal(number[0])

    # A process that is forked has the same pipe: what ends it would end this run. From the fork to where the pipe is
    # forgotten signals wait, for a pool of processes may end one that has hardly begun.
    masks = threading.local()

    def hold_back() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        os.close(writer)
        if signal.SIGTERM in ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_through()

    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=forget)
    threading.Thread(target=read, name="mpipipe-signals", daemon=True).start()
