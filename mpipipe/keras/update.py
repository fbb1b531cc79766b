"""The server's step: the real Keras optimizer, one unit at a time."""

from __future__ import annotations

import math
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from mpipipe.keras import compat
from mpipipe.keras.bridge import Bridge
from mpipipe.logs import logger
from mpipipe.protocol.plan import Plan, Region, Unit


class Updater:
    """Takes mean gradients from a bridge, updates the variables, gives the new weights back.

    Args:
        optimizer: the user's optimizer, built for ``variables``.
        variables: all trainable variables.
        plan: its units are the bridge's slots.
        bridge: where gradients come from and weights go to.
        accumulated: how many gradients of a client are summed in one that it sends (1: it accumulates none).
        on_nonfinite: the setting of that name.
        redoes: whether a step may have to be done again.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        plan: Plan,
        bridge: Bridge,
        accumulated: int = 1,
        *,
        on_nonfinite: str = "ignore",
        redoes: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._plan = plan
        self._bridge = bridge
        self._accumulated = accumulated
        # Besides the variables there may be some that the optimizer changes by itself (see compat.signals).
        self._units = [unit for unit in plan.units if unit.regions[0].variable < len(self._variables)]
        self._signals = plan.units[len(self._units) :]
        self._whole = needs_all_gradients(optimizer, on_nonfinite)
        self._skips = on_nonfinite == "skip" and not self._signals  # it skips by itself, and learns from it
        # Clients may have rows of a step that was done again, which the next one need not change.
        with tf.init_scope():
            self._all_rows = tf.Variable(False, trainable=False) if redoes else None
        if self._whole:
            logger.info("layers are updated together, at the end of the backward pass: %s", self._whole)

    @property
    def all_rows(self) -> bool:
        """Whether a step gives all rows of what travels by rows, whichever it has changed."""
        return self._all_rows is not None and bool(self._all_rows)

    @all_rows.setter
    def all_rows(self, wanted: bool) -> None:
        if self._all_rows is not None:
            self._all_rows.assign(wanted)

    @cached_property
    def step(self) -> Any:
        """Serve one step: :meth:`trace_step` as a function of its own."""
        return tf.function(self.trace_step, autograph=False).get_concrete_function()

    def trace_step(self) -> Any:
        """In the graph: serve one step, every unit as soon as its gradients are there; returns its number."""
        iterations = compat.step_counter(self._optimizer)
        if self._accumulated > 1:
            # Keras counts the steps in which gradients are only accumulated, too.
            done = tf.convert_to_tensor(iterations) % self._accumulated
            iterations.assign_add(self._accumulated - 1 - done)
        if self._whole:
            self._update_all()
        else:
            for unit in self._units:
                if self._plan.divisible and not unit.row_bytes:
                    self._update_parts(unit)
                else:
                    self._update(unit)
            for variable, has_gradient in zip(self._variables, self._plan.has_gradient, strict=False):
                if not has_gradient:
                    self._average(variable, self._average_of(variable), variable)
            # Updates read the number of the step, so it may only change after all of them; TensorFlow sees to that.
            iterations.assign_add(1)
        for unit in self._signals:
            self._shaped(unit)  # nothing, but it has to be taken
            self._give(unit)
        self._bridge.end_step()
        return tf.convert_to_tensor(iterations)

    def _gradients(self, unit: Unit, shapes: Sequence[Any]) -> list[Any]:
        """The gradients of a unit's regions, divided by the factor of the loss and by how many are in their sums."""
        gradients = self._bridge.take(unit, shapes)
        for divisor in (self._optimizer.loss_scale_factor, self._accumulated if self._accumulated > 1 else None):
            if divisor is not None:
                gradients = [_divided(gradient, divisor) for gradient in gradients]
        return gradients

    def _shaped(self, unit: Unit) -> list[Any]:
        """The gradients of a unit of whole variables, in their shapes."""
        shapes = [variable.shape for variable in self._bridge.variables_of(unit)]
        return self._gradients(unit, shapes) if not self._whole else self._bridge.take(unit, shapes)

    def _update_parts(self, unit: Unit) -> None:
        """What ``Optimizer.apply`` does, for parts of variables of an optimizer that takes each element by itself."""
        new = []
        variables = [self._variables[region.variable] for region in unit.regions]
        shapes = [_part(tuple(v.shape), region)[1] for v, region in zip(variables, unit.regions, strict=True)]
        gradients = self._gradients(unit, shapes)
        for variable, region, gradient in zip(variables, unit.regions, gradients, strict=True):
            # Read no sooner: else there is a copy of all variables and slots as soon as a step begins.
            with tf.control_dependencies([gradient]):
                optimizer = compat.OptimizerOfPart(self._optimizer, variable, partial(Part, region=region))
            part = optimizer.part
            (gradient,) = self._optimizer._clip_gradients([gradient])
            if self._optimizer.weight_decay is not None and self._optimizer._use_weight_decay(variable):
                rate = tf.cast(self._optimizer.learning_rate, part.dtype)
                part.assign_sub(part * tf.cast(self._optimizer.weight_decay, part.dtype) * rate)
            optimizer.update_step(gradient, part, self._optimizer.learning_rate)
            self._average(variable, optimizer.average, part)
            optimizer.write()
            new.append(part.tensor)
        self._bridge.give(unit, new)

    def _update(self, unit: Unit) -> None:
        """What ``Optimizer.apply`` does, for the variables of one bucket."""
        optimizer = self._optimizer
        variables = [self._variables[region.variable] for region in unit.regions]
        gradients = self._shaped(unit)
        free = getattr(variables[0], "constraint", None) is None
        few = unit.row_bytes and free and compat.changes_only_rows_with_gradient(optimizer)
        touched = tf.unique(gradients[0].indices)[0] if few else None
        before = self._before(unit) if touched is None else None
        gradients = optimizer._clip_gradients(gradients)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
        for variable in variables:
            self._average(variable, self._average_of(variable), variable)
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))
        self._give(unit, before, touched)

    def _update_all(self) -> None:
        gradients: list[Any] = [None] * len(self._variables)
        for unit in self._units:
            for region, gradient in zip(unit.regions, self._shaped(unit), strict=True):
                gradients[region.variable] = gradient
        before = [self._before(unit) for unit in self._units]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")  # it has been said on the clients
            apply = partial(self._apply, gradients)
            if self._skips:
                flat = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
                finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in flat])
                tf.cond(finite, apply, lambda: False)
            else:
                apply()
        for unit, values in zip(self._units, before, strict=True):
            self._give(unit, values)

    def _apply(self, gradients: list[Any]) -> bool:
        self._optimizer.apply(gradients, self._variables)  # which divides by what is accumulated, too
        return True

    def _before(self, unit: Unit) -> Any:
        """What a unit of rows holds before it is updated."""
        return self._bridge.variables_of(unit)[0].read_value() if unit.row_bytes else None

    def _give(self, unit: Unit, before: Any = None, touched: Any = None) -> None:
        """Give a unit's new weights; of rows those touched, or those that are no longer as ``before``."""
        variables = self._bridge.variables_of(unit)
        if touched is not None:
            if self._all_rows is not None:
                every = tf.range(tf.constant(variables[0].shape[0], touched.dtype))
                touched = tf.cond(self._all_rows.read_value(), lambda: every, lambda: touched)
            values = [tf.IndexedSlices(variables[0].sparse_read(touched), touched)]
        elif unit.row_bytes:
            values = [_changed_rows(before, variables[0].read_value(), self._all_rows)]
        else:
            values = [variable.read_value() for variable in variables]
        self._bridge.give(unit, values)

    def _average_of(self, variable: Any) -> Any:
        if not self._optimizer.use_ema:
            return None
        return self._optimizer._model_variables_moving_average[self._optimizer._get_variable_index(variable)]

    def _average(self, variable: Any, average: Any, target: Any) -> None:
        """The exponential moving average of the weights, and their replacement by it, as ``use_ema`` asks.

        ``average`` and ``target`` are that of the variable and the variable, or the same part of both.
        """
        optimizer = self._optimizer
        if not optimizer.use_ema:
            return
        later = tf.cast(tf.not_equal(optimizer.iterations, 0), variable.dtype)
        momentum = later * tf.cast(optimizer.ema_momentum, variable.dtype)
        average.assign(momentum * tf.convert_to_tensor(average) + (1 - momentum) * tf.convert_to_tensor(target))
        if optimizer.ema_overwrite_frequency:
            due = tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)
            target.assign(tf.where(due, tf.convert_to_tensor(average), tf.convert_to_tensor(target)))


