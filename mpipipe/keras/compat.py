"""Every line that depends on a version of TensorFlow or Keras, or on their private parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from mpipipe.errors import EnvironmentProblem

_WRONG_BACKEND = "Keras runs on the backend {!r}, mpipipe needs KERAS_BACKEND=tensorflow"
# Before Keras is imported: with a backend that is not installed, that fails with an error about the backend's package.
if (_wanted := os.environ.get("KERAS_BACKEND") or "tensorflow") != "tensorflow":
    raise EnvironmentProblem(_WRONG_BACKEND.format(_wanted))
try:
    import tensorflow as tf
except ImportError as error:
    raise EnvironmentProblem(
        f"TensorFlow cannot be imported ({error}): install it with `pip install 'mpipipe[tensorflow-cpu]'` "
        "(or mpipipe[tensorflow], for GPUs)"
    ) from None
import keras  # noqa: E402

# The oldest that is tested, with TensorFlow 2.16. Those before drop batches with steps_per_execution above 1.
OLDEST_KERAS = (3, 7)


def check_environment() -> None:
    """Refuse what cannot work, before it fails somewhere else.

    Raises:
        EnvironmentProblem: another Keras backend, a Keras that is too old, or an active ``tf.distribute`` strategy.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise EnvironmentProblem(_WRONG_BACKEND.format(backend))
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if version < OLDEST_KERAS:
        raise EnvironmentProblem(
            f"Keras {keras.__version__} is too old: mpipipe needs {'.'.join(map(str, OLDEST_KERAS))} or newer "
            "(it runs on TensorFlow 2.16 or newer)"
        )
    if tf.distribute.has_strategy():
        strategy = type(tf.distribute.get_strategy()).__name__
        raise EnvironmentProblem(
            f"a tf.distribute strategy ({strategy}) is active: mpipipe distributes by itself, so leave its scope"
        )


def updates_by_variable(optimizer: Any) -> bool:
    """Whether an optimizer's step is Keras's own, variable by variable, so that it can be taken bucket by bucket.

    Nadam, for one, has a factor that advances once a call; such an optimizer gets all gradients of a step at once.
    """
    stock = keras.optimizers.Optimizer
    names = ("apply", "_backend_apply_gradients", "_backend_update_step", "_clip_gradients", "_clip_by_norm")
    return all(getattr(type(optimizer), name) is getattr(stock, name) for name in names)


def optimizers_inside(optimizer: Any) -> list[str]:
    """The names of an optimizer's attributes that are optimizers, or lists of them."""

    def is_one(value: Any) -> bool:
        values = value if isinstance(value, (list, tuple)) else [value]
        return any(isinstance(each, keras.optimizers.Optimizer) for each in values)

    return [name for name, value in vars(optimizer).items() if is_one(value)]


def step_counter(optimizer: Any) -> Any:
    """The variable in which an optimizer counts its steps, those in which it only accumulates gradients too."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def accumulates_at_clients(optimizer: Any) -> int:
    """How many gradients a client can sum before it sends their sum, as ``gradient_accumulation_steps`` asks.

    1 where it sends each: there is nothing to accumulate, or the optimizer does something in every step (``use_ema``,
    a step of its own).
    """
    stock = keras.optimizers.Optimizer
    of_keras = all(getattr(type(optimizer), n) is getattr(stock, n) for n in ("apply", "_backend_apply_gradients"))
    steps = optimizer.gradient_accumulation_steps
    return int(steps) if steps and of_keras and not optimizer.use_ema else 1


def signals(optimizer: Any) -> list[Any]:
    """What an optimizer that has been built changes by itself and its :meth:`scale_loss` reads, as variables."""
    return [optimizer.dynamic_scale] if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else []


def learning_rate(optimizer: Any) -> float | None:
    """An optimizer's learning rate where it is a number that can be set; None for a schedule, or for several rates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    try:
        scheduled = isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        return None if scheduled else float(optimizer.learning_rate)
    except AttributeError:
        return None


