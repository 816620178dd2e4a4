"""A text that is drawn token by token."""

from __future__ import annotations

from torch import Tensor

from megatron.apps.generation.decoding.constraints import TokenConstraint
from megatron.apps.generation.decoding.sampling import TokenSampler, token_score
from megatron.apps.generation.decoding.stopping import StopWatch
from megatron.apps.generation.request import (
    Finish,
    GenerationRequest,
    Update,
)
from megatron.apps.generation.scheduling.job import Job
from megatron.apps.generation.step import Runner, SequencePart
from megatron.tokenizer import Tokenizer


class TextJob(Job):
    """A request for one text, which ``constraint`` must allow."""

    def __init__(
        self,
        request: GenerationRequest,
        runner: Runner,
        tokenizer: Tokenizer,
        constraint: TokenConstraint | None = None,
    ) -> None:
        super().__init__(request, runner)
        self._constraint = constraint
        self._sampler = TokenSampler(request.sampling, self.prompt, tokenizer)
        self._watch = StopWatch(request.stopping, tokenizer, self.text_before)
        self._new: list[int] = []
        self._table: tuple[int, ...] = ()

    def parts(self) -> list[SequencePart]:
        position = len(self.prompt) + len(self._new) - 1
        count = position // self.page_size + 1
        if len(self._table) != count:
            self._table = tuple(self._pages[:count])
        return [self.decoded(self._new[-1], position, self._table)]

    def take(self, logits_RV: Tensor) -> Update:
        logits_V, top = logits_RV[0], self.request.logprobs
        token, finish = self._chosen(logits_V)
        self._new.append(token)
        if not self.long and self.is_long(len(self.prompt) + len(self._new)):
            self.read_again((*self.prompt, *self._new))
            self._table = ()
        scores = () if top is None else (token_score(logits_V, token, top),)
        return self.update(tokens=(token,), scores=scores, finish=finish)

    def _chosen(self, logits_V: Tensor) -> tuple[int, Finish | None]:
        """The next token, and why the text ends with it."""
        if self._constraint is None:
            token = self._sampler.choose(logits_V)
            return token, self._watch.add(token)
        token = self._sampler.choose(logits_V, self._constraint.allowed())
        self._constraint.advance(token)
        finish = self._watch.add(token)
        return token, "stop" if self._constraint.finished else finish
