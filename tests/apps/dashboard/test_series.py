"""Curves: nothing that is high or low is lost, and smoothing is its definition."""

import numpy as np
import pytest

from megatron.apps.dashboard.tables import (
    Curve,
    MetricTable,
    MetricTableState,
    part,
    rising,
    smoothed,
    thinned,
    training_seconds,
)


def curve(count: int, seed: int = 0) -> Curve:
    return Curve(np.arange(count, dtype=float), np.random.default_rng(seed).normal(size=count))


@pytest.mark.parametrize("count", [0, 1, 5, 699, 700, 10_007])
def test_thinned_keeps_spikes_and_ends(count):
    whole = curve(count)
    for place in {0, count // 3, count - 1} if count else ():
        whole.y[place] = -9.0 if place == 0 else 9.0 + place
    few = thinned(whole, 700)
    assert len(few.x) <= 710 and (np.diff(few.x) > 0).all()
    assert set(few.x) <= set(whole.x)
    if count:
        assert few.x[0] == 0 and few.x[-1] == count - 1
        assert few.y.max() == whole.y.max() and few.y.min() == whole.y.min()
        assert (few.y == whole.y[few.x.astype(int)]).all()


def test_thinned_keeps_a_spike_of_every_part():
    """Each of 300 spikes, up and down by turns, is there."""
    whole = Curve(np.arange(100_000.0), np.zeros(100_000))
    places = np.arange(300) * 333 + 17
    whole.y[places] = np.where(np.arange(300) % 2, 5.0, -5.0)
    assert set(places) <= set(thinned(whole, 800).x.astype(int))


def test_thinned_with_gaps():
    whole = curve(5000)
    whole.y[1000:2000] = np.nan
    few = thinned(whole, 100)
    assert np.isnan(few.y[(few.x >= 1000) & (few.x < 2000)]).all()
    assert np.isnan(few.y).any() and np.isfinite(few.y[few.x < 950]).all()


@pytest.mark.parametrize("factor", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [1, 2, 41, 5000])
def test_smoothed_is_its_definition(factor, count):
    whole = curve(count)
    whole.y[count // 2] = 1e6
    if count > 40:
        whole.y[3:7] = np.nan
    expected, total, weight = [], 0.0, 0.0
    for value in whole.y[np.isfinite(whole.y)]:
        total, weight = factor * total + value, factor * weight + 1
        expected.append(total / weight)
    found = smoothed(whole, factor)
    assert found.y == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert (found.x == whole.x[np.isfinite(whole.y)]).all()


def test_part_has_a_neighbour_on_each_side():
    whole = curve(100)
    assert part(whole, 10.5, 20.0).x.tolist() == [10, *range(11, 21), 21]
    assert part(whole, None, None).x.tolist() == whole.x.tolist()
    assert part(whole, 200.0, 300.0).x.tolist() == [99]
    assert part(whole, -5.0, -1.0).x.tolist() == [0]


def test_rising_positions_are_unique():
    x = np.array([1.0, 3.0, np.nan, 2.0, 3.0])
    found = rising(x, np.array([10.0, 30.0, 0.0, 20.0, 31.0]))
    assert found.x.tolist() == [1, 2, 3] and found.y.tolist() == [10, 20, 31]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([10, 20, 30], [5, 10, 15]),
        ([5010, 5020], [5, 10]),
        ([1, 10, 20], [0.5, 5, 10]),
        ([7], [3.5]),
    ],
)
def test_the_time_of_a_file_that_begins_late(steps, expected, tmp_path):
    """Steps before the first row were another run's, unless there are no more than in others."""
    table = MetricTable(tmp_path, 0, MetricTableState("train", 0, []))
    for step in steps:
        table.add({"iteration": step, "seconds_per_iteration": 0.5})
    table.flush()
    assert training_seconds(table).y.tolist() == expected
