"""A GPT as a family of its own, whose texts, advantages and log-probabilities are drawn, for
``--rl`` with ``--mock-data`` in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import added_families
import numpy as np
import torch

from megatron.apps.parity import gradients, runs
from megatron.apps.reinforcement import settings
from megatron.apps.reinforcement.distill import TextTeacher
from megatron.apps.reinforcement.episodes import EpisodeBatch
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.config import RunConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.data.pipeline import DataPipeline, SampleView
from megatron.data.texts import ScoredText
from megatron.engine.environment import training_device
from megatron.families.gpt import GPT
from megatron.features.distillation.teacher import find_teacher
from megatron.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "episode_families"
VOCAB = 99


class DrawnText(NamedTuple):
    """A prompt, a text after it, numbers of its tokens [6, L], and whether it counts."""

    prompt: np.ndarray
    text: np.ndarray
    numbers_6L: np.ndarray
    kept: bool


class DrawnTexts:
    """Sample i is drawn by its number."""

    def __init__(self, length: int, count: int, part: int) -> None:
        self.length, self.count, self.part = length, count, part

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> DrawnText:
        draw = np.random.default_rng([index, self.part])
        prompt, text = (
            draw.integers(0, VOCAB, int(draw.integers(1, self.length // 2))) for _ in range(2)
        )
        # Log-probabilities are near those of a model without training.
        numbers_6L = draw.normal(0, 0.3, (6, len(text)))
        numbers_6L[:3] -= np.log(VOCAB)
        return DrawnText(prompt, text, numbers_6L, bool(draw.random() < 0.8))


def collate(config: RunConfig, samples: Sequence[DrawnText]) -> EpisodeBatch:
    """As texts are collated after they were written."""
    options, length = config.section(ReinforcementConfig), config.model.seq_length
    rows = [ScoredText(sample.prompt, sample.text) for sample in samples]
    placed_6BS = torch.zeros((6, len(rows), length), dtype=torch.float64)
    for row, sample in enumerate(samples):
        start = len(sample.prompt) - 1
        placed_6BS[:, row, start : start + len(sample.text)] = torch.from_numpy(sample.numbers_6L)
    old, sampled, reference, advantages, returns, values = placed_6BS
    kept = [sample.kept for sample in samples]
    counted = sum(len(sample.text) for sample in samples if sample.kept)
    return EpisodeBatch(
        GPTBatch.scoring(rows, length),
        advantages,
        sampled,
        old,
        reference if options.needs_reference else None,
        returns if options.has_values else None,
        values if options.has_values else None,
        torch.tensor(kept),
        torch.tensor([1.0, counted], dtype=torch.float64),
    )


class DrawnTextData(DataPipeline):
    acting = ()  # type: ignore[assignment]
    """Not the kind that reads prompts."""

    def recipe(self) -> Any:
        raise AssertionError("its samples are drawn, not read")

    def collator(self) -> Callable[[Sequence[DrawnText]], EpisodeBatch]:
        return partial(collate, self.config)

    def view(self, sample: DrawnText, length: int) -> SampleView:
        raise AssertionError("no rank looks at them")

    def mock(self, num_samples: int, part: int) -> Any:
        return DrawnTexts(self.config.model.seq_length, num_samples, part)

    def training_data(self, *arguments: Any) -> Any:
        return super().training_data(*arguments)._replace(weighed=True)


class WritingGPT(GPT):
    name = "writing_gpt"

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DrawnTextData:  # type: ignore[override]
        return DrawnTextData(config, tokenizer)


def _teaching(config: RunConfig, mesh: Any, dtype: torch.dtype) -> Any:
    """See :func:`~megatron.apps.parity.runs.teaching`."""
    if config.section(ReinforcementConfig).rl != "distill":
        return _plain_teaching(config, mesh, dtype)
    # The teacher's folder has an ordinary GPT.
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, family="gpt"))
    teacher = TextTeacher(find_teacher(plain), mesh, training_device())
    teacher.engine.model.to(dtype)
    return teacher.teach


_plain_teaching, _plain_check = runs.teaching, settings.check


def known() -> None:
    """Puts the family among the others, in this process."""
    if added_families.add(FOLDER):
        runs.teaching = gradients.teaching = _teaching
        settings.check = lambda *_: None


def unknown() -> None:
    added_families.remove(FOLDER)
    runs.teaching = gradients.teaching = _plain_teaching
    settings.check = _plain_check
