"""What a run saw, or will see, at a step: samples, where they come from, text, loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.pipeline import DataPipeline, SampleView
from megatron.data.sampler import micro_batch_samples
from megatron.data.samples import Piece, SampleDataset
from megatron.training.plan import TrainingPlan


@dataclass(frozen=True)
class SeenSample:
    """One sample of a step."""

    number: int
    """Training samples consumed before it."""
    data_rank: int
    micro_batch: int
    """Of the step, from 0."""
    pieces: Sequence[Piece]
    """Where its tokens come from."""
    view: SampleView

    @property
    def counted(self) -> int:
        """Tokens whose prediction counts in the loss."""
        return int((self.view.loss_mask_S > 0).sum())

    def to_dict(self) -> dict[str, Any]:
        """The sample as JSON values."""
        return {
            "sample": self.number,
            "data_rank": self.data_rank,
            "micro_batch": self.micro_batch,
            "pieces": [piece._asdict() for piece in self.pieces],
            "tokens": self.view.tokens_S.tolist(),
            "loss_mask": self.view.loss_mask_S.tolist(),
            "text": self.view.text,
        }


def seen_samples(
    dataset: SampleDataset[Any],
    data: DataPipeline,
    plan: TrainingPlan,
    data_size: int,
    iteration: int,
) -> Iterator[SeenSample]:
    """The samples of a step, rank by rank.

    Args:
        dataset: training samples in the order of the run.
        data: what they are samples of.
        data_size: data-parallel ranks.
        iteration: the step, from 1.
    """
    consumed = plan.batch_size.samples(iteration - 1)
    length = plan.lengths.at(iteration - 1)
    for data_rank in range(data_size):
        for micro_batch in range(plan.batch_size.micro_batches(consumed)):
            before = consumed + micro_batch * plan.micro_batch_size * data_size
            for number in micro_batch_samples(before, plan.micro_batch_size, data_rank, data_size):
                view = data.view(dataset[number], length)
                origin = dataset.origin(number)
                yield SeenSample(number, data_rank, micro_batch, origin, view)
