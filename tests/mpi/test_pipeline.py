"""It is a pipeline, by causality and not by timing."""

import pytest

from tests.mpi.harness import case_names, check_case, run_cases

# MPI, ranks, inter-op threads.
JOBS = [("openmpi", 2, "2"), ("openmpi", 4, "2"), ("openmpi", 4, "1"), ("mpich", 4, "1")]


@pytest.mark.parametrize("case", case_names("pipeline"))
@pytest.mark.parametrize(("mpi", "ranks", "threads"), JOBS)
def test_weights_of_the_last_layer_arrive_before_the_first_layers_gradient_exists(mpi, ranks, threads, case):
    job = run_cases(mpi, ranks, "pipeline", f"TEST_INTER_OP_THREADS={threads}")
    check_case(job, case, ranks)


def test_without_a_pipeline_the_same_model_never_moves():
    job = run_cases("openmpi", 2, "stalled", limit=90)
    check_case(job, "no_step_is_ever_done", 2)
