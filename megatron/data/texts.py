"""Texts with continuations that a model scores, and their padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ScoredText:
    """Token ids (int64) of a context and its continuation. Each continuation token is scored given
    all tokens before it. Raises ValueError if the context or the continuation is empty.

    Attributes:
        choices: candidates for the last token of the continuation, each of which is scored. All
            texts in a batch have the same number of choices, which may be 0.
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
    """Sample with several rows, each a prompt and an answer."""

    @property
    def rows(self) -> Sequence[ScoredText]: ...


def padded(
    rows: Sequence[npt.NDArray[np.int64]], length: int, fill: int = 0
) -> npt.NDArray[np.int64]:
    """Return rows of different lengths as one array [B, ``length``], right-padded with ``fill``."""
    table = np.full((len(rows), length), fill, np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table


def check_lengths(lengths: npt.NDArray[np.int64], longest: int | None) -> None:
    """Raise ValueError if a text has more than ``longest`` tokens. None means no limit."""
    over = sorted({int(length) for length in lengths.flatten() if longest and length > longest})
    if over:
        raise ValueError(
            f"texts to score have up to {over[-1]} tokens, and the model has {longest} positions "
            "(--max-position-embeddings): shorten their contexts"
        )


def too_long(answer: str, tokens: int, longest: int, flag: str) -> ValueError:
    """Return an error about an answer that is longer than the model can read."""
    return ValueError(
        f"the answer {answer!r:.60} has {tokens} tokens, and the model reads {longest} ({flag}): "
        "shorten it, or use a model of longer sequences"
    )


def fitted(pad_to: int | None, needed: int, longest: int | None, divisor: int = 1) -> int:
    """Return the length to pad texts to: ``pad_to`` (default: ``needed``), but at most ``longest``
    rounded up to a multiple of ``divisor``."""
    length = needed if pad_to is None else pad_to
    assert length >= needed
    return length if longest is None else min(length, -(-longest // divisor) * divisor)
