"""Pipelined data-parallel training for Keras 3 on MPI; see the README."""

from importlib import import_module as _import_module
from typing import Any as _Any

from mpipipe import launcher as _launcher
from mpipipe import logs as _logs
from mpipipe import quiet as _quiet
from mpipipe._version import __version__
from mpipipe.context import (
    client_index,
    finalize,
    init,
    is_client,
    is_server,
    local_rank,
    local_size,
    num_clients,
    rank,
    size,
)

__all__ = [
    "DistributedOptimizer",
    "__version__",
    "callbacks",
    "client_index",
    "finalize",
    "init",
    "is_client",
    "is_server",
    "local_rank",
    "local_size",
    "num_clients",
    "rank",
    "shard",
    "size",
]

# TensorFlow reads its log level and its threads when it is loaded, and loading it takes seconds: so before, and only on
# demand.
_quiet.quieten_tensorflow()
_launcher.prepared = _launcher.prepare_tensorflow()
_logs.print_errors_briefly()
_ON_DEMAND = {"DistributedOptimizer": "mpipipe.keras.optimizer", "shard": "mpipipe.data"}
_MODULES = {"callbacks": "mpipipe.keras.callbacks"}


def __getattr__(name: str) -> _Any:
    if name in _ON_DEMAND:
        _import_module("mpipipe.keras.compat")  # which says what to do where TensorFlow is missing
        return getattr(_import_module(_ON_DEMAND[name]), name)
    if name in _MODULES:
        _import_module("mpipipe.keras.compat")
        return _import_module(_MODULES[name])
    raise AttributeError(f"module 'mpipipe' has no attribute {name!r}")
