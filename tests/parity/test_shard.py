"""All parts together are exactly the whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpipipe import context as running
from mpipipe import data


@pytest.fixture
def as_client(monkeypatch):
    """Be one of some clients."""

    def become(index, count):
        monkeypatch.setattr(running, "num_clients", lambda: count)
        monkeypatch.setattr(running, "client_index", lambda: index)

    return become


def parts(as_client, count, make):
    result = []
    for index in range(count):
        as_client(index, count)
        result.append(make())
    return result


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_arrays(as_client, count):
    x, y = np.arange(20).reshape(20, 1), np.arange(20)
    shards = parts(as_client, count, lambda: data.shard(x, y))
    assert sorted(np.concatenate([part for _, part in shards]).tolist()) == list(range(20))
    assert all((a[:, 0] == b).all() for a, b in shards)
    assert max(len(b) for _, b in shards) - min(len(b) for _, b in shards) <= 1
    assert all(np.shares_memory(b, y) for _, b in shards)


def test_nested_structures_keep_their_shape(as_client):
    as_client(1, 2)
    inputs = {"a": np.arange(4), "b": (np.arange(4) * 10, [np.arange(4) * 100, None])}
    part = data.shard((inputs, np.arange(4)))
    assert part[0]["a"].tolist() == [1, 3] and part[0]["b"][0].tolist() == [10, 30]
    assert part[0]["b"][1][0].tolist() == [100, 300] and part[0]["b"][1][1] is None
    assert data.shard(tf.range(4)).numpy().tolist() == [1, 3]


def test_datasets(as_client):
    whole = tf.data.Dataset.range(11)
    shards = parts(as_client, 3, lambda: list(data.shard(whole).as_numpy_iterator()))
    assert sorted(sum(shards, [])) == list(range(11))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return np.full(2, index)


def test_py_datasets(as_client):
    def take():
        part = data.shard(Batches(workers=2))
        assert part.workers == 2
        return [int(part[i][0]) for i in range(part.num_batches)]

    assert sorted(sum(parts(as_client, 3, take), [])) == list(range(7))


def test_what_cannot_be_shared_is_said(as_client):
    as_client(0, 3)
    with pytest.raises(ValueError, match=r"different numbers of samples: \[3, 4\]"):
        data.shard(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="2 samples cannot be shared among 3 clients"):
        data.shard(np.zeros(2))
    with pytest.raises(TypeError, match="not builtins.str"):
        data.shard("data")
    with pytest.raises(TypeError, match="needs the data"):
        data.shard()
