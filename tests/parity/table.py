"""The table: what goes with Keras training, and how far mpipipe's model is from the one that one process trains.

``make parity`` prints it. Every optimizer in ``keras.optimizers`` is in it by introspection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parity.running import BATCH, STEPS, Case, Result, Run

SAMPLES = STEPS * BATCH
TOKENS = 50

_HALF = "16-bit floats: a sum over a client's part of a batch is rounded before the parts are added up"


def regression(features: int = 8, samples: int = SAMPLES, seed: int = 0) -> tuple[Any, Any]:
    """Inputs (samples, features) and targets (samples, 1)."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, features)).astype(np.float32)
    return x, (x @ random.normal(size=(features, 1)) + 0.1).astype(np.float32)


def tokens(length: int = 5, samples: int = SAMPLES, seed: int = 0) -> tuple[Any, Any]:
    """Token numbers (samples, length), some of them more than once, and targets (samples, 1)."""
    random = np.random.default_rng(seed)
    x = random.integers(0, TOKENS, size=(samples, length)).astype(np.int32)
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)


def mlp(features: int = 8, **arguments: Any) -> Any:
    """A perceptron; ``arguments`` go to its hidden layers."""
    dense = partial(keras.layers.Dense, 16, activation="tanh", **arguments)
    return keras.Sequential([keras.Input((features,)), dense(), dense(), keras.layers.Dense(1)])


def with_embedding() -> Any:
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(TOKENS, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def train(
    make_optimizer: Callable[[], Any] = adam,
    make_model: Callable[[], Any] = mlp,
    data: Callable[[], tuple[Any, Any]] = regression,
    compiled: dict[str, Any] | None = None,
    fitted: dict[str, Any] | None = None,
    built: bool = False,
    without: str = "",
) -> Callable[[Run], Result]:
    """A case that compiles and fits."""

    def script(run: Run) -> Result:
        model = make_model()
        model.compile(optimizer=run.optimizer(make_optimizer()), **{"loss": "mse", **(compiled or {})})
        if built:
            model.optimizer.build(model.trainable_variables)
        return Result(model, run.fit(model, *data(), **(fitted or {})), without=without)

    return script


# Every optimizer that Keras ships.

# Those whose arguments are not a learning rate.
_BY_HAND: dict[str, Callable[[], Any]] = {
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=5
    ),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        lambda variable: _SPLIT[len(variable.shape) - 1]  # made anew by _two_optimizers
    ),
}
_SPLIT: list[Any] = []


def _two_optimizers() -> Any:
    """Biases by one optimizer, kernels by another."""
    _SPLIT[:] = [keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01)]
    return _BY_HAND["MultiOptimizer"]()


