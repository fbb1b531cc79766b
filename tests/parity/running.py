"""What the table's cases run in: the same script, once distributed on its part of every batch, once plain on all of it.

A case is a function of a :class:`Run`. It builds a model, trains, and returns what is compared. Under ``mpirun`` all
ranks call it with a :class:`Distributed`; then the server alone calls it with a :class:`Plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

import mpipipe as mp

STEPS, BATCH = 12, 24  # 24 divides by 2 and by 3 clients
SEED = 7
LOGS_LIMIT = 1e-5  # Keras computes metrics in float32 whatever the model's dtype


@dataclass
class Result:
    """What a case compares; arrays are taken when the case returns it."""

    model: Any
    history: Any = None  # of fit, or a dictionary of lists
    optimizers: Sequence[Any] = ()
    extra: dict[Any, Any] = field(default_factory=dict)  # anything else, by name: arrays or numbers
    without: str = ""  # slots with this in their path are not compared

    def __post_init__(self) -> None:
        optimizers = self.optimizers or [self.model.optimizer]
        self.weights = [np.asarray(w) for w in self.model.get_weights()]
        slots = [v for o in optimizers for v in o.variables]
        self.slots = [v.numpy() for v in slots if not self.without or self.without not in v.path]
        self.iterations = [int(o.iterations) for o in optimizers]
        self.rates = [_rate(o) for o in optimizers]
        self.logs = getattr(self.history, "history", self.history) or {}


def _rate(optimizer: Any) -> float | None:
    try:
        return float(optimizer.learning_rate)
    except AttributeError:
        return None  # MultiOptimizer has several


class Run:
    """Where a case runs: :class:`Distributed` or :class:`Plain`."""

    distributed = False
    clients = 1

    def optimizer(self, optimizer: Any, **arguments: Any) -> Any:
        """The optimizer to give to ``compile``."""
        raise NotImplementedError

    def part(self, array: Any, batch: int = BATCH) -> Any:
        """Of every batch of an array this run's part; batches follow one another along the first axis."""
        raise NotImplementedError

    def batch(self, batch: int = BATCH) -> int:
        """How many samples of every batch are this run's."""
        return batch // self.clients

    def callbacks(self, make: Callable[[], list[Any]], where: str = "all") -> list[Any]:
        """The callbacks to give to ``fit``: those that plain training has, on "all" ranks or on the "server"."""
        raise NotImplementedError

    def fit(self, model: Any, x: Any, y: Any, batch: int = BATCH, **arguments: Any) -> Any:
        """``fit`` on this run's part of arrays, or of dictionaries or lists of them."""
        x, y = (keras.tree.map_structure(lambda array: self.part(array, batch), data) for data in (x, y))
        if "sample_weight" in arguments:
            arguments["sample_weight"] = self.part(arguments["sample_weight"], batch)
        arguments = {"batch_size": self.batch(batch), "shuffle": False, "verbose": 0, **arguments}
        return model.fit(x, y, **arguments)


class Distributed(Run):
    distributed = True

    def __init__(self) -> None:
        self.clients = mp.num_clients()
        self.rank = mp.rank()

    def optimizer(self, optimizer: Any, **arguments: Any) -> Any:
        return mp.DistributedOptimizer(optimizer, **arguments)

    def part(self, array: Any, batch: int = BATCH) -> Any:
        share, index = batch // self.clients, mp.client_index()
        batches = array.reshape(-1, batch, *array.shape[1:])[:, index * share : (index + 1) * share]
        return batches.reshape(-1, *array.shape[1:])

    def callbacks(self, make: Callable[[], list[Any]], where: str = "all") -> list[Any]:
        return make() if where == "all" or self.rank == 0 else []


class Plain(Run):
    def optimizer(self, optimizer: Any, **arguments: Any) -> Any:
        return optimizer

    def part(self, array: Any, batch: int = BATCH) -> Any:
        return array

    def callbacks(self, make: Callable[[], list[Any]], where: str = "all") -> list[Any]:
        return make()


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        group, name: what it is about.
        train: the script.
        limit: of the largest difference of weights, slots and logs, relative to the largest value of each array.
        why: why that is more than 1e-5, where it is; or why no difference is to be expected at all.
        exact: whether one process would have trained this model. If not, ``why`` says why not, and nothing is compared
            but that there are weights and a loss.
    """

    group: str
    name: str
    train: Callable[[Run], Result]
    limit: float = 1e-5
    why: str = ""
    exact: bool = True

    def run(self, run: Run) -> Result:
        """What is compared, of a distributed run (on all ranks) or of a plain one (on any)."""
        keras.utils.set_random_seed(SEED + (mp.rank() if run.distributed else 0))
        try:
            result = self.train(run)
        finally:
            keras.config.set_dtype_policy("float32")
        result.model = None  # there are many
        result.optimizers = result.history = ()
        return result

    def row(self, ours: Result, theirs: Result) -> dict[str, Any]:
        """The row of the table. Where there is a larger difference than there may be, it has an error."""
        row = {"group": self.group, "name": self.name, "limit": self.limit, "why": self.why, "exact": self.exact}
        row |= {"clients": mp.num_clients(), **differences(ours, theirs)}
        wrong = list(self._wrong(row, ours, theirs)) if self.exact else []
        return row | {"error": "; ".join(wrong)} if wrong else row

    def _wrong(self, row: dict[str, Any], ours: Result, theirs: Result) -> Iterator[str]:
        for what in ("iterations", "rates"):
            if getattr(ours, what) != getattr(theirs, what):
                yield f"{what} are {getattr(ours, what)}, not {getattr(theirs, what)}"
        for what in ("logs", "extra"):
            if list(getattr(ours, what)) != list(getattr(theirs, what)):
                yield f"there are {what} {list(getattr(ours, what))}, not {list(getattr(theirs, what))}"
        for what in ("weights", "slots", "logs", "extra"):
            limit = max(self.limit, LOGS_LIMIT) if what == "logs" else self.limit
            if not row[what] <= limit:
                yield f"{what} differ by {row[what]:.1e}, more than {limit:.0e}"
        if not any(np.any(w != 0) for w in theirs.weights):
            yield "nothing was trained"


def differences(ours: Result, theirs: Result) -> dict[str, float]:
    """The largest relative difference in each kind of values."""
    return {
        "weights": _largest(ours.weights, theirs.weights),
        "slots": _largest(ours.slots, theirs.slots),
        "logs": _largest(list(ours.logs.values()), list(theirs.logs.values())),
        "extra": _largest(list(ours.extra.values()), list(theirs.extra.values())),
    }


def _largest(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    return max((_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _difference(ours: Any, theirs: Any) -> float:
    a, b = (np.asarray(array).astype(np.float64) for array in (ours, theirs))
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    difference = float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    return difference if np.isfinite(difference) else float("inf")
