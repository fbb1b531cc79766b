"""What users may rely on in fit and in loops of their own, on three or more ranks."""

import hashlib
import json
import os
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from cases.common import (
    RANK,
    SIZE,
    WORLD,
    assert_differ,
    assert_same_everywhere,
    compiled,
    everywhere,
    fit,
    mlp,
    record,
    regression,
    train_function,
    without_mpipipe,
)

import mpipipe as mp

SETTINGS = {"fuse_bytes": 0}


def with_batch_norm():
    keras.utils.set_random_seed(RANK)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )


class Lazy(keras.Model):
    """A model that has no variables before its first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        )

    def call(self, x, training=False):
        return self.last(self.norm(tf.nn.tanh(self.first(x)), training=training))


def case_fit_starts_from_the_servers_weights_and_ends_with_the_same_ones_everywhere():
    x, y = regression()
    model = compiled(mlp(), "adam")
    assert_differ(model.get_weights())
    servers = WORLD.bcast(model.get_weights())
    started = []
    start = keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: started.append(model.get_weights()))
    fit(model, x, y, epochs=2, callbacks=[start] if RANK else None)
    for ours, theirs in zip(started[0] if RANK else [], servers, strict=False):
        np.testing.assert_array_equal(ours, theirs)
    assert_same_everywhere(model.get_weights())
    assert everywhere(int(model.optimizer.iterations)) == [2 * 96 // (SIZE - 1) // 8] * SIZE


def case_the_server_runs_no_model_and_reads_no_data():
    x, y = regression()
    model = compiled(mlp())
    called = []
    call = type(model).call
    type(model).call = lambda self, *a, **k: (called.append(1), call(self, *a, **k))[1]
    try:
        if RANK == 0:

            def generator():
                raise AssertionError("the server has read its data")
                yield x, y

            data = tf.data.Dataset.from_generator(
                generator, output_signature=(tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1)))
            )
            model.fit(data, epochs=1, verbose=0)
        else:
            fit(model, x, y)
    finally:
        type(model).call = call
    assert bool(called) == (RANK > 0)
    assert_same_everywhere(model.get_weights())


def case_data_whose_end_comes_as_a_surprise_train_like_arrays():
    """A graph begins with taking weights and then finds no data: it must leave them to the next epoch."""
    x, y = regression()
    ours, theirs = mp.shard(x, y)

    def batches():
        for start in range(0, len(ours), 8):
            yield ours[start : start + 8], theirs[start : start + 8]
        time.sleep(0.3)  # the weights of the last step are all there when the end comes

    signature = (tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1)))
    trained = []
    for arrays in (True, False):
        model = compiled(mlp(seed=3), keras.optimizers.Adam(0.01))
        if arrays:
            fit(model, x, y, epochs=4)
        else:
            model.fit(tf.data.Dataset.from_generator(batches, output_signature=signature), epochs=4, verbose=0)
        assert_same_everywhere(model.get_weights())
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)


def case_a_model_with_batch_norm_saved_on_the_server_predicts_as_the_clients_do():
    x, y = regression()
    model = compiled(with_batch_norm(), "adam")
    before = [v.numpy() for v in model.non_trainable_variables]
    fit(model, x, y, epochs=2)
    assert_same_everywhere(model.get_weights())
    moved = [not np.array_equal(a, v.numpy()) for a, v in zip(before, model.non_trainable_weights, strict=False)]
    assert all(moved), "BatchNorm's moving statistics have not changed"
    predictions = everywhere(model.predict(x[:8], verbose=0))
    np.testing.assert_array_equal(predictions[0], predictions[-1])


def case_moving_statistics_are_the_mean_over_clients():
    x, y = regression()
    model = compiled(with_batch_norm())
    seen = []
    # Before any exchange: a client's own statistics at the end of its last batch.
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda b, logs: seen.append([w.numpy() for w in model.non_trainable_weights])
    )
    fit(model, x, y, callbacks=[look] if RANK else None)
    own = everywhere(seen[-1] if RANK else None)[1:]
    assert not np.array_equal(own[0][0], own[1][0])
    for i, weight in enumerate(model.non_trainable_weights):
        np.testing.assert_allclose(weight.numpy(), np.mean([client[i] for client in own], axis=0), rtol=1e-6)


def case_random_seeds_stay_each_ranks_own():
    x, y = regression()
    model = compiled(with_batch_norm())
    seeds = [v for v in model.variables if "seed" in v.path]
    assert seeds
    fit(model, x, y)
    clients = everywhere([v.numpy().tolist() for v in seeds])[1:]
    assert clients[0] != clients[1]


def case_a_subclassed_model_is_built_at_the_first_batch():
    x, y = regression()
    keras.utils.set_random_seed(RANK)
    model = compiled(Lazy(), "adam")
    fit(model, x, y, epochs=2)
    assert_same_everywhere(model.get_weights())


def case_steps_per_execution():
    x, y = regression()
    model = compiled(mlp(), steps_per_execution=4)
    history = fit(model, x, y, epochs=2)
    assert int(model.optimizer.iterations) == 12
    assert len(history.history["loss"]) == 2
    assert_same_everywhere(model.get_weights())


def case_clients_with_different_numbers_of_batches():
    x, y = regression(samples=96)
    model = compiled(with_batch_norm(), "adam")
    steps = {0: 7, 1: 2, 2: 7}.get(RANK, 4)
    ticks = []
    tick = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: ticks.append(b))
    model.fit(x[: 8 * steps], y[: 8 * steps], batch_size=8, epochs=3, verbose=0, callbacks=[tick])
    assert_same_everywhere(model.get_weights())
    assert int(model.optimizer.iterations) == 21
    assert len(ticks) == 3 * steps


def case_the_server_logs_the_mean_of_the_clients_metrics_by_samples():
    x, y = regression(samples=96)
    model = compiled(mlp(seed=1), keras.optimizers.SGD(0.0), metrics=["mae"])
    samples = {1: 16, 2: 72}.get(RANK, 8)
    at = {1: 0, 2: 16}.get(RANK, 88)
    history = model.fit(x[at : at + samples], y[at : at + samples], batch_size=8, verbose=0).history
    expected = np.abs(model.predict(x[: 88 + 8 * (SIZE - 3)], verbose=0) - y[: 88 + 8 * (SIZE - 3)]).mean()
    np.testing.assert_allclose(history["mae"][0], expected, rtol=1e-5)
    assert all(values == everywhere(history)[0] for values in everywhere(history))


def case_callbacks_on_the_server_do_what_they_say():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.05))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "{epoch}.keras")
        callbacks = [
            keras.callbacks.ModelCheckpoint(path),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch == 0 else 0.0),
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
            keras.callbacks.TensorBoard(os.path.join(folder, "board")),
        ]
        fit(model, x, y, epochs=3, callbacks=callbacks if RANK == 0 else None, validation_data=(x, y))
        if RANK == 0:
            kept = [keras.models.load_model(path.format(epoch=e)).get_weights() for e in (1, 2, 3)]
            # With a rate of 0 nothing moves any more after the first epoch, on any rank.
            for first, second, third, last in zip(*kept, model.get_weights(), strict=True):
                np.testing.assert_array_equal(first, second)
                np.testing.assert_array_equal(first, third)
                np.testing.assert_array_equal(first, last)
            assert len(open(os.path.join(folder, "log.csv")).readlines()) == 4
            assert os.listdir(os.path.join(folder, "board"))
    assert_same_everywhere(model.get_weights())


def case_early_stopping_on_all_ranks_stops_all_of_them_with_the_best_weights():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
    history = fit(model, x, y, epochs=9, callbacks=[stop], validation_data=(x, y))
    assert everywhere(len(history.history["val_loss"])) == [2] * SIZE
    assert_same_everywhere(model.get_weights())


def case_a_client_that_stops_stops_all():
    x, y = regression()
    model = compiled(mlp())
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1))
    history = fit(model, x, y, epochs=9, callbacks=[stop] if RANK == 1 else None)
    assert everywhere(len(history.history["loss"])) == [2] * SIZE


def case_weights_changed_by_a_callback_on_the_server_reach_the_clients():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    double = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.set_weights([2 * w for w in model.get_weights()])
    )
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(model.get_weights()))
    fit(model, x, y, epochs=2, callbacks=[look, double] if RANK == 0 else [look])
    for first, second in zip(*seen, strict=True):
        np.testing.assert_array_equal(2 * first, second)
    assert_same_everywhere(seen[1])


def case_weights_are_current_at_the_end_of_every_epoch():
    x, y = regression()
    model = compiled(with_batch_norm(), "adam")
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    fit(model, x, y, epochs=3, callbacks=[look])
    for weights in seen:
        assert_same_everywhere(weights)
    losses = everywhere(model.evaluate(x, y, verbose=0))
    assert len(set(losses)) == 1


def case_frozen_layers_are_the_servers_and_stay_as_they_are():
    x, y = regression()
    model = mlp()
    model.layers[0].trainable = False
    frozen = WORLD.bcast(model.layers[0].get_weights())
    fit(compiled(model), x, y, epochs=2)
    # And in a loop of the user's own, with a model of other frozen weights on every rank.
    other, optimizer = mlp(), mp.DistributedOptimizer("sgd")
    other.layers[0].trainable = False
    others = WORLD.bcast(other.layers[0].get_weights())
    optimizer.synchronize(other)
    if mp.is_client():
        train_function(other, optimizer)(*mp.shard(x, y))
        optimizer.finish(other)
    else:
        optimizer.serve(other)
    for layer, weights in ((model.layers[0], frozen), (other.layers[0], others)):
        for ours, theirs in zip(layer.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert_same_everywhere(other.get_weights())


def case_weights_changed_by_the_server_at_an_epochs_begin_are_what_clients_train_from():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    seen = []

    def begin(epoch, logs):
        if RANK == 0:
            model.set_weights([w + 1 for w in model.get_weights()])
        seen.append(model.get_weights())

    look = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda b, logs: b or begin(0, None))
    fit(model, x, y, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=begin) if RANK == 0 else look])
    for weights in zip(*everywhere(seen), strict=True):
        for ours, theirs in zip(weights[0], weights[1], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def case_validation_data_wins_over_validation_split():
    x, y = regression()
    model = compiled(mlp())
    history = fit(model, x, y, validation_data=(x, y), validation_split=0.5)
    assert int(model.optimizer.iterations) == 6 and "val_loss" in history.history


def case_a_callback_list_and_metrics_from_the_first_batch_on():
    x, y = regression()
    model = compiled(mlp())
    seen = []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    fit(model, x, y, epochs=2, callbacks=keras.callbacks.CallbackList([look], add_history=True, model=model))
    assert len(seen) == 12


def case_backup_and_restore_on_the_server_goes_on_where_it_was():
    x, y = regression()
    folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    begun = []

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    def train(*callbacks):
        model = compiled(mlp(), "adam")
        look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        fit(model, x, y, epochs=4, callbacks=[look, *callbacks, *([backup] if RANK == 0 else [])])
        return model

    train(Interrupt())
    assert begun == [0, 1]
    model = train()
    assert begun == [0, 1, 2, 3], begun
    assert_same_everywhere(model.get_weights())


def case_the_bits_of_a_run():
    """Compared with another job's by test_training.py."""
    x, y = regression()
    model = compiled(mlp(seed=7, layers=5), "adam")
    fit(model, x, y, epochs=2)
    bits = b"".join(w.tobytes() for w in model.get_weights())
    record("the_bits_of_a_run", hashlib.sha256(bits).hexdigest())


