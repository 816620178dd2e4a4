"""Texts whose continuations a model scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


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
