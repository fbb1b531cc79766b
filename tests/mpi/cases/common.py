"""What the cases share: data, models, and comparisons across ranks by the user's own MPI traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import mpipipe as mp

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


@contextmanager
def settings(**values):
    """Other settings, for the optimizers whose training begins meanwhile."""
    context = mp.init()
    before = context.config
    context.config = type(before).make(**values)
    try:
        yield
    finally:
        context.config = before


def record(case: str, text: str) -> None:
    """Have something printed in the test's output."""
    os.write(1, f"RECORD {case} rank {RANK}: {text}\n".encode())


def without_mpipipe(program: str) -> str:
    """What a program prints in a process in which mpipipe cannot be imported; nothing of a file was left out in it."""
    command = [sys.executable, "-c", f"import sys; sys.modules['mpipipe'] = None; {program}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "Skipping" not in run.stderr, run.stderr
    return run.stdout


def everywhere(value):
    """The values of all ranks, by rank."""
    return WORLD.allgather(value)


def assert_same_everywhere(arrays) -> None:
    """Arrays are the same on all ranks, bit for bit."""
    digests = everywhere([np.asarray(array).tobytes() for array in arrays])
    assert all(digest == digests[0] for digest in digests), "the ranks differ"


def assert_differ(arrays) -> None:
    """Arrays are different on any two ranks: what is tested later would hold by chance otherwise."""
    digests = everywhere(b"".join(np.asarray(array).tobytes() for array in arrays))
    assert len(set(digests)) == len(digests), "the ranks are the same"


def regression(samples: int = 96, features: int = 8, seed: int = 0):
    """Inputs (samples, features) and targets (samples, 1), the same on all ranks."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, features)).astype(np.float32)
    return x, (x @ random.normal(size=(features, 1)).astype(np.float32) + 0.1).astype(np.float32)


def mlp(layers: int = 3, width: int = 16, features: int = 8, seed: int | None = None):
    """A perceptron; without a seed, with other initial weights on every rank."""
    keras.utils.set_random_seed(RANK if seed is None else seed)
    return keras.Sequential(
        [keras.Input((features,))]
        + [keras.layers.Dense(width, activation="tanh") for _ in range(layers - 1)]
        + [keras.layers.Dense(1)]
    )


def compiled(model, optimizer="sgd", **arguments):
    """The model, compiled for distributed training."""
    model.compile(optimizer=mp.DistributedOptimizer(optimizer), loss="mse", **arguments)
    return model


def fit(model, x, y, batch_size=8, epochs=1, **arguments):
    """Train on this client's part."""
    x, y = mp.shard(x, y)
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **arguments)


def train_function(model, optimizer, graph=True):
    """One step of a loop of the user's own."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return tf.function(step) if graph else step
