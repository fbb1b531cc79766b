"""Bad values, checkpoints, and neighbours that use MPI and processes too."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from cases.common import (
    RANK,
    SIZE,
    WORLD,
    assert_same_everywhere,
    compiled,
    everywhere,
    fit,
    mlp,
    record,
    regression,
    settings,
    train_function,
)
from cases.features import logged, shared_folder
from mpi4py import MPI

import mpipipe as mp

SETTINGS = {"fuse_bytes": 0}

# Bad values.


def steps_of_which_one_is_not_finite(optimizer):
    """Weights and iterations after each of four steps; in the second of them one client has NaNs."""
    x, y = mp.shard(*regression())
    model = mlp(seed=1)
    step = train_function(model, optimizer)
    seen = []
    for number in range(4):
        step(x * (float("nan") if RANK == 1 and number == 1 else 1.0), y)
        seen.append(([weight.copy() for weight in model.get_weights()], int(optimizer.iterations)))
    optimizer.finish(model)
    return seen, model


def case_a_step_that_is_not_finite_is_skipped_on_all_ranks():
    with settings(on_nonfinite="skip"), logged() as lines:
        optimizer = mp.DistributedOptimizer(keras.optimizers.Adam(0.01))
        seen, model = steps_of_which_one_is_not_finite(optimizer)
    for (weights, _), (before, _) in zip(seen[1:2], seen[:1], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(weights, before, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(seen[2][0], seen[1][0], strict=True))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert_same_everywhere(model.get_weights())
    assert everywhere(int(optimizer.iterations)) == [3] * SIZE
    if RANK == 0:
        (line,) = [line for line in lines if "not finite" in line and "has sent" in line]
        assert "rank 1 has sent a gradient of" in line and "in step 1 " in line and "skipped on all ranks" in line


def case_a_step_that_is_not_finite_is_used_and_said_as_often_as_doublings():
    with settings(on_nonfinite="warn"), logged() as lines:
        optimizer = mp.DistributedOptimizer("sgd")
        _, model = steps_of_which_one_is_not_finite(optimizer)
    assert not all(np.isfinite(weight).all() for weight in model.get_weights())  # as in plain Keras
    if RANK == 0:
        said = [line for line in lines if "not finite" in line]
        # Once of rank 1's step; from then on all clients' weights are NaN, in two steps more: 5 gradients in all.
        assert [int(line.split("(")[1].split()[0]) for line in said] == [1, 2, 4], said


def case_nobody_looks_where_a_loss_scale_is_meant_to_overflow():
    x, y = mp.shard(*regression())
    with settings(on_nonfinite="raise"):
        optimizer = mp.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**15))
        model = mlp(seed=1)
        step = train_function(model, optimizer)
        for number in range(3):
            step(x * (float("inf") if RANK == 1 and number == 1 else 1.0), y)
        optimizer.finish(model)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert_same_everywhere(model.get_weights())


# Checkpoints. (That a run goes on where it was broken off is in tests/chaos.)


def case_a_checkpoint_is_made_of_seconds_too_and_at_the_end():
    from datetime import timedelta

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)

    x, y = regression()
    with shared_folder() as folder:
        saving = mp.callbacks.Checkpoint(folder, every=timedelta(seconds=0.2), keep=100)
        model = compiled(mlp(seed=1))
        fit(model, x, y, epochs=12, callbacks=[saving, Slow()])
        WORLD.Barrier()
        numbers = numbers_in(folder)
        assert len(numbers) >= 3 and numbers[-1] == 12 * 6, numbers
        # The run is over: the script does nothing more, and has its weights.
        again = compiled(mlp())
        fit(again, x, y, epochs=12, callbacks=[mp.callbacks.Checkpoint(folder, every=10)])
        for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
            assert np.array_equal(a, b)
        # With more epochs it goes on.
        fit(again, x, y, epochs=13, callbacks=[mp.callbacks.Checkpoint(folder, every=10)])
        assert everywhere(int(again.optimizer.iterations)) == [13 * 6] * SIZE


def numbers_in(folder):
    """After how many steps the checkpoints in a folder were written."""
    return sorted(int(path.stem.split("-")[1]) for path in Path(folder).glob("*.mpipipe"))


def case_checkpoints_are_made_where_clients_have_different_numbers_of_batches():
    x, y = regression(samples=8 * 12)
    if RANK == 2:
        x, y = x[: 8 * 3], y[: 8 * 3]  # it ends each epoch long before the others
    with shared_folder() as folder:
        model = compiled(mlp(seed=1))
        saving = mp.callbacks.Checkpoint(folder, every=4, keep=100)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[saving])
        WORLD.Barrier()
        assert numbers_in(folder) == [4, 8, 12, 16, 20, 24]


def case_checkpoints_that_are_due_within_a_call_of_several_steps_are_made_when_the_epoch_ends():
    x, y = regression(samples=8 * 6)
    with shared_folder() as folder:
        model = mlp(seed=1)
        optimizer = mp.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, "mse", steps_per_execution=4)
        saving = mp.callbacks.Checkpoint(folder, every=6, keep=100)
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=[saving])
        WORLD.Barrier()
        assert numbers_in(folder) == [6, 12, 18]


def case_a_checkpoint_of_another_model_is_refused():
    from mpipipe.checkpoint import CheckpointError

    x, y = regression()
    with shared_folder() as folder:
        fit(compiled(mlp()), x, y, callbacks=[mp.callbacks.Checkpoint(folder, every=100)])
        if RANK == 0:
            model = compiled(mlp(width=17))
            model.optimizer.build(model.trainable_variables)
            try:
                mp.callbacks.Checkpoint(folder, every=100).restore(model)
            except CheckpointError as error:
                assert "another model" in str(error)
            else:
                raise AssertionError("it was taken")
        else:
            compiled(mlp(width=17))


# Neighbours.


def case_the_users_own_messages_of_any_tag_never_meet_ours():
    x, y = regression()
    stop, came = threading.Event(), []

    def listen():
        while not stop.is_set():
            status = MPI.Status()
            if WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                came.append((status.Get_source(), status.Get_tag(), WORLD.recv(source=status.Get_source())))
            else:
                time.sleep(0.001)

    WORLD.Barrier()
    thread = threading.Thread(target=listen)
    thread.start()

    class Talks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            WORLD.send(("theirs", RANK), (RANK + 1) % SIZE, tag=batch)

    model = compiled(mlp(seed=1))
    fit(model, x, y, epochs=3, callbacks=[Talks()])
    expected = 3 * (32 // 8 if RANK - 1 in range(1, SIZE) else 0)
    deadline = time.monotonic() + 10
    while len(came) < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert all(message == ("theirs", source) for source, _, message in came), came
    assert len(came) >= expected
    assert_same_everywhere(model.get_weights())


class Squares(keras.utils.PyDataset):
    """Batches that are made in other processes, forked after MPI has begun."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = np.full((4, 8), float(index), np.float32)
        return x, x[:, :1]


