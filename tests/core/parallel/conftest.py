"""Pipelines that the tests of schedules, timelines and messages go through."""

from collections.abc import Callable

import pytest

from megatron.config.layouts import Layout, refusal
from megatron.parallel.pipeline_schedules import PipelineSchedule

FEW = {4: (3, 9), 5: (11,), 8: (8,)}
"""Micro batches of the large pipelines of the normal run, fewer than ranks, as many, and more;
`make proof` has all."""


@pytest.fixture(params=["few", pytest.param("all", marks=pytest.mark.proof)])
def schedules(request: pytest.FixtureRequest) -> Callable[..., list[PipelineSchedule]]:
    """``schedules(name, chunks, forward_only)``: those of all sizes that exist."""

    def every(name: str, chunks: int, forward_only: bool = False) -> list[PipelineSchedule]:
        return [
            PipelineSchedule(name, ranks, chunks, micro_batches, forward_only)
            for ranks in (2, 3, 4, 5, 8)
            for micro_batches in sorted({1, 2, 3, 7, ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks})
            if request.param == "all" or micro_batches in FEW.get(ranks, (micro_batches,))
            if forward_only or exists(name, ranks, chunks, micro_batches)
        ]

    return every


def exists(name: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Whether a step of training can run so."""
    counts = (micro_batches,)
    layout = Layout(pipeline=ranks, schedule=name, chunks=chunks, micro_batches=counts)
    return refusal(layout) is None
