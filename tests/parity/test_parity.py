"""Training with two clients, each on half of every batch, gives the model that one process would have trained."""

import pytest

from tests.mpi.harness import MPIS, case_names, check_case, run_cases


@pytest.mark.parametrize("case", case_names("parity"))
@pytest.mark.parametrize("mpi", MPIS)
def test_two_clients_equal_one_process(mpi, case):
    check_case(run_cases(mpi, 3, "training,parity"), case, 3)
