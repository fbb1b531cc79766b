"""Run under mpirun: the cases of a module, one after the other, on all ranks; each is a function that asserts."""

import faulthandler
import importlib
import os
import sys

faulthandler.enable()
if limit := os.environ.get("MPIPIPE_TEST_LIMIT"):
    faulthandler.dump_traceback_later(float(limit), exit=True)

import mpipipe as mp  # noqa: E402

sys.path.insert(0, os.path.dirname(__file__))
module = importlib.import_module(f"cases.{sys.argv[1]}")
only = sys.argv[2:]


def say(line):
    """Print a line in one write: print() makes two, between which a launcher may put what another rank says."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


rank = mp.init(**getattr(module, "SETTINGS", {})).rank
for name, function in list(vars(module).items()):
    name = name.removeprefix("case_")
    if not getattr(function, "__name__", "").startswith("case_") or (only and name not in only):
        continue
    try:
        function()
    except BaseException:
        say(f"FAILED {name} {rank}")
        raise
    say(f"PASSED {name} {rank}")
