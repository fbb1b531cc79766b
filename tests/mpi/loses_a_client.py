"""A client dies in the middle of the last step, with new weights in hand that its own gradients have gone into.

The first layer's backward pass waits on that client until the new weights of all other layers are there, and then the
process is killed. So the server has updated these layers with gradients of a step that will never be whole: it has to
end with the weights and slots that a plain computation has in which the client had no part in that step.
"""

import faulthandler
import os
import signal

faulthandler.dump_traceback_later(float(os.environ["MPIPIPE_TEST_LIMIT"]), exit=True)

import mpipipe as mp  # noqa: E402

mp.init(fuse_bytes=0, piece_bytes=1024)
RANK, CLIENTS, STEPS, BATCH, DYING = mp.rank(), 3, 6, 8, 3

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

here: set[int] = set()  # the buckets of the last step whose new weights are here
never = tf.queue.FIFOQueue(1, [tf.int32])
steps_begun = tf.Variable(0)


def on_mark(mark):
    if mark.kind == "received" and mark.step == STEPS - 1:
        here.add(mark.bucket)
        if len(here) == BUCKETS - 1:
            print("FAULT", sorted(here), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


@tf.custom_gradient
def wait_in_backward_pass(y):
    def gradient(dy):
        with tf.control_dependencies([steps_begun.assign_add(1)]):
            nothing = tf.cond(steps_begun.read_value() == STEPS, never.dequeue, lambda: 0)
        with tf.control_dependencies([nothing]):
            return tf.identity(dy)

    return y, gradient


class First(keras.layers.Dense):
    def call(self, x):
        y = super().call(x)
        return wait_in_backward_pass(y) if RANK == DYING else y


def build(first=First):
    keras.utils.set_random_seed(3)
    x, row = keras.Input((8,)), keras.Input((2,), dtype="int32")
    y = keras.layers.Dense(40, activation="tanh")(first(40, activation="tanh")(x))
    rows = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(row))
    return keras.Model([x, row], keras.layers.Dense(1)(keras.layers.Concatenate()([y, rows])))


BUCKETS = 4
random = np.random.default_rng(0)
samples = CLIENTS * STEPS * BATCH
# No row of the embedding comes twice in a step.
ids = np.concatenate([random.permutation(50)[: 2 * CLIENTS * BATCH] for _ in range(STEPS)]).astype("int32")
x = [random.normal(size=(samples, 8)).astype("float32"), ids.reshape(samples, 2)]
y = x[0][:, :1] * 2


def part(client):
    """A client's data, step by step: the place of each sample."""
    return np.arange(samples).reshape(STEPS, CLIENTS, BATCH)[:, client]


def plain(last_clients):
    """Weights and slots of a plain computation, in which only these clients are in the last step, layer by layer.

    Args:
        last_clients: by the position of each variable, the clients whose gradients are used in the last step.
    """
    model, optimizer = build(keras.layers.Dense), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    parts = [part(client) for client in range(CLIENTS)]
    for step in range(STEPS):
        gradients = []
        for mine in parts:
            inputs, target = [one[mine[step]] for one in x], y[mine[step]]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs, training=True) - target) ** 2)
            gradients.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)])
        means = []
        for position, of_clients in enumerate(zip(*gradients, strict=True)):
            used = last_clients[position] if step == STEPS - 1 else range(CLIENTS)
            means.append(tf.constant(np.mean([of_clients[client] for client in used], axis=0)))
        optimizer.apply(means, model.trainable_variables)
    return [v.numpy() for v in model.trainable_variables], [v.numpy() for v in optimizer.variables]


if RANK == DYING:
    mp.init().recorder.listen(on_mark)
model = build()
model.compile(mp.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
mine = part(max(RANK - 1, 0)).ravel()
model.fit([one[mine] for one in x], y[mine], batch_size=BATCH, shuffle=False, verbose=0)


def distance(some, others):
    assert len(some) == len(others)
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


variables = len(model.trainable_variables)
left, all_three = [0, 1], [0, 1, 2]
weights, slots = plain([left] * variables)
assert distance(model.get_weights(), weights) < 1e-6, distance(model.get_weights(), weights)
if RANK == 0:
    served = [v.numpy() for v in model.optimizer.inner.variables]
    assert distance(served, slots) < 1e-6, distance(served, slots)
# It can tell: had the layers that were updated already been left as they were, or all been used, this would be other.
first = [v.path.startswith(model.layers[1].name) for v in model.trainable_variables]
for other in (plain([left if one else all_three for one in first]), plain([all_three] * variables)):
    assert distance(other[0], weights) > 1e-3
print(f"AS WITHOUT IT {RANK}", flush=True)
