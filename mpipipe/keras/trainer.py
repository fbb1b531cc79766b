"""``fit`` on the server and on a client.

Keras never shows an optimizer the model that it trains, and the server's ``fit`` must not run the model at all. So a
handful of methods of ``keras.Model`` are replaced, once. Models that are compiled with another optimizer, and runs of
one rank, go through to Keras untouched.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
import zlib
from typing import Any

import keras
import tensorflow as tf

from mpipipe import context as running
from mpipipe.keras import checkpoint, compat
from mpipipe.logs import logger

# Seconds between a client's reports of its metrics, for the server's progress bar.
_REPORT_EVERY = 0.5

PUT_AROUND = (
    "the optimizer inside LossScaleOptimizer is a DistributedOptimizer: put it around instead, "
    "DistributedOptimizer(LossScaleOptimizer(...))"
)

_installed = False


def install() -> None:
    """Replace the methods of ``keras.Model`` that have to know of distributed training."""
    global _installed
    if _installed:
        return
    _installed = True
    for name, replacement in (
        ("compile", _compile),
        ("fit", _fit),
        ("evaluate", _without_progress),
        ("predict", _without_progress),
        ("train_on_batch", _train_on_batch),
    ):
        # Where the method is defined: Keras takes a model whose class has another compile for one of the user's own.
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        setattr(owner, name, _wrap(vars(owner)[name], replacement))


def _wrap(original: Any, replacement: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return method


def _distributed(optimizer: Any) -> bool:
    from mpipipe.keras.optimizer import DistributedOptimizer

    return isinstance(optimizer, DistributedOptimizer) and not optimizer._context.alone


def _compile(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    optimizer = arguments.get("optimizer")
    if _distributed(getattr(optimizer, "inner_optimizer", None)) and not _distributed(optimizer):
        raise ValueError(PUT_AROUND)
    if not _distributed(optimizer):
        original(model, *args, **kwargs)
        return
    compat.check_environment()
    jit_compile = arguments.setdefault("jit_compile", "auto")
    if jit_compile == "auto":
        arguments["jit_compile"] = False
    elif jit_compile:
        raise ValueError(
            "jit_compile=True: XLA compiles a step into one piece, out of which no layer's gradient can be sent before "
            "the end; leave jit_compile out with a DistributedOptimizer"
        )
    if arguments.get("auto_scale_loss", True) and model.dtype_policy.name == "mixed_float16":
        assert optimizer is not None
        optimizer.scale_losses()  # Keras would put its LossScaleOptimizer around this one
        arguments["auto_scale_loss"] = False
    arguments.pop("self")
    original(model, **arguments)


def _without_progress(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``evaluate`` and ``predict``: with the newest weights, and a client draws no progress bar."""
    if not _distributed(getattr(model, "optimizer", None)):
        return original(model, *args, **kwargs)
    model.optimizer.settle()
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if _is_silent_client():
        bound.arguments["verbose"] = 0
    return original(*bound.args, **bound.kwargs)


def _is_silent_client() -> bool:
    context = running.init()
    return not context.is_server and not context.config.client_progress


