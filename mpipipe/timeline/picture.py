"""A picture of one step: a panel for each rank, a row for each layer, a bar for each phase of its way."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipipe.timeline.analysis import Numbers
from mpipipe.timeline.clients import ClientStep, Wait, client_steps
from mpipipe.timeline.intervals import difference
from mpipipe.timeline.run import Run, Timeline
from mpipipe.timeline.spans import Phase, Span, clusters, lanes, spans

# Of the palette of Okabe and Ito (Color Universal Design, 2008), which people with any colour vision can tell apart.
# The same thing has the same colour on both sides: what is on the way in, at the server, on the way out.
_COLOURS: dict[Phase, str] = {
    "wait to send": "#F0E442",
    "send": "#E69F00",
    "gather": "#E69F00",
    "at the server": "#CC79A7",
    "update": "#CC79A7",
    "receive": "#56B4E9",
    "broadcast": "#56B4E9",
    "assign": "#009E73",
}
_FORWARD, _BACKWARD, _WAITING = "#3A3A3A", "#8A8A8A", "#D55E00"
_HATCHED: dict[str, Any] = {"facecolor": "white", "edgecolor": _WAITING, "hatch": "/////"}
_PALE = 0.3  # how much of their colour the bars of the steps before and after have

# In inches.
_WIDTH, _ROW, _SMALLEST_ROW, _HIGHEST = 14.0, 0.27, 0.06, 30.0
_HEAD, _PANEL_HEAD, _FOOT, _RIGHT, _PER_LETTER = 0.8, 0.36, 0.6, 0.3, 0.075
_SMALLEST_LETTERS = 0.11  # the height of a row with a name
_LONGEST_NAME = 32
_STEP_ROW = 0.34  # the row of the forward and backward passes, so that words fit into it
_DPI = 120


@dataclass(frozen=True, slots=True)
class _Window:
    """What a picture shows: a step, from the first client's start of it until its weights are in use everywhere."""

    step: int
    start: float
    end: float

    def bar(self, start: float, end: float) -> tuple[float, float] | None:
        """Start and end, in milliseconds, of what can be seen of a time; None where nothing can."""
        first, last = max(start, self.start), min(end, self.end)
        return (1e3 * (first - self.start), 1e3 * (last - self.start)) if first < last else None


class _Bars:
    """The bars of a panel, drawn in as many goes as there are looks: one by one they would take seconds."""

    def __init__(self) -> None:
        self._corners: dict[tuple[tuple[str, Any], ...], list[list[tuple[float, float]]]] = {}

    def add(self, bar: tuple[float, float], top: float, height: float, **look: Any) -> None:
        """Add a bar from a start to an end."""
        (left, right), bottom = bar, top + height
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        self._corners.setdefault(tuple(look.items()), []).append(corners)

    def draw(self, axes: Any) -> None:
        """Draw them, those of the look that was added first below."""
        collections = importlib.import_module("matplotlib.collections")
        for look, corners in self._corners.items():
            axes.add_collection(collections.PolyCollection(corners, **dict(look)), autolim=False)


