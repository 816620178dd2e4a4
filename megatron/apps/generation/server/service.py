"""A model that many clients ask at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import Request

from megatron.apps.generation.prompts import prompt_tokens
from megatron.apps.generation.request import (
    BeamResult,
    Finish,
    GenerationRequest,
    TokenScore,
    Update,
)
from megatron.apps.generation.scheduling.engine import QueueFull
from megatron.apps.generation.scheduling.engine_stats import EngineStats
from megatron.apps.generation.scheduling.engine_thread import EngineStopped, EngineThread
from megatron.apps.generation.server.config import RequestDefaults, ServiceLimits
from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.exchange import (
    Body,
    HeldBodies,
    while_connected,
)
from megatron.apps.generation.server.metrics import (
    Metrics,
    RequestRecord,
    current_record,
)
from megatron.apps.generation.server.turns import (
    SMALL_BODY,
    RequestTurn,
    Turns,
)
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.apps.generation.decoding.chat import ChatFormat

T = TypeVar("T")
Tokens = tuple[int, ...]
State = Literal["loading", "ok", "draining", "failed"]
_SHORT = 4096
"""Characters that are split into tokens in less than a millisecond or two."""
_LEAST_LONGEST = 64
"""Characters of a token, at least, for a bound of texts: some tokenizers leave out white space."""


@dataclass(frozen=True)
class ServedModel:
    """A running engine and what else belongs to its model; ``ends`` are the tokens that end a
    text."""

    thread: EngineThread
    tokenizer: Tokenizer
    chat: ChatFormat
    ends: frozenset[int]

    @property
    def positions(self) -> int:
        """The longest sequence, prompt and new tokens together; of an encoder its prompt."""
        return self.thread.engine.runner.max_positions

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt has at most."""
        runner = self.thread.engine.runner
        return runner.max_positions if runner.max_prompt is None else runner.max_prompt

    @property
    def has_encoder(self) -> bool:
        """Whether the prompt is read by an encoder, and only the answer is in the sequence."""
        return self.thread.engine.runner.max_prompt is not None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may have."""
        return self.thread.engine.runner.adapters

    def room(self, prompt: Sequence[int]) -> int:
        """The most new tokens after a prompt."""
        runner = self.thread.engine.runner
        longest = min(runner.max_positions, runner.pages * runner.page_size)
        # A decoder begins with a token of its own.
        return longest - (1 if self.has_encoder else len(prompt))

    def prompt(self, text: str) -> Tokens:
        """Ids of a prompt; see :func:`prompt_tokens`."""
        return prompt_tokens(self.tokenizer, text, self.thread.engine.runner)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Ids of a conversation. Raises ValueError if the chat template refuses it."""
        if self.has_encoder:
            return self.prompt(self.chat.render(messages))
        return tuple(self.chat.tokens(self.tokenizer, messages))

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token has at most."""
        return max(_LEAST_LONGEST, *map(len, self.tokenizer.token_bytes))

    @property
    def eod(self) -> int | None:
        """The end-of-document token, if there is one."""
        return self.tokenizer.special_ids.eod


@dataclass
class Answer:
    """What a request has got so far."""

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    finish: Finish | None = None
    beams: tuple[BeamResult, ...] = ()
    cached: int = 0

    def add(self, update: Update) -> None:
        """Appends what a step has added."""
        self.tokens += update.tokens
        self.scores += update.scores
        self.prompt_scores += update.prompt_scores
        self.finish, self.beams = update.finish, update.beams
        self.cached += update.cached


class Service:
    """The state of a server. All methods but :meth:`open` and :meth:`fail` are called in the thread
    of its event loop."""

    def __init__(
        self,
        name: str,
        limits: ServiceLimits | None = None,
        defaults: RequestDefaults | None = None,
        log: Callable[[str], None] = print,
        log_prompts: bool = False,
    ) -> None:
        self.name, self.limits, self.log = name, limits or ServiceLimits(), log
        self.defaults, self.log_prompts = defaults or RequestDefaults(), log_prompts
        self.metrics = Metrics(self.stats)
        self.created = int(time.time())
        self.bodies = HeldBodies(self.limits.held_bytes)
        self.turns = Turns(self.limits.text_seconds)
        self._active: Counter[int] = Counter()
        self._admitted: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._failure: str | None = None
        self._model: ServedModel | None = None
        self._has_ended = False

    def open(self, model: ServedModel) -> None:
        """Takes requests from now on."""
        self._model = model

    def drain(self) -> None:
        """Takes no more requests; those that were admitted continue."""
        self._draining = True

    async def end(self) -> None:
        """Answers the requests that remain with status 503."""
        self._has_ended = True
        for task in self._admitted:
            task.cancel()

    def fail(self, reason: str) -> None:
        """The engine will answer nothing more."""
        self._failure = reason

    @property
    def state(self) -> State:
        failed = self._failure is not None or (self._model and self._model.thread.failed)
        if failed:
            return "failed"
        if self._draining:
            return "draining"
        return "loading" if self._model is None else "ok"

    def stats(self) -> EngineStats | None:
        """The engine's; None before the model is loaded."""
        return None if self._model is None else self._model.thread.stats

    @property
    def active(self) -> int:
        """Requests that were admitted, and have no whole answer yet."""
        return len(self._active)

    def model(self) -> ServedModel:
        """Raises RequestError while requests are not taken."""
        if self.state == "ok" and self._model is not None:
            return self._model
        reason = {
            "loading": "the model is being loaded; try again later",
            "draining": "the server is about to end and takes no more requests",
        }.get(self.state, "the model has failed; the server is about to end")
        raise RequestError(reason, 503, code=self.state, retry_after=5)

    @contextmanager
    def admitted(self) -> Iterator[ServedModel]:
        """Within it a request is answered, also after :meth:`drain`. Raises RequestError while
        requests are not taken, and if the server ends before the answer."""
        model, task = self.model(), asyncio.current_task()
        assert task is not None
        self._admitted.add(task)
        try:
            with self._counted():
                yield model
        except asyncio.CancelledError:
            if self._has_ended:
                raise _stopped() from None
            raise
        finally:
            self._admitted.discard(task)

    @contextmanager
    def _counted(self) -> Iterator[RequestRecord]:
        """Counts a request as active, once, although its answer may be a stream that begins within
        another such block."""
        record = current_record.get(None) or RequestRecord()
        self._active[id(record)] += 1
        try:
            yield record
        finally:
            self._active[id(record)] -= 1
            if not self._active[id(record)]:
                del self._active[id(record)]

    async def in_turn(
        self,
        body: Body,
        client: str,
        model: ServedModel,
        make: Callable[[dict[str, Any], TextReader], Awaitable[T]],
    ) -> T:
        """The request that ``make`` builds of a body, in the turn of its client. Raises
        RequestError."""

        async def work() -> T:
            async with self.turns.of(client, body.size) as turn:
                parse = body.parsed
                is_small = body.size <= SMALL_BODY
                fields = parse() if is_small else await turn.work(parse)
                return await make(fields, TextReader(model, turn, self.limits.tokens))

        try:
            return await asyncio.wait_for(_without_frames(work()), self._seconds_left())
        except asyncio.TimeoutError as error:
            raise self._error(error) from None

    def _seconds_left(self) -> float:
        """Place of this task's request."""
        record = current_record.get(None) or RequestRecord()
        return record.begun + self.limits.request_seconds - time.monotonic()

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """What each request gets, in their order. Raises RequestError."""
        answers = [Answer() for _ in requests]
        async with aclosing(self.updates(requests)) as updates:
            async for index, update in updates:
                answers[index].add(update)
        return answers

    async def updates(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """What the requests get, as it comes, with their indices; whoever stops iterating cancels
        them. Raises RequestError, which ends all of them; if they cannot run at all, before the
        first update."""
        thread = (self._model or self.model()).thread
        queue: asyncio.Queue[tuple[int, Update] | BaseException | None] = asyncio.Queue()

        async def follow(index: int, request: GenerationRequest) -> None:
            clock = _Clock(self.metrics)
            try:
                async with aclosing(thread.stream(request, source)) as stream:
                    async for update in stream:
                        clock.note(update)
                        queue.put_nowait((index, update))
                queue.put_nowait(None)
            except Exception as error:  # to be raised by whoever reads the queue
                queue.put_nowait(error)

        seconds, loop = self._seconds_left(), asyncio.get_running_loop()
        timer = loop.call_later(seconds, queue.put_nowait, asyncio.TimeoutError())
        tasks = [asyncio.create_task(follow(*item)) for item in enumerate(requests)]
        with self._counted() as record:
            source = record.client, id(record)
            record.prompt_tokens += sum(len(request.prompt) for request in requests)
            try:
                running = len(tasks)
                while running:
                    found = await queue.get()
                    if isinstance(found, BaseException):
                        raise self._error(found) from None
                    if found is None:
                        running -= 1
                    elif found[1].finish == "cancelled":
                        raise _stopped()
                    else:
                        record.new_tokens += len(found[1].tokens)
                        yield found
            finally:
                timer.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _error(self, error: BaseException) -> RequestError:
        match error:
            case asyncio.TimeoutError():
                seconds = f"{self.limits.request_seconds:g}"
                return RequestError(
                    f"not finished within {seconds} seconds (--request-timeout)",
                    504,
                    code="timeout",
                )
            case QueueFull():
                return RequestError(str(error), 429, code="queue_full", retry_after=1)
            case EngineStopped():
                return RequestError(str(error), 503, code="stopped", retry_after=5)
            case ValueError():
                return RequestError(str(error))
        self.log(f"error: a request failed: {type(error).__name__}: {error}")
        if self.state == "failed":
            return RequestError("the model has failed; the server is about to end", 503)
        return RequestError("this request made the model fail", 500)


def _stopped() -> RequestError:
    text = "the server has ended before this text did"
    return RequestError(text, 503, code="stopped", retry_after=5)


class TextReader:
    """From the texts of a request to tokens, in its turn. All methods raise RequestError for a
    text that is too long, or that the tokenizer or the chat template refuses."""

    def __init__(self, model: ServedModel, turn: RequestTurn, most_tokens: int) -> None:
        self._model, self._turn, self._most_tokens = model, turn, most_tokens

    async def tokenized(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of texts."""
        return await self._split(texts, self._model.tokenizer.tokenize)

    async def prompts(self, texts: Sequence[str]) -> list[Tokens]:
        """Ids of prompts, each at least one."""
        return await self._split(texts, self._model.prompt)

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Ids of a conversation, up to the model's next message."""
        self._check([sum(len(message["content"]) for message in messages)])
        # A template is rendered in another process, which this thread must not wait for.
        with _refusals():
            return await self._turn.work(self._model.chat_prompt, messages)

    async def _split(
        self, texts: Sequence[str], split: Callable[[str], Iterable[int]]
    ) -> list[Tokens]:
        def work() -> list[Tokens]:
            return [tuple(split(text)) for text in texts]

        sizes = [len(text) for text in texts]
        self._check(sizes)
        with _refusals():
            return work() if sum(sizes) <= _SHORT else await self._turn.work(work)

    def _check(self, sizes: Sequence[int]) -> None:
        """Refuses, before they are split, texts of these characters that must be too many
        tokens."""
        model, most = self._model, self._most_tokens
        longest = min(model.longest_prompt, most) * model.longest_token
        if max(sizes, default=0) > longest or sum(sizes) > most * model.longest_token:
            text = (
                f"This model's maximum context length is {model.longest_prompt:,} tokens, a "
                f"request has at most {most:,}, and no token has more than {model.longest_token:,} "
                f"characters: {sum(sizes):,} characters are too many"
            )
            raise RequestError(text, code="context_length_exceeded")


async def _without_frames(work: Awaitable[T]) -> T:
    """The result of work, whose RequestError keeps nothing of a large request in memory."""
    try:
        return await work
    except RequestError as error:
        refusal = error
    refusal.__traceback__ = refusal.__context__ = None
    raise refusal


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises the errors of a tokenizer or chat template as RequestError."""
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error)) from None


async def prepared(
    request: Request,
    service: Service,
    model: ServedModel,
    make: Callable[[dict[str, Any], TextReader], Awaitable[T]],
) -> T:
    """Reads a request's body, and makes of it, as long as its client waits, what the engine is to
    do. Raises RequestError, ClientGone."""
    client = "" if request.client is None else request.client.host
    with Body(service.bodies) as body:
        await body.read(request, service.limits)
        return await while_connected(request, service.in_turn(body, client, model, make))


class _Clock:
    """Times the tokens of a request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._last, self._first = metrics, time.perf_counter(), True

    def note(self, update: Update) -> None:
        if not update.tokens:
            return
        now = time.perf_counter()
        waited, self._last = now - self._last, now
        if self._first:
            self._metrics.first_token.observe(waited)
        else:
            self._metrics.next_token.observe(waited / len(update.tokens))
        self._first = False


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of one of several texts that a client wants of one seed: the first one's is this
    seed, so that it is the text that the client would get alone."""
    return seed if seed is None or index == 0 else derive_seed(seed, "text", index)
