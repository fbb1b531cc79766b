"""The columns that train with Keras: plain, with an all-reduce of mpi4py, with mpipipe, with Horovod."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import shapes

_NAP = 100e-6


class _Tensorflow:
    """A model and its data; what a step is, the columns say."""

    rank, size = 0, 1

    def __init__(self, model: shapes.Shape, threads: int) -> None:
        import tensorflow as tf

        # The same for all, and by mpipipe's rule: with one thread between operations gradients would leave late.
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(threads, 2))
        self._join()
        import keras

        from benchmarks import models

        keras.utils.set_random_seed(1)
        self._tf, self._shape = tf, model
        self.model = models.build(model)
        self._loss = models.loss_function()
        self._sgd = keras.optimizers.SGD(0.01, momentum=0.9)

    def _join(self) -> None:
        """Find rank and size."""

    def facts(self) -> dict[str, Any]:
        """What the results should name."""
        import keras

        from benchmarks import models

        threading = self._tf.config.threading
        return {
            "layer_bytes": models.layer_bytes(self.model),
            "threads": [threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()],
            "versions": {"tensorflow": self._tf.__version__, "keras": keras.__version__, "python": sys.version},
        }

    def prepare(self, batch: int) -> None:
        """Make the data."""
        x, y = shapes.data(self._shape, batch, self.rank)
        self.x, self.y = self._tf.constant(x), self._tf.constant(y)

    def serve(self) -> bool:
        """Nobody only serves."""
        return False

    def steps(self, mode: str, count: int) -> list[float]:
        """Do steps."""
        step = getattr(self, "_" + mode)
        times = [time.perf_counter()]
        for _ in range(count):
            step()
            times.append(time.perf_counter())
        return times

    def close(self) -> None:
        """Nothing to do."""

    def _function(self, step: Callable[..., Any]) -> Any:
        # Nothing here has control flow to convert, and old versions of autograph stumble over new Python.
        return self._tf.function(step, autograph=False)

    def _gradients(self, x: Any, y: Any) -> list[Any]:
        with self._tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
        gradients: list[Any] = tape.gradient(loss, self.model.trainable_variables)
        return gradients


class Keras(_Tensorflow):
    """Modes: "computing", a plain Keras step of this rank alone; "allreduce", with the mean over all ranks.

    The all-reduce is of one flat buffer, after the backward pass. It is nonblocking and polled with naps: a blocking
    one would spin, and on hosts that share their cores with others take from those what it would not from real ones.
    """

    def _join(self) -> None:
        from mpi4py import MPI

        self._world, self._mpi = MPI.COMM_WORLD, MPI
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()

    def __init__(self, model: shapes.Shape, threads: int) -> None:
        super().__init__(model, threads)
        import numpy as np

        variables = self.model.trainable_variables
        sizes = [int(self._tf.size(variable)) for variable in variables]
        self._flat, self._sum = np.zeros(sum(sizes), np.float32), np.zeros(sum(sizes), np.float32)
        ends = np.cumsum(sizes)
        self._parts = [
            (slice(end - size, end), tuple(variable.shape))
            for end, size, variable in zip(ends, sizes, variables, strict=True)
        ]
        self._train = self._function(self._train_step)
        self._compute = self._function(self._gradients_only)
        self._apply = self._function(self._apply_gradients)

    def facts(self) -> dict[str, Any]:
        """What the results should name."""
        return {**super().facts(), "mpi": self._mpi.Get_library_version().splitlines()[0].strip("\0")}

    def layers(self) -> tuple[list[float], list[float]]:
        """Seconds of each layer's forward and backward pass."""
        from benchmarks import models

        return models.layer_seconds(self.model, self.x)

    def _computing(self) -> None:
        self._train(self.x, self.y)

    def _allreduce(self) -> None:
        for (part, _), gradient in zip(self._parts, self._compute(self.x, self.y), strict=True):
            self._flat[part] = gradient.numpy().ravel()
        request = self._world.Iallreduce(self._flat, self._sum)
        while not request.Test():
            time.sleep(_NAP)
        self._sum /= self.size
        self._apply([self._sum[part].reshape(shape) for part, shape in self._parts])

    def _train_step(self, x: Any, y: Any) -> None:
        self._apply_gradients(self._gradients(x, y))

    def _gradients_only(self, x: Any, y: Any) -> list[Any]:
        return [self._tf.convert_to_tensor(gradient) for gradient in self._gradients(x, y)]

    def _apply_gradients(self, gradients: list[Any]) -> None:
        self._sgd.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))


class Mpipipe(_Tensorflow):
    """Mode "training": rank 0 serves, the others train. ``MPIPIPE_OVERLAP=0`` makes it the straight line."""

    def _join(self) -> None:
        import mpipipe

        self._mp = mpipipe
        self.rank, self.size = mpipipe.rank(), mpipipe.size()

    def __init__(self, model: shapes.Shape, threads: int) -> None:
        super().__init__(model, threads)
        self._optimizer = self._mp.DistributedOptimizer(self._sgd)
        self._train = self._function(self._train_step)

    def facts(self) -> dict[str, Any]:
        """What the results should name."""
        return {**super().facts(), "mpipipe": getattr(self._mp, "__version__", "?")}

    def serve(self) -> bool:
        """Serve on rank 0."""
        if self._mp.is_client():
            return False
        self._optimizer.serve(self.model)
        return True

    def steps(self, mode: str, count: int) -> list[float]:
        """Do steps; what is under way at the end of the last is waited for, but not counted."""
        times = super().steps(mode, count)
        self._optimizer.take_weights(self.model)
        return times

    def close(self) -> None:
        """Meet the server."""
        if self._mp.is_client():
            self._optimizer.finish(self.model)

    def _training(self) -> None:
        self._train(self.x, self.y)

    def _train_step(self, x: Any, y: Any) -> None:
        self._optimizer.take_weights(self.model)
        gradients = self._gradients(x, y)
        self._optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))


class Horovod(_Tensorflow):
    """Modes: "training", with Horovod's all-reduce of each gradient; "computing", without.

    Gradients of embeddings are made dense first, so that it moves the same bytes as the others.
    """

    def _join(self) -> None:
        import horovod.tensorflow as hvd

        # With MPI initialised it is not Horovod's to finalize: Horovod can be shut down and come back.
        import mpi4py.MPI  # noqa: F401

        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def __init__(self, model: shapes.Shape, threads: int) -> None:
        super().__init__(model, threads)
        self._train = self._function(partial(self._train_step, together=True))
        self._compute = self._function(partial(self._train_step, together=False))
        self._hvd.broadcast_variables(self.model.variables, root_rank=0)

    def facts(self) -> dict[str, Any]:
        """What the results should name."""
        import horovod

        return {**super().facts(), "horovod": horovod.__version__}

    def steps(self, mode: str, count: int) -> list[float]:
        """Do steps; computing alone is without Horovod's background threads, which take time all the time."""
        if mode == "computing":
            self._hvd.shutdown()
        times = super().steps(mode, count)
        if mode == "computing":
            self._hvd.init()
        return times

    def _training(self) -> None:
        self._train(self.x, self.y)

    def _computing(self) -> None:
        self._compute(self.x, self.y)

    def _train_step(self, x: Any, y: Any, together: bool) -> None:
        with self._tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
        if together:
            tape = self._hvd.DistributedGradientTape(tape, sparse_as_dense=True)
        variables = self.model.trainable_variables
        self._sgd.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
