"""Generation of completions with the model in training, and interaction with environments."""

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
"""Maximum number of prompt tokens per forward pass, in addition to the decoded tokens."""


class Dialogue(Protocol):
    """Dialogue with an environment during one episode.

    Attributes:
        turns: messages after the prompt so far.
        reward: sum of the environment's rewards so far; None without a reward.
    """

    turns: list[Message]
    reward: float | None

    def answered(self, text: str, room: int) -> Sequence[int] | None:
        """Return the tokens of the environment's response to a turn of the model, after which the
        model continues. Return None at the end of the episode. A response of more than ``room``
        tokens also ends it."""
        ...


@dataclass(frozen=True)
class WritingTask:
    """Completion to generate.

    Attributes:
        number: draw number, which seeds the sampling.
        dialogue: the completion's environment; None without one.
    """

    prompt: Prompt
    number: int
    dialogue: Dialogue | None = None


class Writing(NamedTuple):
    """Settings of generation.

    Attributes:
        seed: seed of the run.
        ends: tokens that end a turn.
    """

    options: ReinforcementConfig
    seed: int
    ends: frozenset[int]

    def request(self, task: WritingTask) -> GenerationRequest:
        """Return the generation request of a task."""
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
    """Generation job of an episode: the model's turns and, with an environment, its responses. A
    response is prefilled like a prompt, and attends to the cached pages of all earlier tokens."""

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
        """Append the environment's response. Return whether the episode continues."""
        stopping = self.request.stopping
        room = stopping.max_new_tokens - len(self._new)
        answer = dialogue.answered(self._texts[-1], room - 1) if self.ended else None
        if answer is None:
            return False
        if not 0 < len(answer) < room:
            self.ended = False
            return False
        # The last sampled token is prefilled together with the response.
        self._computed = len(self.prompt) + len(self._new) - 1
        self._add(answer, False)
        self._turn, self._table = len(self._new), ()
        self._read_tokens = whole = (*self.prompt, *self._new)
        left = StopRules(stopping.max_new_tokens - len(self._new), stopping.tokens)
        self._sampler = TokenSampler(self.request.sampling, whole, self._tokenizer)
        self._watch = StopWatch(left, self._tokenizer, whole)
        return True

    def _text(self, tokens: Sequence[int]) -> str:
        """Detokenize, leaving out end tokens and ids that are not in the tokenizer's vocabulary."""
        ends = self.request.stopping.tokens
        known = [t for t in tokens if t not in ends and t < self._tokenizer.vocab_size]
        return self._tokenizer.detokenize(known)

    def episode(self) -> Episode:
        """Return the episode, once the job has ended."""
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
    """Generation engine for :class:`EpisodeJob` with one temperature for all jobs. It computes the
    probabilities of all jobs of a step together."""

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
    """Generate the episodes of tasks with continuous batching; prompts shared by several
    completions are computed once. Collective: every rank of a replica must call it. Return the
    episodes by index in ``tasks`` on the main rank, and an empty dictionary on the others."""
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
