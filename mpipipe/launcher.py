"""What can be known of this process's rank before MPI is touched, from the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

# (rank, size) as Open MPI's mpirun, MPICH's and Intel MPI's (PMI), and Slurm's srun set them.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# The variable that TensorFlow reads, and a value of our own (3 to it) by which ours is told from the user's.
_LOG_LEVEL, _SILENT = "TF_CPP_MIN_LOG_LEVEL", "03"


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank and the number of ranks that a launcher gave this process, or None without one."""
    for rank, size in _VARIABLES:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return int(environ[rank]), int(environ[size])
    return None


def quieten_tensorflow() -> None:
    """Silence TensorFlow's start-up messages on all ranks but 0, where TensorFlow has not been imported yet.

    The C++ part reads the variable once, when it is loaded; a value that the user set is kept.
    """
    ranks = rank_and_size()
    wanted = os.environ.get("MPIPIPE_QUIET", "1").strip().lower() not in ("0", "false", "no", "off")
    if wanted and ranks is not None and ranks[0] > 0 and _LOG_LEVEL not in os.environ:
        os.environ[_LOG_LEVEL] = _SILENT


def unquieten_tensorflow() -> None:
    """Undo :func:`quieten_tensorflow`; of use before TensorFlow is imported."""
    if os.environ.get(_LOG_LEVEL) == _SILENT:
        del os.environ[_LOG_LEVEL]
