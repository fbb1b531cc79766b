"""The same as train.py with a training loop of its own: ``tf.function`` and ``GradientTape``.

mpirun -np 4 python examples/custom_loop.py
"""

from __future__ import annotations

import mpipipe as mp  # first, so that TensorFlow is quiet on all ranks but one

import data  # isort: skip
import keras  # isort: skip
import model as network  # isort: skip
import tensorflow as tf  # isort: skip
from train import arguments  # isort: skip


def main() -> None:
    """Train, evaluate, save."""
    options = arguments()
    (x, y), (test_x, test_y) = data.load(options.data)
    model = network.build(x.shape[1:])
    optimizer = mp.DistributedOptimizer(options.optimizer)
    compute_loss = keras.losses.SparseCategoricalCrossentropy()
    x, y = mp.shard(x, y)  # this client's part of the data
    optimizer.synchronize(model)  # the server's weights everywhere, all of them; without it, those that are trained
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(options.batch_size)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        optimizer.take_weights(model)  # each layer's new weights when they come: no step waits for all of them
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    if mp.is_client():
        for epoch in range(options.epochs):
            losses = [train_step(*batch) for batch in batches]
            if mp.client_index() == 0:
                print(f"[rank {mp.rank()}] epoch {epoch + 1} loss {sum(losses) / len(losses):.4f}", flush=True)
        optimizer.finish(model)  # the others may have more batches; BatchNorm's statistics are averaged
    else:
        optimizer.serve(model)  # until every client has finished
    if mp.is_server():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        accuracy.update_state(test_y, model.predict(test_x, verbose=0))
        print(f"held-out accuracy {float(accuracy.result()):.4f}", flush=True)
        model.save("model.keras")
        print("saved model.keras", flush=True)


if __name__ == "__main__":
    main()
