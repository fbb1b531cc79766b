"""What users may rely on, on Open MPI and on MPICH."""

import pytest

from tests.mpi.harness import MPIS, case_names, check_case, run_cases


@pytest.mark.parametrize("case", case_names("training") + case_names("features") + case_names("faults"))
@pytest.mark.parametrize("mpi", MPIS)
def test_training(mpi, case):
    check_case(run_cases(mpi, 3, "training,features,faults"), case, 3)


def test_two_runs_on_different_mpis_give_bit_identical_weights():
    runs = [run_cases(mpi, 3, "training,features,faults").lines("RECORD the_bits_of_a_run") for mpi in MPIS]
    assert len(runs[0]) == 3 and sorted(runs[0]) == sorted(runs[1])


# These cost most of their time in TensorFlow, so once.
ONCE = {"200_layers"}
SHAPES = {"openmpi": case_names("shapes"), "mpich": [case for case in case_names("shapes") if case not in ONCE]}


@pytest.mark.parametrize(("mpi", "case"), [(mpi, case) for mpi in MPIS for case in SHAPES[mpi]])
def test_models_of_any_shape(mpi, case):
    ranks = 4 if mpi == "openmpi" else 3
    check_case(run_cases(mpi, ranks, "shapes", only=tuple(SHAPES[mpi])), case, ranks)