def is_linear(optimizer: Any) -> bool:
    """Whether it is the same to an optimizer if it gets gradients of one row, or their sum.

    Keras's others work on each: the square of a ``tf.IndexedSlices`` has the squares of its rows, and those that belong
    to one row of the variable are added up afterwards.
    """
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return type(optimizer) is keras.optimizers.SGD and not clips


def changes_only_rows_with_gradient(optimizer: Any) -> bool:
    """Whether an update with ``tf.IndexedSlices`` leaves every other row of the variable as it is, for sure.

    Momentum moves rows on, weight decay and moving averages move all.
    """
    still = type(optimizer) is keras.optimizers.Adagrad or (
        type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    )
    return still and not optimizer.weight_decay and not optimizer.use_ema


def embeddings_of(model: Any) -> set[Any]:
    """The keys (see :func:`variable_key`) of variables of which a step probably has gradients of some rows only.

    Embeddings in another dtype than they compute in are cast as a whole before rows are taken.
    """
    found = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding) and layer.built]
    return {variable_key(layer.embeddings) for layer in found if layer.compute_dtype == layer.variable_dtype}


# Optimizers whose update of an element depends on nothing but that element's gradient, value and slots.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras's that treat every element by itself (and not a class made from one)."""
    return type(optimizer) in [getattr(keras.optimizers, name) for name in _ELEMENTWISE]


class OptimizerOfPart:
    """An optimizer that has, in place of a variable and its slots, the same part of each.

    Attributes:
        part: the part of the variable.
        average: the part of its moving average, or None.
    """

    def __init__(self, optimizer: Any, variable: Any, part_of: Callable[[Any], Any]) -> None:
        index, count = optimizer._get_variable_index(variable), len(optimizer._trainable_variables)
        self.part = part_of(variable)
        # A copy without Keras's tracking: it shares iterations and learning rate and has nothing else of its own.
        copy = object.__new__(type(optimizer))
        copy.__dict__.update(vars(optimizer))
        slots = []
        for name, value in vars(optimizer).items():
            # Slots are lists with a variable for each of the trainable ones, whatever an optimizer calls them.
            a_list = isinstance(value, (list, tuple)) and name not in ("_variables", "_trainable_variables")
            if not a_list or len(value) != count:
                continue
            if getattr(value[index], "shape", None) == variable.shape:
                slots.append(part_of(value[index]))
                copy.__dict__[name] = [slots[-1]]
        copy.__dict__["_get_variable_index"] = lambda _: 0
        self.average = copy.__dict__["_model_variables_moving_average"][0] if optimizer.use_ema else None
        self.update_step = copy.update_step
        self._parts = [self.part, *slots]

    def write(self) -> None:
        """Put the parts back into the variables."""
        for part in self._parts:
            part.write()


def is_built(model: Any) -> bool:
    """Whether all of a model's variables exist."""
    return all(layer.built for layer in model._flatten_layers())


def build_from_data(model: Any, arguments: dict[str, Any]) -> None:
    """Build a model from the shapes of what was given to ``fit``, without running it on any of the data.

    Raises:
        ValueError: the model cannot be built from shapes alone.
    """
    from keras.src.trainers.data_adapters import data_adapter_utils
    from keras.src.trainers.epoch_iterator import EpochIterator

    names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    data = EpochIterator(shuffle=False, **{name: arguments.get(name) for name in names})
    spec = data.data_adapter.get_tf_dataset().element_spec
    inputs, _, _ = data_adapter_utils.unpack_x_y_sample_weight(spec)
    _build(model, tf.nest.map_structure(lambda s: keras.KerasTensor(tuple(s.shape), dtype=s.dtype.name), inputs))


def build_from_batch(model: Any, x: Any) -> None:
    """Build a model from the shape of a batch.

    Raises:
        ValueError: the model cannot be built from shapes alone.
    """
    _build(model, tf.nest.map_structure(lambda a: keras.KerasTensor((None, *a.shape[1:]), dtype=_dtype(a)), x))


def _dtype(array: Any) -> str:
    return str(keras.backend.standardize_dtype(array.dtype))


def _build(model: Any, symbolic: Any) -> None:
    try:
        model(symbolic)
    except Exception as error:
        raise ValueError(
            f"the model could not be built from the shapes of its data ({error}): build it on all ranks "
            "before fit, by calling it on a batch"
        ) from error