def optimizers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every optimizer in this version of Keras, as it comes and with each of its switches on: (name, maker)."""
    base = keras.optimizers.Optimizer
    found = {n: c for n, c in vars(keras.optimizers).items() if isinstance(c, type) and issubclass(c, base)}
    parameters = {n: inspect.signature(c).parameters for n, c in found.items() if n not in ("Optimizer", *_BY_HAND)}
    # What all have has rows of its own, see _options.
    common = set.intersection(*(set(those) for those in parameters.values()))
    for name in sorted(set(found) - {"Optimizer"}):
        if name in _BY_HAND:
            yield name, _two_optimizers if name == "MultiOptimizer" else _BY_HAND[name]
            continue
        cls = found[name]
        own = {key: p.default for key, p in parameters[name].items() if key not in common}
        yield name, partial(cls, learning_rate=0.003)
        momentum = {"momentum": 0.9} if own.get("momentum") == 0.0 else {}
        if momentum:
            yield f"{name} momentum", partial(cls, learning_rate=0.003, **momentum)
        for switch in [key for key, default in own.items() if default is False]:
            yield f"{name} {switch}", partial(cls, learning_rate=0.003, **momentum, **{switch: True})


# What goes with an optimizer.


def _options() -> Iterator[Case]:
    def case(name: str, make: Callable[[], Any], **more: Any) -> Case:
        return Case("options", name, train(make, **more))

    def without_biases() -> Any:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    o, schedules = keras.optimizers, keras.optimizers.schedules
    yield case("clipnorm", lambda: o.SGD(0.05, momentum=0.9, clipnorm=0.1))
    yield case("clipvalue", lambda: o.Adam(0.01, clipvalue=0.01))
    yield case("global_clipnorm", lambda: o.SGD(0.05, momentum=0.9, global_clipnorm=0.1))
    yield case("weight_decay", lambda: o.SGD(0.05, weight_decay=0.1))
    yield case("exclude_from_weight_decay", without_biases)
    yield case("use_ema", lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.8))
    yield case("use_ema, overwritten", lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3))
    yield case("loss_scale_factor", lambda: o.SGD(0.05, momentum=0.9, loss_scale_factor=128.0))
    yield Case("options", "gradient_accumulation_steps", accumulation)
    yield case("accumulation of Nadam", lambda: o.Nadam(0.01, gradient_accumulation_steps=3))
    yield case(
        "accumulation with use_ema", lambda: o.Adam(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.8)
    )
    yield case(
        "accumulation, clipping, schedule",
        lambda: o.SGD(schedules.ExponentialDecay(0.05, 2, 0.9), clipnorm=0.1, gradient_accumulation_steps=4),
    )
    yield case(
        "accumulation over the end of an epoch",
        lambda: o.Adam(0.01, gradient_accumulation_steps=5),
        fitted={"epochs": 2},
        without="accumulator",  # that of a sum that is not applied yet is at the clients
    )
    constraints = keras.constraints
    for constraint in (constraints.MaxNorm(0.5), constraints.UnitNorm(), constraints.NonNeg()):
        model = partial(mlp, kernel_constraint=constraint)
        yield case(f"constraint {type(constraint).__name__}", sgd, make_model=model)
    penalties = {"kernel_regularizer": "l2", "bias_regularizer": "l1"}
    yield case("regularizers", adam, make_model=partial(mlp, **penalties))
    yield Case(
        "options",
        "activity_regularizer",
        train(adam, partial(mlp, activity_regularizer="l2")),
        exact=_activity_loss_is_a_mean(),
        why=""
        if _activity_loss_is_a_mean()
        else "this version of Keras adds the penalty up over the samples of a batch",
    )
    yield case("ExponentialDecay", lambda: o.Adam(schedules.ExponentialDecay(0.01, 3, 0.8)))
    yield case("CosineDecay", lambda: o.SGD(schedules.CosineDecay(0.0, 9, warmup_target=0.05, warmup_steps=3)))


def _activity_loss_is_a_mean() -> bool:
    """Whether the penalty of a batch is the mean over its samples, as a loss is."""
    layer = keras.layers.Activation("linear", activity_regularizer="l2")
    layer(np.ones((2, 1), np.float32))
    (of_two,) = layer.losses
    layer(np.ones((4, 1), np.float32))
    return bool(np.isclose(of_two, layer.losses[-1]))


def accumulation(run: Run) -> Result:
    """Nothing is on the wire but every fourth step."""
    model = mlp()
    optimizer = run.optimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4))
    model.compile(optimizer=optimizer, loss="mse")
    history = run.fit(model, *regression())
    if run.distributed and run.rank:
        engine = optimizer.session.engine
        per_step = engine.plan.nbytes + 16 * len(engine.plan.pieces)
        assert engine.bytes_sent == STEPS // 4 * per_step, (engine.bytes_sent, per_step)
    return Result(model, history)


# Learning rates and callbacks.


class Halve(keras.callbacks.Callback):
    """Changes the learning rate within epochs."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch % 4 == 3:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


