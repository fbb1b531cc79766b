"""Under an MPI that survives a process that dies."""

import re

from tests.mpi.harness import mpirun


def test_a_step_in_which_a_client_dies_is_done_again_without_it():
    job = mpirun("openmpi", 4, "tests/mpi/loses_a_client.py", options=("--with-ft", "ulfm"), limit=70)
    assert job.returncode == 0, job.output
    assert len(job.lines("AS WITHOUT IT")) == 3, job.output
    # It died with the new weights of all other layers in hand.
    assert re.search(r"FAULT \[\d, \d, \d\]", job.output), job.output
    assert "rank 3 is lost in step 5: its process has died; 2 of 3 clients go on" in job.output
