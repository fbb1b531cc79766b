"""``DistributedOptimizer``: any Keras optimizer, applied at the server, layer by layer, while clients compute."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpipipe import context as running
from mpipipe.errors import MpipipeError
from mpipipe.keras import compat, trainer
from mpipipe.keras.bridge import Bridge
from mpipipe.keras.update import BITS_OF_ROWS, StateBefore, Updater, is_divisible
from mpipipe.logs import logger
from mpipipe.protocol.plan import VariableSpec
from mpipipe.session import ClientSession, Gradient, ServerSession
from mpipipe.trace import Kind
from mpipipe.transport.base import Buffer
from mpipipe.wire import plain, rows
from mpipipe.wire.accumulate import Accumulator


class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer whose updates are computed by the server from the mean of all clients' gradients.

    Give it to ``compile``, or use ``apply_gradients`` in a loop of your own; see the README for both. On a client each
    layer's gradients are sent the moment they are there. The step ends when the server's new weights have come; where
    it began with :meth:`take_weights`, as in ``fit``, it ends at once, and the next one waits for each layer's. On the
    server ``fit`` serves, ``apply`` serves one step, and :meth:`serve` serves until every client has finished. The
    server alone has the optimizer's slots. Where there is one rank only, the wrapped optimizer does everything.

    Saving a model saves the wrapped optimizer, so the file opens without mpipipe.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``, or the name of one, such as ``"adam"``.
        average: ``"clients"``: the mean over the clients' gradients, each of which is the mean over a batch. Or
            ``"samples"``: the mean over all samples of a step, where clients' batches differ in size. ``fit`` and
            ``train_on_batch`` count samples by themselves, a loop of your own says them by :meth:`count_samples`.

    Raises:
        TypeError: ``optimizer`` is something else.
        ValueError: there is no such average, or it does not go with ``gradient_accumulation_steps``.
        EnvironmentProblem: mpipipe cannot work here (another Keras backend, an active ``tf.distribute`` strategy,
            no MPI); the message says what to do.
    """

    built: bool
    _ready = False  # whether there is a wrapped optimizer yet
    _opened = False  # whether all ranks know which variables get a gradient, and steps can be done

    def __init__(self, optimizer: Any, average: str = "clients") -> None:
        compat.check_environment()
        inner = _wrapped(optimizer)
        if average not in ("clients", "samples"):
            raise ValueError(f"average is {average!r}; it can be 'clients' or 'samples'")
        super().__init__(learning_rate=0.0, name=inner.name)
        self._average = average
        self._context = running.init()
        self._wrap(inner)
        self._ready = True
        self._session: ClientSession | ServerSession | None = None
        self._bridge: Bridge | None = None
        self._updater: Updater | None = None
        # What the weights and slots were before the step that is being served; where anybody may want it.
        self._before: StateBefore | None = None
        # On the server, by client: what each is to take over of its own, of a run that goes on.
        self.states: dict[int, dict[str, Any]] = {}
        # The model that fit trains, whose state is exchanged with the weights: a function, as Keras would save a model.
        self._model: Callable[[], Any] = lambda: None
        self._looked_at: Callable[[], Any] = lambda: None  # the one that a loop of the user's own gives
        self._agreed = False  # whether all ranks have the same variables and the server's values
        self._skip_first = False
        self._passed_steps = 0
        # For graphs, and made before they are traced (see Bridge): the number of the step, and whether the new weights
        # of the last one are still to be assigned.
        with tf.init_scope():
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._pending = tf.Variable(False, trainable=False)
            # The number of samples behind the next gradients, if anybody wants to know.
            self._samples = tf.Variable(0, dtype=tf.int64, trainable=False)
            # Training steps whose gradients are in, or go into, what a client accumulates.
            self._accumulated = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._samples_counted = False
        # What a client multiplies its loss by, where the server's optimizer changes that.
        self._scale: Any = None
        self._first_rate = compat.learning_rate(inner)
        # This client's learning rate when it was last the server's.
        self._agreed_rate: float | None = None
        self._rates_said: set[tuple[int, float]] = set()
        # Buckets whose queue holds what the variables hold, for a graph that begins with taking.
        self._primed: set[int] = set()
        self._void: list[Bridge] = []  # of plans that have turned out not to hold; there may be graphs that use them
        # The graphs that begin with take_weights, and whether an eager step has.
        self._took: weakref.WeakSet[Any] = weakref.WeakSet()
        self._took_eagerly = False
        # Whether a step was traced that waits for its own weights, and would not if it were traced again.
        self.trace_again = False
        trainer.install()

    def _wrap(self, inner: Any) -> None:
        """Have ``inner`` as the wrapped optimizer."""
        self.inner = inner
        # Keras and its callbacks read these; the rest is looked up in the wrapped optimizer.
        for name in ("_learning_rate", *_SHARED):
            setattr(self, name, getattr(inner, name))
        self._iterations = compat.step_counter(inner)
        self._accumulates = 1 if self._context.alone else compat.accumulates_at_clients(inner)
        if self._accumulates > 1 and self._average == "samples":
            raise ValueError(
                "average='samples' does not go with gradient_accumulation_steps: the numbers of samples of several "
                "steps would have to be known before the first of them; leave one of them out"
            )

    def scale_losses(self) -> None:
        """Have the loss scaled as Keras does with the policy ``mixed_float16``, unless it already is."""
        if not isinstance(self.inner, keras.optimizers.LossScaleOptimizer):
            self._wrap(keras.optimizers.LossScaleOptimizer(self.inner, name=self.inner.name))

    # What Keras sees of the optimizer is the wrapped one's.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras saves an optimizer under its class. isinstance still sees the real type first.
        return type(self.inner) if self.__dict__.get("_ready") else DistributedOptimizer

    def __dir__(self) -> list[str]:
        # Keras saves what it finds here: the wrapped optimizer's variables are saved as this one's, once, and so are
        # optimizers inside it.
        inside = compat.optimizers_inside(self.inner) if "inner" in self.__dict__ else []
        return [*(name for name in super().__dir__() if name != "inner"), *inside]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def variables(self) -> list[Any]:
        """The wrapped optimizer's variables: with the slots on the server, without them on a client."""
        return list(self.inner.variables)

    @property
    def iterations(self) -> Any:
        """The number of steps done."""
        return self.inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's learning rate. The one that counts is the server's."""
        return self.inner.learning_rate if self._ready else super().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value
        self._learning_rate = self.inner._learning_rate

    def get_config(self) -> dict[str, Any]:
        """The wrapped optimizer's configuration."""
        return dict(self.inner.get_config())

    def save_own_variables(self, store: Any) -> None:
        """Save the wrapped optimizer's variables."""
        self.inner.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the wrapped optimizer's variables; a client has no slots to load."""
        if self._trains_here:
            self.inner.load_own_variables(store)

    def set_weights(self, weights: Any) -> None:
        """Set the wrapped optimizer's variables."""
        self.inner.set_weights(weights)

    def scale_loss(self, loss: Any) -> Any:
        """Scale a loss as the wrapped optimizer does; on a client by the server's newest factor, where it changes."""
        if self._scale is not None:
            return loss * tf.cast(self._scale, loss.dtype)
        return self.inner.scale_loss(loss)

    def count_samples(self, count: Any) -> None:
        """In a step of your own, before :meth:`apply`: the number of samples behind this client's gradients.

        Needed with ``average="samples"``. A client without samples in a step gives 0; its gradients do not count.

        Args:
            count: a scalar, an int or a tensor.
        """
        if self._context.alone or self._context.is_server or self._average != "samples":
            return
        self._samples.assign(tf.cast(count, tf.int64), read_value=False)
        self._samples_counted = True

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Exclude variables from weight decay, as the wrapped optimizer does."""
        self.inner.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """At the end of training: the moving averages for the weights, where ``use_ema`` asks for them."""
        if self._trains_here:
            self.inner.finalize_variable_values(var_list)

    # Training.

    @property
    def _trains_here(self) -> bool:
        """Whether the wrapped optimizer works on this rank: on the server, and where there is one rank."""
        return self._context.alone or self._context.is_server

    def build(self, variables: Any) -> None:
        """Take note of the variables and, on the server, make the wrapped optimizer's slots. Not collective."""
        if self.built:
            return
        variables = list(variables)
        if self._trains_here and not self.inner.built:
            self.inner.build(variables)
        self._trainable_variables = variables
        self._positions = {compat.variable_key(variable): i for i, variable in enumerate(variables)}
        self.built = True

    def synchronize(self, variables: Any) -> None:
        """Agree with the other ranks on the variables and take over the server's values. Collective.

        ``fit`` and the first ``apply`` do it. In a loop without ``tf.function`` call it first, or the first gradients
        come from weights of this rank's own and are thrown away.

        Args:
            variables: the trainable variables; or the model, whose other weights are then taken over too (those of
                frozen layers, BatchNorm's statistics), if it is given on all ranks.

        Raises:
            DisagreementError: the ranks have built different models; every rank raises it.
            TypeError: a variable that cannot be synchronised.
        """
        model = variables if isinstance(variables, keras.Model) else None
        self.build(variables if model is None else model.trainable_variables)
        if self._context.alone:
            return
        with tf.init_scope():
            if not self._agreed:
                self._agree(list(self._trainable_variables))
                self._agreed = True
            if model is not None:
                trainer.exchange_state(self, model)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def take_weights(self, variables: Any = None) -> None:
        """At the top of a training step: from here on the newest weights, each layer's as soon as they have come.

        With it a step's ``apply`` returns when its gradients are under way, and the forward pass of the next step
        starts while the weights of deeper layers are still on the wire. ``fit`` does it by itself. Every
        ``tf.function`` that reads the weights has to begin with it then. Outside of one it waits for all weights:
        do that before you look at them between two steps. ``finish``, ``evaluate`` and ``predict`` do it by themselves.
        A function that fetches its data itself has to have them before, under ``tf.control_dependencies``, or weights
        are lost where the data run out.

        Args:
            variables: the trainable variables, or the model; on all ranks. May be left out once
                :meth:`synchronize` has been called.
        """
        if self._context.alone:
            return
        if variables is not None:
            model = variables if isinstance(variables, keras.Model) else None
            if model is not None and self._model() is None:
                self._looked_at = weakref.ref(model)
            if model is not None and not compat.is_built(model):
                return  # its variables are yet to come: this time apply waits for the weights
            self.synchronize(variables if model is None else model.trainable_variables)
        if self._context.is_server or not self._agreed or not self.session.overlaps:
            return
        with tf.init_scope():
            if self._bridge is None:
                self._connect(self._expected())
        self._note(_STEP, [])
        if tf.inside_function():
            self._take_anyway()
            self._took.add(tf.compat.v1.get_default_graph())
        else:
            self.settle()
            self._took_eagerly = True

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """On a client: send each gradient when it is there. On the server: serve one step.

        A client waits for the new weights, unless the step began with :meth:`take_weights`. On the server gradients
        are not used, and what only they need is not computed under ``tf.function``. When no client takes part in a
        further step, the server's ``apply`` returns without one.

        Args:
            grads: gradients (or None, or ``tf.IndexedSlices``), one for each variable.
            trainable_variables: all variables of this optimizer, the same ones in every call.
        """
        if self._context.alone:
            self.inner.apply(grads, trainable_variables)
            return
        grads = list(grads)
        if trainable_variables is None:
            if not self.built:
                raise ValueError("apply(grads) without variables: call build(trainable_variables) first")
            trainable_variables = self._trainable_variables
        fresh = not self._agreed
        self.synchronize(list(trainable_variables))
        grads = self._in_order(grads, list(trainable_variables))
        if not self._opened:
            # A graph is traced before its first step runs, which therefore finds the server's weights. An eager loop
            # has already computed with others, where they were not the same.
            late = fresh and not tf.inside_function() and self._changed_weights
            with tf.init_scope():
                self._open(self._kinds(grads), unsynchronised=late)
        if self._context.is_server:
            self._serve_one()
        else:
            self._exchange(grads)

    def serve(self, variables: Any) -> int:
        """On the server: serve until every client has finished, then take over the model's state.

        Args:
            variables: the model, or all its variables (``model.variables``), as clients give to :meth:`finish`.

        Returns:
            The number of steps served.

        Raises:
            MpipipeError: called on a client.
        """
        if self._context.alone:
            return 0
        if not self._context.is_server:
            raise MpipipeError("optimizer.serve() is for the server; clients run the training loop and then finish()")
        self.synchronize(_trainable(variables))
        return self.finish(variables)

    def finish(self, variables: Any = None) -> int:
        """After a loop of your own: meet the other ranks. Collective; training may go on afterwards.

        Clients may come here after different numbers of steps. Each gets the final weights, and the mean over clients
        of the state that is not trained (such as BatchNorm's moving statistics).

        Args:
            variables: the model, or all its variables (``model.variables``); the same on every rank. Without them only
                the trained weights are exchanged.

        Returns:
            The number of steps since the last meeting: on a client its own, on the server those served.
        """
        if self._context.alone:
            return 0
        state = _state(variables)
        if isinstance(self._session, ServerSession):
            return self._finish_on_server(self._session, state)
        if isinstance(self._session, ClientSession):
            before, self._passed_steps = self._passed_steps, self._session.steps_done()
            self.end_phase(state, logs={}, samples=0)
            own, self._passed_steps = self._passed_steps - before, self._session.steps_done()
            return own
        raise MpipipeError("optimizer.finish() before any step: call optimizer.synchronize(model) first")

    def _finish_on_server(self, session: ServerSession, state: list[Any]) -> int:
        served = 0
        while self.wait_step():
            self.serve_step()
            served += 1
        self.collect_phase(state)
        return served

    # What fit needs of it.

    @property
    def session(self) -> Any:
        """This optimizer's session, made when it is first asked for; all ranks ask in the same order."""
        if self._session is None:
            self._session = self._context.new_session()
        return self._session

    def wait_step(self) -> bool:
        """On the server: wait until a client begins a step (True) or all have ended the phase (False)."""
        if not self._opened:
            self._open(None, unsynchronised=False)
        self._skip_first = False  # whoever waits for a step gets one that is used
        assert isinstance(self._session, ServerSession) and self._session.engine is not None
        return self._session.wait_step()

    @property
    def steps(self) -> int:
        """Steps begun on a client, or served on the server; where gradients are accumulated, those that are sent."""
        return self._bridge.steps if self._bridge is not None else 0

    def serve_step(self) -> None:
        """On the server: serve the step that has begun."""
        assert self._updater is not None and self._bridge is not None
        step = self._bridge.steps
        if self._before is not None:
            self._before.take(step)
        self._updater.step()
        engine = self.session.engine
        again = step in engine.redo_steps
        if again:
            # Some updates had a client in them that was lost before all of them had.
            assert self._before is not None
            self._before.put_back()
            self._bridge.steps = step
            if step in engine.cancelled_steps:
                return
            self._updater.all_rows = True
            self._updater.step()
        # Clients that have got some of the first weights get all that they need by the next step.
        if self._updater.all_rows != again:
            self._updater.all_rows = again

    def keep_snapshots(self, variables: Sequence[Any]) -> None:
        """On the server: from the next step on, know what was before it, of weights and slots at least."""
        self._before = StateBefore(variables)

    @property
    def snapshot(self) -> tuple[int, list[Any]] | None:
        """On the server, from any thread: steps done before the one that was served last, and what was then.

        That is the values of the variables given to :meth:`keep_snapshots`; None where nobody has asked for it.
        """
        return self._before.taken if self._before is not None else None

    @property
    def batches_a_step(self) -> int:
        """How many batches of a client are behind a step: those whose gradients it accumulates."""
        return self._accumulates

    def end_phase(self, state: Sequence[Any], **content: Any) -> None:
        """On a client: meet the others after this client's last step, and take over weights and state."""
        session = self.session
        session.steps_done()
        self.settle()
        values = [variable.numpy() for variable in state]
        iterations = int(self._iterations)
        answer = session.end_phase(values, **content, iterations=iterations, rate=self.changed_rate())
        if answer["catch_up"]:
            assert self._bridge is not None
            trained = self._trained()
            theirs = session.receive_arrays([compat.native(variable) for variable in trained])
            for variable, value in zip(trained, theirs, strict=True):
                variable.assign(value)
            session.engine.caught_up(answer["steps"])
            self._bridge.steps = answer["steps"]
        self._take_over(answer, state)

    def settle(self) -> None:
        """On a client, outside of a graph: have the newest weights in the variables."""
        if bool(self._pending):
            self._settle()

    def _trained(self) -> list[Any]:
        """The variables that get a gradient."""
        has_gradient = self.session.plan.has_gradient
        return [variable for variable, has in zip(self._carried, has_gradient, strict=True) if has]

    def collect_phase(self, state: Sequence[Any]) -> dict[str, Any]:
        """On the server: end the phase with all clients; returns the mean of their metrics."""
        session = self.session
        values = [variable.numpy() for variable in state]
        said = session.collect_phase(values)
        self.note_rates({client: message["rate"] for client, message in said.items()})
        if self._accumulates > 1:
            # Clients may be in the middle of accumulating.
            steps = max(message["iterations"] for message in said.values())
            self._iterations.assign(max(steps, int(self._iterations)))
            if steps % self._accumulates:
                logger.info(
                    "%d of %d gradients to accumulate are at the clients: a model that is saved now goes on without",
                    steps % self._accumulates,
                    self._accumulates,
                )
        means = session.mean_arrays(values)
        for variable, value in zip(state, means, strict=True):
            variable.assign(value)
        logs: dict[str, Any] = session.mean_logs()
        session.answer_phase(
            said,
            lambda: (compat.native(variable).numpy() for variable in self._trained()),
            iterations=int(self._iterations),
            rate=compat.learning_rate(self.inner),
        )
        session.send_arrays(means)
        return logs

    def _take_over(self, answer: dict[str, Any], state: Sequence[Any]) -> None:
        coming = self.session.receive_arrays([compat.native(variable) for variable in state])
        for variable, value in zip(state, coming, strict=True):
            variable.assign(value)
        self._iterations.assign(answer["iterations"])
        self._take_rate(answer["rate"])

    # The learning rate that counts is the server's.

    def changed_rate(self) -> float | None:
        """On a client: its learning rate, if it is no longer the one that the server had when they last met."""
        rate = compat.learning_rate(self.inner)
        return None if rate == self._agreed_rate else rate

    def note_rates(self, said: Mapping[int, float | None]) -> None:
        """On the server: say, once, where clients have set a learning rate that is not the server's."""
        ours = compat.learning_rate(self.inner)
        for client, rate in said.items():
            if rate is None or rate == ours or (client, rate) in self._rates_said:
                continue
            self._rates_said.add((client, rate))
            logger.warning(
                "rank %d has set the learning rate %g, which has no effect: the server's counts, and is %s. Give the "
                "callback to the server (rank 0) too",
                client,
                rate,
                "a schedule" if ours is None else f"{ours:g}",
            )

    def _take_rate(self, rate: float | None) -> None:
        if rate is not None and compat.learning_rate(self.inner) is not None:
            self.learning_rate = rate
        self._agreed_rate = compat.learning_rate(self.inner)

    def _agree(self, variables: list[Any]) -> None:
        """Compare the variables of all ranks, and have the server's values on each."""
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise TypeError(f"{compat.path_of(variable)} is overwritten with its gradient: that is not supported")
        specs = [
            VariableSpec(compat.path_of(v), tuple(int(n) for n in v.shape), compat.dtype_name(v)) for v in variables
        ]
        for spec in specs:
            if "float" not in spec.dtype and "complex" not in spec.dtype:
                raise TypeError(f"{spec.path} is of dtype {spec.dtype}: only floats can be averaged")
        signals = self._signals()
        self._carried = [*variables, *signals]
        specs += [VariableSpec(f"{self.name}/{n}", tuple(s.shape), compat.dtype_name(s)) for n, s in enumerate(signals)]
        exact = range(len(variables), len(specs))
        rules = {
            "average": self._average,
            "gradient_accumulation_steps": self._accumulates,
            "loss scaling": bool(signals),
        }
        natives = [compat.native(variable) for variable in self._carried]
        rate = compat.learning_rate(self.inner)
        self._changed_weights = False
        if self._context.is_server:
            iterations, on_nonfinite = int(self._iterations), self._context.config.on_nonfinite
            divisible = is_divisible(self.inner, variables, on_nonfinite)
            sum_rows = compat.is_linear(self.inner)
            said = self.session.agree(
                specs, exact, rules, divisible=divisible, sum_rows=sum_rows, iterations=iterations, rate=rate
            )
            # A callback may have changed the server's already.
            began_with = {c: message["rate"] for c, message in said.items() if message["rate"] != self._first_rate}
            self.note_rates(began_with)
            self.session.send_arrays(native.numpy() for native in natives)
        else:
            answer = self.session.agree(specs, exact, rules, rate=rate)
            self._iterations.assign(answer["iterations"])
            self._take_rate(answer["rate"])
            theirs = self.session.receive_arrays(natives)
            for variable, native, their in zip(self._carried, natives, theirs, strict=True):
                same = np.array_equal(plain.encode(native.numpy()), plain.encode(their))
                self._changed_weights |= not same and variable is not self._scale
                variable.assign(their)

    def _signals(self) -> list[Any]:
        """What the server's optimizer changes by itself, and clients have to have: here, a client's copies."""
        if self._context.is_server:
            return compat.signals(self.inner)
        if isinstance(self.inner, keras.optimizers.LossScaleOptimizer):
            with tf.init_scope():
                self._scale = tf.Variable(0.0, dtype=tf.float32, trainable=False)
            return [self._scale]
        return []

    def _expected(self) -> list[Gradient]:
        """What gradients there will probably be, before the first step has been traced."""
        model = self._model() or self._looked_at()
        by_rows = compat.embeddings_of(model) if model is not None and self._by_rows else set()
        return ["rows" if compat.variable_key(v) in by_rows else "whole" for v in self._carried]

    @property
    def _by_rows(self) -> bool:
        """Whether gradients that are ``tf.IndexedSlices`` stay so. What is accumulated is not: nor is it in Keras."""
        return self.session.sparse and self._accumulates == 1

    def _kinds(self, grads: Sequence[Any]) -> list[Gradient]:
        """What gradient each variable gets, and what the server changes by itself."""
        by_rows = self._by_rows
        kinds: list[Gradient] = []
        for gradient, variable in zip(grads, self._trainable_variables, strict=True):
            if gradient is None:
                kinds.append("none")
            elif (
                by_rows
                and isinstance(gradient, tf.IndexedSlices)
                and compat.native(variable).dtype.size in BITS_OF_ROWS
            ):
                kinds.append("rows")
            else:
                kinds.append("whole")
        return [*kinds, *["whole"] * (len(self._carried) - len(kinds))]  # type: ignore[list-item]

    def _in_order(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients by position of their variables; None for variables that are not given."""
        ordered: list[Any] = [None] * len(self._trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients for {len(variables)} variables")
        for gradient, variable in zip(grads, variables, strict=True):
            position = self._positions.get(compat.variable_key(variable))
            if position is None:
                raise ValueError(
                    f"{compat.path_of(variable)} is not one of the variables that this optimizer was built with: "
                    "use a DistributedOptimizer for each set of variables"
                )
            ordered[position] = gradient
        if all(gradient is None for gradient in ordered) and not self._context.is_server:
            raise ValueError("there is no gradient for any variable")
        return ordered

    def _open(self, gradients: list[Gradient] | None, *, unsynchronised: bool) -> None:
        """Agree on which variables get a gradient; make the bridge and, on the server, the update."""
        session = self.session
        if isinstance(session, ServerSession):
            self._skip_first = session.open(lambda unit, data: self._bridge.put(unit, data))  # type: ignore[union-attr]
            assert session.engine is not None and session.plan is not None
            self._bridge = Bridge(session.plan.units, self._carried, self._step, None, session.engine.updated)
            self._updater = Updater(
                self.inner,
                self._trainable_variables,
                session.plan,
                self._bridge,
                self._accumulates,
                on_nonfinite=self._context.config.on_nonfinite,
                redoes=self._context.transport.survives,
            )
            if self._context.transport.survives and self._before is None:
                self.keep_snapshots([*self._trainable_variables, *self.inner.variables])
            session.engine.start()
        else:
            assert gradients is not None
            missing = [v for v, kind in zip(self._carried, gradients, strict=True) if kind == "none"]
            if missing:
                warnings.warn(f"no gradient for {compat.names(missing)}: they are not trained", stacklevel=4)
            if self._bridge is None or gradients != self._gradients:
                self._connect(gradients)
            self._skip_first = session.open(
                gradients,
                unsynchronised,
                lambda bucket, data: self._bridge.put(bucket, data),  # type: ignore[union-attr]
            )
        self._opened = True
        self._context.closers.append(self._close)
        if self._skip_first and self._context.is_server:
            logger.warning(
                "the first gradients came from weights that were not the server's and are not used: call "
                "optimizer.synchronize(model) on every rank before the loop to use them"
            )
        if (model := self._model()) is not None:
            trainer.exchange_state(self, model)

    def _close(self) -> None:
        for bridge in [*self._void, self._bridge]:
            if bridge is not None:
                bridge.close()

    def _connect(self, gradients: list[Gradient]) -> None:
        """On a client: make the bridge for a plan. What began with :meth:`take_weights` of another one is void."""
        if self._bridge is not None:
            self._void.append(self._bridge)
        session = self.session
        self._took.clear()
        self._took_eagerly = False
        self._gradients = gradients
        plan = session.plan_for(gradients)
        done = int(self._iterations) % self._accumulates
        self._accumulated.assign(done)
        accumulator = Accumulator(plan.buckets, self._accumulates, done) if self._accumulates > 1 else None

        def on_gradient(bucket: int, step: int, image: Buffer) -> None:
            ready = image if accumulator is None else accumulator.add(bucket, image)
            if ready is not None:
                session.engine.gradient(bucket, step, ready)

        bridge = Bridge(
            plan.buckets,
            self._carried,
            self._step,
            self._samples if self._average == "samples" else None,
            on_gradient,
            lambda number, step: self._on_mark(bridge, number, step),
        )
        self._bridge = bridge
        self._settle = tf.function(self._take_all, autograph=False)

    def _on_mark(self, bridge: Bridge, number: int, step: int) -> None:
        if number in (_TAKES, _TAKES_NEW) and bridge in self._void:
            self.settle()
            self._prime(bridge)
        elif number == _TAKES:
            self._prime(bridge)
        elif number >= _ASSIGNED:
            bucket = number - _ASSIGNED
            if bucket in self._primed:
                self._primed.discard(bucket)
            else:
                self.session.engine.assigned(bucket)
        elif number != _TAKES_NEW:
            kind: Kind = "step" if number == _STEP else "loss"
            self._context.recorder.mark(kind, -1, step, session=self.session.number)

    def _take_all(self) -> bool:
        """Have the new weights that are to come assigned, each bucket's on its own."""
        assert self._bridge is not None
        for bucket in self._bridge.slots:
            self._take(bucket)
        self._pending.assign(False, read_value=False)
        return True

    def _take_anyway(self) -> None:
        """In a graph, at the top of a step: have the new weights assigned, or the old ones where there are no new ones.

        A branch in the graph for each bucket would take long to trace, and one for all would wait for all. So each is
        always taken, and where nothing is to come, :meth:`_prime` gives what the variables hold.
        """
        assert self._bridge is not None
        pending = tf.cast(self._pending.read_value(), tf.int64)
        self._bridge.mark(_TAKES + pending * (_TAKES_NEW - _TAKES), [])
        self._take_all()

    def _prime(self, bridge: Bridge) -> None:
        """On the bridge's thread, while a graph waits in :meth:`_take_anyway` and changes no variable."""
        for bucket in bridge.slots:
            if self._context.recorder.active:
                self._primed.add(bucket.index)
            if bucket.row_bytes:
                bridge.put(bucket.index, rows.none())
                continue
            values = [np.frombuffer(variable.numpy().tobytes(), np.uint8) for variable in bridge.variables_of(bucket)]
            bridge.put(bucket.index, np.concatenate(values))

    def _take(self, bucket: Any) -> None:
        """Wait for a bucket's new weights and assign them."""
        assert self._bridge is not None
        variables = self._bridge.variables_of(bucket)
        values = self._bridge.take(bucket, [variable.shape for variable in variables])
        if bucket.row_bytes:
            (variable,), (new,) = variables, values
            assigned = [
                tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=new.indices, updates=new.values)
            ]
        else:
            assigned = [v.assign(value, read_value=False) for v, value in zip(variables, values, strict=True)]
        if self._context.recorder.active:
            self._bridge.mark(_ASSIGNED + bucket.index, assigned)

    def note_loss(self, loss: Any) -> None:
        """In the graph, for the timeline: the forward pass is done when there is this loss."""
        self._note(_LOSS, [loss])

    def _note(self, number: int, after: Sequence[Any]) -> None:
        if self._bridge is not None and self._context.recorder.active and tf.inside_function():
            self._bridge.mark(number, after)

    def _took_here(self) -> bool:
        """Whether the step that is being traced, or runs, began with :meth:`take_weights`; asked once a step."""
        if not tf.inside_function():
            took, self._took_eagerly = self._took_eagerly, False
            return took
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if graph in self._took:
                self._took.discard(graph)  # a second apply in it would have to wait for the first one's weights
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    def _exchange(self, grads: list[Any]) -> None:
        """On a client: every bucket's gradients into the bridge, its new weights out of it, now or in the next step."""
        assert self._bridge is not None
        took = self._took_here()
        if self._skip_first and not tf.inside_function():
            self._skip_first = False
            return
        changed = [
            variable
            for variable, gradient, kind in zip(self._trainable_variables, grads, self._gradients, strict=False)
            if (gradient is None) != (kind == "none")
        ]
        if changed:
            raise MpipipeError(
                f"the variables that get a gradient have changed since the first step: {compat.names(changed)}"
            )
        if self._average == "samples" and not self._samples_counted:
            raise ValueError(
                "average='samples' needs the number of samples behind the gradients: call "
                "optimizer.count_samples(n) in each step, before apply"
            )
        if not took and tf.inside_function():
            tf.cond(self._pending.read_value(), self._take_all, lambda: False)
        elif not took:
            self.settle()
        grads = [*grads, *(tf.zeros(signal.shape, signal.dtype) for signal in self._carried[len(grads) :])]
        for bucket in self._bridge.slots:
            of_bucket = [grads[region.variable] for region in bucket.regions]
            if bucket.row_bytes:
                self._bridge.give(bucket, [_as_slices(g) for g in of_bucket], sum_rows=self.session.sums_rows)
            else:
                self._bridge.give(bucket, [tf.convert_to_tensor(gradient) for gradient in of_bucket])
        if not took:
            self.trace_again |= tf.inside_function() and self.session.overlaps
        self._end_step(took)
        self._iterations.assign_add(1)

    def _end_step(self, took: bool) -> None:
        """On a client, when its gradients are under way: wait for the weights, or note that they are to come."""
        assert self._bridge is not None
        sends: Any = True
        if self._accumulates > 1:
            sends = tf.equal(self._accumulated.assign_add(1) % self._accumulates, 0)
        self._bridge.end_step(sends)
        if took:
            self._pending.assign(sends)
        elif sends is not True and tf.inside_function():
            tf.cond(sends, self._take_all, lambda: False)
        elif sends:
            self._take_all()

    def _serve_one(self) -> None:
        """On the server: one step of a loop of the user's own, inside or outside of ``tf.function``."""
        assert self._updater is not None
        if tf.inside_function() and self._before is not None:
            # From Python, as a step may have to be done again.
            tf.numpy_function(self._serve_from_graph, [], tf.bool)
        elif tf.inside_function():
            # The only Python function in this graph, so that it cannot hold up another one.
            begun = tf.numpy_function(self._wait_unless_skipped, [], tf.bool)
            begun.set_shape([])
            # A function of its own, traced once however often this graph is.
            tf.cond(begun, self._updater.step, lambda: tf.convert_to_tensor(self._iterations))
        elif self._wait_unless_skipped():
            self.serve_step()

    def _serve_from_graph(self) -> bool:
        if not self._wait_unless_skipped():
            return False
        self.serve_step()
        return True

    def _wait_unless_skipped(self) -> bool:
        if self._skip_first:
            self._skip_first = False
            return False
        return self.wait_step()


