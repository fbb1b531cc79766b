"""The server's step: the real Keras optimizer, one bucket at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from mpipipe.keras import compat
from mpipipe.keras.bridge import Bridge
from mpipipe.logs import logger
from mpipipe.protocol.plan import Bucket


class Updater:
    """Takes mean gradients from a bridge, updates the variables, gives the new weights back.

    Args:
        optimizer: the user's optimizer, built for ``variables``.
        variables: all trainable variables.
        bridge: where gradients come from and weights go to.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], bridge: Bridge) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._bridge = bridge
        self._whole = _needs_all_gradients(optimizer)
        if self._whole:
            logger.info("layers are updated together, at the end of the backward pass: %s", self._whole)

    @cached_property
    def step(self) -> Any:
        """Serve one step: :meth:`trace_step` as a function of its own."""
        return tf.function(self.trace_step, autograph=False).get_concrete_function()

    def trace_step(self) -> Any:
        """In the graph: serve one step, every bucket as soon as its gradients are there; returns its number."""
        if self._whole:
            self._update_all()
        else:
            for bucket in self._bridge.plan.buckets:
                self._update(bucket)
            has_gradient = self._bridge.plan.has_gradient
            self._average([v for v, has in zip(self._variables, has_gradient, strict=True) if not has])
            # Updates read the number of the step, so it may only change after all of them; TensorFlow sees to that.
            self._optimizer._iterations.assign_add(1)
        return tf.convert_to_tensor(self._optimizer._iterations)

    def _update(self, bucket: Bucket) -> None:
        """What ``Optimizer.apply`` does, for the variables of one bucket."""
        optimizer = self._optimizer
        variables = [self._variables[position] for position in bucket.variables]
        gradients = self._bridge.take(bucket)
        if optimizer.loss_scale_factor is not None:
            gradients = [gradient / optimizer.loss_scale_factor for gradient in gradients]
        gradients = optimizer._clip_gradients(gradients)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
        self._average(variables)
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))
        self._give(bucket)

    def _update_all(self) -> None:
        gradients: dict[int, Any] = {}
        for bucket in self._bridge.plan.buckets:
            gradients.update(zip(bucket.variables, self._bridge.take(bucket), strict=True))
        positions = sorted(gradients)
        self._optimizer.apply([gradients[p] for p in positions], [self._variables[p] for p in positions])
        for bucket in self._bridge.plan.buckets:
            self._give(bucket)

    def _give(self, bucket: Bucket) -> None:
        self._bridge.give(bucket, [variable.read_value() for variable in self._bridge.variables_of(bucket)])

    def _average(self, variables: Sequence[Any]) -> None:
        """The exponential moving average of the weights, and their replacement by it, as ``use_ema`` asks."""
        optimizer = self._optimizer
        if not optimizer.use_ema:
            return
        for variable in variables:
            average = optimizer._model_variables_moving_average[optimizer._get_variable_index(variable)]
            later = tf.cast(tf.not_equal(optimizer.iterations, 0), variable.dtype)
            momentum = later * tf.cast(optimizer.ema_momentum, variable.dtype)
            average.assign(momentum * average + (1 - momentum) * variable)
            if optimizer.ema_overwrite_frequency:
                due = tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)
                target = compat.native(variable)
                target.assign(tf.where(due, tf.convert_to_tensor(average), target.read_value()))


def _needs_all_gradients(optimizer: Any) -> str:
    """Why an optimizer can only update all variables at once, in words; empty where it can do so one by one."""
    if optimizer.global_clipnorm:
        return "global_clipnorm needs the gradients of all layers"
    if optimizer.gradient_accumulation_steps:
        return "gradient_accumulation_steps needs the gradients of all layers"
    if not compat.updates_by_variable(optimizer):
        return f"{type(optimizer).__name__} has a step of its own that needs the gradients of all layers"
    return ""
