"""mpipipe and its peers on hosts with links of a chosen rate: one table of efficiencies, JSON and a picture.

    python -m benchmarks [--quick | --full] [--mpi openmpi|mpich|both] [--horovod-python PATH] [--torch-python PATH]

Makes its hosts of network namespaces itself (as root; without root only shared memory is measured). All numbers of a
row come from one run in which the columns take turns. See ``report.NOTES`` for what the columns of the table mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import driver, hosts, report, rows


def main() -> int:
    """Measure, print and write."""
    hosts.clean_up_when_ended()
    options = _options()
    settings = driver.Settings(
        mpich=options.mpich,
        horovod=options.horovod_python,
        torch=options.torch_python,
        rounds=options.rounds,
        steps=options.steps,
        columns=options.columns,
    )
    chosen = _rows(options)
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    begin = time.monotonic()
    for number, row in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}, {time.monotonic() - begin:.0f} s] ", end="", flush=True)
        try:
            results.append(driver.run(row, settings, lambda text: print(text, flush=True)))
        except RuntimeError as error:
            print(f"{row.title} has failed: {error}", file=sys.stderr, flush=True)
            continue
        print("\n".join(report.lines(results[-1])), flush=True)
        _write(options.out, options, results)
    if not results:
        return 1
    report.picture(results, options.out / "efficiency.png")
    print(f"\n{report.table(results)}\n\n{report.goals(results)}")
    print(f"\nwritten: {options.out / 'results.json'}, {options.out / 'efficiency.png'}")
    return 0 if len(results) == len(chosen) and not any(result["failed"] for result in results) else 1


def _options() -> argparse.Namespace:
    has_torch = importlib.util.find_spec("torch") is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rows, about five minutes")
    parser.add_argument("--full", action="store_true", help="all models at all rates on 2, 4 and 8 hosts; hours")
    parser.add_argument("--rows", default="", help="rows (of all) whose title has this in it, such as 'mlp 4 hosts'")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--columns", nargs="*", default=[], help="only columns whose names begin so")
    parser.add_argument("--mpi", choices=["openmpi", "mpich", "both"], default="openmpi")
    parser.add_argument("--mpich", type=Path, default=hosts.ROOT / ".mpich", help="prefix of MPICH (default: .mpich)")
    parser.add_argument("--horovod-python", default="", help="a Python that has Horovod and Open MPI")
    parser.add_argument("--torch-python", default=sys.executable if has_torch else "", help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each column (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a turn (default 4)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    return parser.parse_args()


def _rows(options: argparse.Namespace) -> list[rows.Row]:
    make = rows.everything if options.full else rows.quick if options.quick else rows.four_hosts
    mpis = ["openmpi", "mpich"] if options.mpi == "both" else [options.mpi]
    chosen = [row for mpi in mpis for row in make(mpi)]
    if options.rows:
        every = [row for mpi in mpis for row in rows.everything(mpi)]
        chosen = [row for row in every if options.rows in row.title]
    reason = hosts.why_no_hosts()
    if reason:
        print(f"shared memory only: {reason}")
        chosen = [row for row in chosen if row.rate is None]
    if options.list:
        print("\n".join(row.title for row in chosen))
        raise SystemExit
    if not chosen:
        raise SystemExit("no row to measure")
    return chosen


def _write(folder: Path, options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()}
    settings = {name: str(value) for name, value in vars(options).items()}
    everything = {"machine": machine, "settings": settings, "rows": results}
    (folder / "results.json").write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    sys.exit(main())
