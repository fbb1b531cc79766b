"""The next forward pass starts with whatever layer has arrived, by causality: the last layer's weights are withheld."""

import threading

import keras
import numpy as np
import tensorflow as tf

from mpipipe import context as running
from mpipipe.config import Config
from mpipipe.context import Context
from mpipipe.transport.inproc import Network

LIMIT = 60.0  # seconds
LAST = 2  # the last layer's bucket, which is one piece, and so its tag


class Run:
    """A server and a client in this process; the server's weights of the last layer can be withheld from the client."""

    def __init__(self, monkeypatch, **settings):
        self.withholds = False
        self.withheld = 0
        self.network = Network(2, seed=1, hold=self._hold)
        config = Config.make(environ={}, piece_bytes=1 << 20, fuse_bytes=0, credit_bytes=1 << 20, **settings)
        contexts = [Context(config, transport) for transport in self.network.transports]
        self.models, self.optimizers = [], []
        for context in contexts:
            monkeypatch.setattr(running, "_current", context)
            from mpipipe.keras.optimizer import DistributedOptimizer

            keras.utils.set_random_seed(context.rank)
            self.models.append(model())
            self.optimizers.append(DistributedOptimizer(keras.optimizers.SGD(0.1)))
        self.initial = self.models[0].get_weights()  # all start from the server's
        self.server = start(lambda: self.optimizers[0].serve(self.models[0]))
        self.reached = tf.queue.FIFOQueue(10, [tf.float32])

    def _hold(self, source, dest, tag):
        held = self.withholds and (source, tag) == (0, LAST)
        self.withheld += held
        return held

    def train_function(self):
        client, optimizer = self.models[1], self.optimizers[1]
        optimizer.synchronize(client.trainable_variables)
        first, *rest = client.layers

        @tf.function
        def step(x, y):
            optimizer.take_weights(client)
            with tf.GradientTape() as tape:
                h = first(x)
                self.reached.enqueue(tf.reduce_sum(h))
                for layer in rest:
                    h = layer(h)
                loss = tf.reduce_mean(tf.square(h - y))
            variables = client.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return step

    def let_go(self):
        self.withholds = False
        self.network.look_again()

    def end(self):
        self.optimizers[1].finish(self.models[1])
        self.server.join(LIMIT)
        assert not self.server.is_alive()
        self.network.close()


def model():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def start(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def data():
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return x, x[:, :1] * 2


def next_value(queue):
    """The next element, or a failure after some time."""
    taken = []
    thread = start(lambda: taken.append(float(queue.dequeue())))
    thread.join(LIMIT)
    assert taken, "the first layer's forward pass has not run"
    return taken[0]


def test_the_first_layer_computes_while_the_last_layers_weights_are_withheld(monkeypatch):
    run = Run(monkeypatch)
    step, (x, y) = run.train_function(), data()
    run.withholds = True
    one = start(lambda: step(x, y))
    one.join(LIMIT)
    assert not one.is_alive(), "the step has waited for weights that only the next one needs"
    before = next_value(run.reached)
    two = start(lambda: step(x, y))
    after = next_value(run.reached)
    # It has run, with the first layer's new weights, and only that: the last layer's are still withheld.
    assert run.withheld and run.withholds
    assert after != before
    two.join(0.2)
    assert two.is_alive(), "the step is over without the last layer's weights"
    run.let_go()
    two.join(LIMIT)
    assert not two.is_alive()
    run.end()
    for ours, theirs in zip(run.models[0].get_weights(), run.models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    expected = model()
    expected.set_weights(run.initial)
    plain = keras.optimizers.SGD(0.1)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(expected(x) - y))
        plain.apply(tape.gradient(loss, expected.trainable_variables), expected.trainable_variables)
    for ours, theirs in zip(run.models[1].get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_looking_at_the_weights_in_between_waits_for_all_of_them(monkeypatch):
    run = Run(monkeypatch)
    step, (x, y) = run.train_function(), data()
    run.withholds = True
    step(x, y)
    look = start(run.optimizers[1].take_weights)
    look.join(0.3)
    assert look.is_alive(), "there is nothing to wait for"
    run.let_go()
    look.join(LIMIT)
    assert not look.is_alive()
    now = run.models[1].get_weights()
    run.end()
    for ours, theirs in zip(now, run.models[0].get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_without_overlap_a_step_waits_for_its_own_weights(monkeypatch):
    run = Run(monkeypatch, overlap=False)
    step, (x, y) = run.train_function(), data()
    run.withholds = True
    one = start(lambda: step(x, y))
    next_value(run.reached)
    one.join(0.5)
    assert one.is_alive(), "the step did not wait"
    run.let_go()
    one.join(LIMIT)
    assert not one.is_alive()
    run.end()
