"""Generates text for many requests at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from torch import Tensor

from megatron.apps.generation.decoding.constraints import ConstraintCompiler, TokenConstraint
from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Update,
)
from megatron.apps.generation.scheduling.beam_job import BeamJob
from megatron.apps.generation.scheduling.check import check_request, check_room
from megatron.apps.generation.scheduling.engine_stats import EngineStats, EngineSums
from megatron.apps.generation.scheduling.job import Job
from megatron.apps.generation.scheduling.pages import PagePool
from megatron.apps.generation.scheduling.schedule import (
    EngineLimits,
    PlannedPart,
    Scheduler,
)
from megatron.apps.generation.scheduling.text_job import TextJob
from megatron.apps.generation.step import Runner, StepOutput
from megatron.tokenizer import Tokenizer


class QueueFull(RuntimeError):
    """The queue is full; a later attempt may succeed."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(f"{limits.waiting:,} requests wait already; try again later")


class GenerationEngine:
    """Continues the texts of many requests together, which come and go at every step. What one of
    them gets does not depend on the others. Not thread-safe; see
    :class:`~megatron.apps.generation.scheduling.engine_thread.EngineThread`."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, limits: EngineLimits | None = None
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.limits = limits or EngineLimits()
        self._pool = PagePool(runner.pages)
        self._schedule = Scheduler(self.limits, self._pool, runner.start_token is not None)
        self._constraints = ConstraintCompiler(tokenizer, runner.vocab_size)
        self._ended: list[Update] = []
        self._sums = EngineSums()
        self._next_number = 0

    def job(self, request: GenerationRequest) -> Job:
        """A request as it can be put in the queue, for a thread that may take its time: a
        constraint takes a while to prepare. Raises ValueError if it can never run: its prompt is
        empty, has an unknown token or, with the new tokens, needs more positions or pages than
        there are."""
        check_request(request, self.runner)
        job: Job
        if request.beams is not None:
            job = BeamJob(request, self.runner, self.tokenizer)
        else:
            job = TextJob(request, self.runner, self.tokenizer, self._constraint(request))
        check_room(request, job.rows, job.pages_needed, self.runner, self.limits)
        return job

    def submit(self, request: GenerationRequest) -> int:
        """Puts a request in the queue; returns the number that its updates have. Raises ValueError
        if it can never run, QueueFull if too many wait."""
        if self.room <= 0:
            raise QueueFull(self.limits)
        return self.add(self.job(request))

    def add(self, job: Job) -> int:
        """`submit` for those who have asked for `room` themselves."""
        job.number = self._next_number
        self._next_number += 1
        self._schedule.waiting.append(job)
        return job.number

    @property
    def room(self) -> int:
        """How many more requests may come: what can run at the next step does not wait."""
        return self.limits.running + self.limits.waiting - self._schedule.rows

    def cancel(self, number: int) -> None:
        """Ends a request, if it has not ended; the next step says so."""
        job = self._schedule.find(number)
        if job is not None:
            update = Update(number, finish="cancelled")
            self._end(job, update)
            self._ended.append(update)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._ended or self._schedule.waiting or self._schedule.running)

    def step(self) -> list[Update]:
        """Gives every running text its next token, and computes more of prompts, in one pass
        through the model. An error of the runner leaves its memory unknown: no step may follow."""
        started = time.perf_counter()
        updates, self._ended = self._ended, []
        for job in self._schedule.admit():
            self._sums.prompt_tokens += len(job.request.prompt)
        step, planned = self._schedule.plan()
        assert planned or not (self._schedule.running or self._schedule.waiting)
        if planned:
            for job, update in self._results(planned, self.runner.run(step)):
                self._sums.new_tokens += len(update.tokens)
                self._sums.prefix_hit_tokens += update.cached
                if update.finish is not None:
                    self._end(job, update)
                updates.append(update)
            self._sums.steps += 1
            self._sums.step_seconds += time.perf_counter() - started
        return updates

    def completions(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion]:
        """What each request gets, in their order, as soon as it is there; requests are taken from
        the iterable as there is room. Raises ValueError if one can never run, or what makes one
        fail."""
        assert not self.busy
        coming, found = iter(requests), dict[int, list[Update]]()
        try:
            while True:
                for request in islice(coming, self.room):
                    found[self.submit(request)] = []
                if not found:
                    return
                for update in self.step():
                    found[update.number].append(update)
                while (number := next(iter(found), None)) is not None and _complete(found[number]):
                    yield completion_of(found.pop(number))
        finally:
            for number in found:
                self.cancel(number)
            self._ended = []

    def complete(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """`completions`, all at once."""
        return list(self.completions(requests))

    @property
    def stats(self) -> EngineStats:
        """Numbers for those who watch."""
        return EngineStats(
            running=len(self._schedule.running),
            waiting=len(self._schedule.waiting),
            pages=self._pool.pages,
            pages_used=self._pool.used,
            pages_cached=self._pool.cached,
            pages_free=self._pool.available - self._pool.cached,
            **vars(self._sums),
        )

    def _constraint(self, request: GenerationRequest) -> TokenConstraint | None:
        if request.constraint is None:
            return None
        return self._constraints.compile(request.constraint, request.stopping.tokens)

    def _results(
        self, planned: Sequence[PlannedPart], result: StepOutput
    ) -> Iterator[tuple[Job, Update]]:
        rows: dict[Job, int] = {}
        scores, followers = iter(result.scores), self._schedule.followers
        for job, part in planned:
            if not part.decoding:
                job.has_read(part, next(scores) if part.targets else None, self._pool)
                if not (part.logits or job.reading):
                    yield job, job.update(finish="length")
                if part.logits:
                    for follower in followers.get(job, ()):
                        follower.adopt(job)
            if part.logits:
                rows[job] = rows.get(job, 0) + 1
        # The parts of a job follow each other.
        of_jobs = result.logits_RV.split(list(rows.values())) if rows else ()
        for first, logits_RV in zip(rows, of_jobs, strict=True):
            for job in (first, *followers.get(first, ())):
                update = _taken(job, logits_RV)
                if update is not None:
                    yield job, update

    def _end(self, job: Job, update: Update) -> None:
        self._schedule.end(job)
        self._sums.finished += 1
        self._sums.failed += update.finish == "failed"


def _taken(job: Job, logits_RV: Tensor) -> Update | None:
    try:
        return job.take(logits_RV)
    except Exception as error:  # of a sampler or a constraint: it concerns this request alone
        return job.update(finish="failed", error=error)


def _complete(updates: Sequence[Update]) -> bool:
    return bool(updates) and updates[-1].finish is not None


def completion_of(updates: Sequence[Update]) -> Completion:
    """All updates of a request together. Raises what made it fail."""
    last = updates[-1]
    assert last.finish is not None
    if last.error is not None:
        raise last.error
    return Completion(
        tuple(chain.from_iterable(update.tokens for update in updates)),
        last.finish,
        tuple(chain.from_iterable(update.scores for update in updates)),
        tuple(chain.from_iterable(update.prompt_scores for update in updates)),
        last.beams,
        sum(update.cached for update in updates),
    )
