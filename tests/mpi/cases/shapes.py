"""Models of any shape train and end the same everywhere."""

import keras
import numpy as np
import tensorflow as tf
from cases.common import RANK, SIZE, assert_same_everywhere, compiled, fit, mlp, record, regression, settings

import mpipipe as mp


def train(model, x, y, optimizer="adam", **arguments):
    keras.utils.set_random_seed(RANK)
    fit(compiled(model, optimizer), x, y, **arguments)
    assert_same_everywhere(model.get_weights())
    return model.optimizer.session.plan


def case_one_layer():
    assert len(train(mlp(layers=1), *regression()).buckets) == 1


def case_200_layers():
    x, y = regression(samples=16 * (SIZE - 1))
    with settings(fuse_bytes=128 << 10):  # of its own it follows from the link
        plan = train(mlp(layers=200, width=72), x, y, "sgd")
    record("200_layers", f"{len(plan.buckets)} buckets, {len(plan.pieces)} pieces")
    assert 1 < len(plan.buckets) <= 64


def case_a_layer_of_64_mib_travels_in_pieces():
    x, y = regression(samples=8 * (SIZE - 1), features=2048)
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(8192, use_bias=False), keras.layers.Dense(1)])
    plan = train(model, x, y, "sgd", batch_size=8)
    assert plan.buckets[0].nbytes == 64 << 20
    assert 8 <= len(plan.buckets[0].pieces) <= 300


def case_hundreds_of_tiny_variables_are_fused():
    x, y = regression()
    plan = train(mlp(layers=150, width=4), x, y, "sgd", batch_size=24)
    assert len(plan.variables) == 300 and len(plan.buckets) < 5


def case_shared_layers():
    x, y = regression()
    keras.utils.set_random_seed(RANK)
    shared = keras.layers.Dense(8, activation="tanh")
    inputs = keras.Input((8,))
    train(keras.Model(inputs, keras.layers.Dense(1)(shared(shared(inputs)))), x, y)


def case_embeddings():
    keras.utils.set_random_seed(RANK)
    words = np.random.default_rng(0).integers(0, 50, size=(96, 6))
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    train(model, words, words.sum(axis=1, keepdims=True).astype(np.float32) / 100)


class Unused(keras.layers.Layer):
    """A layer with a variable that no gradient reaches."""

    def build(self, shape):
        self.used = self.add_weight(shape=(shape[-1],), initializer="ones", name="used")
        self.unused = self.add_weight(shape=(3,), initializer="random_normal", name="unused")

    def call(self, x):
        return x * self.used


def case_variables_without_a_gradient_are_the_servers_and_stay_as_they_are():
    x, y = regression()
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), Unused(), keras.layers.Dense(1)])
    before = model.layers[1].unused.numpy()
    plan = train(model, x, y)
    assert sum(plan.has_gradient) == 5 and len(plan.has_gradient) == 6
    if RANK == 0:
        np.testing.assert_array_equal(before, model.layers[1].unused.numpy())


def case_frozen_layers_and_other_dtypes():
    x, y = regression()
    keras.utils.set_random_seed(RANK)
    frozen = keras.layers.Dense(8, trainable=False)
    model = keras.Sequential(
        [keras.Input((8,)), frozen, keras.layers.Dense(8, dtype="bfloat16"), keras.layers.Dense(1, dtype="float64")]
    )
    plan = train(model, x, y)
    assert {bucket.dtype for bucket in plan.buckets} == {"bfloat16", "float64"}


def case_small_pieces_give_the_same_weights():
    """Splitting does not change what is computed."""
    x, y = regression()
    results = []
    for piece_bytes in (1 << 20, 1024):
        model = mlp(seed=3, width=64)
        with settings(piece_bytes=piece_bytes):
            fit(compiled(model), x, y)
        results.append(model.get_weights())
    assert len(model.optimizer.session.plan.pieces) > 8
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def case_two_runs_give_bit_identical_weights():
    x, y = regression()
    runs = []
    for _ in range(2):
        model = mlp(seed=5, layers=6)
        fit(compiled(model, "adam"), x, y, epochs=2)
        runs.append(model.get_weights())
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def case_plain_tf_variables():
    w, b = tf.Variable(tf.ones((8, 1)) * RANK), tf.Variable([0.0])
    x, y = mp.shard(*regression())
    optimizer = mp.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.synchronize([w, b])
    assert float(w[0, 0]) == 0.0  # the server's

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w + b - y))
        optimizer.apply(tape.gradient(loss, [w, b]), [w, b])
        return loss

    for _ in range(20):
        last = step()
    assert_same_everywhere([w.numpy(), b.numpy()])
    assert RANK == 0 or float(last) < 1.0


def case_half_the_bytes_and_about_the_same_weights_on_narrow_wires():
    x, y = regression(samples=240)
    found = {}
    for form in ("plain", "bf16", "fp16"):
        model = compiled(mlp(width=64, seed=1), keras.optimizers.SGD(0.01))
        with settings(piece_bytes=4096, wire=form, wire_weights=form):
            fit(model, x, y, epochs=3)
        # Also those that travelled in halves: at the end of an epoch clients get the server's own.
        assert_same_everywhere(model.get_weights())
        found[form] = model.optimizer.session.engine.bytes_sent, model.get_weights()
    pieces = 3 * len(x) // (SIZE - 1) // 8 * len(model.optimizer.session.plan.pieces)
    headers = 16 * pieces * (1 if RANK else SIZE - 1)
    for form in ("bf16", "fp16"):
        assert found[form][0] - headers == (found["plain"][0] - headers) // 2
        for ours, plain in zip(found[form][1], found["plain"][1], strict=True):
            np.testing.assert_allclose(ours, plain, atol=0.02)
        assert any((ours != plain).any() for ours, plain in zip(found[form][1], found["plain"][1], strict=True))
    record("narrow_wires", f"bytes sent { ({form: sent for form, (sent, _) in found.items()}) }")
