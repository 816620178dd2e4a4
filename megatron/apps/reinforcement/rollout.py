"""Texts that the model in training writes after prompts, and what an environment answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from megatron.apps.generation.decoding.sampling import SoftRow, TokenSampler, softened
from megatron.apps.generation.decoding.text_stream import StopWatch
from megatron.apps.generation.execution.runner import PagedRunner
from megatron.apps.generation.request import GenerationRequest, Runner, Sampling, StopRules, Update
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.jobs import Job, TextJob
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.reinforcement.episodes import Episode, Message, Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer
from megatron.util.phases import moved

PROMPT_TOKENS = 1024
"""Prompt tokens per pass, in addition to the generated ones."""


class Dialogue(Protocol):
    """An environment during one episode.

    Attributes:
        turns: messages after the prompt so far.
        reward: sum of what the environment gave so far; None without any.
    """

    turns: list[Message]
    reward: float | None

    def answered(self, text: str, room: int) -> Sequence[int] | None:
        """The tokens that follow a text of the model, which the model continues; None at the end
        of the episode. More than ``room`` end it too."""
        ...


@dataclass(frozen=True)
class WritingTask:
    """A text to write.

    Attributes:
        number: of the sample, which determines its draws.
        dialogue: the environment of the text; None without one.
    """

    prompt: Prompt
    number: int
    dialogue: Dialogue | None = None


class Writing(NamedTuple):
    """The rules by which texts are written.

    Attributes:
        seed: of the run.
        ends: tokens that end a text.
    """

    options: ReinforcementConfig
    seed: int
    ends: frozenset[int]

    def request(self, task: WritingTask) -> GenerationRequest:
        """The request of a text."""
        options = self.options
        sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p or 0.0,
            seed=derive_seed(self.seed, "text", task.number),
        )
        prompt = tuple(task.prompt.tokens.tolist())
        return GenerationRequest(prompt, self._stopping(options.max_completion_length), sampling)

    def _stopping(self, count: int) -> StopRules:
        return StopRules(count, self.ends)


class EpisodeJob(TextJob):
    """A text, and the texts that follow answers of an environment. Answers are read as parts of a
    prompt, after the pages of what is before them."""

    def __init__(
        self, request: GenerationRequest, runner: Runner, tokenizer: Tokenizer, task: WritingTask
    ) -> None:
        super().__init__(request, runner, tokenizer)
        self.task, self._tokenizer = task, tokenizer
        self._own: list[bool] = []
        self._log_probs: list[float] = []
        self._texts: list[str] = []
        self._turn = 0
        self.ended = False
        self.soft: SoftRow | None = None

    def _continued(self, logits_V: Tensor) -> Update:
        soft, sampler = self.soft, self._sampler
        assert soft is not None
        token = sampler.choose_softened(soft) if sampler.unfiltered else sampler.choose(logits_V)
        finish = self._watch.add(token)
        self._add([token], True, soft.log_prob(token))
        if finish is not None:
            self.ended = finish == "stop"
            self._texts.append(self._text(self._new[self._turn :]))
            if self.task.dialogue is not None and self._answered(self.task.dialogue):
                finish = None
        return self.update(tokens=(token,), finish=finish)

    def _add(self, tokens: Sequence[int], own: bool, log_prob: float = 0.0) -> None:
        self._new += tokens
        self._own += [own] * len(tokens)
        self._log_probs += [log_prob] * len(tokens)

    def _answered(self, dialogue: Dialogue) -> bool:
        """True if the episode continues after what the environment answered."""
        stopping = self.request.stopping
        room = stopping.max_new_tokens - len(self._new)
        answer = dialogue.answered(self._texts[-1], room - 1) if self.ended else None
        if answer is None:
            return False
        if not 0 < len(answer) < room:
            self.ended = False
            return False
        # The last token that was drawn is read with the answer.
        self._computed = len(self.prompt) + len(self._new) - 1
        self._add(answer, False)
        self._turn, self._table = len(self._new), ()
        self._read_tokens = whole = (*self.prompt, *self._new)
        left = StopRules(stopping.max_new_tokens - len(self._new), stopping.tokens)
        self._sampler = TokenSampler(self.request.sampling, whole, self._tokenizer)
        self._watch = StopWatch(left, self._tokenizer, whole)
        return True

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the tokens that end it and ids that the tokenizer
        lacks."""
        ends = self.request.stopping.tokens
        known = [t for t in tokens if t not in ends and t < self._tokenizer.vocab_size]
        return self._tokenizer.detokenize(known)

    def episode(self) -> Episode:
        """The episode, once it has ended."""
        dialogue = self.task.dialogue
        return Episode(
            self.task.prompt,
            np.array(self._new, np.int64),
            np.array(self._own, np.bool_),
            np.array(self._log_probs, np.float32),
            "".join(self._texts),
            self.ended,
            () if dialogue is None else tuple(dialogue.turns),
            None if dialogue is None else dialogue.reward,
        )


class EpisodeEngine(GenerationEngine):
    """Generates :class:`EpisodeJob` of one temperature. Probabilities are computed for all texts of
    a step together."""

    def before_taking(self, takers: Sequence[Sequence[Job]], logits_RV: Tensor) -> None:
        """See :class:`GenerationEngine`."""
        if not takers:
            return
        temperature = takers[0][0].request.sampling.temperature
        rows = softened(logits_RV.numpy(), temperature)
        for jobs, soft in zip(takers, rows, strict=True):
            for job in jobs:
                assert isinstance(job, EpisodeJob)
                job.soft = soft


def write(
    runner: PagedRunner, tokenizer: Tokenizer, tasks: Sequence[WritingTask], writing: Writing
) -> Mapping[int, Episode]:
    """The episodes of tasks, by their places among these, on the main rank of a replica; empty on
    the others, which compute its steps. All texts are one continuous batch, those after one prompt
    compute it once."""
    if not runner.main:
        runner.follow()
        return {}
    try:
        running = min(writing.options.rollout_batch_size, max(1, len(tasks)))
        limits = EngineLimits(running, running + PROMPT_TOKENS, len(tasks))
        engine = EpisodeEngine(runner, tokenizer, limits)
        jobs = []
        for task in tasks:
            job = EpisodeJob(writing.request(task), runner, tokenizer, task)
            engine.add(job)
            jobs.append(job)
        while engine.busy:
            moved()
            for update in engine.step():
                if update.error is not None:
                    raise update.error
        return {place: job.episode() for place, job in enumerate(jobs)}
    finally:
        runner.close()