def _callbacks() -> Iterator[Case]:
    def script(make: Callable[[], list[Any]], where: str, run: Run, optimizer: Callable[[], Any] = sgd) -> Result:
        model = mlp()
        model.compile(optimizer=run.optimizer(optimizer()), loss="mse", metrics=["mae"])
        x, y = regression()
        return Result(model, run.fit(model, x, y, epochs=4, callbacks=run.callbacks(make, where)))

    c = keras.callbacks
    plateau = partial(c.ReduceLROnPlateau, monitor="loss", factor=0.3, patience=0, min_delta=0.2)
    for where in ("all", "server"):
        yield Case("callbacks", f"LearningRateScheduler, {where}", partial(script, lambda: [_decay()], where))
        yield Case("callbacks", f"ReduceLROnPlateau, {where}", partial(script, lambda: [plateau()], where))
    yield Case("callbacks", "a rate changed between batches", partial(script, lambda: [Halve()], "server"))
    stop = partial(c.EarlyStopping, monitor="loss", patience=0, min_delta=10.0, restore_best_weights=True)
    for where in ("all", "server"):
        yield Case("callbacks", f"EarlyStopping, {where}", partial(script, lambda: [stop()], where))
    yield Case(
        "callbacks",
        "SwapEMAWeights",
        partial(
            script,
            lambda: [c.SwapEMAWeights(swap_on_epoch=True)],
            "server",
            optimizer=lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
        ),
    )


def _decay() -> Any:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)


# Precision.


def _precision() -> Iterator[Case]:
    def script(policy: str, make: Callable[[], Any], run: Run) -> Result:
        keras.config.set_dtype_policy(policy)
        model = mlp(dtype=policy)
        # Keras computes a loss in float32 if it is not told otherwise.
        loss = keras.losses.MeanSquaredError(dtype="float64") if policy == "float64" else "mse"
        model.compile(optimizer=run.optimizer(make()), loss=loss)
        x, y = regression()
        return Result(model, run.fit(model, x, y))

    def with_bad_samples(run: Run) -> Result:
        """In two steps one client's gradient is not finite: all skip them and halve the scale."""
        x, y = regression()
        x[2 * BATCH + 1], x[7 * BATCH + BATCH - 1] = np.inf, 1e30
        model = mlp(dtype="float32")
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)
        model.compile(optimizer=run.optimizer(optimizer), loss="mse")
        model.layers[0].activation = keras.activations.linear
        run.fit(model, x, y)
        result = Result(model)
        assert result.iterations != [STEPS] or run.distributed, "no step was skipped"
        return result

    yield Case("precision", "float64", partial(script, "float64", adam), limit=1e-13)
    yield Case("precision", "mixed_bfloat16", partial(script, "mixed_bfloat16", sgd), limit=3e-2, why=_HALF)
    yield Case("precision", "mixed_float16", partial(script, "mixed_float16", _scaled_sgd), limit=3e-2, why=_HALF)
    yield Case("precision", "variables of float16", partial(script, "float16", _small_sgd), limit=2e-2, why=_HALF)
    yield Case("precision", "variables of bfloat16", partial(script, "bfloat16", _small_sgd), limit=1e-1, why=_HALF)
    yield Case("precision", "gradients that are not finite", with_bad_samples)


def _scaled_sgd() -> Any:
    # With Keras's initial scale of 2**15 it depends on the size of a part what is too large for float16.
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**8)


def _small_sgd() -> Any:
    return keras.optimizers.SGD(0.05)


# Gradients.


class Tied(keras.Model):
    """One weight used twice: as an embedding and, transposed, as the last layer's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(TOKENS, 4)
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.embedding.build((None,))
        self.dense.build((None, 4))

    def call(self, x: Any) -> Any:
        hidden = self.dense(tf.reduce_mean(self.embedding(x), axis=1))
        return tf.reduce_mean(tf.matmul(hidden, self.embedding.embeddings, transpose_b=True), axis=1, keepdims=True)


class Unused(keras.Model):
    """A layer that no gradient comes to, between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (keras.layers.Dense(n) for n in (8, 5, 1))
        for layer, features in ((self.first, 8), (self.unused, 8), (self.last, 8)):
            layer.build((None, features))

    def call(self, x: Any) -> Any:
        return self.last(tf.tanh(self.first(x)))


