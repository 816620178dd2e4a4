"""Curves of rows: which part is seen, smoothed over all rows, thinned so that spikes stay."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.apps.dashboard.tables import Column, MetricTable


class Curve(NamedTuple):
    """Points; NaN is a gap."""

    x: Column
    y: Column


def training_seconds(train: MetricTable | None) -> Curve:
    """The seconds that training took, over its steps; no points if the rows do not say."""
    if train is None or not train.rows or "seconds_per_iteration" not in train.columns:
        return Curve(np.empty(0), np.empty(0))
    steps = train.column("iteration")
    each = np.nan_to_num(train.column("seconds_per_iteration"))
    counts = np.diff(steps, prepend=0.0)
    # A file may begin late, where a run was resumed: its first row is for as many steps as others.
    counts[0] = min(counts[:2])
    return Curve(steps, np.cumsum(each * counts))


def power(energy: Column, seconds: Curve) -> Column:
    """Watts between each row of training and the one before it, from the energy used so far; NaN
    for the first, and where a counter began again."""
    with np.errstate(divide="ignore", invalid="ignore"):
        watts = np.diff(energy, prepend=np.nan) / np.diff(seconds.y, prepend=np.nan)
    return np.where((watts >= 0) & np.isfinite(watts), watts, np.nan)


def clock(name: str, table: MetricTable, seconds: Curve) -> Column:
    """The positions of the rows of a table on the axis ``name``: their iteration, samples or
    tokens, or the seconds that training took until then."""
    if name != "seconds":
        return table.column(name)
    if not len(seconds.x):
        return np.full(table.rows, np.nan)
    if table.kind == "train":
        return seconds.y
    return np.interp(table.column("iteration"), *seconds)


def rising(x: Column, y: Column) -> Curve:
    """The points whose position is known, each once and in order; of equal ones the last."""
    known = np.isfinite(x)
    if not known.all():
        x, y = x[known], y[known]
    if len(x) > 1 and not (np.diff(x) > 0).all():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        last = np.append(np.diff(x) > 0, True)
        x, y = x[last], y[last]
    return Curve(x, y)


def smoothed(curve: Curve, factor: float) -> Curve:
    """The exponential mean of a curve, each value weighing ``factor`` (0 to 1) of the one after it,
    divided by the sum of the weights. Gaps are left out."""
    known = np.isfinite(curve.y)
    x, y = curve.x[known], curve.y[known]
    if not len(y) or factor <= 0:
        return Curve(x, y)
    # Within a block powers of the factor stay in range; of what was before it only the block
    # before still weighs something.
    length = max(1, min(len(y), int(math.log(1e-12) / math.log(factor))))
    blocks = -(-len(y) // length)
    filled = np.zeros(blocks * length)
    filled[: len(y)] = y
    powers = factor ** np.arange(length)
    sums = np.cumsum(filled.reshape(blocks, length) / powers, axis=1) * powers * (1 - factor)
    carried = np.append(0.0, sums[:-1, -1])
    mean = (sums + carried[:, None] * (powers * factor)).ravel()[: len(y)]
    weights = -np.expm1(np.arange(1, len(y) + 1) * math.log(factor))
    return Curve(x, mean / weights)


def part(curve: Curve, first: float | None, last: float | None) -> Curve:
    """The points from ``first`` to ``last``, with one more on either side, to which lines lead."""
    begin = 0 if first is None else int(np.searchsorted(curve.x, first, "left")) - 1
    end = len(curve.x) if last is None else int(np.searchsorted(curve.x, last, "right")) + 1
    return Curve(*(values[max(0, begin) : end] for values in curve))


def thinned(curve: Curve, points: int) -> Curve:
    """About ``points`` of the points: the least and the greatest of each of equal parts, so that no
    spike is lost, and the first and last of all."""
    count = len(curve.x)
    if count <= max(points, 4):
        return curve
    size = -(-count // max(1, points // 2))
    parts = -(-count // size)
    known = np.isfinite(curve.y)
    chosen: list[NDArray[np.intp]] = [np.array([0, count - 1])]
    offsets = np.arange(parts) * size
    for worst, least in ((np.inf, True), (-np.inf, False)):
        filled = np.full(parts * size, worst)
        filled[:count] = np.where(known, curve.y, worst)
        table = filled.reshape(parts, size)
        found = (table.argmin(1) if least else table.argmax(1)) + offsets
        chosen.append(found[found < count])
    index = np.unique(np.concatenate(chosen))
    return Curve(curve.x[index], curve.y[index])
