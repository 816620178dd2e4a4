"""Requests for generated text and their results, and the steps by which a runner computes them.

The positions of a sequence are stored in pages of equal size. The scheduler assigns pages to
sequences, which may share some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from megatron.tokenizer import Tokenizer

Finish = Literal["stop", "length", "cancelled", "failed"]
"""The reason why a text ended: a stop token or text (for all beams of a beam search),
``max_new_tokens``, its client, or an error."""


def _require(values: object, *rules: tuple[str, bool, str]) -> None:
    """Raises ValueError for the first rule (field, whether its value is right, the right values)
    that is broken."""
    for name, right, what in rules:
        if not right:
            raise ValueError(f"{name} {getattr(values, name)} must be {what}")


def _finite(values: object, *names: str) -> None:
    for name in names:
        _require(values, (name, math.isfinite(getattr(values, name)), "a finite number"))


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token from the logits of a position.

    Penalties come first, then ``bias``, then ``temperature`` divides the logits; the draw is among
    the tokens that ``top_k``, then ``top_p`` and then ``min_p`` keep, each of the rest before it.
    ``greedy`` takes the most probable one after penalties and bias, without the others. Raises
    ValueError for a value that is out of range.

    Attributes:
        top_k: number of most probable tokens; 0 for all.
        top_p: least sum of the probabilities of the fewest tokens.
        top_p_decay: factor of ``top_p`` after each token, down to ``top_p_bound``; 0 for none.
        min_p: least share of the probability of the most probable token.
        repetition_penalty: divisor of positive logits, factor of negative ones, of tokens in prompt
            or text (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that are in the new text;
            ``frequency_penalty`` as often as they are.
        bias: addends of logits by token.
        prevent_newline_after_colon: no token that begins with a line end after text that ends with
            a colon.
        seed: determines the draws, with the positions of the tokens; None for random draws.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    prevent_newline_after_colon: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _finite(self, "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
        top_p, bound, penalty = self.top_p, self.top_p_bound, self.repetition_penalty
        no_decay = "0 without top_p_decay: it bounds what that leaves"
        _require(
            self,
            ("temperature", self.temperature > 0, "positive; greedy is its limit at 0"),
            ("top_k", self.top_k >= 0, "0 or more; 0 is for all tokens"),
            ("top_p", 0 < top_p <= 1, "above 0 and at most 1; 1 is for all tokens"),
            ("top_p_decay", 0 <= self.top_p_decay <= 1, "0 to 1; 0 is for no decay"),
            ("top_p_bound", 0 <= bound <= top_p, f"0 to top_p, which is {top_p}"),
            ("top_p_bound", bound == 0 or self.top_p_decay > 0, no_decay),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1; 0 is for all tokens"),
            ("repetition_penalty", penalty > 0, "above 0; 1 is for no penalty"),
        )
        for token, addend in self.bias.items():
            if token < 0 or not math.isfinite(addend):
                raise ValueError(
                    f"bias {addend} of token {token} must be a finite number, and a token's id 0 "
                    "or more"
                )


@dataclass(frozen=True)
class StopRules:
    """End of a text: one of ``tokens``, which is included, or one of ``texts`` in the new text, or
    ``max_new_tokens`` (0 to only score the prompt). ``before`` is the end of the prompt, in which
    one of ``texts`` may begin. Raises ValueError for a value that is out of range."""

    max_new_tokens: int
    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    before: str = ""

    def __post_init__(self) -> None:
        _require(self, ("max_new_tokens", self.max_new_tokens >= 0, "0 or more"))
        if "" in self.texts:
            raise ValueError("a stop text is empty; it must have a character at least")


@dataclass(frozen=True)
class Beams:
    """Beam search: the best ``width`` texts by the sum of their log-probabilities divided by
    (number of new tokens) ^ ``length_penalty``."""

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(self, ("width", self.width >= 1, "1 or more"))
        _finite(self, "length_penalty")


@dataclass(frozen=True)
class Constraint:
    """A regular expression, JSON schema (``{}`` for any object) or Lark grammar that a whole text
    must match."""

    kind: Literal["regex", "json_schema", "grammar"]
    source: str


@dataclass(frozen=True)
class GenerationRequest:
    """A text to continue.

    Attributes:
        prompt: token ids; of a model with an encoder those that it reads. Not empty.
        logprobs: number of most probable tokens whose log-probabilities are returned with each new
            token's; None for no log-probabilities.
        prompt_logprobs: the same for every prompt token except the first.
        adapter: name of the adapter that the model has for this text.
    """

    prompt: tuple[int, ...]
    stopping: StopRules
    sampling: Sampling = Sampling()
    beams: Beams | None = None
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class TokenScore:
    """Natural log-probability of a token under the raw logits of the model; ``top`` are the most
    probable tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class BeamResult:
    """One text of a beam search, and its ranking score."""

    tokens: tuple[int, ...]
    score: float
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Update:
    """A step's addition to the text of the request ``number``.

    Attributes:
        scores: of the new tokens, if requested.
        prompt_scores: once, before or with the first new token, if requested.
        finish: None until the text ends.
        beams: with ``finish``, of a beam search, the best first; its tokens all arrive together.
        error: with ``finish`` "failed".
        cached: in the first update: tokens of the prompt that were found computed.
    """

    number: int
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    beams: tuple[BeamResult, ...] = ()
    error: Exception | None = None
    cached: int = 0


