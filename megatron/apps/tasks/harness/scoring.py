"""Token ids of requests to their log-probabilities, through the engine of any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.data.scored_text import ScoredText
from megatron.engine.train_engine import ModelEngine
from megatron.model.spec import CHOICE_SCORES, TEXT_SCORES, Measure
from megatron.tokenizer import Tokenizer
from megatron.training.measuring import measure_texts
from megatron.util.progress import progress_bar

BATCH_TOKENS = 16384
"""Of a micro batch whose size is left open."""

ROUNDS = 64
"""Micro batches of a rank, times the stages of a pipeline, after which answers are handed on."""


class Likelihood(NamedTuple):
    """The log-probability (natural logarithm) of a continuation, and whether every token of it is
    the most probable one."""

    log_prob: float
    greedy: bool


class TokenRequest(NamedTuple):
    """Token ids; both parts have at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


OnAnswers = Callable[[Sequence[tuple[int, Likelihood]]], object]
"""Called with numbers of requests and their answers."""


@dataclass
class Speed:
    """What was computed, and for how long."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Counts further requests."""
        self.requests += requests
        self.tokens += tokens
        self.seconds += seconds


class TextScorer:
    """Answers requests with a model in any layout. Every rank calls it with the same ones.

    Args:
        batch_size: texts of a rank's micro batch; None for as many as make BATCH_TOKENS tokens of
            the longest, at most ``max_batch_size``.
    """

    def __init__(
        self,
        engine: ModelEngine,
        tokenizer: Tokenizer,
        batch_size: int | None = 1,
        max_batch_size: int = 64,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.batch_size, self.max_batch_size = batch_size, max_batch_size
        self.speed = Speed()

    def answers(
        self, requests: Sequence[TokenRequest], share: bool = True, on_answers: OnAnswers = id
    ) -> list[Likelihood]:
        """The answer to each request. Requests that differ in their last token only are one text,
        which the model reads once, if they may ``share``. ``on_answers`` is called from time to
        time. Raises ConfigError if the model's family does not predict text; ValueError if a
        request is longer than its positions."""
        texts = _texts(requests, share)
        found: list[Likelihood | None] = [None] * len(requests)
        with progress_bar("scoring", total=len(requests), unit=" requests") as bar:
            for measure, several in ((TEXT_SCORES, False), (CHOICE_SCORES, True)):
                chosen = [text for text in texts if (len(text.last) > 1) == several]
                while chosen:
                    size = self._batch_size(chosen[0].tokens)
                    mesh = self.engine.mesh
                    count = ROUNDS * mesh.pipeline.size * mesh.data.size * size
                    answers = self._measured(chosen[:count], measure, size)
                    for number, answer in answers:
                        found[number] = answer
                    on_answers(answers)
                    bar.update(len(answers))
                    chosen = chosen[count:]
        return [answer for answer in found if answer is not None]

    def _batch_size(self, longest: int) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return max(1, min(self.max_batch_size, BATCH_TOKENS // longest))

    def _measured(
        self, texts: Sequence[_Text], measure: Measure, size: int
    ) -> list[tuple[int, Likelihood]]:
        most = max(len(text.last) for text in texts)
        scored = [text.scored(most) for text in texts]
        numbers = measure_texts(self.engine, self.tokenizer, scored, size, measure=measure)
        shape = (len(texts), -1)
        log_probs, correct = (numbers[name].reshape(shape) for name in ("log_prob", "correct"))
        return [
            (
                number,
                Likelihood(float(log_probs[row, place]), bool(correct[row, place] == text.scores)),
            )
            for row, text in enumerate(texts)
            for place, last in enumerate(text.last.values())
            for number in last
        ]


@dataclass(frozen=True)
class _Text:
    """A text with the tokens that may end it, and the numbers of the requests that do."""

    context: Sequence[int]
    begin: Sequence[int]
    last: dict[int, list[int]]

    @property
    def tokens(self) -> int:
        """Tokens that the model reads."""
        return len(self.context) + len(self.begin)

    @property
    def scores(self) -> int:
        """Tokens of a continuation."""
        return len(self.begin) + 1

    def scored(self, choices: int) -> ScoredText:
        """With a number of choices, some of which may be repeated; 1 is none."""
        ends = [*self.last, *[next(iter(self.last))] * (choices - len(self.last))]
        context, continuation = np.array(self.context), np.array([*self.begin, ends[0]])
        return ScoredText(context, continuation, np.array(ends if choices > 1 else [], np.int64))


def _texts(requests: Sequence[TokenRequest], share: bool) -> list[_Text]:
    """The texts of requests, the longest first."""
    found: dict[tuple[object, ...], _Text] = {}
    for number, (context, continuation) in enumerate(requests):
        *begin, last = continuation
        key = (tuple(context), tuple(begin), None if share else last)
        text = found.setdefault(key, _Text(context, begin, {}))
        text.last.setdefault(last, []).append(number)
    return sorted(found.values(), key=lambda text: -text.tokens)
