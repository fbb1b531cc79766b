"""``mpipipe.callbacks.Checkpoint``: a run that ends before its time goes on where it was when it is started again."""

from __future__ import annotations

import base64
import queue
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mpipipe import checkpoint as files
from mpipipe import context as running
from mpipipe.checkpoint import CheckpointError
from mpipipe.errors import MpipipeError
from mpipipe.keras import compat
from mpipipe.keras.update import Snapshot
from mpipipe.logs import logger
from mpipipe.wire import plain

# A client sees the step at whose end it is to say its state before it is there, if it is so many steps ahead of the
# server's: no client can have begun more than two further ones.
_AHEAD = 3


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the whole state of a run now and then; ``fit`` of the same script goes on from the newest.

    Give it to ``fit`` on the server, or on all ranks. A checkpoint has weights, slots, iterations, the epoch and how
    many batches of it are done, and of each client the statistics and the random seeds of its layers. When the order of
    the data is the same again, a run that was broken off ends with the weights, bit for bit, of one that was not. (That
    is so without shuffling, or where an epoch's order follows from its number alone.) Metrics of the epoch in which it
    goes on are those of the batches from there on. Data must not be shared out anew: with another number of clients it
    goes on too, but in another way than before.

    One is written every so many steps, when training ends, when the process gets SIGTERM, and when no client is left
    (these two without the clients' own state). Files appear whole or not at all. A file that cannot be written is
    said, and training goes on; one that cannot be read is passed over for the one before it.

    Each ``fit`` of a script needs a folder of its own.

    Args:
        path: the folder.
        every: how many steps, or how much time (``datetime.timedelta``).
        keep: how many of the newest checkpoints are kept.

    Raises:
        TypeError: ``every`` is something else.
        ValueError: ``every`` or ``keep`` is not positive.
    """

    def __init__(self, path: str | Path, every: int | timedelta, keep: int = 3) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int | timedelta):
            raise TypeError(f"every is {every!r}; it is a number of steps, or a datetime.timedelta")
        positive = every > timedelta(0) if isinstance(every, timedelta) else every > 0
        if not positive or keep < 1:
            raise ValueError(f"every={every!r} and keep={keep!r} have to be positive")
        self.path, self.keep = Path(path), keep
        self._every = None if isinstance(every, timedelta) else every
        self._seconds = every.total_seconds() if isinstance(every, timedelta) else None
        self._works = False
        self._lock = threading.Lock()  # of writing
        self._written = -1  # the number of the newest file
        self._newest: Path | None = None

    # Going on. On the server, before clients begin; also where there is one rank.

    def restore(self, model: Any) -> dict[str, Any] | None:
        """Have a built model as the newest checkpoint says; returns its manifest, or None where there is none.

        Raises:
            CheckpointError: the checkpoint is one of another model.
        """
        self.set_model(model)  # as Keras does when training begins
        found = files.newest(self.path)
        self._base = 0
        self._states: dict[int, dict[str, Any]] = {}  # by client, as local_state has it
        if found is None:
            return None
        path, checkpoint = found
        manifest, arrays = checkpoint.manifest, checkpoint.arrays
        variables = self.variables
        known = {"epoch", "batch", "steps", "stopped", "clients"} <= set(manifest)
        names = [_of_server(position) for position in range(len(variables))]
        if not known or {name for name in arrays if name.startswith(_SERVER)} != set(names):
            raise CheckpointError(f"{path} is of another model or optimizer, with another number of variables")
        values = [arrays[name] for name in names]
        for variable, value in zip(variables, values, strict=True):
            if tuple(variable.shape) != value.shape or compat.dtype_name(variable) != value.dtype.name:
                here = f"{tuple(variable.shape)} {compat.dtype_name(variable)}"
                raise CheckpointError(
                    f"{path} is of another model or optimizer: {compat.path_of(variable)} is {here} here, "
                    f"{value.shape} {value.dtype.name} there"
                )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self._base = self._written = int(manifest["steps"])
        self._newest = path
        for client in manifest["clients"]:
            start = f"client/{client}/"
            own = {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}
            self._states[int(client)] = own
        logger.info(
            "going on from %s: epoch %d, after %d batches of it", path, manifest["epoch"] + 1, manifest["batch"]
        )
        return dict(manifest)

    def states_of(self, clients: list[int]) -> dict[int, dict[str, Any]]:
        """What each client is to take over, once it has all that the server has, as a message has it.

        Nothing where the checkpoint is not of just these clients; which is said, if it is of others.
        """
        if set(self._states) == set(clients):
            return {client: pack(state) for client, state in self._states.items()}
        if self._states:
            logger.warning(
                "the checkpoint was written with %d clients, now there are %d: training goes on, but not as it would "
                "have",
                len(self._states),
                len(clients),
            )
        return {}

    # Saving.

    @property
    def rule(self) -> dict[str, Any]:
        """For clients: when they have to say their state."""
        return {"every": self._every, "base": self._base}

    def begin(self, manifest: dict[str, Any] | None) -> None:
        """Training begins, from what :meth:`restore` has returned."""
        self._works = True
        self._optimizer = self.model.optimizer
        self._alone = running.init().alone
        self._batch = 0 if manifest is None else int(manifest["batch"])  # of the epoch in which it goes on
        self._epochs: list[tuple[int, int, int]] = []  # (epoch, the step that it begins with, its first batch)
        self._last = time.monotonic()
        self._at: int | None = None  # the step after which clients have been told to say their state
        self._due = False
        self._snapshot = Snapshot(self.variables)
        self._work: queue.SimpleQueue[tuple[Any, ...] | int | None] = queue.SimpleQueue()
        self._said: dict[int, dict[str, Any]] = {}  # by client, what has been taken last of what it has of its own
        self._may_save, self._said_slow = threading.Semaphore(), False
        self._writer = threading.Thread(target=self._write_all, name="mpipipe-checkpoint", daemon=True)
        self._writer.start()
        if not self._alone:
            self._optimizer.session.saves.discard(lambda said: True)  # what is left of an earlier fit
            running.init().savers.append(self._save_now)

    def on_train_begin(self, logs: Any = None) -> None:
        """Where there is one rank, go on from the newest checkpoint; on the server that has happened."""
        context = running.init()
        if not context.alone:
            return
        manifest = self.restore(self.model)
        self._skip = Skip(self.model, 0)
        if manifest is not None:
            first = self.params["epochs"] if manifest["stopped"] else int(manifest["epoch"])
            compat.set_first_epoch(self.model, first)
            self._skip = Skip(self.model, int(manifest["batch"]))
            if 0 in self._states:
                take_local(self.model, self._states[0])
        self.begin(manifest)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where training stands; save what was to be saved when the last epoch ended."""
        if not self._works:
            return
        if self._epochs:
            rule = {**self.rule, "at": self._at}
            self._due |= is_overdue(self._steps(), self._epochs[-1][1], self.model.steps_per_execution, rule)
        if self._due:
            self._save(epoch, 0, boundary=True)
        if not self._alone:
            self._work.put(epoch - 1)
        first, self._batch = self._batch, 0
        self._epochs.append((epoch, self._steps(), first))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time: the step before has not been the last one of its epoch."""
        if not self._works:
            return
        if self._alone:
            self._skip.before_batch()
        if self._due:
            epoch, start, first = self._epochs[-1]
            self._save(epoch, first + (self._steps() - start) * self._batches_a_step(), boundary=False)
        if self._seconds is not None and self._at is None and time.monotonic() - self._last >= self._seconds:
            self._at = self._steps() + _AHEAD
            if not self._alone:
                self._optimizer.session.save(at=self._at)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note whether it is time."""
        if self._works and not (self._alone and self._skip.active):
            start = self._epochs[-1][1]
            rule = {**self.rule, "at": self._at}
            self._due |= is_due(self._steps(), start, self.model.steps_per_execution, rule)

    def on_train_end(self, logs: Any = None) -> None:
        """Save the last state."""
        if not self._works:
            return
        epoch = self._epochs[-1][0] + 1 if self._epochs else None
        if epoch is not None:
            self._save(epoch, 0, boundary=True, stopped=bool(self.model.stop_training))
        self._work.put(None)
        self._writer.join()
        self._works = False
        if self._alone:
            compat.set_first_epoch(self.model, None)
        else:
            running.init().savers.remove(self._save_now)

    def _steps(self) -> int:
        return int(self._optimizer.iterations) if self._alone else int(self._optimizer.steps)

    def _batches_a_step(self) -> int:
        return 1 if self._alone else int(self._optimizer.batches_a_step)

    @property
    def variables(self) -> list[Any]:
        """All that is saved of the server."""
        inner = getattr(self.model.optimizer, "inner", self.model.optimizer)
        return [*self.model.weights, *inner.variables]

    def _save(self, epoch: int, batch: int, *, boundary: bool, stopped: bool = False) -> None:
        """Have the present state written, by a thread that waits for what the clients say of theirs."""
        self._wait_until_written()
        if not self._writer.is_alive():
            raise CheckpointError("checkpoints are not written any more: the thread that did so has failed")
        self._due, self._at, self._last = False, None, time.monotonic()
        values = self._snapshot.take()
        steps = self._steps()
        manifest = {"epoch": epoch, "batch": batch, "steps": self._number(steps), "stopped": stopped}
        of_epoch = epoch - 1 if boundary else epoch
        own = {0: local_state(self.model)} if self._alone else None
        self._work.put((manifest, values, of_epoch, steps, boundary, own))

    def _wait_until_written(self) -> None:
        """Let no two states of the model wait for the disk: they would become more and more where it is slow."""
        began = time.monotonic()
        while not self._may_save.acquire(timeout=1.0):  # in slices, so that an interrupt gets through
            if not self._said_slow and time.monotonic() - began > _SLOW:
                self._said_slow = True
                logger.warning("training waits until a checkpoint is written: that takes longer than until the next")

    def _number(self, steps: int) -> int:
        return steps if self._alone else self._base + steps

    def _write_all(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Do the next of what is to be done, and hold none of it any more; False where that was the last."""
        work = self._work.get()
        if work is None:
            return False
        if isinstance(work, int):  # nothing is written any more for which older ones would be wanted
            epoch = work
            self._optimizer.session.saves.discard(lambda said: said["epoch"] < epoch)
            return True
        try:
            self._write_state(*work)
        finally:
            del work  # before the next one is made
            self._may_save.release()
        return True

    def _write_state(
        self,
        manifest: dict[str, Any],
        values: list[Any],
        epoch: int,
        steps: int,
        boundary: bool,
        own: dict[int, dict[str, Any]] | None,
    ) -> None:
        arrays, clients = _server_arrays(values), {}
        for client, state in (own or self._clients_say(epoch, steps)).items():
            # At the end of an epoch all have the server's statistics.
            kept = {name: value for name, value in state.items() if not (boundary and name.startswith("state/"))}
            arrays |= {f"client/{client}/{name}": value for name, value in kept.items()}
            clients[client] = len(kept)
        self._write({**manifest, "clients": clients}, arrays)

    def _clients_say(self, epoch: int, steps: int) -> dict[int, dict[str, Any]]:
        """What each client has of its own after so many steps, or at the end of its epoch if that was before."""

        def is_it(said: dict[str, Any]) -> bool:
            return bool(said["epoch"] == epoch and (said["ends"] or said["step"] == steps))

        session, states = self._optimizer.session, {}
        for client in session.clients:
            # What a client said when it ended an epoch stands for all that is saved in it afterwards.
            said = self._said.get(client)
            while said is None or not is_it(said):
                said = session.saves.take(client)
                if said["kind"] == "ended":
                    break  # it is lost, or its script has ended
                self._said[client] = said
            else:
                states[client] = unpack(said["state"])
        return states

    def _write(self, manifest: dict[str, Any], arrays: dict[str, Any]) -> Path | None:
        with self._lock:
            newer = manifest["steps"] < self._written
            if newer or (manifest["steps"] == self._written and not manifest["clients"]):
                return self._newest  # which has what clients have of their own, too
            try:
                path = files.write(self.path, manifest["steps"], files.Checkpoint(manifest, arrays), self.keep)
            except OSError as error:
                logger.warning("no checkpoint was written (%s): training goes on, older ones stay", error)
                return None
            self._written, self._newest = manifest["steps"], path
            return path

    def _save_now(self) -> str:
        """The run is about to be ended: save the state before the step that is being served. On any thread."""
        optimizer = self._optimizer
        before = optimizer.snapshot
        if not self._works or before is None or not self._epochs:
            return ""
        steps, values = before
        epoch, start, first = next(one for one in reversed(self._epochs) if one[1] <= steps)
        batch = first + (steps - start) * self._batches_a_step()
        manifest = {"epoch": epoch, "batch": batch, "steps": self._number(steps), "stopped": False, "clients": {}}
        return str(self._write(manifest, _server_arrays(values)) or "")


# Seconds that training waits for the disk before it says so.
_SLOW = 2.0

_SERVER = "server/"  # begins the names of arrays of the server


def _of_server(position: int) -> str:
    return f"{_SERVER}{position}"


def _server_arrays(values: list[Any]) -> dict[str, Any]:
    # By numpy(), they would be copied.
    return {_of_server(position): np.asarray(value) for position, value in enumerate(values)}


class Skip:
    """Lets the first batches of an epoch go by: a run that goes on has done them before.

    Keras asks its model for ``train_function`` at every batch; for those it gets one that only fetches data.
    """

    def __init__(self, model: Any, batches: int) -> None:
        self._model, self._left = model, batches
        self._original: Any = None

    @property
    def active(self) -> bool:
        """Whether the present batch goes by."""
        return self._original is not None

    def before_batch(self) -> None:
        """A batch begins."""
        if self._left > 0 and self._original is None:
            self._original, self._model.train_function = self._model.train_function, self._fetch
        elif self._left <= 0 and self._original is not None:
            self.end()

    def end(self) -> None:
        """From now on every batch is trained on, as at the end of an epoch that had no more."""
        if self._original is not None:
            self._model.train_function, self._original = self._original, None
        self._left = 0

    def _fetch(self, iterator: Any) -> Any:
        for _ in range(min(self._model.steps_per_execution, self._left)):
            self._left -= 1
            next(iterator)
        return self._model.get_metrics_result()


def is_due(steps: int, start: int, per_execution: int, rule: dict[str, Any]) -> bool:
    """Whether a checkpoint is to be made of what is after so many steps, in a phase that began after ``start``.

    Ranks can only say what was at the end of a call of Keras's train function, which does ``per_execution`` steps.
    """
    return (steps - start) % per_execution == 0 and _passes(max(steps - per_execution, start), steps, rule)


def is_overdue(steps: int, start: int, per_execution: int, rule: dict[str, Any]) -> bool:
    """Whether one was to be made within the last call of a phase, which has done fewer steps than others."""
    return _passes(steps - (steps - start) % per_execution, steps, rule)


def _passes(before: int, steps: int, rule: dict[str, Any]) -> bool:
    every, at = rule["every"], rule.get("at")
    crossed = every is not None and (rule["base"] + steps) // every > (rule["base"] + before) // every
    return crossed or (at is not None and before < at <= steps)


def local_state(model: Any) -> dict[str, Any]:
    """What each client has of its own: what layers change as they run, and the seeds of those that draw numbers."""
    state = {f"state/{i}": variable.numpy() for i, variable in enumerate(compat.state_of(model))}
    return state | {f"seed/{i}": variable.numpy() for i, variable in enumerate(compat.seeds_of(model))}


def take_local(model: Any, state: dict[str, Any]) -> None:
    """Take over a :func:`local_state`, or a part of it."""
    variables = {f"state/{i}": variable for i, variable in enumerate(compat.state_of(model))}
    variables |= {f"seed/{i}": variable for i, variable in enumerate(compat.seeds_of(model))}
    for name, value in state.items():
        if name not in variables or tuple(variables[name].shape) != value.shape:
            raise MpipipeError(f"the checkpoint has a client's {name}, which is not in this model")
        variables[name].assign(value)


def pack(state: dict[str, Any]) -> dict[str, Any]:
    """Arrays as a control message has them; there are few, and they are small."""
    return {name: [a.dtype.name, list(a.shape), base64.b64encode(a.tobytes()).decode()] for name, a in state.items()}


def unpack(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse."""
    return {
        name: np.frombuffer(base64.b64decode(data), plain.dtype_of(dtype)).reshape(shape)
        for name, (dtype, shape, data) in state.items()
    }
