"""What is asked of a model that generates text, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["stop", "length", "cancelled", "failed"]
"""Why a text ended: at a stop token or text (of a beam search, where all beams did), at
``max_new_tokens``, because its client cancelled it, or by an error of its own."""


def _require(right: bool, values: object, name: str, what: str) -> None:
    if not right:
        raise ValueError(f"{name} {getattr(values, name)} must be {what}")


def _finite(values: object, *names: str) -> None:
    for name in names:
        _require(math.isfinite(getattr(values, name)), values, name, "a finite number")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits of a position.

    Penalties come first, then ``bias``, then ``temperature`` divides the logits; the draw is among
    the tokens that ``top_k``, then ``top_p`` and then ``min_p`` keep, each of what the one before
    has left. ``greedy`` takes the most probable one after penalties and bias, and the rest has no
    effect. Raises ValueError for a value that is out of range.

    Attributes:
        top_k: among this number of most probable tokens; 0 for all.
        top_p: among the fewest tokens whose probabilities sum to at least this.
        top_p_decay: factor of ``top_p`` after each token; 0 for none.
        top_p_bound: the least that the decay leaves of ``top_p``.
        min_p: among tokens at least this share as probable as the most probable one.
        repetition_penalty: divisor of positive logits, factor of negative ones, of tokens in prompt
            or text (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: taken off the logits of tokens that are in the new text.
        frequency_penalty: the same, times how often they are.
        bias: addends of logits by token.
        prevent_newline_after_colon: no token that begins with a line end after text that ends with
            a colon.
        seed: determines the draws, together with the positions of the tokens; None for another
            every time.
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
        _require(self.temperature > 0, self, "temperature", "positive; greedy is its limit at 0")
        _require(self.top_k >= 0, self, "top_k", "0 or more; 0 is for all tokens")
        _require(0 < self.top_p <= 1, self, "top_p", "above 0 and at most 1; 1 is for all tokens")
        _require(0 <= self.top_p_decay <= 1, self, "top_p_decay", "0 to 1; 0 is for no decay")
        _require(
            0 <= self.top_p_bound <= self.top_p,
            self,
            "top_p_bound",
            f"0 to top_p, which is {self.top_p}",
        )
        _require(
            self.top_p_bound == 0 or self.top_p_decay > 0,
            self,
            "top_p_bound",
            "0 without top_p_decay: it bounds what that leaves",
        )
        _require(0 <= self.min_p <= 1, self, "min_p", "0 to 1; 0 is for all tokens")
        _require(
            self.repetition_penalty > 0, self, "repetition_penalty", "above 0; 1 is for no penalty"
        )
        for token, addend in self.bias.items():
            if token < 0 or not math.isfinite(addend):
                raise ValueError(
                    f"bias {addend} of token {token} must be a finite number, and a token's id 0 "
                    "or more"
                )


@dataclass(frozen=True)
class StopRules:
    """When a text ends; what ends it is part of its tokens. Raises ValueError for a value that is
    out of range.

    Attributes:
        max_new_tokens: 0 to score the prompt only.
        tokens: each of these ends it.
        texts: it ends as soon as one of these is in the new text.
        before: text of the prompt's end with which one of ``texts`` may begin.
    """

    max_new_tokens: int
    tokens: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    before: str = ""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 0, self, "max_new_tokens", "0 or more")
        if "" in self.texts:
            raise ValueError("a stop text is empty; it must have a character at least")


@dataclass(frozen=True)
class Beams:
    """Beam search: the best ``width`` texts by the sum of their log-probabilities divided by
    (number of new tokens) ^ ``length_penalty``."""

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(self.width >= 1, self, "width", "1 or more")
        _finite(self, "length_penalty")


@dataclass(frozen=True)
class Constraint:
    """What a text must match as a whole: a regular expression, a JSON schema, any JSON object
    (``json_schema`` with ``{}``) or a Lark grammar."""

    kind: Literal["regex", "json_schema", "grammar"]
    source: str


@dataclass(frozen=True)
class GenerationRequest:
    """A text to continue.

    Attributes:
        prompt: token ids; of a model with an encoder those that it reads. Not empty.
        logprobs: None for no log-probabilities; else those of the new tokens, each with this number
            of the most probable ones.
        prompt_logprobs: the same for every token of the prompt but the first.
        adapter: name of the adapter that the model has for this text; None for none.
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
    """Natural log-probability of a token under the raw logits of the model, before penalties,
    temperature and filters; ``top`` are the most probable tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class BeamResult:
    """One text of a beam search, and what it was ranked by."""

    tokens: tuple[int, ...]
    score: float
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Update:
    """What a step has added to a request's text.

    Attributes:
        number: that the engine gave the request.
        scores: of the new tokens, where log-probabilities are wanted.
        prompt_scores: once, before or with the first new token, where they are wanted.
        finish: None while more is to come.
        beams: with ``finish``, of a beam search, the best first; its tokens come all at once.
        error: with ``finish`` "failed".
        cached: with the first one: tokens of the prompt that were found computed.
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
    """All that a request got; fields as of :class:`Update`."""

    tokens: tuple[int, ...]
    finish: Finish
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    beams: tuple[BeamResult, ...] = ()
    cached: int = 0
