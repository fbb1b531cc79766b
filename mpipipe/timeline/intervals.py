"""Sets of seconds: lists of (start, end) that are sorted and do not touch each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The seconds that are in any of the intervals; those that end before they begin have none."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The seconds that are in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The seconds that are in the first set and not in the second."""
    edges = [float("-inf"), *(edge for interval in other for edge in interval), float("inf")]
    return intersection(one, list(zip(edges[::2], edges[1::2], strict=True)))


def near(intervals: Sequence[Interval], start: float, end: float) -> Sequence[Interval]:
    """Those intervals of a set that have seconds between two times; quick also where there are many."""
    return intervals[bisect_right(intervals, start, key=itemgetter(1)) : bisect_left(intervals, end, key=itemgetter(0))]


def length(intervals: Iterable[Interval]) -> float:
    """How many seconds a set has."""
    return sum(end - start for start, end in intervals)