# The numbers of marks: of the timeline, of steps that take old or new weights, and, plus its own number, of a bucket
# whose weights have been assigned.
_STEP, _LOSS, _TAKES, _TAKES_NEW, _ASSIGNED = 1, 2, 3, 4, 5

# Attributes of the wrapped optimizer that the base class sets too.
_SHARED = (
    "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency",
    "loss_scale_factor", "gradient_accumulation_steps",
)  # fmt: skip


def _wrapped(optimizer: Any) -> Any:
    """The optimizer to wrap.

    Raises:
        TypeError: what was given is none, and not the name of one.
    """
    if isinstance(optimizer, str):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise TypeError(f"there is no Keras optimizer named {optimizer!r}") from error
    if isinstance(optimizer, DistributedOptimizer):
        raise TypeError("the optimizer is a DistributedOptimizer already: wrap a Keras optimizer once")
    if isinstance(getattr(optimizer, "inner_optimizer", None), DistributedOptimizer):
        raise TypeError(trainer.PUT_AROUND)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an instance of keras.optimizers.Optimizer, such as "
            f"keras.optimizers.Adam(1e-3), or a name such as 'adam'; not {optimizer!r} of type "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    return optimizer


def _as_slices(gradient: Any) -> Any:
    """``tf.IndexedSlices`` of a gradient, of all rows where it is one for all."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    gradient = tf.convert_to_tensor(gradient)
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))


def _trainable(variables: Any) -> list[Any]:
    """The trainable variables of a model or among variables."""
    if isinstance(variables, keras.Model):
        return list(variables.trainable_variables)
    return [variable for variable in variables if getattr(variable, "trainable", True)]


def _state(variables: Any) -> list[Any]:
    """The float variables that are not trained, of a model or among variables."""
    if variables is None:
        return []
    if isinstance(variables, keras.Model):
        return compat.state_of(variables)
    return [v for v in variables if not getattr(v, "trainable", True) and "float" in compat.dtype_name(v)]
