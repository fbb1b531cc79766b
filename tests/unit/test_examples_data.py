"""The examples read the files of MNIST's format, gzipped or not, and say what is wrong with others."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import data  # noqa: E402


def idx(values):
    head = bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.astype(np.uint8).tobytes()


def write(folder, zipped=False, **changed):
    files = {
        "train-images-idx3-ubyte": idx(np.arange(2 * 3 * 3).reshape(2, 3, 3) * 15),
        "train-labels-idx1-ubyte": idx(np.array([7, 3])),
        "t10k-images-idx3-ubyte": idx(np.full((1, 3, 3), 255)),
        "t10k-labels-idx1-ubyte": idx(np.array([9])),
        **changed,
    }
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_four_files_are_images_between_0_and_1_with_their_classes(tmp_path, zipped):
    write(tmp_path, zipped)
    (x, y), (test_x, test_y) = data.load(str(tmp_path))
    assert x.shape == (2, 3, 3, 1) and x.dtype == np.float32 and x[0, 0, 1, 0] == np.float32(15 / 255)
    assert y.tolist() == [7, 3] and test_y.tolist() == [9] and test_x.max() == 1.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"no idx file", "is not an idx file"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2, 3])), "2 train images but 3 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([9]))[:-1], "holds 0 values where its head says"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path, name, content, message):
    write(tmp_path, **{name: content})
    with pytest.raises(SystemExit, match=message):
        data.load(str(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match="train-images-idx3-ubyte"):
        data.load(str(tmp_path))


def test_the_digits_are_all_1797_and_no_held_out_one_is_trained_on():
    pytest.importorskip("sklearn")
    (x, y), (test_x, test_y) = data.load(None)
    assert len(x) + len(test_x) == 1797 and len(y) == len(x) and len(test_y) == len(test_x)
    assert x.shape[1:] == (8, 8, 1) and 0.0 == x.min() and x.max() == 1.0
