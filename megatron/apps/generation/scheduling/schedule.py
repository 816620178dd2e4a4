"""Scheduler: choose the requests that run, and the parts of each step."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from megatron.apps.generation.memory import TEXTS
from megatron.apps.generation.request import SequencePart, StepInput
from megatron.apps.generation.scheduling.jobs import Job
from megatron.apps.generation.scheduling.pages import PagePool


@dataclass(frozen=True)
class EngineLimits:
    """Limits on concurrent work. Raises ValueError if a step would have no room for prompts.

    Attributes:
        running: maximum number of running texts. Each beam counts as one.
        step_tokens: maximum number of tokens in a pass: generated tokens, and prompt tokens in the
            remaining room. An encoder's prompt or a `Runner.piece` is never split, even if longer.
        waiting: maximum number of waiting requests, in addition to the running ones.
        drafts: number of tokens of each text that a step computes in advance.
    """

    running: int = TEXTS
    step_tokens: int = 512
    waiting: int = 1024
    drafts: int = 0

    def __post_init__(self) -> None:
        for name in ("running", "waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        decoded = self.running * (1 + self.drafts)
        if self.step_tokens <= decoded:
            more = f" x (1 + drafts {self.drafts})" if self.drafts else ""
            raise ValueError(
                f"step_tokens {self.step_tokens} must be more than running {self.running}{more}: "
                "each running text takes one and its drafts, prompts the rest"
            )


PlannedPart = tuple[Job, SequencePart]
"""Part of a step, with the job that it belongs to."""


class FairQueue:
    """Queue of waiting jobs that is fair to clients: it serves clients round-robin, and the
    requests of each client round-robin. The jobs of one request are served in order of arrival."""

    def __init__(self) -> None:
        self._clients: dict[Hashable, dict[Hashable, deque[Job]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Job]:
        for requests in self._clients.values():
            for jobs in requests.values():
                yield from jobs

    def append(self, job: Job) -> None:
        client, request = job.source
        self._clients.setdefault(client, {}).setdefault(request, deque()).append(job)
        self._count += 1

    def first(self) -> Job:
        """Return the job to start next, without removing it."""
        return next(iter(self))

    def popleft(self) -> Job:
        """Remove and return the job to start next. Its request and client move to the end of their
        queues."""
        job = self.first()
        self.remove(job)
        client, request = job.source
        requests = self._clients.pop(client, {})
        if jobs := requests.pop(request, None):
            requests[request] = jobs
        if requests:
            self._clients[client] = requests
        return job

    def remove(self, job: Job) -> None:
        """Remove a job without changing the order of the others."""
        client, request = job.source
        requests = self._clients[client]
        requests[request].remove(job)
        if not requests[request]:
            del requests[request]
        if not requests:
            del self._clients[client]
        self._count -= 1


class Scheduler:
    """Scheduler that starts waiting requests while there is room, and plans the steps. Waiting
    clients are served round-robin. Running requests are never preempted, and no request overtakes
    the first in the queue. Every step includes one token of each generated text and the drafts
    after it. The remaining tokens of the step are used for prompts, oldest first.

    Attributes:
        waiting: queue of waiting jobs.
        running: jobs by number, in order of arrival.
        followers: for each job whose prompt is computed in this step, the jobs that copy it.
    """

    def __init__(self, limits: EngineLimits, pool: PagePool, encodes: bool) -> None:
        self.limits, self.pool = limits, pool
        self.waiting = FairQueue()
        self.running: dict[int, Job] = {}
        self.followers: dict[Job, list[Job]] = {}
        self._rows = 0
        self._prompts = EncodedPrompts() if encodes else None

    def admit(self) -> list[Job]:
        """Start waiting requests while there is room."""
        admitted = []
        while self.waiting and self._rows + self.waiting.first().rows <= self.limits.running:
            if not self.waiting.first().admit(self.pool):
                break
            job = self.waiting.popleft()
            self.running[job.number] = job
            self._rows += job.rows
            admitted.append(job)
        return admitted

    def end(self, job: Job) -> None:
        """Remove a running or waiting job, and release its pages, slots and encoded prompt."""
        if self.running.pop(job.number, None) is None:
            self.waiting.remove(job)
            return
        self._rows -= job.rows
        job.release(self.pool)
        if self._prompts is not None:
            self._prompts.release(job)

    @property
    def rows(self) -> int:
        """Number of running texts plus waiting requests."""
        return self._rows + len(self.waiting)

    def find(self, number: int) -> Job | None:
        """Return the job of a request, or None if it has ended."""
        running = self.running.get(number)
        return running or next((job for job in self.waiting if job.number == number), None)

    def plan(self) -> tuple[StepInput, list[PlannedPart]]:
        """Return the next step, and its parts in order with their jobs. There may be no parts."""
        planned: list[PlannedPart] = []
        copies: list[tuple[int, int]] = []
        state_copies: list[tuple[int, int]] = []
        reading = []
        for job in self.running.values():
            of_pages, of_states = job.copies()
            copies += of_pages
            state_copies += of_states
            if job.reading:
                reading.append(job)
            else:
                planned += [(job, part) for part in job.parts()]
        self._plan_prompts(planned, reading)
        encode, forget = ((), ()) if self._prompts is None else self._prompts.changes()
        parts = tuple(part for _, part in planned)
        return StepInput(parts, tuple(copies), encode, forget, tuple(state_copies)), planned

    def _plan_prompts(self, planned: list[PlannedPart], reading: Iterable[Job]) -> None:
        decoded = sum(len(part.tokens) + part.drafts for _, part in planned)
        budget = self.limits.step_tokens - decoded
        first: dict[tuple[tuple[int, ...], str | None], Job] = {}
        self.followers = {}
        for job in reading:
            if budget <= 0:
                break
            key = job.prompt, job.request.adapter
            other = job if self._prompts is not None else first.setdefault(key, job)
            if other is not job and job.follows(other, self.pool):
                self.followers.setdefault(other, []).append(job)
                continue
            if self._prompts is not None and job.encoded is None:
                budget -= self._prompts.add(job)
            part = job.read(self.pool, max(budget, 1))
            if part is not None:
                planned.append((job, part))
                budget -= len(part.tokens)


class EncodedPrompts:
    """Numbers of the encoded prompts in use. Equal prompts share a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._users: Counter[int] = Counter()
        self._next = itertools.count()
        self._encode: list[tuple[int, tuple[int, ...]]] = []
        self._forget: list[int] = []

    def add(self, job: Job) -> int:
        """Assign a number to the prompt of a job. Return the number of tokens to encode first, 0 if
        the prompt is already encoded."""
        prompt = job.request.prompt
        new = prompt not in self._numbers
        if new:
            self._numbers[prompt] = next(self._next)
            self._encode.append((self._numbers[prompt], prompt))
        job.encoded = self._numbers[prompt]
        self._users[job.encoded] += 1
        return len(prompt) if new else 0

    def release(self, job: Job) -> None:
        """Remove a user of a job's prompt."""
        if job.encoded is None:
            return
        self._users[job.encoded] -= 1
        if not self._users[job.encoded]:
            del self._users[job.encoded], self._numbers[job.request.prompt]
            self._forget.append(job.encoded)

    def changes(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
        """Return the prompts to encode and those that lost their last user since the last call."""
        changes = tuple(self._encode), tuple(self._forget)
        self._encode, self._forget = [], []
        return changes
