"""Faults, from seeded schedules, in real mpirun jobs and between threads of one process; prints the tallies.

usage: python -m tests.chaos [RUNS UNDER mpirun] [RUNS IN ONE PROCESS]
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.chaos import inprocess, launched


def main(count: int = 40, in_process: int = 200) -> int:
    """The exit status: 0 if every run has ended as it has to."""
    failed, tally = 0, Counter[str]()
    for seed in range(count):
        outcome = launched.run(seed)
        tally[f"{'as it has to' if outcome.ok else 'NOT AS IT HAS TO'}: {outcome.kind} ({outcome.mpi})"] += 1
        failed += not outcome.ok
        state = "ok" if outcome.ok else f"NOT OK\n{outcome.detail}"
        print(f"seed {seed}, {outcome.kind} ({outcome.mpi}), {outcome.seconds:.0f} s: {state}", flush=True)
    print(f"\n{count} runs")
    for line, times in sorted(tally.items()):
        print(f"{times:5d} {line}")
    return int(bool(inprocess.main(in_process)) or failed > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
