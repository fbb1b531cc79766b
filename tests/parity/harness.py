"""The table's rows from a real mpirun."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.mpi.harness import mpirun

Row = dict[str, Any]

# Seconds for the whole table on one number of clients.
LIMIT = 900


@cache
def rows(mpi: str, clients: int) -> dict[str, Row]:
    """The rows by "group: name", from one job.

    Raises:
        AssertionError: the job ended before the last case.
    """
    job = mpirun(mpi, clients + 1, str(Path(__file__).with_name("run_table.py")), limit=LIMIT)
    found = [json.loads(line.removeprefix("ROW ")) for line in job.lines("ROW ")]
    assert job.returncode == 0, f"the table ended after {len(found)} cases:\n{job.output[-12000:]}"
    return {f"{row['group']}: {row['name']}": row for row in found}


def markdown(found: Iterable[Row]) -> str:
    """A table of rows; one row of the same case for each number of clients that it was run with."""
    lines = ["| | case | clients | weights | slots | logs | limit | |", "|---|---|---|---|---|---|---|---|"]
    for row in sorted(found, key=lambda row: (row["group"], row["name"], row["clients"])):
        numbers = [f"{row[what]:.1e}" for what in ("weights", "slots", "logs")]
        limit = f"{row['limit']:.0e}" if row["exact"] else "not exact"
        remark = row.get("error", row["why"])
        lines.append(f"| {' | '.join([row['group'], row['name'], str(row['clients']), *numbers, limit, remark])} |")
    return "\n".join(lines)