@dataclass(frozen=True)
class Completion:
    """All updates of a request together; fields as of :class:`Update`."""

    tokens: tuple[int, ...]
    finish: Finish
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    beams: tuple[BeamResult, ...] = ()
    cached: int = 0


@dataclass(frozen=True)
class SequencePart:
    """Consecutive tokens of one sequence.

    Attributes:
        tokens: ids at the positions ``start``, ``start`` + 1, ...
        pages: numbers of the pages of positions 0 to the last of these; they contain keys and
            values of earlier positions, and these tokens' are written to them.
        decoding: true for a token that was generated and the drafts after it: each is computed as
            where it comes alone. Other tokens are prompt: their results do not depend on how a
            sequence is cut into parts.
        logits: true to compute the logits after the last token; after each of a ``decoding`` part.
        targets: the tokens that follow each of the first ``len(targets)`` tokens, to be scored with
            the ``top`` most probable ones.
        encoded: of a model with an encoder, the number of the encoded prompt.
        long: true in a sequence that has, or will have, more than `Runner.long_after` tokens.
        adapter: one of `Runner.adapters`; None for the model without.
        neighbors: of a model that retrieves, the tokens of the neighbours of each chunk whose last
            token is among these.
        drafts: of a new token: how many tokens after it the runner drafts, which join the part;
            ``pages`` has theirs.
        before: with drafts: the drafts of the step before that were right, this token's last ones.
        slot: of a model with states, the place of those of the sequence, which are replaced; at
            position 0 whatever is there does not count.
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
    slot: int | None = None
    drafts: int = 0
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepInput:
    """One pass through the model. First the pages of ``copies`` (from, to) are copied, in order,
    and the states of ``state_copies``; then prompts are encoded (tokens by number) and forgotten;
    then the parts run."""

    parts: tuple[SequencePart, ...]
    copies: tuple[tuple[int, int], ...] = ()
    encode: tuple[tuple[int, tuple[int, ...]], ...] = ()
    forget: tuple[int, ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TargetScores:
    """Log-probabilities of a part's targets float32 [T], and the most probable tokens with theirs,
    best first, int64 and float32 [T, ``top``]; on the CPU."""

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class StepOutput:
    """Logits float32 [R, V] of the parts with `SequencePart.logits`, without the padding of the
    vocabulary, on the CPU; the scores of each part with targets; and the tokens that the runner
    has drafted for each part with `SequencePart.drafts`; all in order."""

    logits_RV: Tensor
    scores: tuple[TargetScores, ...]
    drafts: tuple[tuple[int, ...], ...] = ()


class Runner(Protocol):
    """A loaded model with its memory.

    Attributes:
        page_size: positions of each of the ``pages``, which are numbered from 0.
        max_positions: the longest sequence, prompt and text together (of a decoder).
        max_prompt: the longest prompt that an encoder accepts; None without an encoder.
        start_token: the first token of a decoder; None without an encoder.
        long_after: tokens of a sequence after which all of its positions are computed otherwise
            (LongRoPE), again from the first one. None for most models.
        slots: sequences whose states have a place; None for a model without states.
        piece: positions at whose multiples a prompt may be cut into parts.
        drafts: the most tokens that it drafts for a part; 0 if it does not.
    """

    page_size: int
    pages: int
    vocab_size: int
    max_positions: int
    max_prompt: int | None
    start_token: int | None
    long_after: int | None
    adapters: tuple[str, ...]
    slots: int | None
    piece: int
    drafts: int

    def run(self, step: StepInput) -> StepOutput:
        """Runs a step on all ranks. Called by the main rank only."""
        ...

    def close(self) -> None:
        """Lets the other ranks end."""
        ...


def prompt_tokens(tokenizer: Tokenizer, text: str, runner: Runner) -> tuple[int, ...]:
    """Ids of a prompt: an empty one starts a new document, and an encoder's ends with the end of a
    text, as in its training. Raises ValueError if the tokenizer cannot split the text, or has no
    such token."""
    if runner.max_prompt is None:
        return tuple(tokenizer.tokenize(text)) or (tokenizer.eod,)
    return (*tokenizer.tokenize_sentences([text])[0].tolist(), tokenizer.eos)
