"""What narrow wire formats do to accuracy: the same trainings on Fashion-MNIST, with each format and several seeds.

    mpirun -np 3 python -m benchmarks.accuracy /usr/share/datasets/fashion-mnist [--epochs 3] [--seeds 3]

The folder holds the four files of the data set (Debian's package ``dataset-fashion-mnist``). Each format is used for
gradients and for weights; the model is a perceptron with two hidden layers, trained by Adam.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import mpipipe as mp  # first, so that TensorFlow is quiet on all ranks but one

import keras  # isort: skip
from examples import data  # isort: skip

_FORMATS = ("plain", "bf16", "fp16")


def held_out_accuracy(train: data.Split, test: data.Split, seed: int, epochs: int) -> float:
    """Train a new model; the accuracy at the server, in per cent."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input(train[0].shape[1:]),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(mp.DistributedOptimizer("adam"), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = mp.shard(*train)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    return 100 * float(model.evaluate(*test, verbose=0)[1])


def main() -> None:
    """Train with all formats and seeds, and print the accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="a folder with the four files of Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    train, test = data.load(options.data)
    context = mp.init()
    before = context.config
    means: dict[str, float] = {}
    for form in _FORMATS:
        context.config = dataclasses.replace(before, wire=form, wire_weights=form)
        seen = [held_out_accuracy(train, test, seed, options.epochs) for seed in range(options.seeds)]
        means[form] = statistics.fmean(seen)
        if mp.is_server():
            by_seed = " ".join(f"{accuracy:6.2f}" for accuracy in seen)
            difference = means[form] - means["plain"]
            print(f"{form:6} {by_seed}   mean {means[form]:6.2f}   against plain {difference:+.2f}", flush=True)


if __name__ == "__main__":
    main()
