"""Data types of generation: requests for text and their results, and the steps that a runner
computes for them.

The positions of a sequence are stored in pages of equal size. The scheduler assigns pages to
sequences. Sequences may share pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from megatron.tokenizer import Tokenizer

Finish = Literal["stop", "length", "cancelled", "failed"]
"""Reason why a text ended: "stop" for a stop token or text (for all beams of a beam search),
"length" for ``max_new_tokens``, "cancelled" by its client, or "failed" with an error."""


def _require(values: object, *rules: tuple[str, bool, str]) -> None:
    """Raise ValueError for the first broken rule. A rule is (field, whether its value is valid,
    description of valid values)."""
    for name, right, what in rules:
        if not right:
            raise ValueError(f"{name} {getattr(values, name)} must be {what}")


def _finite(values: object, *names: str) -> None:
    for name in names:
        _require(values, (name, math.isfinite(getattr(values, name)), "a finite number"))


@dataclass(frozen=True)
class Sampling:
    """Parameters for choosing the next token from the logits of a position.

    Penalties are applied first, then ``bias``, then the logits are divided by ``temperature``.
    Then ``top_k``, ``top_p`` and ``min_p`` filter the tokens, in this order, each among those
    that are left. ``greedy`` takes the most probable token after penalties and bias, and ignores
    the temperature and filters. Raises ValueError if a value is out of range.

    Attributes:
        top_k: number of most probable tokens to keep. 0 keeps all.
        top_p: keep the fewest tokens whose probabilities sum to at least this.
        top_p_decay: factor applied to ``top_p`` after each token, down to ``top_p_bound``. 0
            disables the decay.
        min_p: keep tokens with at least this fraction of the highest probability.
        repetition_penalty: divisor of positive logits, and factor of negative ones, for tokens
            in the prompt or the text (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that occur in the new text.
        frequency_penalty: subtracted once for each occurrence of a token in the new text.
        bias: values added to the logits, by token.
        prevent_newline_after_colon: never choose a token that begins with a newline after text
            that ends with a colon.
        seed: determines the random numbers, together with the positions. None uses a random
            seed.
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
    """Conditions that end a text: one of ``tokens``, which is included in the text, one of
    ``texts`` in the new text, or ``max_new_tokens`` (0 only scores the prompt). ``before`` is
    the end of the prompt, in which a stop text may begin. Raises ValueError if a value is out of
    range."""

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
    """Beam search for the ``width`` best texts, by the sum of their log-probabilities divided by
    (number of new tokens) ^ ``length_penalty``."""

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(self, ("width", self.width >= 1, "1 or more"))
        _finite(self, "length_penalty")


@dataclass(frozen=True)
class Constraint:
    """Regular expression, JSON schema (``{}`` for any object) or Lark grammar for the whole
    text."""

    kind: Literal["regex", "json_schema", "grammar"]
    source: str


@dataclass(frozen=True)
class GenerationRequest:
    """Request to continue a text.

    Attributes:
        prompt: token ids, at least one. They are the encoder's input if the model has an
            encoder.
        logprobs: number of most probable tokens to report with the log-probability of each new
            token. None reports no log-probabilities.
        prompt_logprobs: like ``logprobs``, for every prompt token except the first.
        adapter: name of the adapter to use for this text. None uses the model without an
            adapter.
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
    """Natural log-probability of a token under the model's raw logits. ``top`` contains the most
    probable tokens with their log-probabilities, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class BeamResult:
    """One beam of a finished beam search, with its ranking score."""

    tokens: tuple[int, ...]
    score: float
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Update:
    """Result of one step for the request ``number``.

    Attributes:
        scores: scores of the new tokens, if requested.
        prompt_scores: sent once, before or with the first new token, if requested.
        finish: None until the text ends.
        beams: results of a beam search, best first, sent with ``finish``. A beam search sends all
            its tokens at once.
        error: set if ``finish`` is "failed".
        cached: number of prompt tokens that were already cached. Set in the first update only.
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
    """Complete result of a request. The fields combine those of all its :class:`Update` objects."""

    tokens: tuple[int, ...]
    finish: Finish
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    beams: tuple[BeamResult, ...] = ()
    cached: int = 0


@dataclass(frozen=True)
class SequencePart:
    """Consecutive tokens of one sequence, to be computed in one step.

    Attributes:
        tokens: token ids at the positions ``start``, ``start`` + 1, ...
        pages: page numbers of the positions from 0 to the last of these tokens. They contain the
            keys and values of earlier positions; those of these tokens are written to them.
        decoding: true for a generated token and the drafts after it, each of which is computed
            independently of all other tokens of the step. False for prompt tokens, whose results do
            not depend on how the prompt is split into parts.
        logits: whether to compute the logits after the last token. In a ``decoding`` part, whether
            to compute them after every token.
        targets: the tokens that follow the first ``len(targets)`` tokens. They are scored, together
            with the ``top`` most probable ones.
        encoded: number of the encoded prompt, for a model with an encoder.
        long: whether the sequence has, or will have, more than `Runner.long_after` tokens.
        adapter: one of `Runner.adapters`. None uses the model without an adapter.
        neighbors: for a model that retrieves, the neighbours' tokens for each chunk whose last
            token is in ``tokens``.
        drafts: number of tokens that the runner drafts after a new token and appends to the part.
            ``pages`` includes their pages.
        before: drafts accepted in the previous step, which precede this token. Only with
            ``drafts``.
        slot: for a model with recurrent states, the slot of the sequence's states, which are
            updated in place. At position 0 its contents are ignored.
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
    """One pass through the model. First the pages of ``copies`` (from, to) and the states of
    ``state_copies`` are copied, in order. Then prompts are encoded (token ids by number) or
    forgotten. Then the parts are computed."""

    parts: tuple[SequencePart, ...]
    copies: tuple[tuple[int, int], ...] = ()
    encode: tuple[tuple[int, tuple[int, ...]], ...] = ()
    forget: tuple[int, ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TargetScores:
    """Log-probabilities of a part's targets, float32 [T], and the most probable tokens with their
    log-probabilities, best first, int64 and float32 [T, ``top``]. All are on the CPU."""

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class StepOutput:
    """Result of a step, each field in the order of the parts: float32 logits [R, V] of the parts
    with `SequencePart.logits`, on the CPU and without vocabulary padding; the scores of each part
    with targets; and the drafted tokens of each part with `SequencePart.drafts`."""

    logits_RV: Tensor
    scores: tuple[TargetScores, ...]
    drafts: tuple[tuple[int, ...], ...] = ()


class Runner(Protocol):
    """A loaded model with its memory.

    Attributes:
        page_size: positions of each of the ``pages``, which are numbered from 0.
        max_positions: maximum length of a sequence, prompt and text together (in the decoder).
        max_prompt: maximum length of a prompt that the encoder accepts. None without an encoder.
        start_token: first token of the decoder. None without an encoder.
        long_after: sequence length above which all positions, from the first, are computed
            differently (LongRoPE). None for most models.
        slots: number of sequences whose recurrent states can be stored. None without states.
        piece: prompts may only be split at positions that are multiples of this.
        drafts: maximum number of tokens that the runner drafts for a part. May be 0.
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
        """Compute a step on all ranks. Only the main rank may call it; the other ranks follow."""
        ...

    def close(self) -> None:
        """Release the other ranks, which wait for steps."""
        ...


def prompt_tokens(tokenizer: Tokenizer, text: str, runner: Runner) -> tuple[int, ...]:
    """Return the token ids of a prompt. An empty prompt starts a new document. An encoder's prompt
    ends with the end-of-text token, as in training. Raises ValueError if the tokenizer cannot
    encode the text or lacks the special token."""
    if runner.max_prompt is None:
        return tuple(tokenizer.tokenize(text)) or (tokenizer.eod,)
    return (*tokenizer.tokenize_sentences([text])[0].tolist(), tokenizer.eos)