def case_processes_forked_while_mpi_runs_feed_the_training():
    model = compiled(mlp(seed=1))
    data = mp.shard(Squares(workers=2, use_multiprocessing=True, max_queue_size=4))
    model.fit(data, epochs=12, verbose=0)  # ends as many pools, some of them before their processes have begun
    assert_same_everywhere(model.get_weights())
    dataset = tf.data.Dataset.range(24).map(
        lambda i: tf.py_function(lambda n: np.full(8, float(n), np.float32), [i], tf.float32), num_parallel_calls=2
    )
    dataset = dataset.map(lambda row: (tf.ensure_shape(row, [8]), tf.ensure_shape(row, [8])[:1])).batch(4)
    model.fit(mp.shard(dataset), verbose=0)
    assert_same_everywhere(model.get_weights())


def case_a_handler_of_the_users_own_is_left_alone():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert callable(signal.getsignal(signal.SIGTERM))


# A long run, in which nothing grows.


def resources() -> dict[str, int]:
    """What this rank uses: kilobytes, open files, threads, communicators."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
    made = mp.init().transport.communicators
    files = len(os.listdir("/proc/self/fd"))
    return {"kB": resident, "files": files, "threads": threading.active_count(), "communicators": made}


def case_nothing_grows():
    steps = int(os.environ.get("TEST_SOAK_STEPS", "2000"))
    x = np.zeros((8, 8), np.float32)
    y = np.ones((8, 1), np.float32)
    model, optimizer = mlp(seed=1), mp.DistributedOptimizer("adam")
    seen = {}

    @tf.function
    def step():
        optimizer.take_weights(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # Meets the others now and then, as an epoch's end does.
    for done in range(0, steps, 500):
        for _ in range(500):
            step()
        optimizer.finish(model)
        if done + 500 in (1000, steps):
            seen[done + 500] = resources()
    first, last = seen[1000], seen[steps]
    record("nothing_grows", f"after 1000 steps {first}, after {steps} {last}")
    for name in ("files", "threads", "communicators"):
        assert last[name] == first[name], (name, first, last)
    # What the allocators of TensorFlow and of MPI hold back is not told from growth below this.
    assert last["kB"] - first["kB"] < 8 * 1024, (first, last)