def draw(run: Run, numbers: Numbers, step: int, path: Path, session: int = 0) -> None:
    """Draw a step into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figures = importlib.import_module("matplotlib.figure")  # an extra
    timeline = run.timeline(session)
    steps = {client: client_steps(timeline, client) for client in timeline.clients}
    window = _window(timeline, steps, step)
    ranks = sorted({*timeline.servers, *timeline.clients})
    row = min(_ROW, max(_SMALLEST_ROW, _HIGHEST / (len(ranks) * len(timeline.buckets))))
    heights = {rank: row * len(timeline.buckets) + _STEP_ROW * (rank in steps) for rank in ranks}
    names = {bucket: _label(timeline.name(bucket)) for bucket in timeline.buckets}
    left = 0.35 + _PER_LETTER * max(len("computing"), *map(len, names.values()))
    height = _HEAD + _FOOT + sum(_PANEL_HEAD + inches for inches in heights.values())
    figure = figures.Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    top = height - _HEAD
    for rank in ranks:
        top -= _PANEL_HEAD + heights[rank]
        axes = figure.add_axes((left / _WIDTH, top / height, 1 - (left + _RIGHT) / _WIDTH, heights[rank] / height))
        axes.set_title(run.title(rank), loc="left", fontsize=10, fontweight="bold", pad=4)
        _panel(axes, timeline, rank, window, steps.get(rank), names, row)
        if rank == ranks[-1]:
            axes.set_xlabel("milliseconds since the first client began the step", fontsize=9)
        else:
            axes.tick_params(axis="x", labelbottom=False)
    _head(figure, numbers, step, left, height)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font may lack a letter of a layer's name
        figure.savefig(path, format="png")


def _window(timeline: Timeline, steps: dict[int, dict[int, ClientStep]], step: int) -> _Window:
    own = [client[number] for client in steps.values() for number in (step, step + 1) if number in client]
    in_use = [
        time
        for client in steps
        for bucket in timeline.buckets
        if (time := timeline.last(client, "assigned", bucket, step)) is not None
    ]
    starts = [client[step].start for client in steps.values() if step in client]
    ends = [one.loss for one in own] + in_use
    return _Window(step, min(starts), max([*ends, min(starts) + 1e-6]))  # an axis of no length cannot be drawn


def _panel(
    axes: Any,
    timeline: Timeline,
    rank: int,
    window: _Window,
    steps: dict[int, ClientStep] | None,
    names: dict[int, str],
    row: float,
) -> None:
    """Draw what a rank did. The y axis is in inches, downwards; ``row`` is the height of a bucket's row."""
    near = (window.step - 1, window.step + 1, window.step)
    every = math.ceil(_SMALLEST_LETTERS / row)  # as many names as there is room for
    top = 0.0
    ticks: list[tuple[float, str]] = []
    bars = _Bars()
    axes.set_xlim(0, 1e3 * (window.end - window.start))
    if steps is not None:
        for number in near:
            if number in steps:
                _computing(axes, bars, steps[number], window, number)
        ticks.append((_STEP_ROW / 2, "computing"))
        top = _STEP_ROW
    for place, bucket in enumerate(timeline.buckets):
        middle = top + (place + 0.5) * row
        if place % every == 0:
            ticks.append((middle, names[bucket]))
        if place % 2 == 0:
            bars.add(axes.get_xlim(), middle - row / 2, row, facecolor="#F5F5F5", zorder=0)
        for number in near:
            _bucket(bars, spans(timeline, rank, bucket, number), window, middle, row)
    bars.draw(axes)
    axes.set_ylim(top + len(timeline.buckets) * row, 0)
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0, labelsize=min(8.5, 72 * 0.8 * row * every))
    axes.tick_params(axis="x", labelsize=8.5, color="#AAAAAA")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _bucket(bars: _Bars, phases: Sequence[Span], window: _Window, middle: float, row: float) -> None:
    """The bars of a bucket in a step. Where some cover each other, they share the height of the row."""

    def add(span: Span, top: float, height: float) -> None:
        bar = window.bar(span.start, span.end)
        if bar is not None:
            alpha = 1.0 if span.step == window.step else _PALE
            bars.add(bar, top, height, facecolor=_COLOURS[span.phase], alpha=alpha, linewidth=0, zorder=2)

    for cluster in clusters(span for span in phases if span.phase != "assign"):
        placed = lanes(cluster)
        height = 0.8 * row / max(lane + 1 for lane, _ in placed)
        for lane, span in placed:
            add(span, middle - 0.4 * row + lane * height, height)
    for span in phases:
        if span.phase == "assign":  # nothing moves any more: only a line
            add(span, middle - 0.08 * row, 0.16 * row)


