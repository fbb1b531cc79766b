"""Run under mpirun: the cases of modules, one after the other, on all ranks; each is a function that asserts.

usage: run_cases.py MODULE[,MODULE...] [CASE...]
"""

import faulthandler
import importlib
import os
import sys

faulthandler.enable()
if limit := os.environ.get("MPIPIPE_TEST_LIMIT"):
    faulthandler.dump_traceback_later(float(limit), exit=True)

import mpipipe as mp  # noqa: E402

sys.path.insert(0, os.path.dirname(__file__))
modules = [importlib.import_module(f"cases.{name}") for name in sys.argv[1].split(",")]
only = sys.argv[2:]


def say(line):
    """Print a line in one write: print() makes two, between which a launcher may put what another rank says."""
    sys.stdout.flush()
    os.write(1, f"{line}\n".encode())


rank = mp.init(**getattr(modules[0], "SETTINGS", {})).rank
for name, function in [item for module in modules for item in vars(module).items()]:
    name = name.removeprefix("case_")
    if not getattr(function, "__name__", "").startswith("case_") or (only and name not in only):
        continue
    try:
        function()
    except BaseException:
        say(f"FAILED {name} {rank}")
        raise
    say(f"PASSED {name} {rank}")
