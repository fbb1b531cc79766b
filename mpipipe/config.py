"""Every setting: its name, its default, its meaning, and the environment variable that sets it.

An argument of :func:`mpipipe.init` wins over the environment variable, which wins over the default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mpipipe.errors import ConfigError
from mpipipe.wire.formats import FORMATS

_MOST = 1 << 40  # bytes, of any setting: far more than a host has
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _bytes(text: str) -> int:
    """Parse a number of bytes: ``4194304``, ``4096K``, ``4M``, ``4MiB``."""
    found = re.fullmatch(r"([-+]?[0-9]+)\s*(?:b|([kmg])(?:i?b)?)?", text.strip().lower())
    if found is None:
        raise ValueError(text)
    return int(found[1]) * _UNITS[found[2] or ""]


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return values[text.strip().lower()]


@dataclass(frozen=True, slots=True)
class _OneOf:
    """Parses one of some words, of which it knows what they are."""

    what: str
    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(text)
        return text


_FORMAT = _OneOf("wire format", tuple(FORMATS))
_NONFINITE = _OneOf("known way", ("ignore", "warn", "skip", "raise"))


def _folder(text: str) -> str:
    """A folder's name; one that no system can have is refused now, and not when it is to be made, at the end."""
    os.fsencode(text)
    if "\0" in text:
        raise ValueError(text)
    return text


def _setting(default: Any, meaning: str, parse: Any, least: float = -math.inf, most: float = math.inf) -> Any:
    return field(default=default, metadata={"meaning": meaning, "parse": parse, "least": least, "most": most})


# The settings that only concern the rank that has them. All others must be the same on every rank.
_OWN = ("client_progress", "quiet", "timeline", "stall_warning", "stall_abort")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a run."""

    # Those that are None follow from the link, which is measured at the start.
    piece_bytes: int | None = _setting(None, "size of the pieces in which large layers travel", _bytes, 1024, _MOST)
    fuse_bytes: int | None = _setting(
        None, "layers smaller than this share a bucket with their neighbours (auto: 1/4 piece)", _bytes, 0, _MOST
    )
    credit_bytes: int | None = _setting(
        None, "bytes under way from one rank to another; the rest waits by priority (auto: 3 pieces)",
        _bytes, 1024, _MOST,
    )  # fmt: skip
    max_buckets: int = _setting(256, "most buckets of one optimizer; neighbours are fused to keep to it", int, 1, 4096)
    overlap: bool = _setting(
        True, "if not: all gradients are sent after the backward pass, all weights waited for (to compare)", _flag
    )
    wire: str = _setting("plain", "how float32 gradients travel: plain, or in half the bytes: bf16, fp16", _FORMAT)
    wire_weights: str = _setting("plain", "how float32 weights travel: plain, bf16, fp16", _FORMAT)
    sparse: bool = _setting(True, "send of an embedding only the rows that have a gradient, or have changed", _flag)
    on_nonfinite: str = _setting(
        "ignore", "a gradient that is not finite: ignore (as Keras does), warn, skip its step, or raise", _NONFINITE
    )
    stall_warning: float = _setting(
        30.0, "seconds after which it is said who waits for whom, then at every doubling (0: never)", float, 0
    )
    stall_abort: float = _setting(
        600.0, "seconds after which a rank that does not answer, or is stuck in a step, ends the run (0: never)",
        float, 0,
    )  # fmt: skip
    client_progress: bool = _setting(False, "let clients draw Keras's progress bar too", _flag)
    quiet: bool = _setting(True, "silence TensorFlow's start-up messages on all ranks but the server", _flag)
    timeline: str = _setting("", "folder for a timeline of the run; see `python -m mpipipe.trace`", _folder)

    def shared(self) -> dict[str, Any]:
        """The settings that must be the same on every rank, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OWN}

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


def _check(name: str, given: Any, setting: Any, where: str) -> Any:
    value = given
    try:
        if isinstance(value, str):
            value = setting.metadata["parse"](value)
        if _type(setting) is float and type(value) is int:
            value = float(value)
    except (ValueError, KeyError, OverflowError):
        value = None
    if type(value) is not _type(setting):
        raise ConfigError(f"{where} is {_shown(given)}, which is not a {_kind(setting)}")
    if isinstance(value, int | float) and not setting.metadata["least"] <= value <= setting.metadata["most"]:
        least, most = setting.metadata["least"], setting.metadata["most"]
        raise ConfigError(f"{where} is {_shown(given)}; {name} is at least {least} and at most {most}")
    return value


def _shown(value: Any) -> str:
    """A value for an error, on one line and not without end."""
    try:
        text = " ".join(repr(value).split("\n"))
    except (ValueError, RecursionError):  # an integer of more digits than Python writes; lists in lists in lists
        return f"of type {type(value).__name__} and too large to show"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _type(setting: Any) -> type:
    return {_bytes: int, int: int, _flag: bool, float: float}.get(setting.metadata["parse"], str)


def _kind(setting: Any) -> str:
    if isinstance(parse := setting.metadata["parse"], _OneOf):
        return f"{parse.what} ({', '.join(parse.words)})"
    kinds = {
        bool: "yes or no (1 or 0)",
        int: "whole number (of bytes, such as 4194304 or 4M)",
        float: "number of seconds",
        str: "text",
    }
    return kinds[_type(setting)]


def table() -> list[tuple[str, str, str, str]]:
    """Rows of (setting, environment variable, default, meaning), as the README shows them."""
    return [
        (f.name, variable_name(f.name), "auto" if f.default is None else repr(f.default), f.metadata["meaning"])
        for f in fields(Config)
    ]