def _train_on_batch(original: Any, model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A client trains and tells the server its metrics; the server serves and returns their mean."""
    if not _distributed(getattr(model, "optimizer", None)):
        return original(model, x, *args, **kwargs)
    context, optimizer = running.init(), model.optimizer
    if not compat.is_built(model):
        compat.build_from_batch(model, x)
    optimizer._model = weakref.ref(model)
    optimizer.synchronize(model.trainable_variables)
    if not context.is_server:
        optimizer.count_samples(compat.sample_count(x))
    as_dict = kwargs.pop("return_dict", False)
    if context.is_server:
        logs = _serve_batch(optimizer)
    else:
        logs = original(model, x, *args, return_dict=True, **kwargs)
        optimizer.settle()
        logs = {name: logs[name] for name in compat.metric_order(model, logs)}
        optimizer.session.say("batch", logs=compat.plain_logs(logs), samples=int(compat.sample_count(x)))
    values = list(logs.values())
    return logs if as_dict else values[0] if len(values) == 1 else values


def _serve_batch(optimizer: Any) -> dict[str, Any]:
    session = optimizer.session
    if not optimizer.wait_step():
        return {"loss": float("nan")}  # no client trains any more
    optimizer.serve_step()
    session.latest.update({c: (said["logs"], said["samples"]) for c, said in session.collect("batch").items()})
    logs: dict[str, Any] = session.mean_logs()
    return logs


def _fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not _distributed(getattr(model, "optimizer", None)):
        return original(model, *args, **kwargs)
    compat.check_environment()
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    context = running.init()
    context.busy = "fit"
    model.optimizer._model = weakref.ref(model)
    if context.is_server:
        history = _ServerFit(model, bound.arguments).run()
    else:
        history = _fit_on_client(original, model, bound)
    # Not where an exception came through: a script that goes on without the others is still in the middle of it.
    context.busy = ""
    return history


def exchange_state(optimizer: Any, model: Any) -> None:
    """What the server has and clients may not: the weights that have changed outside the steps. Collective."""
    session = optimizer.session
    if optimizer._context.is_server:
        session.collect("state")
        states, optimizer.states = optimizer.states, {}
        _push_changed(optimizer, model, "state", None, besides=bool(states))
        for client, state in states.items():
            session.tell(client, state=state)
    else:
        answer = session.round("state")
        _take_changed(optimizer, model, answer)
        if answer["besides"]:
            checkpoint.take_local(model, checkpoint.unpack(session.next_answer()["state"]))


def _fingerprints(model: Any) -> dict[int, int]:
    """By position, what changes when a weight does."""
    return {i: zlib.crc32(weight.numpy().tobytes()) for i, weight in enumerate(model.weights)}


def _push_changed(optimizer: Any, model: Any, kind: str, known: dict[int, int] | None, **content: Any) -> None:
    """On the server: answer a round with the weights whose fingerprints have changed; all, where none are known."""
    weights = model.weights
    if known is None:
        changed = list(range(len(weights)))
    else:
        changed = [i for i, fingerprint in _fingerprints(model).items() if fingerprint != known.get(i)]
    iterations, rate = int(optimizer._iterations), compat.learning_rate(optimizer.inner)
    optimizer.session.answer(kind, changed=changed, iterations=iterations, rate=rate, **content)
    optimizer.session.send_arrays(compat.native(weights[i]).numpy() for i in changed)


def _take_changed(optimizer: Any, model: Any, answer: dict[str, Any]) -> None:
    """On a client: take over what :func:`_push_changed` sends."""
    optimizer._take_over(answer, [model.weights[i] for i in answer["changed"]])


class _ServerFit:
    """``fit`` on the server: no data, no model, but the epochs, callbacks and validation of Keras's own."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model = model
        self.optimizer = model.optimizer
        self.arguments = arguments
        validation = arguments["validation_data"]
        self.validation = None if validation is None else compat.unpack(validation)

    def run(self) -> Any:
        """Serve all epochs; returns Keras's ``History``."""
        model, optimizer, arguments = self.model, self.optimizer, self.arguments
        session = optimizer.session
        session.collect("fit")
        session.answer("fit", validates=self.validation is not None)
        if not compat.is_built(model):
            compat.build_from_data(model, arguments)
        steps = [said["steps"] for said in session.collect("steps").values()]
        callbacks = compat.callback_list(
            model,
            arguments["callbacks"],
            add_progbar=arguments["verbose"] != 0,
            verbose=arguments["verbose"],
            epochs=arguments["epochs"],
            steps=None if None in steps else max(steps) // optimizer._accumulates,
        )
        model.stop_training = False
        self._say_what_differs()
        saving = next((c for c in callbacks.callbacks if isinstance(c, checkpoint.Checkpoint)), None)
        manifest = self._restore(saving) if saving is not None else None
        callbacks.on_train_begin()
        first = compat.first_epoch(model, arguments["initial_epoch"])
        skip = 0
        if manifest is not None:
            first, skip = manifest["epoch"], manifest["batch"]
            if manifest["stopped"]:
                first = arguments["epochs"]
        self._done = skip // optimizer._accumulates
        session.answer("steps", first=first, skip=skip, saves=None if saving is None else saving.rule)
        more = first < arguments["epochs"]
        if more:
            self._begin(first, callbacks)
        optimizer.synchronize(model.trainable_variables)
        if optimizer._opened:
            exchange_state(optimizer, model)
        logs, epoch = None, first
        while more:
            logs, more = self._epoch(epoch, callbacks)
            epoch += 1
        optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs)
        session.collect("end")
        _push_changed(optimizer, model, "end", None)
        return model.history

    def _restore(self, saving: Any) -> Any:
        """Have the model as the newest checkpoint says, if there is one."""
        model, optimizer = self.model, self.optimizer
        optimizer.build(model.trainable_variables)
        manifest = saving.restore(model)
        optimizer.states = saving.states_of(optimizer.session.clients)
        optimizer.keep_snapshots(saving.variables)
        saving.begin(manifest)
        return manifest

    def _say_what_differs(self) -> None:
        """Where the model is not the one that one process would train."""
        if layers := compat.batch_statistics(self.model):
            logger.info(
                "each client normalises by its own part of a batch, other than one process would: %s; the moving "
                "statistics are the mean over clients",
                ", ".join(layers),
            )
        if layers := compat.random_layers(self.model):
            logger.info(
                "each client draws random numbers of its own, other than one process would: %s", ", ".join(layers)
            )

    def _begin(self, epoch: int, callbacks: Any) -> None:
        """Begin an epoch, before the clients do: a callback may change weights here."""
        self.model.reset_metrics()
        callbacks.on_epoch_begin(epoch)

    def _epoch(self, epoch: int, callbacks: Any) -> tuple[dict[str, Any], bool]:
        """Serve one epoch and begin the next; returns its logs and whether all ranks want another one."""
        model, optimizer = self.model, self.optimizer
        session = optimizer.session
        step, told, waited = self._done, False, False
        self._done = 0  # of the next epoch
        session.stopped = False
        while optimizer.wait_step():
            callbacks.on_train_batch_begin(step)
            optimizer.serve_step()
            if not waited and model.steps_per_execution == 1:
                waited = True
                session.wait_reports()  # callbacks may rely on there being metrics; later ones are the latest
            callbacks.on_train_batch_end(step, session.mean_logs())
            step += 1
            if not told and (model.stop_training or session.stopped):
                # No client can have begun more than two further ones: so all of them end after the same step.
                told = True
                session.stop(after=optimizer.steps + 2)
        logs = optimizer.collect_phase(compat.state_of(model))
        known = _fingerprints(model)
        logs.update(self._validate(epoch, callbacks))
        session.collect("logs")
        session.answer("logs", logs=logs)
        callbacks.on_epoch_end(epoch, logs)
        votes = session.collect("vote")
        optimizer.note_rates({client: said["rate"] for client, said in votes.items()})
        wanted = {client: said["more"] for client, said in votes.items()}
        wanted[0] = epoch + 1 < self.arguments["epochs"] and not model.stop_training
        more = all(wanted.values())
        if not more and any(wanted.values()):
            done = sorted(rank for rank, wants in wanted.items() if not wants)
            logger.info("all ranks stop after epoch %d, because rank(s) %s do", epoch + 1, ", ".join(map(str, done)))
        if not more and epoch + 1 < self.arguments["epochs"]:
            model.stop_training = True
        if more:
            self._begin(epoch + 1, callbacks)
        _push_changed(optimizer, model, "vote", known, more=more)
        return logs, more

    def _validate(self, epoch: int, callbacks: Any) -> dict[str, Any]:
        often = self.arguments["validation_freq"]
        due = (epoch + 1) % often == 0 if isinstance(often, int) else epoch + 1 in often
        if self.validation is None or not due:
            return {}
        x, y, sample_weight = self.validation
        logs = self.model.evaluate(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=self.arguments["validation_batch_size"] or self.arguments["batch_size"],
            steps=self.arguments["validation_steps"],
            callbacks=callbacks,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in compat.plain_logs(logs).items()}


