"""What a model computes in one step of generation, for any number of sequences.

The positions of a sequence are stored in pages of equal size. The scheduler assigns pages to
sequences, which may share some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SequencePart:
    """Consecutive tokens of one sequence.

    Attributes:
        tokens: ids at the positions ``start``, ``start`` + 1, ...
        pages: numbers of the pages of the positions 0 to the last of these; keys and values of
            earlier positions are in them already, those of these tokens are written.
        decoding: whether this is a single token that was generated. All others are prompt: their
            results do not depend on how a sequence is cut into parts.
        logits: whether the logits after the last token are wanted.
        targets: the tokens that follow each of the first ``len(targets)`` tokens, whose
            log-probabilities are wanted.
        top: how many of the most probable tokens are wanted at each target.
        encoded: of a model with an encoder, the number of the encoded prompt that is read.
        long: whether the sequence is, or is part of, one of more than `Runner.long_after` tokens.
        adapter: the name of one of `Runner.adapters`; None for the model without.
        neighbors: of a model that retrieves, the tokens of the neighbours of each chunk whose last
            token is among these, one after the other.
    """

    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    decoding: bool = False
    logits: bool = False
    targets: tuple[int, ...] = ()
    top: int = 0
    encoded: int | None = None
    long: bool = False
    adapter: str | None = None
    neighbors: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StepInput:
    """One pass through the model. First pages are copied, in order; then prompts are encoded and
    forgotten; then the parts run.

    Attributes:
        copies: (from, to) pages.
        encode: tokens by number, of a model with an encoder.
        forget: numbers of encoded prompts that are needed no more.
    """

    parts: tuple[SequencePart, ...]
    copies: tuple[tuple[int, int], ...] = ()
    encode: tuple[tuple[int, tuple[int, ...]], ...] = ()
    forget: tuple[int, ...] = ()


@dataclass(frozen=True)
class TargetScores:
    """Of the T targets of a part: their log-probabilities float32 [T], and the most probable tokens
    with theirs, best first, int64 and float32 [T, ``top``]; on the CPU."""

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class StepOutput:
    """Logits float32 [R, V] of the R parts that want them, in order, without the padding of the
    vocabulary, on the CPU; and the scores of each part that has targets, in order."""

    logits_RV: Tensor
    scores: tuple[TargetScores, ...]


class Runner(Protocol):
    """A loaded model with the memory of its keys and values.

    Attributes:
        page_size: positions of a page.
        pages: how many there are, numbered from 0.
        max_positions: the longest sequence, prompt and text together (of a decoder).
        max_prompt: the longest prompt that an encoder accepts; None without an encoder.
        start_token: what a decoder begins with; None without an encoder.
        long_after: tokens of a sequence after which all of its positions are computed otherwise
            (LongRoPE): a sequence that grows beyond it is computed again. None for most models.
        adapters: names of the adapters that parts may have.
    """

    page_size: int
    pages: int
    vocab_size: int
    max_positions: int
    max_prompt: int | None
    start_token: int | None
    long_after: int | None
    adapters: tuple[str, ...]

    def run(self, step: StepInput) -> StepOutput:
        """Runs a step on all ranks. Called by the main rank only."""
        ...

    def close(self) -> None:
        """Lets the other ranks end."""
        ...
