"""What users may rely on, on Open MPI and on MPICH."""

import pytest

from tests.mpi.harness import MPIS, case_names, check_case, run_cases


@pytest.mark.parametrize("case", case_names("training"))
@pytest.mark.parametrize("mpi", MPIS)
def test_training(mpi, case):
    check_case(run_cases(mpi, 3, "training"), case, 3)


@pytest.mark.parametrize("case", case_names("shapes"))
@pytest.mark.parametrize("mpi", MPIS)
def test_models_of_any_shape(mpi, case):
    ranks = 4 if mpi == "openmpi" else 3
    check_case(run_cases(mpi, ranks, "shapes"), case, ranks)
