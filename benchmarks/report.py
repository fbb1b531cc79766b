"""What the measurements look like: a table, and a picture of the efficiencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEAD = (
    f"{'row':34} {'M MB':>5} {'batch':>6} {'C s':>6} {'wire':>6} {'ratio':>5}   {'column':20} {'limit':>6} "
    f"{'step':>6} {'min':>6} {'max':>6} {'cpu':>6} {'busy':>6} {'efficiency':>10} {'x straight':>10}"
)

# Cores that something else may keep busy before a row's numbers are doubted: a quiet machine has about 0.1.
_DISTURBED = 0.3
_NUMBERS = ("limit", "median", "min", "max", "cpu", "busy")

NOTES = """\
M: bytes of weights. C: seconds of computing in a step, all clients at once. wire: seconds of the busiest link in a
step where one server has all clients' gradients; ratio: wire / C. limit: of the fluid model (limit.py), with the
column's own computing time and own wire. step, min, max: median, least and greatest of the counted steps, in seconds.
cpu: processor seconds of all the column's ranks in a step; busy: cores that were busy, with whatever else the machine
did. efficiency: limit / step. x straight: how many times as fast as the straight line (all gradients after the backward
pass, all weights before the next forward pass). In the all-reduce columns every rank trains, the first one too: one
rank's data more than with a server, and a busiest link that carries 2 (N - 1) / N M. "Keras alone": one process, no
communication. "emulated": layers that take time but no cores, as if each host had cores of its own. Everywhere else all
hosts compute and communicate on the cores of this machine, and a step of which C keeps all cores busy can only be as
fast as they do both."""


def lines(result: dict[str, Any]) -> list[str]:
    """One row's part of the table."""
    text: list[str] = []
    for title, entry in result["columns"].items():
        head = ""
        if not text:
            head = (
                f"{result['title']:34} {result['bytes'] / 1e6:5.1f} {result['batch']:6} {result['computing']:6.3f} "
                f"{result['wire']['server']:6.3f} {result['ratio']:5.2f}"
            )
        numbers = " ".join(f"{entry[key]:6.3f}" if key in entry else "     -" for key in _NUMBERS)
        ratios = " ".join(f"{entry[key]:10.2f}" if key in entry else f"{'':10}" for key in ("efficiency", "faster"))
        text.append(f"{head:67}   {title:20} {numbers} {ratios}".rstrip())
    text += [f"{'':67}   {name}: failed" for name in result["failed"]]
    if result.get("others", 0.0) > _DISTURBED:
        text.append(f"{'':67}   disturbed: something else kept {result['others']:.1f} cores busy")
    return text


def table(results: Sequence[dict[str, Any]]) -> str:
    """The whole table."""
    return "\n".join([_HEAD, *(line for result in results for line in lines(result)), "", NOTES])


def goals(results: Sequence[dict[str, Any]]) -> str:
    """What mpipipe is to reach, and whether it did in the rows that say so."""
    lines = []

    def check(result: dict[str, Any], what: str, value: float, reached: bool) -> None:
        lines.append(f"{'reached' if reached else 'MISSED':8} {result['title']:34} {what}: {value:.2f}")

    for result in results:
        row, ours = result["row"], result["columns"].get("mpipipe")
        if ours is None:
            continue
        if (row["hosts"], row["rate"]) in ((4, "200mbit"), (8, "1gbit")) and 0.8 < result["ratio"] < 1.25:
            over = ours["median"] / ours["limit"]
            check(result, "step over limit, at most 1.05", over, over <= 1.05)
        if row["rate"] is None and row["hosts"] == 2:
            over = ours["median"] / result["columns"]["Keras alone"]["median"]
            check(result, "step over plain Keras, at most 1.05", over, over <= 1.05)
        if "faster" in ours:
            least = 1.6 if row["rate"] and 0.8 < result["ratio"] < 1.25 else 1.0
            what = f"times as fast as the straight line, at least {least}"
            check(result, what, ours["faster"], ours["faster"] >= least)
    return "\n".join(lines)


def picture(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Bars of efficiency by row and column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        name
        for name in dict.fromkeys(name for result in results for name in result["columns"])
        if any("efficiency" in result["columns"].get(name, {}) for result in results)
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.22 * len(results) * (len(names) + 1.5)))
    height = 0.85 / len(names)
    for number, name in enumerate(names):
        entries = [result["columns"].get(name, {}) for result in results]
        at = [row + (number - (len(names) - 1) / 2) * height for row in range(len(results))]
        values = [entry.get("efficiency", 0.0) for entry in entries]
        # A fast step is a high efficiency: the whiskers are the slowest and the fastest step.
        spread = [
            [value - entry["limit"] / entry["max"], entry["limit"] / entry["min"] - value] if value else [0.0, 0.0]
            for value, entry in zip(values, entries, strict=True)
        ]
        bars = axes.barh(at, values, height, label=name, xerr=list(zip(*spread, strict=True)), ecolor="0.5")
        axes.bar_label(bars, [f"{value:.2f}" if value else "" for value in values], padding=3, fontsize=7)
    axes.axvline(1.0, color="0.3", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(results)), [_label(result) for result in results], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25)
    axes.set_xlabel("efficiency: limit / step (median; whiskers: slowest and fastest step)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _label(result: dict[str, Any]) -> str:
    return f"{result['title']}\ncommunication / computing {result['ratio']:.2g}"
