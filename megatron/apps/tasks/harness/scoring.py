"""Log-probabilities for lm-eval's requests, computed with a model in any layout, and a file that
caches answers between evaluations."""

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
from megatron.features.evaluation.scoring import CHOICE_SCORES, TEXT_SCORES
from megatron.model.spec import Measure
from megatron.tokenizer import Tokenizer
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar

BATCH_TOKENS = 16384
"""Maximum number of tokens in a micro batch if the batch size is chosen automatically."""

ROUNDS = 64
"""Number of micro batches, per data-parallel rank and pipeline stage, between two calls of
``on_answers``."""

_MADE_BY = "model"
"""Key of the model's description in an answer file. No lm-eval request has this key."""


_CHOSEN = 1e9
"""Logit bias that forces a token to be chosen. Scores are computed from the unbiased logits."""


class Likelihood(NamedTuple):
    """Log-probability (natural logarithm) of a continuation. ``greedy`` is true if each of its
    tokens is the most probable one."""

    log_prob: float
    greedy: bool


class TokenRequest(NamedTuple):
    """Token ids of a request. ``context`` and ``continuation`` have at least one token each."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass
class Speed:
    """Number of requests and tokens that were computed, and the time spent on them."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        self.requests += requests
        self.tokens += tokens
        self.seconds += seconds


class TextScorer:
    """Scorer of requests with a model in any layout. Every rank must make the same calls.
    ``batch_size`` is the number of texts in a rank's micro batch. None fills a micro batch with
    at most BATCH_TOKENS tokens when padded to its longest text, and at most ``max_batch_size``
    texts."""

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
        """Return the answer to each request. With ``share``, requests that differ only in their
        last token are computed as one text. ``on_answers`` is called at intervals with pairs of
        request index and answer. Collective: every rank must call it. Raises ConfigError if the
        model's family does not predict text, and ValueError if a request is longer than the model's
        positions."""
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
    """Text without its last token. ``last`` maps possible last tokens to indices of requests."""

    context: Sequence[int]
    begin: Sequence[int]
    last: dict[int, list[int]]

    @property
    def tokens(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.context) + len(self.begin)

    def scored(self, choices: int) -> ScoredText:
        """Return the text with ``choices`` possible last tokens; the first is repeated if there are
        fewer. With 1, the last token is part of the continuation and there are no choices."""
        ends = [*self.last, *[next(iter(self.last))] * (choices - len(self.last))]
        context, continuation = np.array(self.context), np.array([*self.begin, ends[0]])
        return ScoredText(context, continuation, np.array(ends if choices > 1 else [], np.int64))


def _texts(requests: Sequence[TokenRequest], share: bool) -> list[_Text]:
    """Return the distinct texts of the requests, longest first."""
    texts: dict[tuple[object, ...], _Text] = {}
    for number, (context, continuation) in enumerate(requests):
        *begin, last = continuation
        key = (tuple(context), tuple(begin), None if share else last)
        text = texts.setdefault(key, _Text(context, begin, {}))
        text.last.setdefault(last, []).append(number)
    return sorted(texts.values(), key=lambda text: -text.tokens)


class AnswerCache:
    """Cache of answers by method and arguments, in the format of lm-eval's own cache. The main
    process opens the file and broadcasts its answers, so all ranks must look up the same requests.
    ``path`` is the value of --use-cache. ``model`` describes everything that the answers depend on.
    Raises ConfigError if the file belongs to another model or is not such a cache."""

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
        except Exception as error:  # an error of sqlite3, or RuntimeError if the folder is missing
            return f"--use-cache: {self.path} cannot be used: {error}"
        return None

    def find(self, method: str, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the cached answer to each request, or None if it is missing. Collective: all ranks
        get the main process's answers."""
        answers = self._answers
        keys = () if answers is None else [_key(method, arguments) for arguments in requests]
        return _from_main([answers.get(key) for key in keys])

    def add(self, method: str, answers: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        """Add pairs of arguments and answer, and commit them. Only on the main process."""
        if self._answers is None:
            return
        for arguments, answer in answers:
            self._answers[_key(method, arguments)] = answer
        self._answers.commit()

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()


def _from_main(value: Any) -> Any:
    """Return the main process's value on every rank. Collective: every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _key(method: str, arguments: tuple[Any, ...]) -> str:
    """Return the key of a request in the format of lm-eval's cache."""
    from lm_eval.api.model import hash_args

    return str(hash_args(method, arguments))


def prefix_likelihoods(
    writer: TextWriter, prompt: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[Likelihood]:
    """Return the likelihoods of continuations of one long prompt, all given as token ids. The
    continuations form a prefix tree, and each node is one request to the generation engine, whose
    KV cache shares the pages of the prompt. Collective: every rank must call it."""
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
