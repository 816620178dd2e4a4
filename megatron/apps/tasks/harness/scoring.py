"""Answers to requests: their log-probabilities, through the engine of any layout, and a file that
keeps answers from one evaluation to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.writing import TextWriter
from megatron.config import ConfigError
from megatron.data.texts import ScoredText
from megatron.engine.train_engine import ModelEngine
from megatron.features.evaluation.checkpoints import measure_texts
from megatron.model.spec import CHOICE_SCORES, TEXT_SCORES, Measure
from megatron.tokenizer import Tokenizer
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar

BATCH_TOKENS = 16384
"""Tokens of a micro batch whose size is left open."""

ROUNDS = 64
"""Micro batches of a rank, times the stages of a pipeline, after which answers are handed on."""

_MADE_BY = "model"
"""Key of the description of the model in a file of answers, which lm-eval never asks for."""


_CHOSEN = 1e9
"""Added to a token's logit so that it is the next one; scores are of the logits without it."""


class Likelihood(NamedTuple):
    """The log-probability (natural logarithm) of a continuation, and whether every token of it is
    the most probable one."""

    log_prob: float
    greedy: bool


class TokenRequest(NamedTuple):
    """Token ids; both parts have at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass
class Speed:
    """Computed requests and tokens, and the time they took."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        self.requests += requests
        self.tokens += tokens
        self.seconds += seconds