def _computing(axes: Any, bars: _Bars, one: ClientStep, window: _Window, number: int) -> None:
    """The bars of a forward and a backward pass, and of what the forward pass waited for."""
    here = number == window.step
    alpha, ink = (1.0, "white") if here else (_PALE, "#444444")
    where = (0.03, _STEP_ROW - 0.06)
    waits = [(wait.start, wait.end) for wait in one.waits]
    for word, start, end, colour in (
        ("forward", one.start, one.loss, _FORWARD),
        ("backward", one.loss, one.end, _BACKWARD),
    ):
        seen = [bar for part in difference([(start, end)], waits) if (bar := window.bar(*part)) is not None]
        for bar in seen:
            bars.add(bar, *where, facecolor=colour, alpha=alpha, linewidth=0, zorder=2)
        if seen:
            _word(axes, max(seen, key=lambda bar: bar[1] - bar[0]), (f"{word} {number}", word), color=ink)
    for wait in one.waits:
        waited = window.bar(wait.start, wait.end)
        if waited is not None:
            bars.add(waited, *where, **_HATCHED, linewidth=0.8, zorder=3)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            _word(axes, waited, (f"waits for {_whom(wait)}", _whom(wait), "waits"), color=_WAITING, bbox=box)


def _whom(wait: Wait) -> str:
    """What a forward pass waited for longest, in a few words."""
    reason = max(wait.reasons, key=lambda reason: reason.seconds, default=None)
    if reason is None or reason.cause in ("assign", "unknown"):
        return "weights"
    if reason.cause in ("server", "way out"):
        return "the server" if reason.cause == "server" else "weights on the way"
    return "its own gradient" if reason.cause == "own way in" else f"rank {reason.rank}'s gradient"


def _word(axes: Any, bar: tuple[float, float], words: Sequence[str], **style: Any) -> None:
    """Write the longest of some words that fits into a bar, if any does."""
    inches = (bar[1] - bar[0]) / axes.get_xlim()[1] * axes.bbox.width / axes.figure.dpi
    for word in words:
        if len(word) * _PER_LETTER + 0.1 < inches:
            middle = (bar[0] + bar[1]) / 2, _STEP_ROW / 2
            axes.text(*middle, word, ha="center", va="center", fontsize=8.5, zorder=4, **style)
            return


def _head(figure: Any, numbers: Numbers, step: int, left: float, height: float) -> None:
    """The title and, below it, what the colours mean."""
    patches = importlib.import_module("matplotlib.patches")
    title = f"step {step}"
    if step in numbers.step_seconds:
        title += f": {1e3 * numbers.step_seconds[step]:.1f} ms"
    if step in numbers.hidden:
        title += f", {100 * numbers.hidden[step]:.0f} % of the communication hidden"
    at = left / _WIDTH
    figure.text(at, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="center")
    end, note = 1 - _RIGHT / _WIDTH, "pale: the steps before and after"
    figure.text(end, 1 - 0.3 / height, note, fontsize=9, color="#666666", va="center", ha="right")
    meanings: Sequence[tuple[str, dict[str, Any]]] = (
        ("forward", {"facecolor": _FORWARD}),
        ("backward", {"facecolor": _BACKWARD}),
        ("waits for weights", _HATCHED),
        ("wait to send", {"facecolor": _COLOURS["wait to send"]}),
        ("send, gather", {"facecolor": _COLOURS["send"]}),
        ("at the server, update", {"facecolor": _COLOURS["update"]}),
        ("broadcast, receive", {"facecolor": _COLOURS["receive"]}),
        ("in, not yet assigned", {"facecolor": _COLOURS["assign"]}),
    )
    figure.legend(
        [patches.Patch(**style) for _, style in meanings],
        [word for word, _ in meanings],
        loc="center left",
        bbox_to_anchor=(at, 1 - 0.66 / height),
        ncols=len(meanings),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.6,
        borderaxespad=0,
        borderpad=0,
    )


def _label(name: str) -> str:
    """A layer's name for an axis: not too long, and with dollars that are not the start of a formula."""
    short = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
    return short.replace("$", r"\$")
