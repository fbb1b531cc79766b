"""The models of the rows in Keras (2 or 3). ``torch_models`` has the same layers in the same sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks import shapes

_layers = keras.layers


def build(model: shapes.Shape) -> Any:
    """The model, from inputs to logits."""
    if model.name == "emulated":
        inputs, outputs = _emulated(model)
    else:
        make = {"mlp": _mlp, "resnet": _resnet, "transformer": _transformer, "embedding": _embedding}[model.name]
        inputs, outputs = make(model.size)
    return keras.Model(inputs, _layers.Dense(shapes.CLASSES)(outputs))


def _mlp(units: int) -> tuple[Any, Any]:
    """Equal layers."""
    x = inputs = keras.Input((units,))
    for _ in range(shapes.MLP_LAYERS):
        x = _layers.Dense(units, activation="relu")(x)
    return inputs, x


def _resnet(channels: int) -> tuple[Any, Any]:
    """Pictures through three stages of two residual blocks, with BatchNorm: much computing for each weight."""
    inputs = keras.Input((shapes.RESNET_IMAGE, shapes.RESNET_IMAGE, 3))
    x = _convolution(inputs, channels, 3, 1)
    for stage, factor in enumerate(shapes.RESNET_STAGES):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = _convolution(x, channels * factor, 3, stride)
            y = _convolution(y, channels * factor, 3, 1, activate=False)
            if stride == 2:
                x = _convolution(x, channels * factor, 1, 2, activate=False)
            x = _layers.ReLU()(_layers.Add()([x, y]))
    return inputs, _layers.GlobalAveragePooling2D()(x)


def _convolution(x: Any, channels: int, kernel: int, stride: int, activate: bool = True) -> Any:
    x = _layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False)(x)
    x = _layers.BatchNormalization()(x)
    return _layers.ReLU()(x) if activate else x


def _transformer(width: int) -> tuple[Any, Any]:
    """Words through blocks of attention (one head, which every framework has) and two dense layers."""
    inputs = keras.Input((shapes.TRANSFORMER_LENGTH,), dtype="int32")
    x = _layers.Embedding(shapes.TRANSFORMER_WORDS, width)(inputs)
    for _ in range(shapes.TRANSFORMER_BLOCKS):
        y = _layers.LayerNormalization(epsilon=1e-5)(x)
        query, key, value = (_layers.Dense(width)(y) for _ in range(3))
        x = _layers.Add()([x, _layers.Dense(width)(_layers.Attention()([query, value, key]))])
        y = _layers.LayerNormalization(epsilon=1e-5)(x)
        x = _layers.Add()([x, _layers.Dense(width)(_layers.Dense(4 * width, activation="relu")(y))])
    return inputs, _layers.GlobalAveragePooling1D()(x)


def _embedding(words: int) -> tuple[Any, Any]:
    """A large embedding and little else: nearly all weights are in the first layer, and nothing can hide them."""
    inputs = keras.Input((shapes.EMBEDDING_LENGTH,), dtype="int32")
    x = _layers.Embedding(words, shapes.EMBEDDING_WIDTH)(inputs)
    x = _layers.Flatten()(x)
    x = _layers.Dense(64, activation="relu")(x)
    return inputs, x


def _emulated(model: shapes.Shape) -> tuple[Any, Any]:
    """Equal layers that take time but no cores, as if each host had cores of its own."""
    x = inputs = keras.Input((shapes.EMULATED_WIDTH,))
    for _ in range(shapes.EMULATED_LAYERS):
        x = Emulated(model.size, *model.emulated_passes)(x)
    return inputs, x


class Emulated(_layers.Layer):  # type: ignore[misc, name-defined]
    """Passes its input on after a time, and a gradient for all of its weights after another.

    As in a real layer the forward pass waits for the layer's weights, and the gradient is there when the pass is over.
    """

    def __init__(self, weights: int, forward: float, backward: float) -> None:
        super().__init__()
        self._shape = (weights // shapes.EMULATED_ROW, shapes.EMULATED_ROW)
        self._forward_seconds, self._backward_seconds = forward, backward

    def build(self, input_shape: Any) -> None:
        """Make the weights."""
        self.kernel = self.add_weight(shape=self._shape, initializer="zeros", name="kernel")
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Sleep."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def pass_on(x: Any, kernel: Any) -> Any:
            def back(upstream: Any) -> Any:
                upstream = _sleep(upstream, self._backward_seconds)
                return upstream, tf.fill(self._shape, tf.reduce_mean(upstream))

            return _sleep(x + kernel[0, 0], self._forward_seconds), back

        return pass_on(inputs, tf.convert_to_tensor(self.kernel))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """As the input."""
        return input_shape


def _sleep(x: Any, seconds: float) -> Any:
    """A tensor, some time later. Neither a core nor Python's lock is held meanwhile."""
    # Of an operation that is made for datasets: it is asked twice, for the element and for the end.
    half = tf.constant(int(seconds / 2 * 1e6), tf.int64)
    once = tf.data.Dataset.from_tensors(x)._variant_tensor
    kind = {"output_types": [x.dtype], "output_shapes": [x.shape]}
    later = tf.raw_ops.SleepDataset(input_dataset=once, sleep_microseconds=half, **kind)
    result = tf.raw_ops.DatasetToSingleElement(dataset=later, **kind)[0]
    result.set_shape(x.shape)
    return result


