"""Run under mpirun: cases of the table, one after the other; the server prints a row of each, as JSON.

usage: run_table.py [CASE...], where a case is "group: name"
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

from tests.parity.table import table  # noqa: E402

wanted = sys.argv[1:]
for case in table():
    title = f"{case.group}: {case.name}"
    if wanted and title not in wanted:
        continue
    try:
        row = case.run()
    except BaseException:
        os.write(1, f"FAILED {title} rank {mp.rank()}\n{traceback.format_exc()}".encode())
        raise
    if row is not None:
        os.write(1, f"ROW {json.dumps(row)}\n".encode())
