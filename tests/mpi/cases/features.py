"""Keras's training features across ranks: what the parity table cannot compare with one process."""

import logging
import os
import tempfile
from contextlib import contextmanager

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
    without_mpipipe,
)

import mpipipe as mp
from mpipipe.wire.rows import PART_BYTES

SETTINGS = {"fuse_bytes": 0}


@contextmanager
def logged():
    """The lines that mpipipe logs on this rank meanwhile."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    logger = logging.getLogger("mpipipe")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@contextmanager
def shared_folder():
    """A folder that all ranks know."""
    with tempfile.TemporaryDirectory() as own:
        yield WORLD.bcast(own)
        WORLD.Barrier()


# Saving, and going on.


def trained(model, epochs, first=0, **arguments):
    x, y = regression()
    return fit(model, x, y, epochs=epochs, initial_epoch=first, **arguments)


def goes_on_bit_for_bit(make_optimizer):
    """Two epochs, a file, and two more: as four epochs."""
    whole = compiled(mlp(seed=1), make_optimizer())
    trained(whole, 4)
    broken = compiled(mlp(seed=1), make_optimizer())
    trained(broken, 2)
    with shared_folder() as folder:
        path = os.path.join(folder, "model.keras")
        if RANK == 0:
            broken.save(path)
        WORLD.Barrier()
        loaded = keras.models.load_model(path)
    loaded.compile(optimizer=mp.DistributedOptimizer(loaded.optimizer), loss="mse")
    trained(loaded, 4, first=2)
    assert_same_everywhere(loaded.get_weights())
    for ours, theirs in zip(loaded.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if RANK == 0:
        ours, theirs = ([v.numpy() for v in m.optimizer.variables] for m in (loaded, whole))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert everywhere(int(loaded.optimizer.iterations)) == [int(whole.optimizer.iterations)] * SIZE


def case_a_saved_run_goes_on_bit_for_bit():
    decay = keras.optimizers.schedules.ExponentialDecay
    o = keras.optimizers
    for make in (
        lambda: o.Adam(0.01),
        lambda: o.SGD(decay(0.05, 3, 0.9), momentum=0.9, clipnorm=0.5),
        lambda: o.LossScaleOptimizer(o.AdamW(0.01), initial_scale=64.0, dynamic_growth_steps=5),
        lambda: o.Adam(0.01, gradient_accumulation_steps=3, clipvalue=0.1),
        lambda: o.Nadam(0.01, use_ema=True, ema_overwrite_frequency=3),
    ):
        goes_on_bit_for_bit(make)


def case_a_model_saved_in_mid_training_opens_without_mpipipe_and_holds_the_slots():
    model = compiled(mlp(seed=1), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))
    with shared_folder() as folder:
        path = os.path.join(folder, "{epoch}.keras")
        callbacks = [keras.callbacks.ModelCheckpoint(path)] if RANK == 0 else None
        trained(model, 2, callbacks=callbacks)
        if RANK == 0:
            program = (
                "import keras, numpy as np;"
                f"m = keras.models.load_model({path.format(epoch=1)!r});"
                "o = m.optimizer; i = o.inner_optimizer; print(type(o).__name__, type(i).__name__, int(i.iterations),"
                "[v.path for v in o.variables if len(v.shape) and not np.any(v.numpy())])"
            )
            printed = without_mpipipe(program)
            steps = 96 // (SIZE - 1) // 8
            assert printed.split()[-4:] == ["LossScaleOptimizer", "Adam", str(steps), "[]"], printed


# Loss scaling.


def case_mixed_float16_scales_the_loss_on_all_ranks_alike():
    x, y = regression()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(mlp(seed=RANK), "adam")
        history = fit(model, x, y, epochs=2)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = model.optimizer
    assert isinstance(optimizer, mp.DistributedOptimizer)
    assert isinstance(optimizer.inner, keras.optimizers.LossScaleOptimizer)
    assert_same_everywhere(model.get_weights())
    scales = everywhere(float(optimizer.scale_loss(tf.constant(1.0))))
    assert len(set(scales)) == 1 and scales[0] > 1, scales
    assert np.isfinite(history.history["loss"]).all()


def case_one_client_with_a_gradient_that_is_not_finite_makes_all_skip_the_step_and_halve_the_scale():
    x, y = regression()
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=256.0)
    model = mlp(seed=1)
    optimizer = mp.DistributedOptimizer(inner)
    optimizer.synchronize(model)
    step = train_function(model, optimizer)
    before = model.get_weights()
    step(x * np.float32("inf") if RANK == 1 else x, y)
    if RANK > 0:
        optimizer.settle()
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert everywhere(float(optimizer.scale_loss(tf.constant(1.0)))) == [128.0] * SIZE
    step(x, y)
    optimizer.finish(model)
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert everywhere(int(inner.inner_optimizer.iterations)) == [1] * SIZE


# Embeddings.


def with_embedding(rows=1000, width=16):
    keras.utils.set_random_seed(RANK)
    layers = [keras.layers.Embedding(rows, width), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def case_only_rows_that_have_a_gradient_or_have_changed_are_on_the_wire():
    rows, width, steps, batch = 1000, 16, 4, 8
    x = np.random.default_rng(RANK).integers(0, rows, size=(steps * batch, 3)).astype(np.int32)
    y = np.ones((len(x), 1), np.float32)
    model = compiled(with_embedding(rows, width), keras.optimizers.SGD(0.1))
    before = WORLD.bcast(model.get_weights())
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    assert_same_everywhere(model.get_weights())
    row_bytes, dense = 8 + 4 * width, 16 + 4 * (width + 1)
    touched = [[len(np.unique(x[s * batch : (s + 1) * batch])) for s in range(steps)]]
    touched = everywhere(touched[0])
    by_all = everywhere([set(np.unique(x[s * batch : (s + 1) * batch]).tolist()) for s in range(steps)])
    changed = [len(set.union(*[of_client[s] for of_client in by_all[1:]])) for s in range(steps)]
    sent = everywhere(model.optimizer.session.engine.bytes_sent)
    for client in range(1, SIZE):
        expected = sum(dense + 16 + PART_BYTES + n * row_bytes for n in touched[client])
        assert sent[client] == expected, (sent[client], expected)
    assert sent[0] == (SIZE - 1) * sum(dense + 16 + PART_BYTES + n * row_bytes for n in changed)
    assert sent[1] < steps * rows * width * 4 / 10
    record(
        "only_rows_that_have_a_gradient_or_have_changed_are_on_the_wire",
        f"{sent[RANK]} bytes in {steps} steps; all rows would be {steps * rows * width * 4} (a client)",
    )
    seen = set.union(*(s for of_client in by_all[1:] for s in of_client))
    untouched = [row for row in range(rows) if row not in seen]
    np.testing.assert_array_equal(model.get_weights()[0][untouched], before[0][untouched])
    assert not np.array_equal(model.get_weights()[0][sorted(seen)], before[0][sorted(seen)])


def case_rows_in_many_parts_and_rows_that_travel_whole_give_the_same_model():
    x = np.random.default_rng(RANK).integers(0, 1000, size=(64, 3)).astype(np.int32)
    y = np.ones((64, 1), np.float32)
    weights = []
    for options in ({}, {"piece_bytes": 1024, "credit_bytes": 2048}, {"sparse": False}):
        with settings(fuse_bytes=0, **options):
            keras.utils.set_random_seed(RANK)
            model = compiled(with_embedding(), keras.optimizers.SGD(0.1, momentum=0.9))
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
            assert_same_everywhere(model.get_weights())
            weights.append(model.get_weights())
    for other in weights[1:]:
        for ours, theirs in zip(weights[0], other, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def case_an_embedding_in_a_loop_with_weights_taken_at_the_top():
    model, optimizer = with_embedding(), mp.DistributedOptimizer(keras.optimizers.Adam(0.01))
    x = np.random.default_rng(RANK).integers(0, 1000, size=(8, 3)).astype(np.int32)

    @tf.function
    def step(x):
        optimizer.take_weights(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [float(step(x)) for _ in range(10)]
    optimizer.finish(model)
    assert_same_everywhere(model.get_weights())
    assert RANK == 0 or losses[-1] < losses[0]
    assert not optimizer._void, "what was expected before the first step was wrong"


# Learning rates.


def case_a_rate_that_a_client_alone_sets_is_said_and_has_no_effect():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.05))
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    with logged() as lines:
        fit(model, x, y, epochs=2, callbacks=[rate] if RANK == 1 else None)
    said = [line for line in lines if "rank 1 has set the learning rate 0.5" in line]
    assert len(said) == (RANK == 0), lines
    assert [round(r, 6) for r in everywhere(float(model.optimizer.learning_rate))] == [0.05] * SIZE


def case_a_rate_that_the_server_alone_sets_is_every_ranks_after_the_epoch():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.05))
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    with logged() as lines:
        fit(model, x, y, callbacks=[rate] if RANK == 0 else None)
    assert not [line for line in lines if "has set the learning rate" in line], lines
    assert everywhere(float(model.optimizer.learning_rate)) == [0.5] * SIZE


def case_the_rate_warms_up_from_a_clients_share_of_it():
    x, y = regression(samples=16 * (SIZE - 1) * 3)
    n = SIZE - 1
    for arguments in ({"steps": 8}, {"epochs": 4 / 3}):
        model = compiled(mlp(), keras.optimizers.SGD(0.08))
        seen = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda b, logs: seen.append(float(model.optimizer.learning_rate))  # noqa: B023
        )
        fit(model, x, y, epochs=2, callbacks=[mp.callbacks.LearningRateWarmup(**arguments), look])
        if RANK == 0:
            expected = [0.08 * (1 / n + (1 - 1 / n) * min(step / 8, 1)) for step in range(12)]
            np.testing.assert_allclose(seen, expected, rtol=1e-6)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    callback = mp.callbacks.LearningRateWarmup(steps=3)
    callback.set_params({"steps": 6})
    callback.set_model(compiled(mlp(), keras.optimizers.SGD(schedule)))
    try:
        callback.on_train_begin()
    except ValueError as error:
        assert RANK == 0 and "schedule" in str(error)
    else:
        assert RANK > 0


# Stopping.


def case_a_callback_that_stops_the_server_in_mid_epoch_stops_all_ranks_after_the_same_step():
    x, y = regression(samples=8 * (SIZE - 1) * 40)
    model = compiled(mlp())

    def stop(batch, logs):
        if batch == 5:
            model.stop_training = True

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)] if RANK == 0 else None
    fit(model, x, y, epochs=3, callbacks=callbacks)
    steps = everywhere(int(model.optimizer.steps))
    assert steps == [8] * SIZE, steps
    assert_same_everywhere(model.get_weights())


def case_terminate_on_nan_on_one_client_ends_training_on_all():
    x, y = regression(samples=8 * (SIZE - 1) * 40)
    if RANK == 1:
        x, y = x.copy(), y.copy()
        y[:] = np.nan
    model = compiled(mlp())
    fit(model, x, y, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN()] if RANK == 1 else None)
    assert max(everywhere(int(model.optimizer.steps))) < 40
    assert everywhere(bool(model.stop_training)) == [True] * SIZE


# Callbacks.


def case_callbacks_given_on_all_ranks_on_the_server_or_on_a_client():
    x, y = regression()
    with shared_folder() as folder:
        for where in ("all", "server", "client"):
            mine = where == "all" or (where == "server") == (RANK == 0)
            own = os.path.join(folder, f"{where}-{RANK}")
            os.makedirs(own)
            called = []
            c = keras.callbacks
            callbacks = [
                c.CSVLogger(os.path.join(own, "log.csv")),
                c.TensorBoard(os.path.join(own, "board"), histogram_freq=1, write_graph=False),
                c.ModelCheckpoint(os.path.join(own, "model.keras"), monitor="loss", save_best_only=True),
                c.BackupAndRestore(os.path.join(own, "backup")),
                c.TerminateOnNaN(),
                c.LambdaCallback(on_epoch_end=lambda epoch, logs: called.append(dict(logs))),  # noqa: B023
            ]
            model = compiled(mlp(), keras.optimizers.Adam(0.01), metrics=["mae"])
            history = fit(model, x, y, epochs=2, callbacks=callbacks if mine else None)
            assert_same_everywhere(model.get_weights())
            assert all(h == history.history for h in everywhere(history.history))
            if not mine:
                assert not os.listdir(own)
                continue
            assert [logs["loss"] for logs in called] == history.history["loss"]
            assert len(open(os.path.join(own, "log.csv")).readlines()) == 3
            assert os.listdir(os.path.join(own, "board"))
            saved = keras.models.load_model(os.path.join(own, "model.keras"), compile=False)
            assert [w.shape for w in saved.get_weights()] == [w.shape for w in model.get_weights()]


# What is not as in one process is said; what cannot be is refused.


def case_layers_that_do_otherwise_than_in_one_process_are_said_once():
    x, y = regression()
    keras.utils.set_random_seed(RANK)
    layers = [
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.1, name="drop"),
    ]
    layers += [keras.layers.Dense(1)]
    model = compiled(keras.Sequential([keras.Input((8,)), *layers]))
    with logged() as lines:
        fit(model, x, y, epochs=2)
    for words in (("normalises", "norm"), ("random numbers", "drop")):
        assert len([line for line in lines if all(word in line for word in words)]) == (RANK == 0), lines


def refused(function, *words):
    try:
        function()
    except (TypeError, ValueError) as error:
        for word in words:
            assert word in str(error), error
    else:
        raise AssertionError(f"it was taken, instead of {words}")


def case_what_cannot_be_right_is_refused_with_one_line():
    around = keras.optimizers.LossScaleOptimizer
    refused(lambda: mp.DistributedOptimizer(around(mp.DistributedOptimizer("sgd"))), "put it around")
    refused(lambda: mlp().compile(around(mp.DistributedOptimizer("sgd")), "mse"), "put it around")
    refused(lambda: mp.DistributedOptimizer("sgd", average="mean"), "'mean'", "samples")
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    refused(lambda: mp.DistributedOptimizer(accumulating, average="samples"), "samples", "accumulation")
    refused(lambda: mp.callbacks.LearningRateWarmup(), "steps", "epochs")

    class Overwritten(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones", overwrite_with_gradient=True)

        def call(self, x):
            return x * self.scale

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    variable = model.trainable_variables[0]
    if hasattr(variable, "overwrite_with_gradient"):
        variable.overwrite_with_gradient = True
        optimizer = mp.DistributedOptimizer("sgd")
        refused(lambda: optimizer.synchronize(model.trainable_variables), "overwritten")


def case_by_samples_in_a_loop_of_ones_own_needs_their_number():
    x, y = regression()
    model, optimizer = mlp(seed=1), mp.DistributedOptimizer(keras.optimizers.SGD(0.05), average="samples")
    before = model.get_weights()
    optimizer.synchronize(model)

    @tf.function
    def step(x, y):
        optimizer.count_samples(tf.shape(x)[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    starts = [0, 0, 5, 16, 40, 50]
    mine = slice(starts[RANK], starts[RANK + 1])
    step(x[mine], y[mine])
    optimizer.finish(model)
    plain = mlp(seed=1)
    plain.set_weights(before)
    plain.compile(keras.optimizers.SGD(0.05), "mse")
    plain.train_on_batch(x[: starts[SIZE]], y[: starts[SIZE]])
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    if RANK > 0:
        refused(lambda: _apply_uncounted(), "count_samples")


def _apply_uncounted():
    optimizer = mp.DistributedOptimizer("sgd", average="samples")
    optimizer._bridge, optimizer._gradients = object(), ["whole"]
    optimizer._trainable_variables = []
    optimizer._exchange([tf.constant(1.0)])
