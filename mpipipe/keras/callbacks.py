"""Callbacks for distributed training: ``mpipipe.callbacks``."""

from __future__ import annotations

from typing import Any

import keras

from mpipipe import context as running
from mpipipe.keras import compat
from mpipipe.keras.checkpoint import Checkpoint

__all__ = ["Checkpoint", "LearningRateWarmup"]


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets the learning rate grow from rate / clients to the rate, linearly with the steps, then leaves it alone.

    With n clients a step sees n times the samples, for which one takes n times the learning rate; too much for the
    first steps, with which the weights change fastest. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet
    in 1 Hour", 2017, section 2.2.

    Give it to the server, or to all ranks: on clients it does nothing. Where there is one rank only, it does not change
    the rate.

    Args:
        steps: in how many steps.
        epochs: or in how many epochs. Their length has to be known, which that of a generator is not.
        learning_rate: what is reached; by default the rate that the optimizer has when training begins. Needed where a
            run goes on that was broken off while the rate was growing.

    Raises:
        ValueError: not one of ``steps`` and ``epochs`` is given; or, when training begins, the length of an epoch is
            not known, or the learning rate is a schedule.
    """

    def __init__(
        self, steps: int | None = None, epochs: float | None = None, learning_rate: float | None = None
    ) -> None:
        super().__init__()
        if (steps is None) == (epochs is None):
            raise ValueError("LearningRateWarmup takes either steps or epochs")
        self._wanted_steps, self._epochs, self._wanted_rate = steps, epochs, learning_rate
        self._ended = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Note the rate to reach, and where training stands."""
        context, optimizer = running.init(), self.model.optimizer
        self._ended = not context.is_server
        if self._ended:
            return
        if self._wanted_steps is not None:
            self._steps = self._wanted_steps
        elif (per_epoch := self.params.get("steps")) is not None:
            assert self._epochs is not None
            self._steps = round(self._epochs * per_epoch)
        else:
            raise ValueError("LearningRateWarmup(epochs=...) needs the number of steps of an epoch: give steps=...")
        rate = compat.learning_rate(getattr(optimizer, "inner", optimizer))
        if rate is None:
            raise ValueError("LearningRateWarmup cannot change a learning rate that is a schedule: let it warm up")
        self._rate = rate if self._wanted_rate is None else self._wanted_rate
        self._least = 1 / len(context.clients)
        self._done = int(optimizer.iterations)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step that begins."""
        if self._ended:
            return
        grown = min(self._done / self._steps, 1.0) if self._steps else 1.0
        self.model.optimizer.learning_rate = self._rate * (self._least + (1 - self._least) * grown)
        self._ended = grown == 1.0
        self._done += 1
