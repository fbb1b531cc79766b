"""Train a small convolutional network on real images: rank 0 serves, all other ranks train.

mpirun -np 4 python examples/train.py            the digits that scikit-learn ships
mpirun -np 4 python examples/train.py --data /usr/share/datasets/fashion-mnist --epochs 3
"""

from __future__ import annotations

import argparse

import mpipipe as mp  # first, so that TensorFlow is quiet on all ranks but one

import data  # isort: skip
import keras  # isort: skip
import model as network  # isort: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="a folder with the four files of MNIST or Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each client")
    parser.add_argument("--optimizer", default="adam", help="the name of any Keras optimizer")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate, save."""
    options = arguments()
    (x, y), test = data.load(options.data)
    model = network.build(x.shape[1:])
    x, y = mp.shard(x, y)  # this client's part of the data
    model.compile(
        optimizer=mp.DistributedOptimizer(options.optimizer),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs, validation_data=test)
    if mp.is_server():
        _, accuracy = model.evaluate(*test, verbose=0)
        print(f"held-out accuracy {accuracy:.4f}", flush=True)
        model.save("model.keras")  # opens in plain Keras, without mpipipe
        print("saved model.keras", flush=True)


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    main()
