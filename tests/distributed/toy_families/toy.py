"""A family that stands for those to come: an encoder-decoder with padding and two losses.

With its layer list, ``toy_encoder_decoder.py``, it is all that a new family needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from toy_encoder_decoder import DECODED, ENCODED, PairBatch, toy_spec

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.data.pipeline import DataPipeline, SampleView
from megatron.families import Family
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class PairSamples:
    """Sample i is drawn by its number: encoder tokens, their padding, decoder tokens, labels."""

    def __init__(self, count: int, vocab_size: int, part: int) -> None:
        self.count, self.vocab_size, self.part = count, vocab_size, part

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(10 * index + self.part)
        length = int(torch.randint(ENCODED // 2, ENCODED + 1, (), generator=draw))
        encoded, decoded, labels = (
            torch.randint(self.vocab_size, (size,), generator=draw)
            for size in (ENCODED, DECODED, DECODED)
        )
        return encoded, torch.arange(ENCODED) >= length, decoded, labels


def collate(samples: Sequence[tuple[Tensor, ...]]) -> PairBatch:
    return PairBatch(*map(torch.stack, zip(*samples, strict=True)))


class ToyData(DataPipeline):
    def recipe(self) -> Any:
        raise AssertionError("its samples are drawn, not read")

    def collator(self) -> Callable[[Sequence[Any]], PairBatch]:
        return collate

    def view(self, sample: Any, length: int) -> SampleView:
        encoded, padding, *_ = sample
        return SampleView(encoded.numpy(), 1.0 - padding.numpy(), str(encoded.tolist()))

    def mock(self, num_samples: int, part: int) -> Any:
        return PairSamples(num_samples, self.tokenizer.vocab_size, part)


class Toy(Family):
    name = "toy"

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        return toy_spec(model)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> ToyData:
        return ToyData(config, tokenizer)


FAMILY = Toy()
