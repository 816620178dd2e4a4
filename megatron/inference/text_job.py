"""A text that is drawn token by token."""

from __future__ import annotations

from torch import Tensor

from megatron.inference.job import Job
from megatron.inference.request import GenerationRequest, Update
from megatron.inference.sampling import TokenSampler, token_score
from megatron.inference.step import Part, Runner
from megatron.inference.stopping import StopWatch
from megatron.tokenizer import Tokenizer


class TextJob(Job):
    """A request for one text."""

    def __init__(self, request: GenerationRequest, runner: Runner, tokenizer: Tokenizer) -> None:
        super().__init__(request, runner)
        self._sampler = TokenSampler(request.sampling, self.prompt, tokenizer)
        self._watch = StopWatch(request.stopping, tokenizer, self.text_before)
        self._new = 0
        self._last = -1
        self._table: tuple[int, ...] = ()

    def parts(self) -> list[Part]:
        position = len(self.prompt) + self._new - 1
        count = position // self.page_size + 1
        if len(self._table) != count:
            self._table = tuple(self._pages[:count])
        return [Part((self._last,), position, self._table, True, True, encoded=self.encoded)]

    def take(self, logits_RV: Tensor) -> Update:
        logits_V, top = logits_RV[0], self.request.logprobs
        token = self._last = self._sampler.choose(logits_V)
        self._new += 1
        scores = () if top is None else (token_score(logits_V, token, top),)
        return self.update(tokens=(token,), scores=scores, finish=self._watch.add(token))
