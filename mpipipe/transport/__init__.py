"""Who carries messages: MPI in a run, threads of one process in tests."""