class TextScorer:
    """Answers requests with a model in any layout. Every rank must call it with the same requests.
    ``batch_size`` is the texts of a rank's micro batch; None for as many as make BATCH_TOKENS
    tokens of the longest, at most ``max_batch_size``."""

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
        self,
        requests: Sequence[TokenRequest],
        share: bool = True,
        on_answers: Callable[[Sequence[tuple[int, Likelihood]]], object] = id,
    ) -> list[Likelihood]:
        """The answer to each request. Requests that differ in their last token only are one text,
        which the model reads once, if they may ``share``. ``on_answers`` is called from time to
        time with numbers of requests and their answers. Raises ConfigError if the model's family
        does not predict text; ValueError if a request is longer than its positions."""
        texts = _texts(requests, share)
        likelihoods: list[Likelihood | None] = [None] * len(requests)
        with progress_bar("scoring", total=len(requests), unit=" requests") as bar:
            for measure, several in ((TEXT_SCORES, False), (CHOICE_SCORES, True)):
                chosen = [text for text in texts if (len(text.last) > 1) == several]
                while chosen:
                    size = self.batch_size or max(
                        1, min(self.max_batch_size, BATCH_TOKENS // chosen[0].tokens)
                    )
                    mesh = self.engine.mesh
                    count = ROUNDS * mesh.pipeline.size * mesh.samples.size * size
                    answers = self._measured(chosen[:count], measure, size)
                    for number, answer in answers:
                        likelihoods[number] = answer
                    on_answers(answers)
                    bar.update(len(answers))
                    chosen = chosen[count:]
        return [answer for answer in likelihoods if answer is not None]

    def _measured(
        self, texts: Sequence[_Text], measure: Measure, size: int
    ) -> list[tuple[int, Likelihood]]:
        most = max(len(text.last) for text in texts)
        scored = [text.scored(most) for text in texts]
        numbers = measure_texts(self.engine, self.tokenizer, scored, size, measure=measure)
        shape = (len(texts), -1)
        log_probs, correct = (numbers[name].reshape(shape) for name in ("log_prob", "correct"))
        answers = []
        for row, text in enumerate(texts):
            for place, same in enumerate(text.last.values()):
                greedy = bool(correct[row, place] == len(text.begin) + 1)
                answer = Likelihood(float(log_probs[row, place]), greedy)
                answers += [(number, answer) for number in same]
        return answers


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

    def scored(self, choices: int) -> ScoredText:
        """With a number of choices, some of which may be repeated; 1 is none."""
        ends = [*self.last, *[next(iter(self.last))] * (choices - len(self.last))]
        context, continuation = np.array(self.context), np.array([*self.begin, ends[0]])
        return ScoredText(context, continuation, np.array(ends if choices > 1 else [], np.int64))


def _texts(requests: Sequence[TokenRequest], share: bool) -> list[_Text]:
    """The texts of requests, the longest first."""
    texts: dict[tuple[object, ...], _Text] = {}
    for number, (context, continuation) in enumerate(requests):
        *begin, last = continuation
        key = (tuple(context), tuple(begin), None if share else last)
        text = texts.setdefault(key, _Text(context, begin, {}))
        text.last.setdefault(last, []).append(number)
    return sorted(texts.values(), key=lambda text: -text.tokens)


class AnswerCache:
    """Answers by method and arguments, in the format of lm-eval's own cache. The main process has
    the file, and shares its content with the others: all must answer the same requests. ``path`` is
    lm-eval's flag, ``model`` describes what the answers depend on. Raises ConfigError if the file
    belongs to another model or is not such a file."""

    def __init__(self, path: str, model: str) -> None:
        self.path = f"{path}_rank0.db"
        self._answers: Any = None
        refusal = _from_main(self._open(model) if is_main_process() else None)
        if refusal is not None:
            raise ConfigError(refusal)

    def _open(self, model: str) -> str | None:
        from sqlitedict import SqliteDict

        try:
            self._answers = SqliteDict(self.path)
            made_by = self._answers.get(_MADE_BY)
            if made_by is None and len(self._answers):
                return (
                    f"--use-cache: {self.path} does not say which model gave its answers; name "
                    "another file"
                )
            if made_by not in (None, model):
                return (
                    f"--use-cache: {self.path} has the answers of {made_by}, and this is {model}; "
                    "name another file"
                )
            self._answers[_MADE_BY] = model
            self._answers.commit()
        except Exception as error:  # of sqlite3, or RuntimeError if the folder does not exist
            return f"--use-cache: {self.path} cannot be used: {error}"
        return None

    def find(self, method: str, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The kept answer to each request, None where it is missing; the same on every rank."""
        answers = self._answers
        keys = () if answers is None else [_key(method, arguments) for arguments in requests]
        return _from_main([answers.get(key) for key in keys])

    def add(self, method: str, answers: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        """Keeps answers by arguments; they are on the disk afterwards."""
        if self._answers is None:
            return
        for arguments, answer in answers:
            self._answers[_key(method, arguments)] = answer
        self._answers.commit()

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()


def _from_main(value: Any) -> Any:
    """The main process's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _key(method: str, arguments: tuple[Any, ...]) -> str:
    """The key of a request in lm-eval's own cache."""
    from lm_eval.api.model import hash_args

    return str(hash_args(method, arguments))


def prefix_likelihoods(
    writer: TextWriter, prompt: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[Likelihood]:
    """Return the likelihoods of continuations of a long prompt, token ids. Each token of the tree
    of continuations is one request of the generation engine, whose cache has the pages of the
    prompt. Every rank must call it."""
    edges: dict[tuple[tuple[int, ...], int], int] = {}
    for continuation in continuations:
        for at, token in enumerate(continuation):
            edges.setdefault((tuple(continuation[:at]), token), len(edges))
    requests = [
        GenerationRequest(
            (*prompt, *before),
            StopRules(1),
            Sampling(greedy=True, bias={token: _CHOSEN}),
            logprobs=1,
        )
        for before, token in edges
    ]
    scores = []
    for completion in writer.completions(requests):
        (score,) = completion.scores
        scores.append((score.logprob, score.top[0][0] == score.token))
    result = []
    for continuation in continuations:
        of_tokens = [
            scores[edges[tuple(continuation[:at]), token]] for at, token in enumerate(continuation)
        ]
        total = sum(log_prob for log_prob, _ in of_tokens)
        result.append(Likelihood(total, all(best for _, best in of_tokens)))
    return result
