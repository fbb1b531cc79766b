"""The rows: which model on how many hosts with which links, and how much communication for its computing."""

from __future__ import annotations

from dataclasses import dataclass

# Communication over computing, and seconds of the busiest link in a step: steps then take 0.2 to 2.5 seconds.
RATIOS = {"resnet": 0.5, "mlp": 1.0, "transformer": 2.0, "embedding": 8.0, "emulated": 1.0}
_WIRE = {"resnet": 0.4, "mlp": 0.5, "transformer": 0.6, "embedding": 0.8, "emulated": 2.0}
_MODELS = ("resnet", "mlp", "transformer", "embedding")
_MOST_BYTES = 32e6
# Shared memory has no link to measure computing against: these are the bytes and the seconds there.
_MEMORY_BYTES, _MEMORY_COMPUTING = 8e6, 0.3


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        model: its name, which sets the ratio of communication to computing.
        hosts: how many there are, a rank on each: one server and its clients, or ranks that all train.
        rate: of each link, such as "1gbit", or None for the shared memory of one machine.
        mpi: "openmpi" or "mpich".
    """

    model: str
    hosts: int
    rate: str | None
    mpi: str

    @property
    def clients(self) -> int:
        """How many ranks train where one only serves."""
        return self.hosts - 1

    @property
    def ratio(self) -> float:
        """Communication over computing, as wanted."""
        return RATIOS[self.model]

    @property
    def title(self) -> str:
        """The row in a few words."""
        where = f"{self.hosts} hosts {self.rate}" if self.rate else f"memory np={self.hosts}"
        return f"{self.model} {where} {self.mpi}"

    def weight_bytes(self, rate: float) -> float:
        """Bytes of weights, given the bytes per second of a link."""
        return min(_MOST_BYTES, _WIRE[self.model] * rate / self.clients) if self.rate else _MEMORY_BYTES

    def computing(self, wire: float) -> float:
        """The wanted seconds of computing in a step, given the seconds of the busiest link."""
        return wire / self.ratio if self.rate else _MEMORY_COMPUTING


def goals(mpi: str) -> list[Row]:
    """The rows that the project's goals are about.

    On hosts with computing that takes cores and with computing that only takes time: the hosts share one machine's
    cores, on which what real hosts compute, send and receive at the same time does not fit when it has few.
    """
    places: list[tuple[int, str]] = [(4, "200mbit"), (8, "1gbit")]
    rows = [Row(model, count, rate, mpi) for model in ("emulated", "mlp") for count, rate in places]
    return [*rows, Row("mlp", 2, None, mpi)]


def quick(mpi: str) -> list[Row]:
    """Three rows for a first look."""
    return [row for row in goals(mpi) if row.hosts <= 4]


def four_hosts(mpi: str) -> list[Row]:
    """The goals, and every model at every rate on four hosts."""
    return goals(mpi) + [Row(model, 4, rate, mpi) for rate in ("1gbit", "100mbit", None) for model in _MODELS]


def everything(mpi: str) -> list[Row]:
    """The goals, and every model at every rate on 2, 4 and 8 hosts."""
    rows = [
        Row(model, hosts, rate, mpi) for hosts in (2, 4, 8) for rate in ("1gbit", "100mbit", None) for model in _MODELS
    ]
    return list(dict.fromkeys(goals(mpi) + rows))
