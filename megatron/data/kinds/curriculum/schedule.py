"""The difficulty of a step, as a pure function of its number.

The formulas are those of DeepSpeed 0.19's ``CurriculumScheduler``, which describes the schedules of
Li et al. 2021 (arXiv:2108.06084, section 4).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from megatron.config.kinds.curriculum import DifficultySchedule


def difficulty(schedule: DifficultySchedule, step: int) -> int:
    """The difficulty of a step.

    Args:
        step: its number, from 1.
    """
    assert step >= 1, step
    if schedule.kind == "fixed_discrete":
        return schedule.difficulties[bisect.bisect_left(schedule.last_steps, step)]
    share = (float(step) / schedule.steps) ** (1.0 / schedule.root)
    grown = math.floor(share * (schedule.highest - schedule.lowest) + schedule.lowest)
    grown -= grown % schedule.increment
    first = -(-schedule.lowest // schedule.increment) * schedule.increment
    return min(max(grown, first), schedule.highest)


def stages(schedule: DifficultySchedule) -> Iterator[tuple[int, int]]:
    """The steps at which the difficulty changes: (number of the step from 1, difficulty)."""
    step, last = 1, max((schedule.steps, *schedule.last_steps)) + 1
    while True:
        current = difficulty(schedule, step)
        yield step, current
        if current == difficulty(schedule, last):
            return
        low, high = step, last  # of low the difficulty is the current one, of high another
        while high - low > 1:
            middle = (low + high) // 2
            if difficulty(schedule, middle) == current:
                low = middle
            else:
                high = middle
        step = high