def case_fit_again_and_compile_again():
    x, y = regression()
    model = compiled(mlp(), "adam")
    fit(model, x, y)
    if RANK == 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    fit(model, x, y)
    assert_same_everywhere(model.get_weights())
    fit(compiled(model, "sgd"), x, y)
    assert_same_everywhere(model.get_weights())


def case_validation_split_is_evaluated_by_the_clients():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    history = fit(model, x, y, validation_split=0.25).history
    assert len(set(everywhere(history["val_loss"][0]))) == 1


def case_datasets():
    x, y = regression()
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model = compiled(mlp())
    model.fit(mp.shard(whole), epochs=2, verbose=0)
    assert_same_everywhere(model.get_weights())

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    part = mp.shard(Batches())
    model.fit(part, epochs=2, verbose=0)
    assert_same_everywhere(model.get_weights())
    parts = everywhere([part[i][0].tobytes() for i in range(part.num_batches)] if RANK else [])
    assert sorted(b for own in parts for b in own) == sorted(x[i : i + 8].tobytes() for i in range(0, 96, 8))


def case_a_train_step_of_the_users_own():
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"mine": loss}

    x, y = regression()
    keras.utils.set_random_seed(RANK)
    inputs = keras.Input((8,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    history = compiled(model).fit(*mp.shard(x, y), batch_size=8, epochs=2, verbose=0)
    assert set(history.history) == {"mine"}
    assert_same_everywhere(model.get_weights())


def case_train_on_batch():
    x, y = mp.shard(*regression())
    model = compiled(mlp(), "adam", metrics=["mae"])
    losses = [model.train_on_batch(x, y) for _ in range(5)]
    assert_same_everywhere(model.get_weights())
    assert int(model.optimizer.iterations) == 5
    # On the server: the mean over clients.
    clients = everywhere(losses)[1:]
    if RANK == 0:
        np.testing.assert_allclose([list(map(float, pair)) for pair in losses], np.mean(clients, axis=0), rtol=1e-5)


def case_eager_fit():
    x, y = regression()
    model = compiled(mlp(), "adam", run_eagerly=True)
    fit(model, x, y, epochs=2)
    assert_same_everywhere(model.get_weights())


def case_eager_loop_on_all_ranks():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("adam")
    optimizer.synchronize(model.trainable_variables)
    assert_same_everywhere(model.get_weights())
    step = train_function(model, optimizer, graph=False)
    for _ in range(5):
        step(x, y)
    assert_same_everywhere(model.get_weights())
    assert int(optimizer.iterations) == 5


def case_eager_loop_without_build_does_not_use_gradients_of_other_weights():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("adam")
    servers = WORLD.bcast(model.get_weights())
    step = train_function(model, optimizer, graph=False)
    step(x, y)
    for ours, theirs in zip(model.get_weights(), servers, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for _ in range(4):
        step(x, y)
    assert_same_everywhere(model.get_weights())
    assert int(optimizer.iterations) == 4


def case_the_same_loop_on_the_server():
    x, y = mp.shard(*regression())
    model, optimizer = with_batch_norm(), mp.DistributedOptimizer("adam")
    step = train_function(model, optimizer)
    for _ in range(5):
        step(x, y)
    assert_same_everywhere([v.numpy() for v in model.trainable_variables])
    assert everywhere(int(optimizer.iterations)) == [5] * SIZE
    optimizer.finish(model)
    assert_same_everywhere(model.get_weights())


def case_a_loop_on_the_server_that_is_longer_than_the_clients():
    x, y = mp.shard(*regression())
    model, optimizer = mlp(), mp.DistributedOptimizer("adam")
    step = train_function(model, optimizer)
    for _ in range(9 if RANK == 0 else 3 + RANK):
        step(x, y)
    optimizer.finish(model)
    assert_same_everywhere(model.get_weights())
    assert everywhere(int(optimizer.iterations)) == [3 + SIZE - 1] * SIZE


def case_serve_until_every_client_has_finished():
    x, y = mp.shard(*regression())
    model, optimizer = with_batch_norm(), mp.DistributedOptimizer("adam")
    if mp.is_server():
        assert optimizer.serve(model.variables) == 4 + SIZE - 1
    else:
        step = train_function(model, optimizer)
        for _ in range(4 + RANK):
            step(x, y)
        assert optimizer.finish(model.variables) == 4 + RANK
    assert_same_everywhere(model.get_weights())
    # And once more, with the same optimizer.
    if mp.is_server():
        assert optimizer.serve(model) == 2
    else:
        for _ in range(2):
            step(x, y)
        assert optimizer.finish(model) == 2
    assert_same_everywhere(model.get_weights())


def case_a_saved_model_holds_the_plain_optimizer_and_opens_without_mpipipe():
    x, y = regression()
    model = compiled(mlp(), keras.optimizers.Adam(0.01))
    fit(model, x, y)
    if RANK == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            program = (
                "import keras, json;"
                f"m = keras.models.load_model({path!r});"
                "print(json.dumps([type(m.optimizer).__module__, type(m.optimizer).__name__,"
                "int(m.optimizer.iterations), [float(abs(v.numpy()).sum()) for v in m.optimizer.variables]]))"
            )
            module, name, iterations, sums = json.loads(without_mpipipe(program).splitlines()[-1])
            assert (module.split(".")[0], name, iterations) == ("keras", "Adam", 6)
            np.testing.assert_allclose(
                sums, [float(abs(v.numpy()).sum()) for v in model.optimizer.variables], rtol=1e-6
            )
    WORLD.Barrier()


def case_only_the_server_has_optimizer_slots():
    import resource

    x, y = regression(features=64)
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential(
        [keras.Input((64,)), *[keras.layers.Dense(516, activation="relu") for _ in range(9)], keras.layers.Dense(1)]
    )
    fit(compiled(model, "adam"), x, y, epochs=2)
    weights = sum(v.numpy().nbytes for v in model.trainable_variables)
    slots = sum(v.numpy().nbytes for v in model.optimizer.variables)
    assert 8e6 < weights < 12e6
    assert slots > 2 * weights if RANK == 0 else slots < 100, slots
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record(
        "only_the_server_has_optimizer_slots",
        f"{weights / 1e6:.1f} MB of weights in 10 layers, {slots / 1e6:.1f} MB of slots, peak memory {peak:.0f} MiB",
    )


def case_two_models_with_two_optimizers_in_one_loop():
    keras.utils.set_random_seed(RANK)
    generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)])
    critic = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    first, second = mp.DistributedOptimizer("adam"), mp.DistributedOptimizer("sgd")
    x, _ = mp.shard(*regression())

    @tf.function
    def step(real, noise):
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(noise, training=True)
            on_real, on_fake = critic(real, training=True), critic(fake, training=True)
            critic_loss = tf.reduce_mean(tf.nn.softplus(-on_real) + tf.nn.softplus(on_fake))
            generator_loss = tf.reduce_mean(tf.nn.softplus(-on_fake))
        pairs = ((first, generator, generator_loss), (second, critic, critic_loss))
        for optimizer, model, loss in pairs:
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    noise = np.random.default_rng(RANK).normal(size=(len(x), 4)).astype(np.float32)
    for _ in range(6):
        step(x, noise)
    assert_same_everywhere(generator.get_weights() + critic.get_weights())


def case_the_users_own_messages_never_meet_ours():
    from mpi4py import MPI

    x, y = regression()
    request = WORLD.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    fit(compiled(mlp()), x, y)
    WORLD.send("mine", (RANK + 1) % SIZE, tag=7)
    assert request.wait() == "mine"


def case_bad_input_is_a_type_error_that_says_what_to_pass():
    for bad, word in ((keras.losses.MeanSquaredError(), "MeanSquaredError"), ("no such", "no such"), (None, "None")):
        try:
            mp.DistributedOptimizer(bad)
        except TypeError as error:
            assert word in str(error)
        else:
            raise AssertionError(f"{bad!r} was taken")
    try:
        mlp().compile(mp.DistributedOptimizer("sgd"), "mse", jit_compile=True)
    except ValueError as error:
        assert "XLA" in str(error)
    else:
        raise AssertionError("jit_compile=True was taken")
    model = compiled(mlp(), jit_compile="auto")
    assert model.jit_compile is False
    assert isinstance(model.optimizer, keras.optimizers.Optimizer)
    assert isinstance(model.optimizer, mp.DistributedOptimizer)
