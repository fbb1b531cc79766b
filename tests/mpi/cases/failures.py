"""Ranks that do not do the same, one failure a job: run with its name; each ends non-zero on all ranks.

Not a list of cases: every function here is run alone by test_failures.py, which looks at how the job ends.
"""

import os
import signal
import sys
import tempfile
import threading
import time

import keras
import tensorflow as tf
from cases.common import RANK, WORLD, compiled, fit, mlp, regression, settings, train_function

import mpipipe as mp

SETTINGS = {"fuse_bytes": 0}


def first_step_now():
    """All ranks are here: what follows has to end within 10 s of this moment."""
    WORLD.Barrier()
    if RANK == 0:
        print(f"FIRST STEP {time.time():.3f}", flush=True)


def long_fit(model, **arguments):
    """A training that would take far longer than a test."""
    x, y = regression()
    return fit(model, x, y, epochs=100_000, **arguments)


def first_step_at_the_clients():
    """The clients have done a step each."""
    if RANK == 1:
        print(f"FIRST STEP {time.time():.3f}", flush=True)


def at_step(number, action):
    """A callback that does something in the middle of training."""
    seen = []

    def on_batch(batch, logs):
        seen.append(batch)
        if len(seen) == number:
            print(f"FIRST STEP {time.time():.3f}", flush=True)
            action()

    return keras.callbacks.LambdaCallback(on_train_batch_end=on_batch)


def fail():
    raise ZeroDivisionError("the user's own mistake")


def case_models_differ_in_a_shape():
    model = mlp(layers=4, width=16)
    if RANK == 2:
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(16)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(17, name="odd")(hidden)))
    first_step_now()
    long_fit(compiled(model))


def case_lazy_models_differ_in_a_custom_loop():
    x, y = mp.shard(*regression())
    model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(8 if RANK == 1 else 1)])
    optimizer = mp.DistributedOptimizer("sgd")
    step = train_function(model, optimizer)
    first_step_now()
    while True:
        step(x, y)


def case_exception_on_a_client_in_fit():
    long_fit(compiled(mlp()), callbacks=[at_step(5, fail)] if RANK == 1 else [])


def case_exception_on_the_server_in_fit():
    long_fit(compiled(mlp()), callbacks=[at_step(5, fail)] if RANK == 0 else [])


def case_sigterm_that_only_one_client_gets():
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [mp.callbacks.Checkpoint(folder, every=1000)]
        if RANK == 1:
            callbacks.append(at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        long_fit(compiled(mlp()), callbacks=callbacks)


def case_sys_exit_on_a_client_in_fit():
    long_fit(compiled(mlp()), callbacks=[at_step(5, lambda: sys.exit(0))] if RANK == 1 else [])


def case_sys_exit_on_the_server_in_fit():
    long_fit(compiled(mlp()), callbacks=[at_step(5, lambda: sys.exit(3))] if RANK == 0 else [])


def case_sys_exit_0_in_a_custom_loop():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("sgd")
    step = train_function(model, optimizer)
    for number in range(1_000_000):
        step(x, y)
        if number == 5 and RANK == 1:
            print(f"FIRST STEP {time.time():.3f}", flush=True)
            sys.exit(0)


def case_the_server_leaves_a_custom_loop():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("sgd")
    step = train_function(model, optimizer)
    for _ in range(5 if RANK == 0 else 1_000_000):
        step(x, y)
    if RANK == 0:
        print(f"FIRST STEP {time.time():.3f}", flush=True)


def case_only_the_server_fits():
    model = compiled(mlp())
    first_step_now()
    if RANK == 0:
        long_fit(model)


def case_exception_in_a_helper_thread_of_ours():
    model = compiled(mlp())

    def break_the_transport():
        time.sleep(1)
        print(f"FIRST STEP {time.time():.3f}", flush=True)
        mp.init().transport.submit(fail)

    if RANK == 1:
        threading.Thread(target=break_the_transport, daemon=True).start()
    long_fit(model)


def case_the_server_serves_the_model_but_clients_finish_without_it():
    x, y = mp.shard(*regression())
    model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = mp.DistributedOptimizer("sgd")
    if mp.is_server():
        optimizer.serve(model)
    train_function(model, optimizer)(x, y)
    first_step_at_the_clients()
    optimizer.finish()


def case_clients_forget_to_finish_before_fit():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("sgd")
    if mp.is_server():
        optimizer.serve(model)
    train_function(model, optimizer)(x, y)
    first_step_at_the_clients()
    fit(compiled(model), x, y)


def case_two_optimizers_with_different_numbers_of_steps():
    x, y = mp.shard(*regression())
    models, optimizers = (mlp(), mlp()), (mp.DistributedOptimizer("sgd"), mp.DistributedOptimizer("sgd"))
    steps = [train_function(*pair) for pair in zip(models, optimizers, strict=True)]
    for _ in range(3 if RANK == 1 else 4):
        for step in steps:
            step(x, y)
    if RANK == 1:
        print(f"FIRST STEP {time.time():.3f}", flush=True)
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.finish(model)


def case_a_gradient_that_only_one_client_has():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("sgd")
    first_step_now()
    if mp.is_server():
        optimizer.serve(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) - y)
    gradients = tape.gradient(loss, model.trainable_variables)
    if RANK == 2:
        gradients[1] = None
    optimizer.apply(gradients, model.trainable_variables)


def case_a_gradient_that_is_not_finite():
    x, y = mp.shard(*regression())
    first_step_now()
    with settings(on_nonfinite="raise"):
        model, optimizer = mlp(), mp.DistributedOptimizer("sgd")
        step = train_function(model, optimizer)
        for number in range(1_000_000):
            step(x * float("nan") if RANK == 1 and number == 4 else x, y)


def case_settings_differ():
    first_step_now()
    with settings(wire="bf16" if RANK == 1 else "plain"):
        long_fit(compiled(mlp()))


def case_another_set_of_trainable_variables():
    model = mlp()
    if RANK == 1:
        model.layers[0].trainable = False
    first_step_now()
    long_fit(compiled(model))


def case_a_train_step_with_another_optimizer_than_fits():
    other = mp.DistributedOptimizer("sgd")

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            pairs = list(zip(gradients, self.trainable_variables, strict=True))
            other.apply_gradients(pairs[:2])
            self.optimizer.apply_gradients(pairs[2:])
            return {"loss": loss}

    first_step_now()
    long_fit(compiled(Model(mlp().layers)))
