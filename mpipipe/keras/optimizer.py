"""``DistributedOptimizer``: any Keras optimizer, applied at the server, layer by layer, while clients compute."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpipipe import context as running
from mpipipe.errors import MpipipeError
from mpipipe.keras import compat, trainer
from mpipipe.keras.bridge import Bridge
from mpipipe.keras.update import Updater, is_divisible
from mpipipe.logs import logger
from mpipipe.protocol.plan import VariableSpec
from mpipipe.session import ClientSession, ServerSession
from mpipipe.trace import Kind
from mpipipe.wire import plain


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

    Raises:
        TypeError: ``optimizer`` is something else.
        EnvironmentProblem: mpipipe cannot work here (another Keras backend, an active ``tf.distribute`` strategy,
            no MPI); the message says what to do.
    """

    built: bool
    _ready = False  # whether there is a wrapped optimizer yet
    _opened = False  # whether all ranks know which variables get a gradient, and steps can be done

    def __init__(self, optimizer: Any) -> None:
        compat.check_environment()
        inner = _wrapped(optimizer)
        super().__init__(learning_rate=0.0, name=inner.name)
        self.inner = inner
        # Keras and its callbacks read these; the rest is looked up in the wrapped optimizer.
        for name in ("_iterations", "_learning_rate", *_SHARED):
            setattr(self, name, getattr(inner, name))
        self._ready = True
        self._context = running.init()
        self._session: ClientSession | ServerSession | None = None
        self._bridge: Bridge | None = None
        self._updater: Updater | None = None
        # The model that fit trains, whose state is exchanged with the weights: a function, as Keras would save a model.
        self._model: Callable[[], Any] = lambda: None
        self._agreed = False  # whether all ranks have the same variables and the server's values
        self._skip_first = False
        self._passed_steps = 0
        # For graphs, and made before they are traced (see Bridge): the number of the step, and whether the new weights
        # of the last one are still to be assigned.
        with tf.init_scope():
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._pending = tf.Variable(False, trainable=False)
        # Buckets whose queue holds what the variables hold, for a graph that begins with taking.
        self._primed: set[int] = set()
        self._void: list[Bridge] = []  # of plans that have turned out not to hold; there may be graphs that use them
        # The graphs that begin with take_weights, and whether an eager step has.
        self._took: weakref.WeakSet[Any] = weakref.WeakSet()
        self._took_eagerly = False
        # Whether a step was traced that waits for its own weights, and would not if it were traced again.
        self.trace_again = False
        trainer.install()

    # What Keras sees of the optimizer is the wrapped one's.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Keras saves an optimizer under its class. isinstance still sees the real type first.
        return type(self.inner) if self.__dict__.get("_ready") else DistributedOptimizer

    def __dir__(self) -> list[str]:
        # Keras saves what it finds here: the wrapped optimizer's variables are saved as this one's, once.
        return [name for name in super().__dir__() if name != "inner"]

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
        """Scale a loss as the wrapped optimizer does."""
        return self.inner.scale_loss(loss)

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
        if self._trains_here:
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
            if model is not None and not compat.is_built(model):
                return  # its variables are yet to come: this time apply waits for the weights
            self.synchronize(variables if model is None else model.trainable_variables)
        if self._context.is_server or not self._agreed or not self.session.overlaps:
            return
        with tf.init_scope():
            if self._bridge is None:
                self._connect([True] * len(self._trainable_variables))
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
                self._open([gradient is not None for gradient in grads], unsynchronised=late)
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

    def serve_step(self) -> None:
        """On the server: serve the step that has begun."""
        assert self._updater is not None
        self._updater.step()

    def end_phase(self, state: Sequence[Any], **content: Any) -> None:
        """On a client: meet the others after this client's last step, and take over weights and state."""
        session = self.session
        session.steps_done()
        self.settle()
        values = [variable.numpy() for variable in state]
        answer = session.end_phase(values, **content)
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
        return [variable for variable, has in zip(self._trainable_variables, has_gradient, strict=True) if has]

    def collect_phase(self, state: Sequence[Any]) -> dict[str, Any]:
        """On the server: end the phase with all clients; returns the mean of their metrics."""
        session = self.session
        values = [variable.numpy() for variable in state]
        said = session.collect_phase(values)
        means = session.mean_arrays(values)
        for variable, value in zip(state, means, strict=True):
            variable.assign(value)
        logs: dict[str, Any] = session.mean_logs()
        session.answer_phase(
            said,
            lambda: (compat.native(variable).numpy() for variable in self._trained()),
            iterations=int(self.inner._iterations),
        )
        session.send_arrays(means)
        return logs

    def _take_over(self, answer: dict[str, Any], state: Sequence[Any]) -> None:
        coming = self.session.receive_arrays([compat.native(variable) for variable in state])
        for variable, value in zip(state, coming, strict=True):
            variable.assign(value)
        self.inner._iterations.assign(answer["iterations"])

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
        natives = [compat.native(variable) for variable in variables]
        self._changed_weights = False
        if self._context.is_server:
            self.session.agree(specs, divisible=is_divisible(self.inner, variables))
            self.session.send_arrays(native.numpy() for native in natives)
        else:
            self.session.agree(specs)
            for variable, native, their in zip(variables, natives, self.session.receive_arrays(natives), strict=True):
                self._changed_weights |= not np.array_equal(plain.encode(native.numpy()), plain.encode(their))
                variable.assign(their)

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

    def _open(self, has_gradient: list[bool] | None, *, unsynchronised: bool) -> None:
        """Agree on which variables get a gradient; make the bridge and, on the server, the update."""
        session = self.session
        if isinstance(session, ServerSession):
            self._skip_first = session.open(lambda unit, data: self._bridge.put(unit, data))  # type: ignore[union-attr]
            assert session.engine is not None and session.plan is not None
            self._bridge = Bridge(session.plan.units, self._trainable_variables, self._step, session.engine.updated)
            self._updater = Updater(self.inner, self._trainable_variables, session.plan, self._bridge)
            session.engine.start()
        else:
            assert has_gradient is not None
            missing = [v for v, has in zip(self._trainable_variables, has_gradient, strict=True) if not has]
            if missing:
                warnings.warn(f"no gradient for {compat.names(missing)}: they are not trained", stacklevel=4)
            if self._bridge is None or missing:
                self._connect(has_gradient)
            self._skip_first = session.open(
                has_gradient,
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

    def _connect(self, has_gradient: list[bool]) -> None:
        """On a client: make the bridge for a plan. What began with :meth:`take_weights` of another one is void."""
        if self._bridge is not None:
            self._void.append(self._bridge)
        session = self.session
        self._took.clear()
        self._took_eagerly = False
        self._has_gradient = has_gradient
        plan = session.plan_for(has_gradient)
        bridge = Bridge(
            plan.buckets,
            self._trainable_variables,
            self._step,
            lambda bucket, step, image: session.engine.gradient(bucket, step, image),
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
            values = [np.frombuffer(variable.numpy().tobytes(), np.uint8) for variable in bridge.variables_of(bucket)]
            bridge.put(bucket.index, np.concatenate(values))

    def _take(self, bucket: Any) -> None:
        """Wait for a bucket's new weights and assign them."""
        assert self._bridge is not None
        variables = self._bridge.variables_of(bucket)
        values = self._bridge.take(bucket, [variable.shape for variable in variables])
        assigned = [variable.assign(value, read_value=False) for variable, value in zip(variables, values, strict=True)]
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
        given = [gradient is not None for gradient in grads]
        if given != self._has_gradient:
            changed = [
                v for v, a, b in zip(self._trainable_variables, given, self._has_gradient, strict=True) if a != b
            ]
            raise MpipipeError(
                f"the variables that get a gradient have changed since the first step: {compat.names(changed)}"
            )
        if not took and tf.inside_function():
            tf.cond(self._pending.read_value(), self._take_all, lambda: False)
        elif not took:
            self.settle()
        for bucket in self._bridge.slots:
            self._bridge.give(bucket, [tf.convert_to_tensor(grads[region.variable]) for region in bucket.regions])
        self._bridge.end_step()
        if took:
            self._pending.assign(True)
        else:
            self.trace_again |= tf.inside_function() and self.session.overlaps
            for bucket in self._bridge.slots:
                self._take(bucket)
        self.inner._iterations.assign_add(1)

    def _serve_one(self) -> None:
        """On the server: one step of a loop of the user's own, inside or outside of ``tf.function``."""
        assert self._updater is not None
        if tf.inside_function():
            # The only Python function in this graph, so that it cannot hold up another one.
            begun = tf.numpy_function(self._wait_unless_skipped, [], tf.bool)
            begun.set_shape([])
            # A function of its own, traced once however often this graph is.
            tf.cond(begun, self._updater.step, lambda: tf.convert_to_tensor(self.inner._iterations))
        elif self._wait_unless_skipped():
            self.serve_step()

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
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "LossScaleOptimizer is not supported: its scale would have to change on all ranks at once; "
            "use the policy mixed_bfloat16, or pass the optimizer inside it"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an instance of keras.optimizers.Optimizer, such as "
            f"keras.optimizers.Adam(1e-3), or a name such as 'adam'; not {optimizer!r} of type "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    return optimizer


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
