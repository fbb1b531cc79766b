"""Every setting: its name, its default, its meaning, and the environment variable that sets it.

An argument of :func:`mpipipe.init` wins over the environment variable, which wins over the default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mpipipe.errors import ConfigError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _bytes(text: str) -> int:
    """Parse a number of bytes: ``4194304``, ``4096K``, ``4M``, ``4MiB``."""
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = number[-1:] if number[-1:] in ("k", "m", "g") else ""
    return int(number.removesuffix(unit)) * _UNITS[unit]


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return values[text.strip().lower()]


def _setting(default: Any, meaning: str, parse: Any, least: float = -math.inf, most: float = math.inf) -> Any:
    return field(default=default, metadata={"meaning": meaning, "parse": parse, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a run. They must be the same on every rank."""

    piece_bytes: int = _setting(4 << 20, "largest message; a larger bucket travels in such pieces", _bytes, 1024)
    fuse_bytes: int = _setting(16 << 10, "layers smaller than this share a bucket with their neighbours", _bytes, 0)
    credit_bytes: int = _setting(
        32 << 20, "bytes under way at once per rank and direction; the rest waits by priority", _bytes, 1024
    )
    max_buckets: int = _setting(64, "most buckets of one optimizer; neighbours are fused to keep to it", int, 1, 512)
    client_progress: bool = _setting(False, "let clients draw Keras's progress bar too", _flag)
    quiet: bool = _setting(True, "silence TensorFlow's start-up messages on all ranks but the server", _flag)
    timeline: str = _setting("", "folder in which each rank writes when each bucket was ready, sent, ...", str)

    @classmethod
    def make(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Config:
        """The settings from keyword arguments, then environment variables, then defaults.

        Raises:
            ConfigError: an unknown setting, or a value that it cannot have, naming both.
        """
        known = {f.name: f for f in fields(cls)}
        for name in arguments:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; the settings are {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, setting in known.items():
            variable = variable_name(name)
            if arguments.get(name) is not None:
                values[name] = _check(name, arguments[name], setting, f"init({name}=...)")
            elif environ.get(variable):
                values[name] = _check(name, environ[variable], setting, f"the environment variable {variable}")
        return cls(**values)


def variable_name(setting: str) -> str:
    """The environment variable of a setting: ``piece_bytes`` is set by ``MPIPIPE_PIECE_BYTES``."""
    return "MPIPIPE_" + setting.upper()


def _check(name: str, value: Any, setting: Any, where: str) -> Any:
    if isinstance(value, str):
        try:
            value = setting.metadata["parse"](value)
        except (ValueError, KeyError):
            raise ConfigError(f"{where} is {value!r}, which is not a {_kind(setting.default)}") from None
    if type(value) is not type(setting.default):
        raise ConfigError(f"{where} is {value!r}, which is not a {_kind(setting.default)}")
    if isinstance(value, int) and not setting.metadata["least"] <= value <= setting.metadata["most"]:
        least, most = setting.metadata["least"], setting.metadata["most"]
        raise ConfigError(f"{where} is {value!r}; {name} is at least {least} and at most {most}")
    return value


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "yes or no (1 or 0)"
    return "whole number (of bytes, such as 4194304 or 4M)" if isinstance(default, int) else "text"


def table() -> list[tuple[str, str, str, str]]:
    """Rows of (setting, environment variable, default, meaning), as the README shows them."""
    return [(f.name, variable_name(f.name), repr(f.default), f.metadata["meaning"]) for f in fields(Config)]