# By the bytes of an element: what a variable's rows are compared as. Where there is nothing, it travels whole.
BITS_OF_ROWS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


def _divided(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / factor, gradient.indices, gradient.dense_shape)
    return gradient / factor


def _changed_rows(before: Any, after: Any, every: Any) -> Any:
    """The rows of ``after`` in which any bit is another one than before, whatever the optimizer has changed.

    All of them, where ``every`` is a variable that is true.
    """
    bits = BITS_OF_ROWS[before.dtype.size]
    unlike = tf.not_equal(tf.bitcast(before, bits), tf.bitcast(after, bits))
    in_row = tf.reduce_any(unlike, axis=list(range(1, len(before.shape))))
    changed = tf.where(in_row if every is None else in_row | every.read_value())[:, 0]
    return tf.IndexedSlices(tf.gather(after, changed), changed, tf.shape(after, tf.int64))


class Part:
    """A region of a variable, which an optimizer's ``update_step`` may use in the variable's place.

    In the graph only: it is read once, holds its newest value as a tensor, and is written back by :meth:`write`.
    """

    def __init__(self, variable: Any, region: Region) -> None:
        self._variable = compat.native(variable)
        self._blocks, shape = _part(tuple(self._variable.shape), region)
        if self._blocks is None:
            self.tensor = self._variable.read_value()
        else:
            # Unlike a slice of the whole value, this copies the region only, and lets it be written in place.
            self.tensor = tf.raw_ops.ResourceGatherNd(
                resource=self._variable.handle, indices=self._blocks, dtype=self._variable.dtype
            )
            self.tensor.set_shape(shape)
        self._read = self.tensor

    @property
    def dtype(self) -> str:
        """The name of the variable's dtype."""
        return str(self._variable.dtype.name)

    @property
    def shape(self) -> Any:
        """The variable's shape, or (blocks, *shape of a block)."""
        return self.tensor.shape

    def assign(self, value: Any) -> None:
        """Replace the value."""
        self.tensor = tf.reshape(tf.cast(value, self._variable.dtype), self.shape)

    def assign_add(self, value: Any) -> None:
        """Add to the value."""
        self.assign(self.tensor + tf.cast(value, self._variable.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtract from the value."""
        self.assign(self.tensor - tf.cast(value, self._variable.dtype))

    def write(self) -> None:
        """Put the value into the variable, if it has been replaced."""
        if self.tensor is self._read:
            return
        if self._blocks is None:
            self._variable.assign(self.tensor, read_value=False)
        else:
            tf.raw_ops.ResourceScatterNdUpdate(ref=self._variable.handle, indices=self._blocks, updates=self.tensor)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self.tensor if dtype is None else tf.cast(self.tensor, dtype)


def _operator(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Part, Any], Any]:
    def method(self: Part, other: Any) -> Any:
        other = tf.convert_to_tensor(other, self.tensor.dtype) if not tf.is_tensor(other) else other
        return function(other, self.tensor) if swapped else function(self.tensor, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Part, f"__{_name}__", _operator(getattr(operator, _name), swapped=False))
    setattr(Part, f"__r{_name}__", _operator(getattr(operator, _name), swapped=True))


def _part(shape: tuple[int, ...], region: Region) -> tuple[Any, tuple[int, ...]]:
    """What makes up a region of a variable of some shape, and its shape.

    That is the indices (blocks, depth) of the largest blocks, and (blocks, *shape of a block); None and the variable's
    where the region is the whole variable.
    """
    if region.size == math.prod(shape):
        return None, shape
    size, depth = math.prod(shape), 0
    while region.start % size or region.stop % size:
        size //= shape[depth]
        depth += 1
    numbers = np.arange(region.start // size, region.stop // size)
    return np.stack(np.unravel_index(numbers, shape[:depth]), axis=1).astype(np.int32), (len(numbers), *shape[depth:])


def is_divisible(optimizer: Any, variables: Sequence[Any], on_nonfinite: str = "ignore") -> bool:
    """Whether parts of variables can be updated by themselves, with the result that whole ones would give."""
    constrained = any(getattr(variable, "constraint", None) is not None for variable in variables)
    whole = constrained or optimizer.clipnorm or needs_all_gradients(optimizer, on_nonfinite)
    return compat.is_elementwise(optimizer) and not whole


class Snapshot:
    """The values of variables as they were at one moment.

    They take as much memory as the variables. A value that is read shares the variable's memory, and TensorFlow copies
    that when it writes to what is shared; but once parts of a variable have been written, it copies when it is read.

    Args:
        variables: what to know of, in the order of the values.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [compat.native(variable) for variable in variables]
        read = tf.function(lambda: [v.read_value() for v in self._variables], autograph=False)
        self._read = read.get_concrete_function()

    def take(self) -> list[Any]:
        """The values that the variables have now."""
        return list(self._read())

    def put_back(self, values: Sequence[Any]) -> None:
        """Have the variables as they were when these values were taken."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


class StateBefore:
    """The state before the step that is being served, or has been served last.

    It is kept here, as whatever an optimizer has for an attribute Keras tracks, and TensorFlow then keeps alive.

    Args:
        variables: see :class:`Snapshot`.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._snapshot = Snapshot(variables)
        self._taken: tuple[int, list[Any]] | None = None
        self._lock = threading.Lock()

    def take(self, steps: int) -> None:
        """A step begins, after so many."""
        with self._lock:
            self._taken = None  # first, as there need not be both
            self._taken = steps, self._snapshot.take()

    @property
    def taken(self) -> tuple[int, list[Any]] | None:
        """That number of steps, and the values of the variables; None before the first step. From any thread."""
        with self._lock:
            return self._taken

    def put_back(self) -> None:
        """Have the variables as they were."""
        assert self._taken is not None
        self._snapshot.put_back(self._taken[1])


def needs_all_gradients(optimizer: Any, on_nonfinite: str = "ignore") -> str:
    """Why an optimizer can only update all variables at once, in words; empty where it can do so one by one."""
    if on_nonfinite == "skip":
        return "on_nonfinite='skip' needs to know that all gradients are finite"
    if optimizer.global_clipnorm:
        return "global_clipnorm needs the gradients of all layers"
    if optimizer.gradient_accumulation_steps and compat.accumulates_at_clients(optimizer) == 1:
        return "gradient_accumulation_steps with use_ema, or in an optimizer with an apply of its own, needs all layers"
    if not compat.updates_by_variable(optimizer):
        return f"{type(optimizer).__name__} has a step of its own that needs the gradients of all layers"
    return ""
