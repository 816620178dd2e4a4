"""BERTs with heads for labelled text as families of their own, whose samples are drawn: their heads
have no flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import added_families
import numpy as np

from megatron.config import RunConfig, Setting, Settings
from megatron.data.pipeline import DataPipeline, SampleView
from megatron.features.masked.bert import BERT
from megatron.features.masked.heads import LabelledBatch, LabelledText, collate_labelled
from megatron.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "labelled_families"
PAD = 0
LABELS, CHOICES = 3, 3
WORDS = 10
"""Tokens that texts of one label are made of."""


class DrawnTexts:
    """Sample i is drawn by its number, and can be told from its tokens."""

    def __init__(self, config: RunConfig, count: int, part: int) -> None:
        self.head, self.length = config.model.head, config.model.seq_length
        self.regression = config.model.num_labels == 1
        self.count, self.part = count, part

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> LabelledText:
        draw = np.random.default_rng([index, self.part])
        label = int(draw.integers(LABELS))
        if self.head == "span":
            return self._span(index, draw)
        kinds = [label]
        if self.head == "multiple_choice":
            kinds = [0 if choice == label else 1 for choice in range(CHOICES)]
        texts = [self._text(draw, kind) for kind in kinds]
        answer = float(label) if self.regression else label
        return LabelledText(*zip(*texts, strict=True), answer, index)

    def _text(self, draw: np.random.Generator, kind: int) -> tuple[np.ndarray, np.ndarray]:
        size = int(draw.integers(self.length // 2, self.length + 1))
        tokens = draw.integers(5 + WORDS * kind, 5 + WORDS * (kind + 1), size)
        return tokens, (np.arange(size) > size // 2).astype(np.int64)

    def _span(self, index: int, draw: np.random.Generator) -> LabelledText:
        tokens, types = self._text(draw, 1)
        first, last = np.sort(draw.choice(len(tokens), 2, replace=False))
        tokens[first], tokens[last] = 3, 4
        return LabelledText((tokens,), (types,), (int(first), int(last)), index)


class DrawnData(DataPipeline):
    def recipe(self) -> Any:
        raise AssertionError("its samples are drawn, not read")

    def collator(self) -> Callable[[Sequence[LabelledText]], LabelledBatch]:
        return partial(collate_labelled, pad=PAD, length=self.seq_length)

    def view(self, sample: LabelledText, length: int) -> SampleView:
        raise AssertionError("nobody looks at them")

    def mock(self, num_samples: int, part: int) -> Any:
        return DrawnTexts(self.config, num_samples, part)


class LabelledBert(BERT):
    """A BERT with such a head, as ``settings`` say."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings = name, settings  # type: ignore[misc]

    def complete_settings(self, settings: Settings) -> Settings:
        found = {name: Setting(value, self.name) for name, value in self.settings.items()}
        return super().complete_settings(settings | found)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DrawnData:  # type: ignore[override]
        return DrawnData(config, tokenizer)


def known() -> None:
    """Puts them among the families, in this process."""
    added_families.add(FOLDER)


def unknown() -> None:
    added_families.remove(FOLDER)
