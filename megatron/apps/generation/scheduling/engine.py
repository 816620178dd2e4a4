"""Generation engine: continue the texts of many concurrent requests."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from torch import Tensor

from megatron.apps.generation.decoding.constraints import ConstraintCompiler, TokenConstraint
from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Runner,
    StepOutput,
    Update,
)
from megatron.apps.generation.scheduling.jobs import BeamJob, Job, TextJob
from megatron.apps.generation.scheduling.pages import PagePool
from megatron.apps.generation.scheduling.schedule import EngineLimits, PlannedPart, Scheduler
from megatron.tokenizer import Tokenizer


class QueueFull(RuntimeError):
    """Raised if the queue is full. A later attempt may succeed."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(f"{limits.waiting:,} requests wait already; try again later")


@dataclass
class EngineStats:
    """Statistics of an engine's past and current work.

    Attributes:
        prompt_tokens: prompt tokens of the requests that were started.
        prefix_hit_tokens: prompt tokens that were found in the cache.
        new_tokens: generated tokens. For a beam search, those of the best beam.
        draft_tokens: drafted tokens, of which ``accepted_tokens`` were accepted.
        finished: requests that ended, including cancelled and failed ones.
        failed: requests that ended with an error.
        steps: passes through the model. ``step_seconds`` is their total time, including sampling.
        running: number of running requests; ``waiting`` is the number in the queue.
        pages: total number of pages: those that running requests use, cached ones with prompts that
            may be reused, and free ones.
        slots: slots for recurrent states, of which running requests use ``slots_used``. 0 for a
            model without states.
    """

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    failed: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    slots: int = 0
    slots_used: int = 0


