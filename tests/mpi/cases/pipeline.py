"""It is a pipeline, by causality: the first layer's backward pass waits until the last layer's new weights are here.

They can only come when the last layer's gradient was sent, reduced, applied and broadcast while the backward pass of
the same step was still going on. Without a pipeline nothing ever moves, which stalled.py shows.
"""

import os

import keras
import tensorflow as tf
from cases.common import RANK, SIZE, WORLD, assert_same_everywhere, fit, regression, train_function

import mpipipe as mp

SETTINGS = {"fuse_bytes": int(os.environ.get("TEST_FUSE_BYTES", "0"))}
if threads := os.environ.get("TEST_INTER_OP_THREADS"):
    tf.config.threading.set_inter_op_parallelism_threads(int(threads))
    tf.config.threading.set_intra_op_parallelism_threads(1)

arrived = tf.queue.FIFOQueue(100, [tf.int32])
waited = tf.Variable(0)


def watch(last_bucket):
    """From now on, note when the last layer's new weights arrive at this client."""
    listener = [last_bucket]

    def on_mark(mark):
        if mark.kind == "received" and mark.bucket == listener[0] and RANK > 0:
            arrived.enqueue(mark.step)

    mp.init().recorder.listen(on_mark)
    return lambda: listener.__setitem__(0, None)


@tf.custom_gradient
def wait_in_backward_pass(y):
    def gradient(dy):
        with tf.control_dependencies([arrived.dequeue(), waited.assign_add(1)]):
            return tf.identity(dy)

    return y, gradient


@keras.saving.register_keras_serializable()
class First(keras.layers.Dense):
    """A layer whose backward pass waits."""

    def call(self, x):
        return wait_in_backward_pass(super().call(x))


def build():
    return keras.Sequential(
        [
            keras.Input((8,)),
            First(16, activation="tanh"),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def finished(model, before, steps, stop):
    """All ranks have done these steps, and each client's backward pass has waited in each of them."""
    stop()
    assert_same_everywhere(model.get_weights())
    assert int(model.optimizer.iterations if hasattr(model, "optimizer") else steps) == steps
    if RANK > 0:
        assert int(waited) - before == steps, f"waited {int(waited) - before} times in {steps} steps"
    WORLD.Barrier()


def train_in_fit(steps_per_execution):
    x, y = regression(samples=8 * (SIZE - 1) * 8)
    model, before, stop = build(), int(waited), watch(2)
    model.compile(mp.DistributedOptimizer("sgd"), "mse", steps_per_execution=steps_per_execution)
    fit(model, x, y, epochs=2)
    finished(model, before, 16, stop)


def case_fit():
    train_in_fit(1)


def case_fit_with_4_steps_per_execution():
    train_in_fit(4)


def case_custom_loop():
    x, y = mp.shard(*regression(samples=64))
    model, before, stop = build(), int(waited), watch(2)
    optimizer = mp.DistributedOptimizer("sgd")
    if mp.is_client():
        step = train_function(model, optimizer)
        for _ in range(6):
            step(x, y)
    else:
        optimizer.serve(model)
    if mp.is_client():
        optimizer.finish(model)
    finished(model, before, 6, stop)


def case_custom_loop_with_4_steps_in_one_function():
    x, y = mp.shard(*regression(samples=64))
    model, before, stop = build(), int(waited), watch(2)
    optimizer = mp.DistributedOptimizer("sgd")
    if mp.is_client():
        step = train_function(model, optimizer)

        @tf.function
        def four_steps():
            for _ in tf.range(4):
                step(x, y)

        optimizer.synchronize(model.trainable_variables)
        four_steps()
        four_steps()
        optimizer.finish(model)
    else:
        optimizer.serve(model)
    finished(model, before, 8, stop)
