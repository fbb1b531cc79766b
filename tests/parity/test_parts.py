"""Variables updated part by part get the bits that they get when they are updated whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mpipipe.keras import compat
from mpipipe.keras.bridge import Bridge
from mpipipe.keras.update import Updater, is_divisible
from mpipipe.protocol.plan import VariableSpec, make_plan
from mpipipe.wire.header import HEADER_BYTES

SHAPES = [(40, 24), (24,), (3, 3, 8, 16), (16,), (), (700,), (5, 1)]
STEPS = 4
OPTIMIZERS = {
    **{name: getattr(keras.optimizers, name) for name in compat._ELEMENTWISE},
    "SGD with momentum": lambda **more: keras.optimizers.SGD(0.01, momentum=0.9, **more),
    "SGD with Nesterov momentum": lambda **more: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, **more),
    "Adam with AMSGrad": lambda **more: keras.optimizers.Adam(0.01, amsgrad=True, **more),
    "centred RMSprop with momentum": lambda **more: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True, **more),
}
OPTIONS = {
    "plain": {},
    "clipvalue and weight decay": {"clipvalue": 0.5, "weight_decay": 0.01},
    "moving average": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "loss scale": {"loss_scale_factor": 4.0},
}


def variables(dtype):
    random = np.random.default_rng(0)
    return [keras.Variable(random.normal(size=shape), dtype=dtype, name=f"v{i}") for i, shape in enumerate(SHAPES)]


def gradients(step, dtype):
    random = np.random.default_rng(100 + step)
    return [tf.cast(random.normal(size=shape), dtype) for shape in SHAPES]


def train_by_parts(optimizer, trained, dtype):
    """The steps through an updater with small pieces; returns the weights that it has given, put together."""
    specs = [VariableSpec(f"layer/{v.name}", tuple(v.shape), dtype) for v in trained]
    plan = make_plan(specs, [True] * len(specs), piece_bytes=1024, fuse_bytes=0, max_buckets=10, divisible=True)
    assert len(plan.units) > 5
    given = {}
    number = tf.Variable(0, dtype=tf.int64)
    bridge = Bridge(
        plan.units, trained, number, None, lambda unit, step, image: given.__setitem__((step, unit), image.copy())
    )
    updater = Updater(optimizer, trained, plan, bridge)
    for step in range(STEPS):
        for bucket in plan.buckets:
            whole = b"".join(gradients(step, dtype)[p].numpy().tobytes() for p in bucket.variables)
            for unit in plan.units:
                if unit.bucket == bucket.index:
                    (piece,) = unit.pieces
                    part = whole[piece.offset : piece.offset + piece.nbytes]
                    bridge.put(unit.index, np.frombuffer(part, dtype=np.uint8))
        updater.step()
    bridge.close()
    return b"".join(given[STEPS - 1, unit.index][HEADER_BYTES:].tobytes() for unit in plan.units)


CASES = [(name, "plain") for name in OPTIMIZERS] + [("Adam", options) for options in OPTIONS if options != "plain"]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_optimizer_that_is_taken_by_parts_gives_the_same_bits(name, options):
    dtype = "float32"
    ours, plain = OPTIMIZERS[name](**OPTIONS[options]), OPTIMIZERS[name](**OPTIONS[options])
    parts, whole = variables(dtype), variables(dtype)
    ours.build(parts)
    plain.build(whole)
    assert is_divisible(ours, parts)
    sent = train_by_parts(ours, parts, dtype)

    @tf.function
    def step(grads):
        plain.apply(grads, whole)

    for number in range(STEPS):
        step(gradients(number, dtype))
    for a, b in zip([*parts, *ours.variables], [*whole, *plain.variables], strict=True):
        # Grappler may fuse the two graphs in different ways: a rounding or two.
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=3e-6, atol=1e-7, err_msg=a.path)
    assert sent == b"".join(variable.numpy().tobytes() for variable in parts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_parts_of_other_dtypes(dtype):
    ours, plain = keras.optimizers.SGD(0.25, momentum=0.5), keras.optimizers.SGD(0.25, momentum=0.5)
    parts, whole = variables(dtype), variables(dtype)
    ours.build(parts)
    plain.build(whole)
    sent = train_by_parts(ours, parts, dtype)
    for number in range(STEPS):
        plain.apply(gradients(number, dtype), whole)
    for a, b in zip(parts, whole, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert sent == b"".join(variable.numpy().tobytes() for variable in parts)


def test_what_depends_on_more_than_one_element_is_not_taken_by_parts():
    trained = variables("float32")
    for optimizer in (
        keras.optimizers.Adam(clipnorm=1.0),
        keras.optimizers.SGD(global_clipnorm=1.0),
        keras.optimizers.Adafactor(),
        keras.optimizers.Lamb(),
        keras.optimizers.Nadam(),
        type("Mine", (keras.optimizers.SGD,), {})(),
    ):
        assert not is_divisible(optimizer, trained)
    constrained = keras.Variable(np.ones((3, 3)), name="v")
    constrained.constraint = keras.constraints.NonNeg()
    assert not is_divisible(keras.optimizers.SGD(), [*trained, constrained])
    assert is_divisible(keras.optimizers.SGD(), trained)
