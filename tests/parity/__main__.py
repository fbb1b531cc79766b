"""Print the parity table: ``make parity``, or ``python -m tests.parity [--clients 2 3] [--mpi openmpi mpich]``."""

import argparse

from tests.mpi.harness import MPIS
from tests.parity.harness import markdown, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--clients", nargs="*", type=int, default=[2, 3], help="numbers of clients (of 2 and 3)")
    parser.add_argument("--mpi", nargs="*", choices=MPIS, default=["openmpi"])
    arguments = parser.parse_args()
    found = [row for mpi in arguments.mpi for clients in arguments.clients for row in rows(mpi, clients).values()]
    print(markdown(found))
    wrong = [row for row in found if "error" in row]
    for row in wrong:
        print(f"{row['group']}: {row['name']} with {row['clients']} clients: {row['error']}")
    raise SystemExit(bool(wrong))


main()