class GenerationEngine:
    """Engine that batches many requests into common steps. Requests may join and leave at every
    step; their results do not depend on each other. Not thread-safe; see
    :class:`~megatron.apps.generation.scheduling.engine_thread.EngineThread`."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, limits: EngineLimits | None = None
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.limits = limits or EngineLimits()
        self._pool = PagePool(runner.pages, runner.slots)
        self._schedule = Scheduler(self.limits, self._pool, runner.start_token is not None)
        self._constraints = ConstraintCompiler(tokenizer, runner.vocab_size)
        self._ended: list[Update] = []
        self._stats = EngineStats()
        self._next_number = 0

    def job(self, request: GenerationRequest) -> Job:
        """Return a request as a job for the queue. May be called from other threads, because a
        constraint takes a while to compile. Raises ValueError if the request can never run: its
        prompt is empty or has an unknown token, or prompt and new tokens together need more
        positions or pages than the model has."""
        _check_request(request, self.runner)
        job: Job
        if request.beams is not None:
            job = BeamJob(request, self.runner, self.tokenizer)
        else:
            constraint: TokenConstraint | None = None
            if request.constraint is not None:
                constraint = self._constraints.compile(request.constraint, request.stopping.tokens)
            drafts = self.limits.drafts
            job = TextJob(request, self.runner, self.tokenizer, constraint, drafts)
        if job.rows > self.limits.running:
            raise ValueError(
                f"{job.rows} beams are more than the {self.limits.running} texts that may run at "
                "once"
            )
        if self.runner.slots is not None and job.rows > self.runner.slots:
            raise ValueError(
                f"{job.rows} beams need the states of as many texts; there is memory for "
                f"{self.runner.slots}"
            )
        if job.pages_needed > self.runner.pages:
            raise ValueError(
                f"a prompt of {len(request.prompt):,} tokens and "
                f"{request.stopping.max_new_tokens:,} new ones need {job.pages_needed:,} pages of "
                f"{self.runner.page_size} positions; there is memory for {self.runner.pages:,}"
            )
        return job

    def submit(self, request: GenerationRequest) -> int:
        """Add a request to the queue. Return its number, which its updates carry. Raises ValueError
        if the request can never run, and QueueFull if too many requests are waiting."""
        if self.room <= 0:
            raise QueueFull(self.limits)
        return self.add(self.job(request))

    def add(self, job: Job) -> int:
        """Add a job to the queue without checking `room`. Return its number."""
        job.number = self._next_number
        self._next_number += 1
        self._schedule.waiting.append(job)
        return job.number

    @property
    def room(self) -> int:
        """Number of further requests that can be submitted. Requests that can start at the next
        step do not count towards the limit on waiting requests."""
        return self.limits.running + self.limits.waiting - self._schedule.rows

    def cancel(self, number: int) -> None:
        """Cancel a request that has not ended yet. The next step reports it as cancelled."""
        job = self._schedule.find(number)
        if job is not None:
            update = Update(number, finish="cancelled")
            self._end(job, update)
            self._ended.append(update)

    @property
    def busy(self) -> bool:
        """True if a step has anything to do."""
        return bool(self._ended or self._schedule.waiting or self._schedule.running)

    def step(self) -> list[Update]:
        """Run one pass through the model, and return the updates of all requests. Every text in
        generation gets its next token, and more if its drafts are accepted. Prompts are computed in
        parts. If the runner raises an error, its memory is undefined and no step may follow."""
        started, stats = time.perf_counter(), self._stats
        updates, self._ended = self._ended, []
        for job in self._schedule.admit():
            stats.prompt_tokens += len(job.request.prompt)
        step, planned = self._schedule.plan()
        assert planned or not (self._schedule.running or self._schedule.waiting)
        if planned:
            for job, update in self._results(planned, self.runner.run(step)):
                stats.new_tokens += len(update.tokens)
                stats.prefix_hit_tokens += update.cached
                if update.finish is not None:
                    self._end(job, update)
                updates.append(update)
            stats.steps += 1
            stats.step_seconds += time.perf_counter() - started
        return updates

    def completions(self, requests: Iterable[GenerationRequest]) -> Iterator[Completion]:
        """Yield the results of requests in order, as soon as they are complete. Requests are taken
        from the iterable while there is room. The engine must be idle. Raises ValueError if a
        request can never run, or the error of a request that fails."""
        assert not self.busy
        coming, open_updates = iter(requests), dict[int, list[Update]]()
        try:
            while True:
                for request in islice(coming, self.room):
                    open_updates[self.submit(request)] = []
                if not open_updates:
                    return
                for update in self.step():
                    open_updates[update.number].append(update)
                while (updates := next(iter(open_updates.values()), None)) and updates[-1].finish:
                    yield completion_of(open_updates.pop(updates[-1].number))
        finally:
            for number in open_updates:
                self.cancel(number)
            self._ended = []

    def complete(self, requests: Iterable[GenerationRequest]) -> list[Completion]:
        """Return the results of `completions` as a list."""
        return list(self.completions(requests))

    @property
    def stats(self) -> EngineStats:
        """Snapshot of the current statistics."""
        return replace(
            self._stats,
            running=len(self._schedule.running),
            waiting=len(self._schedule.waiting),
            pages=self._pool.pages,
            pages_used=self._pool.used,
            pages_cached=self._pool.cached,
            pages_free=self._pool.available - self._pool.cached,
            slots=self._pool.slots,
            slots_used=self._pool.slots_used,
        )

    def _results(
        self, planned: Sequence[PlannedPart], result: StepOutput
    ) -> Iterator[tuple[Job, Update]]:
        rows: dict[Job, int] = {}
        drafts: dict[Job, Sequence[int]] = {}
        scores, followers = iter(result.scores), self._schedule.followers
        drafted = iter(result.drafts)
        for job, part in planned:
            if not part.decoding:
                job.has_read(part, next(scores) if part.targets else None, self._pool)
                if not (part.logits or job.reading):
                    yield job, job.update(finish="length")
                if part.logits:
                    for follower in followers.get(job, ()):
                        follower.adopt(job)
            if part.logits:
                drafts[job] = part.tokens[1:] if part.decoding else ()
                if part.drafts:
                    drafts[job] = next(drafted)
                rows[job] = rows.get(job, 0) + 1 + len(drafts[job])
        # All parts of a job are consecutive.
        of_jobs = result.logits_RV.split(list(rows.values())) if rows else ()
        takers = [(first, *followers.get(first, ())) for first in rows]
        self.before_taking(takers, result.logits_RV)
        for first, jobs, logits_RV in zip(rows, takers, of_jobs, strict=True):
            for job in jobs:
                updates = list(_taken(job, logits_RV, drafts[first]))
                if drafts[first]:
                    self._stats.draft_tokens += len(drafts[first])
                    self._stats.accepted_tokens += len(updates) - 1
                yield from ((job, update) for update in updates)

    def before_taking(self, takers: Sequence[Sequence[Job]], logits_RV: Tensor) -> None:
        """Hook that is called with the logits of a step. Each element of ``takers`` lists the jobs
        that use the same logits."""

    def _end(self, job: Job, update: Update) -> None:
        self._schedule.end(job)
        self._stats.finished += 1
        self._stats.failed += update.finish == "failed"


def _taken(job: Job, logits_RV: Tensor, drafts: Sequence[int]) -> Iterator[Update]:
    try:
        yield from job.take(logits_RV, drafts)
    except Exception as error:  # from a sampler or constraint: only this request fails
        yield job.update(finish="failed", error=error)


def completion_of(updates: Sequence[Update]) -> Completion:
    """Combine all updates of a request. Raises its error if the request failed."""
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


def _check_request(request: GenerationRequest, runner: Runner) -> None:
    """Raise ValueError if the model can never run a request: an empty prompt, an unknown token or
    adapter, too many positions, or contradictory fields."""
    if not request.prompt:
        raise ValueError("the prompt is empty; start from the end-of-document token instead")
    _check_tokens("the prompt", request.prompt, runner.vocab_size)
    _check_tokens("the bias", request.sampling.bias, runner.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= runner.vocab_size:
            raise ValueError(f"{name} {count} must be from 0 to {runner.vocab_size:,}")
    if request.adapter is not None and request.adapter not in runner.adapters:
        known = ", ".join(runner.adapters) or "no adapters"
        raise ValueError(f"there is no adapter {request.adapter!r}; the model has {known}")
    _check_positions(request, runner)


def _check_tokens(where: str, tokens: Collection[int], vocab_size: int) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        foreign = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(
            f"{where} has token id {foreign}, outside the model's vocabulary of {vocab_size:,}"
        )


def _check_positions(request: GenerationRequest, runner: Runner) -> None:
    prompt, new, long = len(request.prompt), request.stopping.max_new_tokens, runner.long_after
    asked = f"a prompt of {prompt:,} tokens and {new:,} new ones"
    if runner.max_prompt is None and prompt + new > runner.max_positions:
        raise ValueError(f"{asked} are more than the model's {runner.max_positions:,} positions")
    if runner.max_prompt is not None:
        if prompt > runner.max_prompt:
            raise ValueError(
                f"a prompt of {prompt:,} tokens is longer than the {runner.max_prompt:,} that the "
                "model's encoder takes"
            )
        if 1 + new > runner.max_positions:
            raise ValueError(
                f"a start token and {new:,} new ones are more than the {runner.max_positions:,} "
                "positions of the model's decoder"
            )
        if request.prompt_logprobs is not None:
            raise ValueError(
                "an encoder reads the prompt and does not predict it: it has no log-probabilities"
            )
    if request.beams is not None and request.constraint is not None:
        raise ValueError("a beam search cannot be constrained")
    if request.beams is not None and long is not None and prompt <= long < prompt + new - 1:
        raise ValueError(
            f"{asked} pass the {long:,} positions after which this model computes otherwise, which "
            f"a beam search cannot; ask for at most {long - prompt + 1:,} new ones"
        )