def _gradients() -> Iterator[Case]:
    o = keras.optimizers
    for name, make in (
        ("SGD", lambda: o.SGD(0.1)),
        ("SGD momentum", lambda: o.SGD(0.02, momentum=0.9)),
        ("Adam", adam),
        ("Adagrad", lambda: o.Adagrad(0.1)),
        ("SGD, weight_decay", lambda: o.SGD(0.1, weight_decay=0.1)),
        ("RMSprop centered", lambda: o.RMSprop(0.01, centered=True)),
        ("AdamW, clipvalue", lambda: o.AdamW(0.01, clipvalue=0.01)),
        ("Adam, global_clipnorm", lambda: o.Adam(0.01, use_ema=True, ema_overwrite_frequency=4)),
    ):
        yield Case("gradients", f"embedding, {name}", train(make, with_embedding, tokens))
    yield Case("gradients", "one weight used twice", train(adam, Tied, tokens))
    yield Case("gradients", "variables without a gradient", train(adam, Unused))
    yield Case("gradients", "frozen and unfrozen", frozen_and_unfrozen)
    yield Case("gradients", "edited before apply_gradients", train(adam, Edited))


class Edited(keras.Sequential):
    """User code between the tape and the optimizer: it scales gradients, and drops those of one variable's half."""

    def __init__(self) -> None:
        super().__init__([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [0.5 * gradient for gradient in gradients]
        gradients[0] = gradients[0] * np.array([1.0] * 8 + [0.0] * 8, np.float32)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, None) | {"loss": loss}


def frozen_and_unfrozen(run: Run) -> Result:
    model = mlp()
    x, y = regression()
    model.layers[0].trainable = False
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    run.fit(model, x, y)
    model.layers[0].trainable = True
    model.layers[1].trainable = False
    model.compile(optimizer=run.optimizer(sgd()), loss="mse")
    return Result(model, run.fit(model, x, y))


# Ways to train.


def _ways() -> Iterator[Case]:
    def case(name: str, script: Callable[[Run], Result], **more: Any) -> Case:
        return Case("ways to train", name, script, **more)

    yield case("fit", train(adam, compiled={"metrics": ["mae"]}))
    yield case("fit twice", fit_twice)
    yield case("compile again", compile_again)
    yield case("two models", two_models)
    yield case("a train_step with two optimizers", two_optimizers)
    yield case("a loop of one's own", own_loop)
    yield case("train_on_batch", on_batches)
    yield case("sample_weight", weighted)
    yield case("class_weight", train(adam, classifier, classes, {"loss": "binary_crossentropy"}, _CLASS_WEIGHT))
    yield case("several outputs and losses", several_outputs)
    yield case("run_eagerly", train(adam, compiled={"run_eagerly": True}))
    yield case("steps_per_execution", train(adam, compiled={"steps_per_execution": 4}))
    for name, layers in _LAYERS.items():
        yield case(name, train(adam, partial(_around, layers), partial(regression, 12)))
    yield case("lookup tables", lookup)
    yield case("Normalization", adapted)
    yield case("BatchNormalization, equal parts", batch_norm_of_equal_parts)
    yield case(
        "BatchNormalization",
        train(adam, partial(_around, lambda: [keras.layers.BatchNormalization()]), partial(regression, 12)),
        exact=False,
        why="each client normalises by its own part of the batch; statistics are the mean over clients",
    )
    yield case(
        "Dropout",
        train(adam, partial(_around, lambda: [keras.layers.Dropout(0.3)]), partial(regression, 12)),
        exact=False,
        why="each client draws random numbers of its own",
    )


_CLASS_WEIGHT = {"class_weight": {0: 0.3, 1: 2.0}}
_LAYERS: dict[str, Callable[[], list[Any]]] = {
    "LSTM": lambda: [keras.layers.Reshape((4, 3)), keras.layers.LSTM(6)],
    "GRU": lambda: [keras.layers.Reshape((4, 3)), keras.layers.GRU(6)],
    "attention": lambda: [keras.layers.Reshape((4, 3)), _SelfAttention(), keras.layers.Flatten()],
    "LayerNormalization": lambda: [keras.layers.Dense(8), keras.layers.LayerNormalization()],
    "GroupNormalization": lambda: [keras.layers.Dense(8), keras.layers.GroupNormalization(2)],
    "convolutions": lambda: [
        keras.layers.Reshape((4, 3, 1)),
        keras.layers.Conv2D(4, 2, activation="tanh"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
    ],
}


class _SelfAttention(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: softmax does not see that of the keys, whose gradient is nothing but rounding.
        self.attention = keras.layers.MultiHeadAttention(2, 4, use_bias=False)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return x + self.attention(x, x)


def _around(layers: Callable[[], list[Any]]) -> Any:
    return keras.Sequential([keras.Input((12,)), *layers(), keras.layers.Dense(1)])


def fit_twice(run: Run) -> Result:
    model = mlp()
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    x, y = regression()
    run.fit(model, x, y, epochs=2)
    return Result(model, run.fit(model, x, y))


def compile_again(run: Run) -> Result:
    model = mlp()
    x, y = regression()
    for make in (adam, sgd):
        model.compile(optimizer=run.optimizer(make()), loss="mse")
        history = run.fit(model, x, y)
    return Result(model, history)


def two_models(run: Run) -> Result:
    x, y = regression()
    first, second = mlp(), mlp()
    for model, make in ((first, adam), (second, sgd)):
        model.compile(optimizer=run.optimizer(make()), loss="mse")
    run.fit(first, x, y)
    history = run.fit(second, x, y)
    run.fit(first, x, y)
    return Result(second, history, [first.optimizer, second.optimizer], dict(enumerate(first.get_weights())))


class TwoOptimizers(keras.Sequential):
    """A ``train_step`` that updates the first layer by one optimizer and the rest by another, unknown to Keras."""

    def compile(self, first: Any, second: Any) -> None:
        super().compile(loss="mse")
        self.first, self.second = first, second

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))
        self.first.apply_gradients(pairs[:2])
        self.second.apply_gradients(pairs[2:])
        return {"loss": loss}


def two_optimizers(run: Run) -> Result:
    """All ranks run ``fit``, the server too: in each step it serves one optimizer and then the other."""
    model = TwoOptimizers(mlp().layers)
    first, second = run.optimizer(sgd()), run.optimizer(adam())
    model.compile(first, second)
    if run.distributed:
        first.synchronize(model.trainable_variables[:2])
        second.synchronize(model.trainable_variables[2:])
    run.fit(model, *regression())
    if run.distributed:
        first.finish()
        second.finish()
    return Result(model, optimizers=[first, second])


def own_loop(run: Run) -> Result:
    x, y = regression()
    x, y = run.part(x), run.part(y)
    model, optimizer = mlp(), run.optimizer(adam())
    take = optimizer.take_weights if run.distributed else lambda model: None

    @tf.function
    def step(x: Any, y: Any) -> None:
        take(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    size = run.batch()
    if not run.distributed or run.rank:
        for at in range(0, len(x), size):
            step(x[at : at + size], y[at : at + size])
        if run.distributed:
            optimizer.finish(model)
    else:
        optimizer.serve(model)
    return Result(model, optimizers=[optimizer])


def on_batches(run: Run) -> Result:
    model = mlp()
    model.compile(optimizer=run.optimizer(adam()), loss="mse", metrics=["mae"])
    x, y = regression()
    x, y = run.part(x), run.part(y)
    size = run.batch()
    logs = []
    for at in range(0, len(x), size):
        logs.append(model.train_on_batch(x[at : at + size], y[at : at + size], return_dict=True))
        model.reset_metrics()
    return Result(model, {name: [log[name] for log in logs] for name in logs[0]})


def weighted(run: Run) -> Result:
    model = mlp()
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    x, y = regression()
    weight = np.random.default_rng(3).uniform(size=len(x)).astype(np.float32)
    return Result(model, run.fit(model, x, y, sample_weight=weight))


def classifier() -> Any:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])


