"""What can be known of this process's rank before MPI is touched, from the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# (rank, size) as Open MPI's mpirun, MPICH's and Intel MPI's (PMI), and Slurm's srun set them.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# What has been set before TensorFlow was loaded, as ``NAME=value``.
prepared: list[str] = []

_INFINIBAND = Path("/sys/class/infiniband")

# The number of ranks on this host, as Open MPI, MPICH and Slurm set it.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")

# TensorFlow reads these when it starts its threads; a number that is set in the program wins over them.
_INTRA, _INTER = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"

# What the MPIs need to move data both ways at once over TCP at full speed, unless the user has set it: without it
# handshakes of long messages queue behind bulk data (a step takes up to twice as long). Open MPI's ob1 over TCP: no
# handshake for messages up to 8 MiB. UCX over TCP, under MPICH: none at all, and segments of 256 KiB instead of 8,
# of which one call moves 16 at most.
_OPEN_MPI = {"OMPI_MCA_btl_tcp_eager_limit": str(8 << 20)}
_UCX = {"UCX_RNDV_THRESH": "inf", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


def prepare_mpi(environ: MutableMapping[str, str] = os.environ, infiniband: Path = _INFINIBAND) -> list[str]:
    """Set what the MPIs read when they are initialised; returns what was set, as ``NAME=value``.

    UCX is left alone where there is InfiniBand: it knows better there.
    """
    wanted = dict(_OPEN_MPI)
    if not (infiniband.is_dir() and any(infiniband.iterdir())):
        wanted |= _UCX
    made = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(made)
    return [f"{name}={value}" for name, value in made.items()]


def prepare_tensorflow(
    environ: MutableMapping[str, str] = os.environ, allowed: int | None = None, available: int | None = None
) -> list[str]:
    """Give TensorFlow as many threads as a rank has cores, where it has not been loaded yet; returns what was set.

    By itself it takes a thread for each core of the host, on every rank. Nothing is set where the user has set anything
    of it, nor without a launcher. There are at least two threads between operations: with one, a layer's gradients
    would not be computed as soon as they could be.

    Args:
        environ: environment variables.
        allowed: the number of cores that this process may run on; by default what the system says.
        available: the number of cores of the host; by default what the system says.
    """
    sizes = [_number(environ.get(name, "")) for name in _LOCAL_SIZES]
    size = next((size for size in sizes if size is not None), None)
    if rank_and_size(environ) is None or size is None or {_INTRA, _INTER, "OMP_NUM_THREADS"} & set(environ):
        return []
    available = (os.cpu_count() or 1) if available is None else available
    if allowed is None:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else available
    # Bound to cores of its own by the launcher, or sharing all of them with the other ranks.
    cores = max(allowed // max(size, 1), 1) if allowed >= available else allowed
    made = {_INTRA: str(cores), _INTER: str(max(cores, 2))}
    environ.update(made)
    return [f"{name}={value}" for name, value in made.items()]


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank and the number of ranks that a launcher gave this process, or None without one."""
    for names in _VARIABLES:
        rank, size = (_number(environ.get(name, "")) for name in names)
        if rank is not None and size is not None:
            return rank, size
    return None


def _number(text: str) -> int | None:
    """A number as a launcher writes it, or None."""
    # Of what else Python calls digits it does not read all (such as a superscript), nor more than some thousands.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
