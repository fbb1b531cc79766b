"""Disagreement is an error, not a hang: the job ends on all ranks, non-zero, with a message that says what happened."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.mpi.harness import MPIS, RECORDED, ROOT, mpirun

# What happens, and what must be said of it, once.
FAILURES = {
    "models_differ_in_a_shape": (
        r"first layer that differs is '.*/dense_1' \(variable 2\): .*/kernel \(16, 16\) float32 on ranks 0, 1, "
        r"odd/kernel \(16, 17\) float32 on rank 2"
    ),
    "lazy_models_differ_in_a_custom_loop": r"\(16, 1\) float32 on ranks 0, 2, .*\(16, 8\) float32 on rank 1",
    "exception_on_a_client_in_fit": r"\[mpipipe 1\] ZeroDivisionError: the user's own mistake",
    "exception_on_the_server_in_fit": r"\[mpipipe 0\] ZeroDivisionError: the user's own mistake",
    "sys_exit_on_a_client_in_fit": r"\[mpipipe 1\] this rank's script ended in the middle of fit",
    "sys_exit_on_the_server_in_fit": r"\[mpipipe 0\] this rank called sys.exit\(3\)",
    "sys_exit_0_in_a_custom_loop": r"\[mpipipe 0\] rank 1 ended after 6 steps without optimizer.finish\(\)",
    "the_server_leaves_a_custom_loop": r"\[mpipipe 0\] the server's script has ended, but clients go on",
    "only_the_server_fits": r"\[mpipipe 0\] rank 1 is at the end of its script while the server",
    "exception_in_a_helper_thread_of_ours": r"\[mpipipe 1\] ZeroDivisionError: the user's own mistake",
    "the_server_serves_the_model_but_clients_finish_without_it": (
        r"\[mpipipe 0\] rank 1 exchanges 0 variables that are not trained, the server 2"
    ),
    "clients_forget_to_finish_before_fit": (
        r"\[mpipipe 0\] rank 1 is starting fit of another optimizer while the server \(rank 0\) is waiting for"
    ),
    "two_optimizers_with_different_numbers_of_steps": (
        r"\[mpipipe 0\] rank 1 is at the end of an epoch, or in optimizer.finish\(\) of another optimizer while a step"
    ),
    "a_train_step_with_another_optimizer_than_fits": (
        r"\[mpipipe 0\] rank 1 is building its optimizer of another optimizer while the server \(rank 0\) is"
    ),
    "a_gradient_that_only_one_client_has": r"bias gets a gradient on rank 1 but none on rank 2",
    "a_gradient_that_is_not_finite": (
        r"\[mpipipe 0\] rank 1 has sent a gradient of .*dense\S* in step 4 that is not finite: ending the run"
    ),
    "sigterm_that_only_one_client_gets": r"\[mpipipe 0\] rank 1 has got SIGTERM: ending the run on all ranks; saved to",
    "settings_differ": (
        r"\[mpipipe 0\] the ranks have different settings: wire is 'plain' \(rank 0\) and 'bf16' \(rank 1\)"
    ),
    "another_set_of_trainable_variables": r"\[mpipipe 0\] the ranks have built different models. The first layer",
}
# Those that are about several clients; two ranks are enough for the others, and start sooner.
WITH_3_RANKS = (
    "models_differ_in_a_shape",
    "lazy_models_differ_in_a_custom_loop",
    "sys_exit_0_in_a_custom_loop",
    "two_optimizers_with_different_numbers_of_steps",
    "a_gradient_that_only_one_client_has",
)
# The other MPI ends jobs in its own way: that is worth a look at each way in which we ask it to.
ON_BOTH = ("models_differ_in_a_shape", "exception_on_a_client_in_fit")


@pytest.mark.parametrize(
    ("mpi", "failure"), [(mpi, name) for mpi in MPIS for name in FAILURES if mpi == "openmpi" or name in ON_BOTH]
)
def test_all_ranks_end_within_10_seconds_with_one_message(mpi, failure):
    ranks = 3 if failure in WITH_3_RANKS else 2
    job = mpirun(mpi, ranks, str(ROOT / "tests/mpi/run_cases.py"), "failures", failure, limit=90)
    ended = time.time()
    assert job.returncode != 0, job.output
    said = re.findall(FAILURES[failure], job.output)
    assert len(said) == 1, job.output
    first_step = float(re.search(r"FIRST STEP ([\d.]+)", job.output)[1])
    RECORDED.append(f"{failure} ({mpi}): ended {ended - first_step:.1f} s after the first step")
    assert ended - first_step < 10, job.output


def test_mpi_that_the_program_has_initialised_for_one_thread_is_refused_in_one_line_on_every_rank():
    program = (
        "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\nfrom mpi4py import MPI\n"
        "assert MPI.COMM_WORLD.Get_size() == 2\nimport mpipipe as mp\nmp.rank()\n"
    )
    job = mpirun("openmpi", 2, "-c", program, limit=60)
    assert job.returncode != 0
    said = re.findall(r"\[mpipipe [01]\] MPI was initialised for one thread only", job.output)
    assert len(said) in (1, 2) and "Traceback" not in job.output, job.output


def test_tensorflow_and_mpi_may_be_there_before_mpipipe():
    program = (
        "import tensorflow as tf\nfrom mpi4py import MPI\nimport numpy as np, keras\nimport mpipipe as mp\n"
        "m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "m.compile(mp.DistributedOptimizer('sgd'), 'mse')\n"
        "m.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)\n"
        "w = MPI.COMM_WORLD.allgather(m.get_weights()[0].tobytes())\nassert len(set(w)) == 1\n"
    )
    assert (job := mpirun("openmpi", 3, "-c", program)).returncode == 0, job.output


SCRIPT = "import mpipipe as mp; mp.DistributedOptimizer('adam')"


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        (
            SCRIPT,
            {"KERAS_BACKEND": "numpy"},
            "Keras runs on the backend 'numpy', mpipipe needs KERAS_BACKEND=tensorflow",
        ),
        (
            "import tensorflow as tf\nwith tf.distribute.OneDeviceStrategy('CPU').scope():\n " + SCRIPT,
            {},
            "a tf.distribute strategy (OneDeviceStrategy) is active",
        ),
        ("import mpipipe as mp; mp.rank()", {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "no MPI library was found"),
        ("import mpipipe as mp; mp.rank()", {"MPIPIPE_PIECE_BYTES": "much"}, "MPIPIPE_PIECE_BYTES is 'much'"),
        (
            "import mpipipe as mp; mp.rank()",
            {"PMI_RANK": "0", "PMI_SIZE": "4"},
            "the launcher started 4 processes, but the MPI library",
        ),
    ],
)
def test_what_cannot_work_is_one_clear_line(script, env, message):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **env}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=100)
    lines = [line for line in run.stderr.splitlines() if "mpipipe" in line]
    assert run.returncode == 1
    assert len(lines) == 1 and message in lines[0], run.stderr
    assert "Traceback" not in run.stderr


def test_a_script_that_simply_ends_exits_with_0():
    job = mpirun(
        "openmpi",
        3,
        "-c",
        "import mpipipe as mp, numpy as np, keras, sys\n"
        "m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "m.compile(mp.DistributedOptimizer('sgd'), 'mse')\n"
        "m.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)\n"
        "sys.exit(0)",
    )
    assert job.returncode == 0, job.output


def test_one_rank_alone_trains_as_plain_keras_does_and_says_so():
    program = (
        "import mpipipe as mp, numpy as np, keras, sys\n"
        "keras.utils.set_random_seed(1)\n"
        "x = np.random.default_rng(0).normal(size=(32, 4)).astype('f4')\n"
        "def train(optimizer):\n"
        "    keras.utils.set_random_seed(1)\n"
        "    m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])\n"
        "    m.compile(optimizer, 'mse')\n"
        "    h = m.fit(*mp.shard(x, x[:, :1]), batch_size=8, epochs=2, validation_split=0.25, verbose=0)\n"
        "    return m.get_weights(), h.history\n"
        "a, h = train(mp.DistributedOptimizer(keras.optimizers.Adam(0.01)))\n"
        "b, g = train(keras.optimizers.Adam(0.01))\n"
        "assert all((u == v).all() for u, v in zip(a, b)) and h == g, (h, g)\n"
        "assert mp.is_server() and mp.is_client() and mp.num_clients() == 1 and mp.size() == 1\n"
    )
    job = mpirun("openmpi", 1, "-c", program)
    assert job.returncode == 0, job.output
    assert job.output.count("one rank only: training as plain Keras does") == 1