def classes() -> tuple[Any, Any]:
    x, y = regression()
    return x, (y > 0).astype(np.float32)


def several_outputs(run: Run) -> Result:
    inputs = keras.Input((8,), name="x")
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "b": keras.layers.Dense(2, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(optimizer=run.optimizer(adam()), loss=losses, loss_weights={"a": 1.0, "b": 0.5})
    x, y = regression()
    return Result(model, run.fit(model, x, {"a": y, "b": (y > 0).astype(np.int32)[:, 0]}))


def lookup(run: Run) -> Result:
    words = np.array(["red", "green", "blue", "no such word"])
    numbers, y = tokens(1)
    text = words[numbers % 4]
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(8, 4), keras.layers.Flatten(),
                              keras.layers.Dense(1)])  # fmt: skip
    strings = keras.layers.StringLookup(vocabulary=list(words[:3]))
    integers = keras.layers.IntegerLookup(vocabulary=[5, 6])
    inputs = keras.Input((1,), dtype="string"), keras.Input((1,), dtype="int64")
    outputs = model(keras.layers.Add()([strings(inputs[0]), integers(inputs[1])]))
    whole = keras.Model(inputs, outputs)
    whole.compile(optimizer=run.optimizer(adam()), loss="mse")
    x = tf.constant(run.part(text)), tf.constant(run.part((numbers % 8).astype(np.int64)))
    data = tf.data.Dataset.from_tensor_slices((x, run.part(y))).batch(run.batch())
    return Result(whole, whole.fit(data, verbose=0))


