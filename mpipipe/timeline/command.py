"""``python -m mpipipe.trace DIR``: a run's timeline in numbers and in a picture."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mpipipe.timeline import chrome, picture
from mpipipe.timeline.analysis import analyse
from mpipipe.timeline.report import report
from mpipipe.timeline.run import TimelineError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the numbers and draw the picture; returns the exit code."""
    try:
        code = _look(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _look(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    path = options.dir / chrome.FILE
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a layer may have a name that this terminal cannot show
    try:
        run = chrome.read(path)
        numbers = analyse(run, options.optimizer, options.step)
    except TimelineError as error:
        return _fail(f"{path}: {error}")
    print(f"{path}: {report(run, numbers, options.optimizer)}")
    target = options.picture or options.dir / "step.png"
    step = numbers.median_step if options.step is None else options.step
    try:
        picture.draw(run, numbers, step, target, options.optimizer)
    except ImportError as error:
        print(f"no picture: it is drawn with matplotlib, an extra ({error}): pip install matplotlib")
        return 0 if options.picture is None else 2
    except (OSError, ValueError) as error:  # a file that cannot be written, or a picture of more dots than there may be
        return _fail(f"no picture in {target}: {error}")
    print(f"picture of step {step}: {target}")
    print(f"all steps, to look around in: open {path} in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _fail(reason: str) -> int:
    print(f"mpipipe.trace: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe.trace",
        description="Say what a run's timeline shows: how much communication was hidden, and who waited for whom.",
    )
    parser.add_argument("dir", type=Path, help="the folder that was given as MPIPIPE_TIMELINE")
    parser.add_argument("--step", type=int, metavar="N", help="look at this step alone (default: at all steps)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="where the picture goes (default: DIR/step.png)")
    parser.add_argument(
        "--optimizer", type=int, default=0, metavar="N", help="of several optimizers, the one to look at (default: 0)"
    )
    return parser
