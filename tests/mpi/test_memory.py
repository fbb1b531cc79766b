"""How much memory ranks need, whether or not clients may be lost."""

import pytest

from tests.mpi.harness import case_names, check_case, run_cases

# Freed memory goes back at once, else it would be counted as needed: glibc's malloc and oneDNN's allocator, which
# TensorFlow has on processors with certain instructions, keep what they think will soon be wanted again.
GIVE_BACK = ("MALLOC_MMAP_THRESHOLD_=1048576", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1")


@pytest.mark.parametrize("case", case_names("memory"))
@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
def test_memory(options, case):
    check_case(run_cases("openmpi", 4, "memory", *GIVE_BACK, options=options), case, 4)