def loss_function() -> Callable[[Any, Any], Any]:
    """The loss of labels and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # type: ignore[no-any-return]


def layer_bytes(model: Any) -> list[int]:
    """Bytes of trainable weights of each layer, in the order of the forward pass."""
    return [sum(4 * int(tf.size(weight)) for weight in layer.trainable_weights) for layer in _computing(model)]


def layer_seconds(model: Any, x: Any, rounds: int = 5) -> tuple[list[float], list[float]]:
    """Seconds of each layer's forward and backward pass, in the order of the forward pass.

    Each layer runs alone, on what the layers before it make of ``x``: forward, and forward with gradients for its
    weights and inputs. That they add up to a step's computing time is not to be expected (a step also has a loss and an
    update, and runs with caches in another state): whoever uses them scales them so that they do.
    """
    layers = _computing(model)
    inputs = [layer.input if isinstance(layer.input, (list, tuple)) else [layer.input] for layer in layers]
    values = keras.Model(model.inputs, [tensor for several in inputs for tensor in several])(x, training=True)
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    known: dict[Any, tuple[float, float]] = {}  # layers of the same kind and sizes are timed once
    times = []
    for layer, several in zip(layers, inputs, strict=True):
        own, values = values[: len(several)], values[len(several) :]
        kind = (type(layer), *(tuple(t.shape) for t in own), *(tuple(weight.shape) for weight in layer.weights))
        if kind not in known:
            there = _seconds(_forward(layer), own, rounds)
            known[kind] = there, max(0.0, _seconds(_with_gradients(layer), own, rounds) - there)
        times.append(known[kind])
    return [there for there, _ in times], [back for _, back in times]


def _computing(model: Any) -> list[Any]:
    return [layer for layer in model.layers if not isinstance(layer, _layers.InputLayer)]


def _call(layer: Any, inputs: list[Any]) -> Any:
    return layer(inputs if len(inputs) > 1 else inputs[0], training=True)


def _forward(layer: Any) -> Callable[[list[Any]], Any]:
    return tf.function(lambda inputs: _call(layer, inputs), autograph=False)  # type: ignore[no-any-return]


def _with_gradients(layer: Any) -> Callable[[list[Any]], Any]:
    def both(inputs: list[Any]) -> Any:
        with tf.GradientTape() as tape:
            floats = [tensor for tensor in inputs if tensor.dtype.is_floating]
            tape.watch(floats)
            result = _call(layer, inputs)
        gradients = tape.gradient(result, [*floats, *(weight for weight in layer.trainable_weights)])
        return [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

    return tf.function(both, autograph=False)  # type: ignore[no-any-return]


def _seconds(function: Callable[[list[Any]], Any], inputs: list[Any], rounds: int) -> float:
    function(inputs)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function(inputs)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
