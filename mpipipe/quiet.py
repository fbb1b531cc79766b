"""TensorFlow's start-up messages: one rank's are enough."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mpipipe import launcher

# The variable that TensorFlow's C++ part reads once, when it is loaded, and a value of our own (3 to it) by which ours
# is told from the user's.
_LOG_LEVEL, _SILENT = "TF_CPP_MIN_LOG_LEVEL", "03"

_STDERR = 2

# How a line of TensorFlow's log begins, below "fatal", and what it says before the first that its log level does not
# hold back: since 2.21 (where it is about oneDNN, on processors that have instructions for it) there is one.
_LINE = re.compile(rb"[IWE]\d{4} \d\d:\d\d:\d+\.\d+ |WARNING: All log messages before absl::InitializeLog\(\) ")


class _QuietImport(MetaPathFinder):
    """Takes the lines of TensorFlow's log out of what is written to standard error while it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The real module's, whose loader is quiet; ends with that, as a module is loaded once."""
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def quietly(module: ModuleType) -> None:
                with _log_held_back():
                    execute(module)

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


@contextmanager
def _log_held_back() -> Iterator[None]:
    """What is written to standard error meanwhile is written when this ends, but for TensorFlow's log."""
    try:
        holding = tempfile.TemporaryFile()  # noqa: SIM115
    except OSError:  # there is no place for it
        yield
        return
    sys.stderr.flush()
    with holding as held:
        real = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, _STDERR)
            os.close(real)
            held.seek(0)
            os.write(_STDERR, b"".join(line for line in held if not _LINE.match(line)))


_quiet_import = _QuietImport()


def quieten_tensorflow() -> None:
    """Silence TensorFlow's start-up messages on all ranks but 0, where TensorFlow has not been imported yet.

    A log level that the user has set is kept.
    """
    ranks = launcher.rank_and_size()
    wanted = os.environ.get("MPIPIPE_QUIET", "1").strip().lower() not in ("0", "false", "no", "off")
    if wanted and ranks is not None and ranks[0] > 0 and _LOG_LEVEL not in os.environ:
        os.environ[_LOG_LEVEL] = _SILENT
        if "tensorflow" not in sys.modules and _quiet_import not in sys.meta_path:
            sys.meta_path.insert(0, _quiet_import)


def unquieten_tensorflow() -> None:
    """Undo :func:`quieten_tensorflow`; of use before TensorFlow is imported."""
    if os.environ.get(_LOG_LEVEL) == _SILENT:
        del os.environ[_LOG_LEVEL]
    if _quiet_import in sys.meta_path:
        sys.meta_path.remove(_quiet_import)
