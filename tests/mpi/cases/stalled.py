"""The same model as in pipeline.py with all layers in one bucket: nothing can move, so that test can fail."""

import os
import threading
import time

from cases import pipeline
from cases.common import RANK

SETTINGS = {"fuse_bytes": 1 << 20}


def case_no_step_is_ever_done():
    threading.Thread(target=pipeline.case_fit, daemon=True).start()
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        time.sleep(0.2)
    assert int(pipeline.waited) <= 1
    print(f"PASSED no_step_is_ever_done {RANK}", flush=True)
    time.sleep(2)  # the other ranks print it too
    os._exit(0)
