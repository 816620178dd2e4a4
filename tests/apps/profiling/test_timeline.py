"""The innermost event of a thread at every moment."""

from megatron.apps.profiling.trace import Event, Thread


def innermost(*events):
    made = [Event(name, "1", start, end, {}) for name, start, end in events]
    thread = Thread(made, {})
    middles = (thread.edges[1:] + thread.edges[:-1]) / 2
    cells = zip(thread.edges, thread.edges[1:], middles, strict=False)
    return [
        (start, end, found[0].name) for start, end, time in cells if (found := thread.find(time))
    ]


def test_the_innermost_event_counts():
    assert innermost(("a", 0, 10), ("b", 2, 8), ("c", 3, 4), ("d", 4, 6)) == [
        (0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 6, "d"), (6, 8, "b"), (8, 10, "a"),
    ]  # fmt: skip


def test_times_in_no_event_are_left_out():
    assert innermost(("a", 0, 2), ("b", 5, 6)) == [(0, 2, "a"), (5, 6, "b")]
    thread = Thread([Event("a", "1", 0, 2, {})], {})
    assert [thread.find(time) for time in (-1, 2, 3)] == [None] * 3


def test_an_inner_event_that_outlasts_the_outer_one_by_rounding_ends_with_it():
    assert innermost(("a", 0, 4), ("b", 1, 4.001), ("c", 4.001, 5)) == [
        (0, 1, "a"), (1, 4, "b"), (4.001, 5, "c"),
    ]  # fmt: skip


def test_an_operator_dispatched_again_is_the_outer_one():
    events = [Event("aten::mm", "1", 0, 4, {}), Event("aten::mm", "1", 1, 3, {})]
    assert Thread(events, {}).find(2)[0] is events[0]
