"""Images for the examples: the digits that scikit-learn ships, or MNIST's or Fashion-MNIST's four files in a folder."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Split = tuple[NDArray[np.float32], NDArray[np.int64]]


def load(folder: str | None) -> tuple[Split, Split]:
    """Training and held-out images, (n, height, width, 1) in 0..1, and their classes, (n,) in 0..9."""
    return load_digits() if folder is None else load_idx(Path(folder))


def load_digits() -> tuple[Split, Split]:
    """The 1,797 handwritten digits of 8 x 8 pixels in scikit-learn; every fifth is held out."""
    from sklearn.datasets import load_digits as digits

    bunch = digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def load_idx(folder: Path) -> tuple[Split, Split]:
    """The files of MNIST's format: ``train-images-idx3-ubyte`` and so on, gzipped or not.

    Raises:
        SystemExit: a file is missing or is not what its name says.
    """
    train, test = (
        (_read(folder, f"{part}-images-idx3-ubyte", 3), _read(folder, f"{part}-labels-idx1-ubyte", 1))
        for part in ("train", "t10k")
    )
    for (images, labels), part in ((train, "train"), (test, "t10k")):
        if len(images) != len(labels):
            raise SystemExit(f"{folder}: {len(images)} {part} images but {len(labels)} labels")
    (train_x, train_y), (test_x, test_y) = train, test
    return (_scale(train_x), train_y.astype(np.int64)), (_scale(test_x), test_y.astype(np.int64))


def _scale(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (images / np.float32(255)).astype(np.float32)[..., np.newaxis]


def _read(folder: Path, name: str, dimensions: int) -> NDArray[np.uint8]:
    """One idx file: 0, 0, 8 (unsigned bytes), the number of dimensions, their sizes (big-endian), the bytes."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    if plain.is_file():
        content = plain.read_bytes()
    elif zipped.is_file():
        content = gzip.decompress(zipped.read_bytes())
    else:
        raise SystemExit(f"neither {plain} nor {zipped} exists: --data takes a folder with the four files of MNIST")
    if content[:4] != bytes((0, 0, 8, dimensions)):
        raise SystemExit(f"{folder / name} is not an idx file of {dimensions} dimensions of unsigned bytes")
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if len(values) != int(np.prod(shape)):
        raise SystemExit(f"{folder / name} holds {len(values)} values where its head says {shape.tolist()}")
    return values.reshape(shape)
