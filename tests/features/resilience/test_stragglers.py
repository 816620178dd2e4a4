"""Which rank is named as slower than the others, and when."""

from __future__ import annotations

import random

import pytest

from megatron.features.resilience.steps.stragglers import SECONDS, Change, StepTimes, StragglerRule


def run(
    rule: StragglerRule,
    seconds: float,
    step: float,
    owns: list[float],
    noise: float = 0.0,
    **parts: float,
) -> list[tuple[float, Change]]:
    """Exchanges once a second what ranks with these shares of a step need."""
    chance, found = random.Random(0), []
    for second in range(round(seconds)):
        steps = max(1, round(1 / step))
        wall = steps * step
        pieces = [
            StepTimes(
                wall,
                own * wall * (1 + chance.uniform(-noise, noise)),
                **{name: part * own * wall for name, part in parts.items()},
            )
            for own in owns
        ]
        found += [(second + 1.0, change) for change in rule.add(steps, pieces)]
    return found  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("step", [0.01, 0.1, 0.5])
def test_a_slow_rank_is_named_once_and_when_it_recovers(ranks, step):
    rule = StragglerRule([range(ranks)], factor=1.5, window=50)
    slow, equal = [0.3] * ranks, [0.3] * ranks
    slow[1] = 0.9
    assert run(rule, 70, step, equal) == []
    found = run(rule, 100, step, slow)
    window = 0.8 * SECONDS  # at least: it may have begun before
    assert [(change.rank, change.slow) for _, change in found] == [(1, True)]
    assert window <= found[0][0] <= window + 25
    assert "takes 3 times as long for its own part of a step as the median rank" in str(found[0][1])
    found = run(rule, 100, step, equal)
    assert [(change.rank, change.slow) for _, change in found] == [(1, False)]
    assert "again" in str(found[0][1])


def test_one_pause_names_nobody():
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    for _ in range(5):
        assert run(rule, 34, 0.1, [0.4, 0.4]) == []
        assert run(rule, 6, 0.1, [0.1, 1.0]) == []  # reads from a slow disk, for instance


def test_ranks_that_take_turns_are_not_named():
    rule, chance = StragglerRule([range(4)], factor=1.5, window=50), random.Random(1)
    for _ in range(300):
        owns = [chance.uniform(0.3, 0.6) for _ in range(4)]
        assert run(rule, 2, 0.02, owns, noise=0.3) == []


def test_what_hardly_lengthens_a_step_is_not_named():
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    assert run(rule, 100, 0.1, [0.03, 0.06]) == []


def test_two_slow_ranks_of_four_are_both_named():
    rule = StragglerRule([range(4)], factor=1.5, window=50)
    found = run(rule, 60, 0.1, [0.9, 0.3, 0.3, 0.9])
    assert [change.rank for _, change in found] == [0, 3]


def test_stages_of_a_pipeline_are_compared_with_themselves():
    rule = StragglerRule([[0, 1], [2, 3]], factor=1.5, window=50)
    assert run(rule, 60, 0.1, [0.3, 0.3, 0.9, 0.9]) == []
    found = run(rule, 60, 0.1, [0.3, 0.6, 0.9, 0.9])
    assert [change.rank for _, change in found] == [1]


def test_a_stage_of_one_rank_is_compared_with_what_it_needed_at_first():
    rule = StragglerRule([[0], [1]], factor=1.5, window=50)
    assert run(rule, 120, 0.1, [0.3, 0.8]) == []
    assert run(rule, 120, 0.2, [0.3, 0.8]) == []  # a larger batch
    found = run(rule, 120, 0.3, [0.8, 0.4])
    assert [(change.rank, change.before) for _, change in found] == [(0, True)]
    assert "before, in proportion to the other pipeline stages" in str(found[0][1])


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"reading": 0.8}, "reading its data"),
        ({"reading": 0.2}, "the others wait for it"),
    ],
)
def test_the_reason(parts, reason):
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    ((_, change),) = run(rule, 60, 0.1, [0.3, 0.9], **parts)
    assert str(change).split(";")[-1].endswith(reason) or reason in str(change).split(";")[-1]


def test_a_slow_gpu_is_named_on_any_stage():
    rule = StragglerRule([[0], [1], [2]], factor=1.5, window=50)
    for _ in range(60):
        pieces = [StepTimes(1.0, 0.3, device=seconds) for seconds in (1e-4, 2e-4, 1e-4)]
        for change in rule.add(10, pieces):
            assert (change.rank, change.by_device, change.slow) == (1, True, True)
            assert "product of matrices" in str(change)
    assert (1, True) in rule._named


def test_a_factor_of_0_names_nobody():
    rule = StragglerRule([range(2)], factor=0, window=50)
    assert run(rule, 100, 0.1, [0.1, 0.9]) == []


def pieces_without_processor(own: float, others: float) -> list[StepTimes]:
    return [StepTimes(1.0, 0.3, 0.0, 0.3 * others), StepTimes(1.0, 0.9, 0.0, 0.9 * own)]


def test_a_rank_without_a_processor_is_named():
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    found = [c for _ in range(60) for c in rule.add(10, pieces_without_processor(0.8, 0.05))]
    assert [change.rank for change in found] == [1]
    assert "waits for a processor" in str(found[0])


def test_a_machine_that_is_too_busy_for_all_its_ranks_names_nobody():
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    assert not any(rule.add(10, pieces_without_processor(0.8, 0.5)) for _ in range(60))


def test_a_stopped_rank_is_named_on_a_busy_machine():
    rule = StragglerRule([range(2)], factor=1.5, window=50)
    busy, stopped = pieces_without_processor(0.8, 0.5)
    stopped = stopped._replace(suspended=stopped.unscheduled)
    found = [change for _ in range(60) for change in rule.add(10, [busy, stopped])]
    assert [change.rank for change in found] == [1]
    assert "is stopped" in str(found[0])
