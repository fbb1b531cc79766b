"""The table: clients on the parts of batches give the model that one process would have trained on the whole ones."""

import keras
import pytest

from tests.mpi.harness import RECORDED
from tests.parity.harness import rows
from tests.parity.table import optimizers, table

CASES = [f"{case.group}: {case.name}" for case in table()]
RUNS = [("openmpi", 2), ("mpich", 3)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mpi", "clients"), RUNS)
def test_clients_equal_one_process(mpi, clients, case):
    row = rows(mpi, clients)[case]
    differences = ", ".join(f"{what} {row[what]:.1e}" for what in ("weights", "slots", "logs"))
    RECORDED.append(f"{case}, {clients} clients: {differences}{'' if row['exact'] else ' (not exact)'}")
    assert "error" not in row, row["error"]
    assert row["clients"] == clients


def test_every_case_is_there_once():
    assert len(set(CASES)) == len(CASES)


def test_what_is_not_exact_or_not_within_the_usual_limit_has_a_reason():
    assert [case.name for case in table() if not case.why and (not case.exact or case.limit > 1e-5)] == []


def test_every_optimizer_that_keras_ships_is_in_the_table():
    base = keras.optimizers.Optimizer
    shipped = {n for n, c in vars(keras.optimizers).items() if isinstance(c, type) and issubclass(c, base)}
    assert {name.split()[0] for name, _ in optimizers()} == shipped - {"Optimizer"}
