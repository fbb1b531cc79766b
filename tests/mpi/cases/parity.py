"""Two clients with half of every batch each compute what one process computes with whole batches."""

import inspect
from functools import partial

import keras
import numpy as np
from cases.common import RANK, SIZE, assert_same_everywhere, compiled, mlp, record, regression

import mpipipe as mp

STEPS, BATCH = 20, 16
SETTINGS = {"fuse_bytes": 0}


def parts():
    """The whole data, and this client's half of every batch."""
    x, y = regression(samples=STEPS * BATCH)
    share = BATCH // (SIZE - 1)
    mine = slice(mp.client_index() * share, (mp.client_index() + 1) * share)
    own = [a.reshape(STEPS, BATCH, -1)[:, mine].reshape(STEPS * share, -1) for a in (x, y)]
    return (x, y), own, share


def largest_difference(ours, theirs):
    """The largest difference in any array, relative to that array's largest value."""
    return max(
        float(np.max(np.abs(a.astype(float) - b)) / max(np.max(np.abs(b)), 1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


def compare(case, make_optimizer, limit=1e-6, metrics=(), title=""):
    """Train distributed, then on the server alone, and compare weights, slots and logged loss there."""
    (x, y), (own_x, own_y), share = parts()
    model = compiled(mlp(seed=RANK), make_optimizer(), metrics=list(metrics))
    if RANK == 0:
        plain = keras.models.clone_model(model)
        plain.set_weights(model.get_weights())
    history = model.fit(own_x, own_y, batch_size=share, shuffle=False, verbose=0)
    assert_same_everywhere(model.get_weights())
    if RANK > 0:
        return
    plain.compile(make_optimizer(), "mse", metrics=list(metrics))
    expected = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    weights = largest_difference(model.get_weights(), plain.get_weights())
    slots = largest_difference(*([v.numpy() for v in m.optimizer.variables] for m in (model, plain)))
    record(case, f"{title}largest relative difference after {STEPS} steps: weights {weights:.1e}, slots {slots:.1e}")
    assert weights <= limit, weights
    assert slots <= 1e-5, slots  # of gradients, which shrink while their rounding does not
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)


def shipped():
    """Every optimizer in this version of Keras, as it comes and with each of its switches on: (name, maker)."""
    base, common = keras.optimizers.Optimizer, inspect.signature(keras.optimizers.Optimizer).parameters
    for name, cls in sorted(vars(keras.optimizers).items()):
        if not (isinstance(cls, type) and issubclass(cls, base)) or cls in (base, keras.optimizers.LossScaleOptimizer):
            continue
        own = {key: p.default for key, p in inspect.signature(cls).parameters.items() if key not in common}
        momentum = {"momentum": 0.9} if own.get("momentum") == 0.0 else {}
        yield name, partial(cls, learning_rate=0.003)
        for switch in [key for key, default in own.items() if default is False]:
            yield f"{name} {switch}", partial(cls, learning_rate=0.003, **momentum, **{switch: True})


def case_every_optimizer_that_keras_ships():
    failed = []
    for name, make in shipped():
        try:
            compare("every_optimizer_that_keras_ships", make, limit=1e-5, title=f"{name}: ")
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, failed


def case_sgd_with_nesterov_momentum():
    compare(
        "sgd_with_nesterov_momentum", lambda: keras.optimizers.SGD(0.003, momentum=0.9, nesterov=True), metrics=["mae"]
    )


def case_adam():
    compare("adam", lambda: keras.optimizers.Adam(0.01))


def case_adamw_with_clipnorm_ema_and_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    compare(
        "adamw_with_clipnorm_ema_and_schedule",
        lambda: keras.optimizers.AdamW(schedule, clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3),
    )


def case_global_clipnorm_waits_for_all_gradients():
    compare(
        "global_clipnorm_waits_for_all_gradients", lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.5)
    )


def case_nadam_whose_step_is_not_by_variable():
    compare("nadam_whose_step_is_not_by_variable", lambda: keras.optimizers.Nadam(0.01))


def case_gradient_accumulation():
    compare("gradient_accumulation", lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=4))


def case_loss_scale_factor_and_weight_decay():
    compare(
        "loss_scale_factor_and_weight_decay",
        lambda: keras.optimizers.SGD(0.01, loss_scale_factor=128.0, weight_decay=0.01),
    )
