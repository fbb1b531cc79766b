"""``shard``: this client's part of the data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpipipe import context as running


def shard(*data: Any) -> Any:
    """This client's part of the data: with n clients, every n-th sample from its own number on.

    All parts together are exactly the whole, and no part is more than one sample larger than another. Shuffle after
    sharding: data in another order on every rank has other parts. On the server
    it is the first client's part (as a view, so it costs nothing), to build a model from.

    Args:
        *data: numpy arrays, tensors, and tuples, lists and dictionaries of them, which are shared by their first
            axis; or a ``tf.data.Dataset``, shared by its elements; or a ``keras.utils.PyDataset``, by its batches.

    Returns:
        The part, of the same structure; a tuple of parts where several arguments are given.

    Raises:
        TypeError: data of another kind.
        ValueError: arrays of different lengths, or fewer samples than clients.
    """
    if not data:
        raise TypeError("shard() needs the data that is to be shared, such as mpipipe.shard(x, y)")
    count, index = running.num_clients(), running.client_index()
    lengths = {len(array) for array in _arrays(data)}
    if len(lengths) > 1:
        raise ValueError(f"the arrays have different numbers of samples: {sorted(lengths)}")
    if lengths and min(lengths) < count:
        raise ValueError(f"{min(lengths)} samples cannot be shared among {count} clients: each needs one")
    parts = tuple(_map(part, count, index) for part in data)
    return parts if len(parts) > 1 else parts[0]


def _arrays(data: Any) -> list[Any]:
    """The arrays in nested data."""
    if isinstance(data, dict):
        return [array for part in data.values() for array in _arrays(part)]
    if isinstance(data, tuple | list):
        return [array for part in data for array in _arrays(part)]
    if isinstance(data, tf.data.Dataset | keras.utils.PyDataset) or data is None:
        return []
    if isinstance(data, np.ndarray | tf.Tensor) and len(data.shape):
        return [data]
    raise TypeError(
        f"shard() takes numpy arrays, tensors, tuples, lists and dictionaries of them, a tf.data.Dataset or a "
        f"keras.utils.PyDataset; not {type(data).__module__}.{type(data).__qualname__}"
    )


def _map(data: Any, count: int, index: int) -> Any:
    if data is None:
        return None
    if isinstance(data, dict):
        return {name: _map(part, count, index) for name, part in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_map(part, count, index) for part in data))
    if isinstance(data, tuple | list):
        return type(data)(_map(part, count, index) for part in data)
    if isinstance(data, tf.data.Dataset):
        return data.shard(count, index)
    if isinstance(data, keras.utils.PyDataset):
        return data if count == 1 else _ShardedPyDataset(data, count, index)
    return data[index::count]


class _ShardedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Every ``count``-th batch of a PyDataset, from number ``index`` on."""

    def __init__(self, whole: Any, count: int, index: int) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        if whole.num_batches is not None and whole.num_batches < count:
            raise ValueError(f"{whole.num_batches} batches cannot be shared among {count} clients: each needs one")
        self._whole, self._count, self._index = whole, count, index

    @property
    def num_batches(self) -> int | None:
        """The number of batches of this part; None where the whole does not know its own."""
        whole = self._whole.num_batches
        return None if whole is None else len(range(self._index, whole, self._count))

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._index + index * self._count]

    def on_epoch_begin(self) -> None:
        """Let the whole know."""
        if hasattr(self._whole, "on_epoch_begin"):
            self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Let the whole know."""
        self._whole.on_epoch_end()
