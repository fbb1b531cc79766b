"""What a process knows of its rank before it has touched MPI."""

from __future__ import annotations

import pytest

from mpipipe import launcher


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
        {"PMI_RANK": "3", "PMI_SIZE": "8"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"},
    ],
)
def test_the_rank_is_known_under_every_launcher(environ):
    assert launcher.rank_and_size(environ) == (3, 8)


@pytest.mark.parametrize(
    "environ", [{}, {"PMI_RANK": "3"}, {"PMI_RANK": "", "PMI_SIZE": "8"}, {"PMI_RANK": "x", "PMI_SIZE": "8"}]
)
def test_without_a_launcher_there_is_no_rank(environ):
    assert launcher.rank_and_size(environ) is None


def test_mpirun_within_a_slurm_job_is_what_counts():
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    mpirun = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    assert launcher.rank_and_size({**slurm, **mpirun}) == (2, 4)


# ------------------------------------------------------------------------------------------------ what is set for MPI


@pytest.fixture
def infiniband(tmp_path):
    """A host's folder of InfiniBand devices, with so many in it."""

    def with_devices(*names: str):
        for name in names:
            (tmp_path / name).mkdir()
        return tmp_path

    return with_devices


def test_both_mpis_get_what_they_need_to_move_data_both_ways_over_tcp(infiniband):
    environ: dict[str, str] = {}
    made = launcher.prepare_mpi(environ, infiniband())
    assert int(environ["OMPI_MCA_btl_tcp_eager_limit"]) >= 4 << 20, "the longest piece takes a handshake"
    assert environ["UCX_RNDV_THRESH"] == "inf"
    assert sorted(made) == sorted(f"{name}={value}" for name, value in environ.items())


def test_ucx_is_left_alone_where_there_is_infiniband(infiniband):
    environ: dict[str, str] = {}
    launcher.prepare_mpi(environ, infiniband("mlx5_0"))
    assert [name for name in environ if name.startswith("UCX")] == []
    assert "OMPI_MCA_btl_tcp_eager_limit" in environ


def test_a_host_without_a_folder_of_infiniband_devices_has_none(tmp_path):
    environ: dict[str, str] = {}
    launcher.prepare_mpi(environ, tmp_path / "infiniband")
    assert "UCX_RNDV_THRESH" in environ


def test_what_the_user_has_set_for_mpi_is_kept(infiniband):
    environ = {"OMPI_MCA_btl_tcp_eager_limit": "1", "UCX_RNDV_THRESH": "64k"}
    made = launcher.prepare_mpi(environ, infiniband())
    assert environ["OMPI_MCA_btl_tcp_eager_limit"] == "1" and environ["UCX_RNDV_THRESH"] == "64k"
    assert not [text for text in made if text.startswith(("OMPI_MCA_btl_tcp_eager_limit", "UCX_RNDV_THRESH"))]


# -------------------------------------------------------------------------------------------- TensorFlow's own threads

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize("launched", [OPEN_MPI, MPICH])
@pytest.mark.parametrize(
    "allowed,available,intra,inter",
    [
        (16, 16, 4, 4),  # four ranks share the host
        (4, 16, 4, 4),  # the launcher has given each its own cores
        (1, 16, 1, 2),
        (2, 2, 1, 2),  # more ranks than cores
    ],
)
def test_a_rank_gives_tensorflow_as_many_threads_as_it_has_cores(launched, allowed, available, intra, inter):
    environ = dict(launched)
    made = launcher.prepare_tensorflow(environ, allowed, available)
    assert environ["TF_NUM_INTRAOP_THREADS"] == str(intra) and environ["TF_NUM_INTEROP_THREADS"] == str(inter)
    assert sorted(made) == [f"TF_NUM_INTEROP_THREADS={inter}", f"TF_NUM_INTRAOP_THREADS={intra}"]


@pytest.mark.parametrize("name", ["TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"])
def test_the_users_number_of_threads_is_kept(name):
    environ = {**OPEN_MPI, name: "3"}
    assert launcher.prepare_tensorflow(environ, 16, 16) == []
    assert environ == {**OPEN_MPI, name: "3"}


@pytest.mark.parametrize("environ", [{}, {"PMI_RANK": "0", "PMI_SIZE": "2"}, {"SLURM_NTASKS_PER_NODE": "4"}])
def test_tensorflows_threads_are_left_alone_without_a_launcher_that_says_how_many_ranks_a_host_has(environ):
    before = dict(environ)
    assert launcher.prepare_tensorflow(environ, 16, 16) == []
    assert environ == before


def test_the_number_of_cores_is_what_the_system_says():
    environ = dict(OPEN_MPI)
    assert launcher.prepare_tensorflow(environ)
    assert int(environ["TF_NUM_INTRAOP_THREADS"]) >= 1 and int(environ["TF_NUM_INTEROP_THREADS"]) >= 2
