"""What mpipipe costs against size: the overhead of a step by buckets and by clients, and which thread spends it.

    python -m benchmarks.cost [--mpi openmpi|mpich] [--steps N] [--out FILE]

On shared memory, with layers so small (256 weights) that nothing but overhead is left: a chain of them is trained by
plain Keras and by mpipipe, on all clients at once, and the difference is the overhead. Processor time is that of each
thread (by its name; "tensorflow" is all threads that are not Python's), of rank 0 and of one client in the mean.

All ranks share the cores of this machine. The slope is that of a line by least squares: microseconds for one more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import hosts

_WEIGHTS = 256
_LIMIT = 1800.0  # seconds of one job: TensorFlow takes minutes to trace 1,000 layers
_BUCKETS, _CLIENTS = (10, 100, 1000), (1, 3, 7, 15)
_USUAL_BUCKETS, _USUAL_CLIENTS = 100, 1
# One layer, one bucket.
_SETTINGS = {"MPIPIPE_FUSE_BYTES": "0", "MPIPIPE_MAX_BUCKETS": "2000"}


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each Python thread by its name, and of all others together."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = thread.name.removeprefix("mpipipe-").rstrip("-0123456789")
            name = "main" if thread is threading.main_thread() else name
            seconds[name] = seconds.get(name, 0.0) + time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    seconds["tensorflow"] = max(0.0, time.process_time() - sum(seconds.values()))
    return seconds


def work(buckets: int, steps: int, folder: Path) -> None:
    """One rank: mpipipe to warm up, then plain Keras, then mpipipe again; each rank writes what it saw."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    import mpipipe as mp

    optimizer, model, train, plain = _training(mp, tf, buckets)
    before: dict[str, float] = {}
    plain_seconds, step_seconds = [0.0], [0.0]
    for count in (3, steps):
        if mp.is_client():
            if count == steps:
                plain_seconds = _times(plain, 3 + steps)[3:]
            before = thread_seconds()
            step_seconds = _times(train, count)
            optimizer.take_weights(model)
            optimizer.finish(model)
        else:
            before = thread_seconds()
            optimizer.serve(model)
    after = thread_seconds()
    report = {
        "plain": statistics.median(plain_seconds),
        "step": statistics.median(step_seconds[2:] or step_seconds),
        "threads": {name: (after[name] - before.get(name, 0.0)) / steps for name in after},
    }
    (folder / f"rank-{mp.rank()}.json").write_text(json.dumps(report))


def _training(mp: Any, tf: Any, buckets: int) -> tuple[Any, Any, Any, Any]:
    """A chain of layers; a function that trains it with mpipipe, and one that does without."""
    import keras

    class Scale(keras.layers.Layer):  # type: ignore[misc]
        """Elementwise."""

        def build(self, input_shape: Any) -> None:
            self.kernel = self.add_weight(shape=(_WEIGHTS,), initializer="ones", name="kernel")

        def call(self, inputs: Any) -> Any:
            return inputs * self.kernel

    class Chain(keras.Model):  # type: ignore[misc]
        """Not a functional model, which would be gone through by recursion."""

        def __init__(self) -> None:
            super().__init__()
            self.chain = [Scale() for _ in range(buckets)]

        def call(self, inputs: Any) -> Any:
            for layer in self.chain:
                inputs = layer(inputs)
            return inputs

    model = Chain()
    optimizer = mp.DistributedOptimizer(keras.optimizers.SGD(1e-6))
    sgd = keras.optimizers.SGD(1e-6)
    data = tf.ones((4, _WEIGHTS))
    model(data)

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(data))
        return zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)

    def train() -> None:
        optimizer.take_weights(model)
        optimizer.apply_gradients(gradients())

    def plain() -> None:
        sgd.apply_gradients(gradients())

    return optimizer, model, tf.function(train, autograph=False), tf.function(plain, autograph=False)


def _times(step: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


def measure(launch: hosts.Launch, buckets: int, clients: int, steps: int) -> dict[str, Any]:
    """One job: seconds of a step, and of each thread."""
    with hosts.Place() as place:
        command = [sys.executable, "-m", "benchmarks.cost", "--work", str(buckets), str(steps), str(place.folder)]
        place.start(launch, clients + 1, command, {**_SETTINGS, "TF_CPP_MIN_LOG_LEVEL": "2"}).wait(_LIMIT)
        ranks = [json.loads((place.folder / f"rank-{rank}.json").read_text()) for rank in range(clients + 1)]
    plain, step = (statistics.fmean(rank[key] for rank in ranks[1:]) for key in ("plain", "step"))
    names = dict.fromkeys(name for rank in ranks for name in rank["threads"])
    return {
        "buckets": buckets,
        "clients": clients,
        "plain": plain,
        "step": step,
        "overhead": step - plain,
        "server": ranks[0]["threads"],
        "client": {name: statistics.fmean(rank["threads"].get(name, 0.0) for rank in ranks[1:]) for name in names},
    }


def table(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Rows that differ in ``key``, with the slopes in the last line; times in microseconds."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["server"], *row["client"])))
    columns: dict[str, list[float]] = {name: [row[name] for row in rows] for name in ("plain", "step", "overhead")}
    for who in ("server", "client"):
        for name in names:
            if any(row[who].get(name, 0.0) > 1e-6 for row in rows):
                columns[f"{who} {name}"] = [row[who].get(name, 0.0) for row in rows]
        columns[f"{who} cpu"] = [sum(row[who].values()) for row in rows]
    sizes = [row[key] for row in rows]
    lines = [f"{key:>24} " + " ".join(f"{size:9}" for size in sizes) + f" {'slope':>9}"]
    for name, values in columns.items():
        slope = statistics.linear_regression(sizes, values).slope
        lines.append(f"{name:>24} " + " ".join(f"{v * 1e6:9.0f}" for v in values) + f" {slope * 1e6:9.1f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or be one rank of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mpi", choices=["openmpi", "mpich"], default="openmpi")
    parser.add_argument("--mpich", type=Path, default=hosts.ROOT / ".mpich", help="prefix of MPICH (default .mpich)")
    parser.add_argument("--steps", type=int, default=30, help="steps that count (default 30)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cost.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(int(options.work[0]), int(options.work[1]), Path(options.work[2]))
        return
    hosts.clean_up_when_ended()
    launch = hosts.openmpi() if options.mpi == "openmpi" else hosts.mpich(options.mpich)
    results: dict[str, list[dict[str, Any]]] = {"buckets": [], "clients": []}
    for buckets in _BUCKETS:
        results["buckets"].append(measure(launch, buckets, _USUAL_CLIENTS, options.steps))
    print(f"microseconds a step, {_USUAL_CLIENTS} client ({options.mpi})")
    print(table(results["buckets"], "buckets"), flush=True)
    for clients in _CLIENTS:
        results["clients"].append(measure(launch, _USUAL_BUCKETS, clients, options.steps))
    print(f"\nmicroseconds a step, {_USUAL_BUCKETS} buckets ({options.mpi})")
    print(table(results["clients"], "clients"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
