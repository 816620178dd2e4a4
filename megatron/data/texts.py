"""Texts whose continuations a model scores, and texts with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.loader import mapped


@dataclass(frozen=True)
class ScoredText:
    """Token ids (int64): every token of the continuation is scored, given all before it. Raises
    ValueError if one of the two is empty.

    Attributes:
        choices: where there are any, tokens that are each scored as the last one of the
            continuation; then all texts of a batch have as many.
    """

    context: npt.NDArray[np.int64]
    continuation: npt.NDArray[np.int64]
    choices: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        for name in ("context", "continuation"):
            tokens = np.asarray(getattr(self, name), np.int64)
            if tokens.ndim != 1 or not len(tokens):
                raise ValueError(
                    f"the {name} of a text to score needs at least one token"
                    + ": the end-of-document token, where nothing comes before"
                    * (name == "context")
                )
            object.__setattr__(self, name, tokens)


@runtime_checkable
class ScoredRows(Protocol):
    """A sample of several rows, each a prompt and an answer to it."""

    @property
    def rows(self) -> Sequence[ScoredText]: ...


def padded(
    rows: Sequence[npt.NDArray[np.int64]], length: int, fill: int = 0
) -> npt.NDArray[np.int64]:
    """Rows of several lengths as one array [B, ``length``]."""
    table = np.full((len(rows), length), fill, np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table


def check_lengths(lengths: npt.NDArray[np.int64], longest: int | None) -> None:
    """Raises ValueError if texts of these lengths are longer than the model can read."""
    over = sorted({int(length) for length in lengths.flatten() if longest and length > longest})
    if over:
        raise ValueError(
            f"texts to score have up to {over[-1]} tokens, and the model has {longest} positions "
            "(--max-position-embeddings): shorten their contexts"
        )


def too_long(answer: str, tokens: int, longest: int, flag: str) -> ValueError:
    """Return an error about an answer of more tokens than a model reads."""
    return ValueError(
        f"the answer {answer!r:.60} has {tokens} tokens, and the model reads {longest} ({flag}): "
        "shorten it, or use a model of longer sequences"
    )


def fitted(pad_to: int | None, needed: int, longest: int | None, divisor: int = 1) -> int:
    """The length to pad texts to: as wanted, but no more than the model can read, or the next
    multiple of the ``divisor`` of all lengths."""
    length = needed if pad_to is None else pad_to
    assert length >= needed
    return length if longest is None else min(length, -(-longest // divisor) * divisor)


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
    """True if there is padding."""

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
