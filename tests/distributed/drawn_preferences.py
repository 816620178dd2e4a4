"""A GPT and a T5 as families of their own, whose preferences are drawn, for ``--preference`` with
``--mock-data`` in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import added_families
import numpy as np
import torch

from megatron.config import RunConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.data.pipeline import DataPipeline, SampleView
from megatron.data.texts import ScoredText
from megatron.families import family_of
from megatron.families.gpt import GPT
from megatron.features.masked.t5 import T5
from megatron.features.preference import reference
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.samples import PreferenceBatch
from megatron.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "preference_families"
VOCAB = 99


class Preference(NamedTuple):
    """A prompt with two answers, the log-probabilities of these under a reference, and whether the
    first is a good one."""

    prompt: np.ndarray
    answers: tuple[np.ndarray, np.ndarray]
    reference: tuple[float, float]
    desirable: bool


class DrawnPreferences:
    """Sample i is drawn by its number. The better answers are of other tokens than the worse."""

    def __init__(self, length: int, count: int, part: int) -> None:
        self.length, self.count, self.part = length, count, part

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Preference:
        draw = np.random.default_rng([index, self.part])
        prompt = draw.integers(0, VOCAB, int(draw.integers(1, self.length // 2)))
        answers = tuple(
            draw.integers(first, first + VOCAB // 3, int(draw.integers(1, self.length // 2)))
            for first in (0, VOCAB // 2)
        )
        # Near that of a model without training.
        reference = tuple(-np.log(VOCAB) * len(answer) for answer in answers)
        return Preference(prompt, answers, reference, bool(draw.integers(2)))  # type: ignore[arg-type]


def collate(config: RunConfig, samples: Sequence[Preference]) -> PreferenceBatch:
    """As data files are collated: two rows for each sample. For kto these are its own answer and
    that of the sample before it."""
    kind = config.section(PreferenceConfig).preference
    rows, reference, desirable = [], [], []
    for place, sample in enumerate(samples):
        answers, known = sample.answers, sample.reference
        if kind == "kto":
            before = samples[place - 1]
            answers = (answers[not sample.desirable], before.answers[not before.desirable])
            known = (known[not sample.desirable], before.reference[not before.desirable])
        rows += [(sample.prompt, answer) for answer in answers]
        reference += known
        desirable += 2 * [sample.desirable]
    length = config.model.seq_length
    if kind == "reward":
        return PreferenceBatch(GPTBatch.ended([np.concatenate(row) for row in rows], length))
    texts = [ScoredText(*row) for row in rows]
    if config.model.decoder_seq_length is None:
        answers = GPTBatch.scoring(texts, length)
    else:
        lengths = (length, config.model.decoder_seq_length)
        answers = family_of("t5").scored_batch(config, _Starting(), texts, lengths)
    return PreferenceBatch(
        answers,
        torch.tensor(reference) if config.section(PreferenceConfig).needs_reference else None,
        torch.tensor(desirable) if kind == "kto" else None,
    )


class _Starting:
    """What of a tokenizer a T5 needs to score text."""

    pad = 0


class DrawnData(DataPipeline):
    acting = ()  # type: ignore[assignment]
    """Not the kind that reads files."""

    def recipe(self) -> Any:
        raise AssertionError("its samples are drawn, not read")

    def collator(self) -> Callable[[Sequence[Preference]], PreferenceBatch]:
        return partial(collate, self.config)

    def view(self, sample: Preference, length: int) -> SampleView:
        raise AssertionError("nobody looks at them")

    def mock(self, num_samples: int, part: int) -> Any:
        length = self.config.model.decoder_seq_length or self.config.model.seq_length
        return DrawnPreferences(length, num_samples, part)


class PreferringGPT(GPT):
    name = "preferring_gpt"

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DrawnData:  # type: ignore[override]
        return DrawnData(config, tokenizer)


class PreferringT5(T5):
    name = "preferring_t5"

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DrawnData:  # type: ignore[override]
        return DrawnData(config, tokenizer)


def has_reference(run: Any, mesh: Any, data: Any) -> None:
    """Drawn samples have the reference's log-probabilities."""


_evaluated = reference.add_reference


def known() -> None:
    """Puts them among the families, in this process."""
    if added_families.add(FOLDER):
        reference.add_reference = has_reference  # type: ignore[assignment]


def unknown() -> None:
    added_families.remove(FOLDER)
    reference.add_reference = _evaluated  # type: ignore[assignment]
