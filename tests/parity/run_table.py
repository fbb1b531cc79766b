"""Run under mpirun: cases of the table, one after the other; the server prints a row of each, as JSON.

usage: run_table.py [CASE...], where a case is "group: name"

The plain runs come afterwards, spread over the ranks: one process trains each of them, but any.
"""

import faulthandler
import json
import os
import sys
import traceback

faulthandler.enable()
if limit := os.environ.get("MPIPIPE_TEST_LIMIT"):
    faulthandler.dump_traceback_later(float(limit), exit=True)

import mpipipe as mp  # noqa: E402

mp.init(fuse_bytes=0)

from mpi4py import MPI  # noqa: E402

from tests.parity.running import Case, Distributed, Plain, Result, Run  # noqa: E402
from tests.parity.table import table  # noqa: E402


def run(case: Case, where: Run) -> Result:
    """Run a case; a failure says where each rank stood."""
    try:
        return case.run(where)
    except BaseException:
        what = f"{type(where).__name__} {case.group}: {case.name}"
        os.write(1, f"FAILED {what}, rank {mp.rank()}\n{traceback.format_exc()}".encode())
        raise


wanted = sys.argv[1:]
cases = [case for case in table() if not wanted or f"{case.group}: {case.name}" in wanted]
ours = [run(case, Distributed()) for case in cases]
theirs = {at: run(case, Plain()) for at, case in enumerate(cases) if at % mp.size() == mp.rank()}
for part in MPI.COMM_WORLD.gather(theirs) or ():
    for at, result in part.items():
        os.write(1, f"ROW {json.dumps(cases[at].row(ours[at], result))}\n".encode())
