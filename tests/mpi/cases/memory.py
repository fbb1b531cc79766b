"""How much memory a rank needs, in models."""

import ctypes
import gc
import tempfile

import keras
import numpy as np
from cases.common import RANK, SIZE, record

import mpipipe as mp

MODEL, WIDTH, LAYERS = 128, 1448, 16  # MiB
CLIENTS = SIZE - 1


def memory(what):
    """MiB that this process holds ("VmRSS") or has held at most ("VmHWM")."""
    line = next(line for line in open("/proc/self/status") if line.startswith(what))
    return int(line.split()[1]) / 1024


def peak(train):
    """MiB that this process holds at most while it trains, beyond what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is from now on
    before = memory("VmRSS")
    train()
    return memory("VmHWM") - before


def peaks(name, optimizer, callbacks=()):
    """The models that this process holds at most beyond what it held before, as plain Keras and with mpipipe."""
    x = np.zeros((16, WIDTH), np.float32)

    def train(optimizer, callbacks=()):
        keras.utils.set_random_seed(RANK)
        model = keras.Sequential([keras.Input((WIDTH,))] + [keras.layers.Dense(WIDTH) for _ in range(LAYERS)])
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x, x, batch_size=4, verbose=0, callbacks=list(callbacks))

    train(optimizer())  # TensorFlow's own, which comes with the first training
    keras.backend.clear_session()
    plain = peak(lambda: train(optimizer())) / MODEL
    keras.backend.clear_session()
    ours = peak(lambda: train(mp.DistributedOptimizer(optimizer()), callbacks)) / MODEL
    keras.backend.clear_session()
    record(name, f"{ours:.2f} models, plain Keras {plain:.2f}")
    return plain, ours


def most(slots, states):
    """The models that the server may hold, with so many of slots, and so many copies of its weights and slots."""
    kept = CLIENTS if mp.init().transport.survives else 0  # the gradients of a step that may have to be done again
    return CLIENTS + 4 + slots + kept + states * (1 + slots)


def case_memory_is_within_its_bounds():
    """At the server (clients + 4) times the model; at a client three times the model beyond plain Keras."""
    plain, ours = peaks("memory_is_within_its_bounds", lambda: keras.optimizers.SGD(1e-4))
    states = 1 if mp.init().transport.survives else 0
    assert ours < most(0, states) if mp.is_server() else ours - plain < 3


def case_memory_with_checkpoints_is_within_its_bounds():
    """At the server three times weights and slots more: as before the step, what is written, what is being updated."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = mp.callbacks.Checkpoint(folder, every=1)
        name = "memory_with_checkpoints_is_within_its_bounds"
        plain, ours = peaks(name, lambda: keras.optimizers.Adam(1e-5), [checkpoint])
    # At a client plain Keras has the slots, which ours has not.
    assert ours < most(2, 3) if mp.is_server() else ours - (plain - 2) < 3
