"""What mpipipe says, each line with the prefix of the rank that says it."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from types import TracebackType

from mpipipe import launcher
from mpipipe.errors import MpipipeError

logger = logging.getLogger("mpipipe")


def set_up(rank: int, size: int) -> None:
    """Prefix mpipipe's log and Python's warnings with this rank, where there are several."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        prefix = f"mpipipe {rank}" if size > 1 else "mpipipe"
        handler.setFormatter(logging.Formatter(f"[{prefix}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if size > 1:
        plain = warnings.formatwarning

        def prefixed(*arguments: object, **keywords: object) -> str:
            return prefix_lines(rank, plain(*arguments, **keywords))  # type: ignore[arg-type]

        warnings.formatwarning = prefixed


def prefix_lines(rank: int, text: str) -> str:
    """The text with ``[mpipipe rank]`` before each line."""
    return "".join(f"[mpipipe {rank}] {line}\n" for line in text.splitlines())


def print_lines(rank: int, text: str) -> None:
    """Print lines with the prefix of the rank, in one write so that those of several ranks do not mix."""
    sys.stderr.write(prefix_lines(rank, text))
    sys.stderr.flush()


def print_errors_briefly() -> None:
    """Have mpipipe's own errors printed without a traceback, which has nothing to add to what they say."""
    hook = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MpipipeError):
            ranks = launcher.rank_and_size()
            sys.stderr.write(prefix_lines(ranks[0], str(error)) if ranks else f"[mpipipe] {error}\n")
        else:
            hook(kind, error, trace)

    sys.excepthook = on_exception


def print_exception(
    rank: int, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, *, brief: bool
) -> None:
    """Print an exception; without its traceback if brief."""
    print_lines(rank, str(error) if brief else "".join(traceback.format_exception(kind, error, trace)))
