"""Nested events cut into segments, and sets of intervals against sets of points."""

import random

from megatron.profiling.timeline import common, length, segments, union, without
from megatron.profiling.trace import Event


def cut(*events):
    made = [Event(name, "cpu_op", "1", start, end, {}) for name, start, end in events]
    return [(s.start, s.end, s.event.name) for s in segments(made, {})]


def test_the_innermost_event_counts():
    assert cut(("a", 0, 10), ("b", 2, 8), ("c", 3, 4), ("d", 4, 6)) == [
        (0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 6, "d"), (6, 8, "b"), (8, 10, "a"),
    ]  # fmt: skip


def test_times_in_no_event_are_left_out():
    assert cut(("a", 0, 2), ("b", 5, 6)) == [(0, 2, "a"), (5, 6, "b")]


def test_an_inner_event_that_outlasts_the_outer_one_by_rounding_ends_with_it():
    assert cut(("a", 0, 4), ("b", 1, 4.001), ("c", 4.001, 5)) == [
        (0, 1, "a"), (1, 4, "b"), (4.001, 5, "c"),
    ]  # fmt: skip


def test_intervals_against_sets_of_points():
    generator = random.Random(3)

    def some():
        starts = [generator.randrange(60) for _ in range(generator.randrange(6))]
        return [(start, start + generator.randrange(1, 12)) for start in starts]

    def points(intervals):
        return {n for start, end in intervals for n in range(start, end)}

    for _ in range(300):
        first, second = union(some()), union(some())
        assert points(common(first, second)) == points(first) & points(second)
        assert points(without(first, second)) == points(first) - points(second)
        assert length(first) == len(points(first))
    raw = some() + some()
    assert points(union(raw)) == points(raw)