def adapted(run: Run) -> Result:
    x, y = regression()
    normalization = keras.layers.Normalization()
    normalization.adapt(x)
    model = keras.Sequential([keras.Input((8,)), normalization, keras.layers.Dense(1)])
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    return Result(model, run.fit(model, x, y))


def batch_norm_of_equal_parts(run: Run) -> Result:
    """Where the parts of a batch are equal, so are their statistics and those of the whole."""
    x, y = regression(12, samples=STEPS * 4)
    x, y = (np.tile(a.reshape(STEPS, 4, -1), (1, BATCH // 4, 1)).reshape(STEPS * BATCH, -1) for a in (x, y))
    # Without a bias, whose gradient would be nothing but rounding.
    model = _around(lambda: [keras.layers.Dense(8, use_bias=False), keras.layers.BatchNormalization(momentum=0.8)])
    model.compile(optimizer=run.optimizer(sgd()), loss="mse")
    return Result(model, run.fit(model, x, y))


# Data.


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, x: Any, y: Any, size: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._x, self._y, self._size = x, y, size

    def __len__(self) -> int:
        return -(-len(self._x) // self._size)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        part = slice(index * self._size, (index + 1) * self._size)
        return self._x[part], self._y[part]


def _data() -> Iterator[Case]:
    def case(name: str, script: Callable[[Run], Result], **more: Any) -> Case:
        return Case("data", name, script, **more)

    yield case("generator", partial(from_batches, lambda x, y, size: _generator(Batches(x, y, size))))
    yield case("tf.data", partial(from_batches, _dataset))
    yield case("PyDataset with threads", partial(from_batches, partial(Batches, workers=2)))
    yield case(
        "PyDataset with processes",
        partial(from_batches, partial(Batches, workers=2, use_multiprocessing=True)),
    )
    yield case("parts of unlike sizes, by samples", unlike_parts)
    yield case("unlike numbers of batches, by samples", unlike_numbers)
    yield case("embedding, parts of unlike sizes", partial(unlike_parts, make_model=with_embedding, data=tokens))
    yield case("lengths that differ by rank", unlike_lengths)


def from_batches(make: Callable[..., Any], run: Run) -> Result:
    model = mlp()
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    x, y = regression()
    data = make(run.part(x), run.part(y), run.batch())
    return Result(model, model.fit(data, verbose=0, shuffle=False, **_end(run)))


def _end(run: Run) -> dict[str, int]:
    """Where data end. Distributed runs find it by themselves.

    Keras alone would count one more iteration at the end of a generator: its graph counts while there are no data.
    """
    return {} if run.distributed else {"steps_per_epoch": STEPS}


def _generator(batches: Batches) -> Iterator[tuple[Any, Any]]:
    for index in range(len(batches)):
        yield batches[index]


def _dataset(x: Any, y: Any, size: int) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size).prefetch(2)


def _uneven(run: Run, batch: int) -> slice:
    """This run's part of a batch: one sample for the first client, all the rest for the last, two for any between."""
    if not run.distributed:
        return slice(0, batch)
    starts = [0, 1, 3, 5, 7, 9][: run.clients] + [batch]
    index = max(run.rank - 1, 0)
    return slice(starts[index], starts[index + 1])


def unlike_parts(
    run: Run,
    make_model: Callable[[], Any] = mlp,
    data: Callable[[], tuple[Any, Any]] = regression,
) -> Result:
    """Every sample counts the same, however many of a batch a client has; the last batch is shorter."""
    model = make_model()
    arguments = {"average": "samples"} if run.distributed else {}
    model.compile(optimizer=run.optimizer(adam(), **arguments), loss="mse")
    x, y = (array[: SAMPLES - 5] for array in data())
    part = _uneven(run, BATCH)
    batches = [(x[at : at + BATCH][part], y[at : at + BATCH][part]) for at in range(0, len(x), BATCH)]
    return Result(model, model.fit((batch for batch in batches), verbose=0, **_end(run)))


def unlike_numbers(run: Run) -> Result:
    """The last client has data for four steps only: then the others go on, and every sample counts the same."""
    model = mlp()
    arguments = {"average": "samples"} if run.distributed else {}
    model.compile(optimizer=run.optimizer(adam(), **arguments), loss="mse")
    x, y = regression()
    size = BATCH // 2
    batches = []
    for step in range(STEPS):
        at = step * BATCH
        first, last = slice(at, at + size), slice(at + size, at + BATCH)
        if not run.distributed:
            rows = slice(at, at + BATCH if step < 4 else at + size)
        elif run.rank == run.clients:
            rows = last
        else:  # the other clients share the first half
            share = size // (run.clients - 1)
            begin = first.start + max(run.rank - 1, 0) * share
            rows = slice(begin, begin + share)
        if step < 4 or not (run.distributed and run.rank == run.clients):
            batches.append((x[rows], y[rows]))
    return Result(model, model.fit((batch for batch in batches), verbose=0, **_end(run)))


def unlike_lengths(run: Run) -> Result:
    """Padding is masked, so that it does not matter how long a client pads its batches."""
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(TOKENS, 4, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=run.optimizer(adam()), loss="mse")
    x, y = tokens()
    x[:, 3:] = 0
    padded = np.pad(run.part(x), ((0, 0), (0, run.rank if run.distributed else 0)))
    data = _generator(Batches(padded, run.part(y), run.batch()))
    return Result(model, model.fit(data, verbose=0, **_end(run)))


def table() -> list[Case]:
    """All cases, by group."""
    return [
        # Built beforehand, for Keras's fit builds optimizers in a scratch graph, where a slot does not get an initial
        # value that depends on the weights, such as ScheduleFreeAdamW's.
        *(Case("optimizers", name, train(make, built=True)) for name, make in optimizers()),
        *_options(),
        *_callbacks(),
        *_precision(),
        *_gradients(),
        *_ways(),
        *_data(),
    ]
