"""Texts with a label, questions with choices, texts with a span: samples of an encoder with a head.

Shape suffixes: B micro batch, S tokens. Where samples are questions, the B of the texts is that of
the labels times the number of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.loader import mapped

Label = int | float | tuple[int, int]
"""The number of a label or of the right choice; a float where a number is predicted; the places of
a span's first and last token."""


class LabelledText(NamedTuple):
    """One sample: the tokens of its text with their types or, of a question, one such text for each
    choice; without padding. ``identity`` is what predictions are written under."""

    tokens: tuple[npt.NDArray[np.int64], ...]
    types: tuple[npt.NDArray[np.int64], ...]
    label: Label
    identity: str | int = 0

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.tokens))


class LabelledBatch(NamedTuple):
    """One micro batch. The texts of a question are consecutive rows."""

    tokens_BS: Tensor
    """Texts with special tokens, then padding; int64."""
    types_BS: Tensor
    """Token types; 0 for padding; int64."""
    padding_mask_BS: Tensor
    """1 for tokens, 0 for padding, which is not attended to; int64."""
    labels_B: Tensor
    """int64, or float32 for numbers; of spans [B, 2]."""
    choices: int = 1
    padded: bool = True
    """Whether there is padding."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabelledBatch:
        return mapped(self, Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def collate_labelled(
    samples: Sequence[LabelledText], length: int | None = None, *, pad: int, multiple: int = 8
) -> LabelledBatch:
    """Stacks samples with as many texts each, filled up with the token ``pad`` to ``length`` or, if
    it is None, to a multiple of ``multiple`` that holds the longest."""
    longest, choices = max(sample.length for sample in samples), len(samples[0].tokens)
    if length is None:
        length = -(-longest // multiple) * multiple
    assert longest <= length, f"a text of {longest} tokens in a batch of {length}"
    assert all(len(sample.tokens) == choices for sample in samples), "questions differ in choices"
    texts = [text for sample in samples for text in zip(sample.tokens, sample.types, strict=True)]
    tokens_BS = np.full((len(texts), length), pad, np.int64)
    types_BS, padding_mask_BS = (np.zeros_like(tokens_BS) for _ in range(2))
    for row, (tokens, types) in enumerate(texts):
        size = len(tokens)
        tokens_BS[row, :size], types_BS[row, :size] = tokens, types
        padding_mask_BS[row, :size] = 1
    return LabelledBatch(
        torch.from_numpy(tokens_BS),
        torch.from_numpy(types_BS),
        torch.from_numpy(padding_mask_BS),
        torch.tensor([sample.label for sample in samples]),
        choices,
        padded=not bool(padding_mask_BS.all()),
    )
