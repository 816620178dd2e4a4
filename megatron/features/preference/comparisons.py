"""What kto compares its judged answers with, computed without gradients: half of the rows then take
a third of the work of those that are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron.engine.train_engine import TrainEngine
from megatron.features.preference.batch import PreferenceBatch
from megatron.model.spec import TEXT_SCORES


def compare_ahead(engine: TrainEngine) -> None:
    """From now on every step of the engine begins with a forward pass of the answers that serve its
    reference point, and trains on the others."""
    engine.look_ahead = partial(_compared, engine)


def _compared(
    engine: TrainEngine, batches: Iterator[PreferenceBatch], count: int
) -> Iterator[PreferenceBatch]:
    """The next ``count`` micro batches; the weights are the same before and during a step."""
    step = [next(batches) for _ in range(count)]
    others = (batch._replace(answers=_rows(batch.answers, 1)) for batch in step)
    with torch.no_grad():
        engine.prepare_evaluation()
        # Nothing on pipeline stages without the output head, which need nothing.
        found: list[Any] = engine.backend.evaluate(others, count, TEXT_SCORES) or [None] * count
    return (
        batch._replace(
            answers=_rows(batch.answers, 0), others_N=None if scores is None else scores[:, 0]
        )
        for batch, scores in zip(step, found, strict=True)
    )


def _rows(answers: Any, first: int) -> Any:
    """Every second one, of a batch of the model's family."""
    return answers._make(None if part is None else part[first::2] for part in answers)