def _fit_on_client(original: Any, model: Any, bound: inspect.BoundArguments) -> Any:
    """Keras's own ``fit``, with a callback before and one after the user's."""
    arguments = bound.arguments
    optimizer = model.optimizer
    if _is_silent_client():
        arguments["verbose"] = 0
    if optimizer.session.round("fit")["validates"]:
        arguments["validation_data"], arguments["validation_split"] = None, 0.0
    users = compat.users_callbacks(arguments["callbacks"])
    watching = sorted({type(callback).__name__ for callback in users if compat.looks_at_batches(callback)})
    if watching:
        logger.info("every step waits for all weights, because of callbacks that look at batches: %s", watching)
    first = _First(optimizer, _TrainStep.of(model), settles=bool(watching))
    last = _Last(optimizer, arguments["epochs"])
    arguments["callbacks"] = [first, *users, last]
    return original(*bound.args, **bound.kwargs)


class _TrainStep:
    """A model's ``train_step`` with two things before it: the newest weights are taken, and samples are counted.

    It stays with the model, whose graph counts with it.
    """

    def __init__(self) -> None:
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @classmethod
    def of(cls, model: Any) -> _TrainStep:
        """The wrapper of a model's ``train_step``, which is put around it the first time."""
        step = model.train_step
        if isinstance(wrapper := getattr(step, "wrapper", None), cls):
            return wrapper
        wrapper = cls()
        of_model = weakref.ref(model)  # the model has the function: it may not have the model too

        @functools.wraps(step)
        def train_step(data: Any) -> Any:
            model = of_model()
            if model is not None and _distributed(model.optimizer) and model.optimizer._model() is model:
                # Only when there are data: a graph that ends for want of them may not have taken any weights.
                parts = tf.nest.flatten(data, expand_composites=True)
                with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
                    model.optimizer.take_weights(model)
            samples = compat.sample_count(data)
            if model is not None and _distributed(model.optimizer):
                model.optimizer.count_samples(samples)
            wrapper._count.assign_add(samples)
            return step(data)

        train_step.wrapper = wrapper  # type: ignore[attr-defined]
        object.__setattr__(model, "train_step", train_step)
        model.train_function = None  # it would not count
        if running.init().recorder.active:
            compute_loss = model.compute_loss

            @functools.wraps(compute_loss)
            def noted(*args: Any, **kwargs: Any) -> Any:
                loss = compute_loss(*args, **kwargs)
                model = of_model()
                if model is not None and _distributed(model.optimizer):
                    model.optimizer.note_loss(loss)
                return loss

            object.__setattr__(model, "compute_loss", noted)
        return wrapper

    @property
    def value(self) -> int:
        """Samples since the last reset."""
        return int(self._count)

    def reset(self) -> None:
        """Start from 0."""
        self._count.assign(0)


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Before the user's callbacks: the model as the server has it, and the metrics of all clients."""

    def __init__(self, optimizer: Any, counter: _TrainStep, *, settles: bool) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._counter = counter
        self._settles = settles
        self._reported = 0.0
        self._skip: Any = None
        self._saves: Any = None  # when to say what this client has of its own, if ever
        self._said = 0  # after so many steps it has been said last

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self._optimizer
        optimizer.session.stop_after = None
        answer = optimizer.session.round("steps", steps=self.params.get("steps"))
        compat.set_first_epoch(self.model, answer["first"])
        self._skip, self._saves = checkpoint.Skip(self.model, answer["skip"]), answer["saves"]
        if compat.is_built(self.model):  # else when the first step is traced
            optimizer.synchronize(self.model.trainable_variables)
        if optimizer._opened:
            exchange_state(optimizer, self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._counter.reset()
        self._reported = 0.0
        self._epoch, self._start = epoch, self._optimizer.steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._skip.before_batch()

    def _say_own(self, *, ends: bool) -> None:
        """Say what this client has of its own, if the server wants to know it now."""
        if self._saves is None:
            return
        optimizer, steps = self._optimizer, self._optimizer.steps
        rule = {**self._saves, "at": optimizer.session.save_at}
        due = steps != self._said and checkpoint.is_due(steps, self._start, self.model.steps_per_execution, rule)
        if due or ends:
            self._said = steps
            state = checkpoint.pack(checkpoint.local_state(self.model))
            optimizer.session.say("saves", epoch=self._epoch, step=steps, ends=ends, state=state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._skip.active:
            return
        self._say_own(ends=False)
        if self._settles:
            self._optimizer.settle()
        if self._optimizer.trace_again:
            # The first step was traced before it was known what there would be to take at its top.
            self._optimizer.trace_again = False
            self.model.make_train_function(force=True)
        stop_after = self._optimizer.session.stop_after
        if stop_after is not None and self._optimizer.steps >= stop_after:
            self.model.stop_training = True
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY:
            self._reported = now
            self._optimizer.session.running(compat.plain_logs(logs), self._counter.value)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = {} if logs is None else logs
        self._skip.end()
        self._say_own(ends=True)
        state = compat.state_of(self.model)
        stopped = bool(self.model.stop_training)
        self._optimizer.end_phase(state, logs=compat.plain_logs(logs), samples=self._counter.value, stopped=stopped)
        logs.update(self._optimizer.session.round("logs")["logs"])


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """After the user's callbacks: whether to go on, and what callbacks on the server have changed."""

    def __init__(self, optimizer: Any, epochs: int) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._epochs = epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        more = epoch + 1 < self._epochs and not self.model.stop_training
        answer = self._optimizer.session.round("vote", more=more, rate=self._optimizer.changed_rate())
        _take_changed(self._optimizer, self.model, answer)
        if not answer["more"]:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        compat.set_first_epoch(self.model, None)
        _take_changed(self._optimizer, self.model, self._optimizer.session.round("end"))