def state_of(model: Any) -> list[Any]:
    """What a model's layers change as they run, such as moving statistics.

    That is its weights without those that are trained or frozen, and without the state of random generators.
    """
    own = {id(variable) for layer in model._flatten_layers() for variable in layer._non_trainable_variables}
    return [variable for variable in model.non_trainable_weights if id(variable) in own]


def batch_statistics(model: Any) -> list[str]:
    """The names of a model's layers that normalise by the statistics of a batch when they are trained."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer.name for layer in layers if layer.trainable]


def random_layers(model: Any) -> list[str]:
    """The names of a model's layers that draw random numbers."""
    return [layer.name for layer in model._flatten_layers() if getattr(layer, "_seed_generators", None)]


def seeds_of(model: Any) -> list[Any]:
    """The states of the random generators of a model's layers."""
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", None) or ()]
    return [generator.state for generator in generators]


def native(variable: Any) -> Any:
    """The ``tf.Variable`` in a Keras variable."""
    from keras.src.backend import Variable  # in older versions keras.Variable is another class

    return variable.value if isinstance(variable, Variable) else variable


def path_of(variable: Any) -> str:
    """Where a variable stands in its model; its name, for a plain ``tf.Variable``."""
    return str(getattr(variable, "path", variable.name))


def dtype_name(variable: Any) -> str:
    """The name of a variable's dtype."""
    return _dtype(variable)


def variable_key(variable: Any) -> Any:
    """What is the same for two references to one variable."""
    return native(variable)._unique_id


def sample_count(batch: Any) -> Any:
    """The number of samples of a batch as ``train_step`` gets it, as an int64 tensor."""
    first = next(part for part in tf.nest.flatten(batch) if part is not None)
    return tf.cast(tf.shape(first)[0], tf.int64)


def plain_logs(logs: Any) -> dict[str, float]:
    """The numbers of a dictionary of logs, as Python floats; what is not one number is left out."""
    numbers: dict[str, float] = {}
    for name, value in (logs or {}).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def metric_order(model: Any, logs: dict[str, Any]) -> list[str]:
    """The names in logs in the order in which Keras returns them where it returns no dictionary."""
    names = model._flatten_metrics_in_order({name: name for name in logs})
    return names if isinstance(names, list) else [names]


def callback_list(model: Any, callbacks: Any, **arguments: Any) -> Any:
    """Keras's list of callbacks, with its own added as ``fit`` does."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, add_history=True, model=model, **arguments)


def users_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks given to ``fit``, as a list, without those that Keras adds by itself."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        added = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
        return [callback for callback in callbacks.callbacks if not isinstance(callback, added)]
    return [] if callbacks is None else tf.nest.flatten(callbacks)


def looks_at_batches(callback: Any) -> bool:
    """Whether a callback may look at the weights between two batches.

    Those of Keras that act at the end of an epoch only, as most do by default, do not.
    """
    names = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    if all(getattr(getattr(callback, name), "_is_default", False) for name in names):
        return False
    if type(callback).__module__.startswith("mpipipe."):
        return False  # they act on the server
    ours = type(callback).__module__.startswith("keras.") and not isinstance(callback, keras.callbacks.LambdaCallback)
    return not (ours and all(getattr(callback, name, "epoch") == "epoch" for name in ("save_freq", "update_freq")))


def first_epoch(model: Any, initial_epoch: int) -> int:
    """Where ``fit`` starts: where ``BackupAndRestore`` says, if it has restored anything."""
    return int(model._initial_epoch or initial_epoch)


def set_first_epoch(model: Any, epoch: int | None) -> None:
    """Have ``fit`` start at an epoch; it looks when the callbacks' ``on_train_begin`` is over."""
    model._initial_epoch = epoch


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """The inputs, targets and sample weights in what ``fit`` takes as ``validation_data``."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(data)
    return x, y, sample_weight


def names(variables: Iterable[Any]) -> str:
    """Paths of variables, for a message."""
    return ", ".join(path_of(variable) for variable in variables)
