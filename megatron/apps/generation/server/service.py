"""Serve a model to many clients concurrently."""

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

from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Runner,
    Update,
    prompt_tokens,
)
from megatron.apps.generation.scheduling.engine import EngineStats, QueueFull, completion_of
from megatron.apps.generation.scheduling.engine_thread import EngineStopped, EngineThread
from megatron.apps.generation.server.config import RequestDefaults, ServiceLimits
from megatron.apps.generation.server.exchange import (
    SMALL_BODY,
    Body,
    HeldBodies,
    RequestError,
    while_connected,
)
from megatron.apps.generation.server.metrics import Metrics, RequestRecord, current_record
from megatron.apps.generation.server.turns import RequestTurn, Turns
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.apps.generation.decoding.chat import ChatFormat

T = TypeVar("T")
Tokens = tuple[int, ...]
Make = Callable[[dict[str, Any], "TextReader"], Awaitable[T]]
"""Function that builds an API's request from the fields of its JSON body."""
# maximum characters to tokenize in the event loop, which takes one or two milliseconds
_SHORT = 4096
# Minimum for `longest_token`, in characters: some tokenizers drop spaces, so a token may cover more
# characters of the text than it contains.
_LEAST_LONGEST = 64


@dataclass(frozen=True)
class ServedModel:
    """Running engine, with the tokenizer, chat format and end tokens of its model."""

    thread: EngineThread
    tokenizer: Tokenizer
    chat: ChatFormat
    ends: frozenset[int]

    @property
    def runner(self) -> Runner:
        return self.thread.engine.runner

    @property
    def has_encoder(self) -> bool:
        """True if the model has an encoder for the prompt, so that the sequence contains only the
        answer."""
        return self.runner.max_prompt is not None

    @property
    def longest_prompt(self) -> int:
        """Maximum number of tokens of a prompt."""
        runner = self.runner
        return runner.max_positions if runner.max_prompt is None else runner.max_prompt

    def room(self, prompt: Sequence[int]) -> int:
        """Return the maximum number of new tokens after a prompt."""
        runner = self.runner
        longest = min(runner.max_positions, runner.pages * runner.page_size)
        # With an encoder, the sequence begins with a start token instead of the prompt.
        return longest - (1 if self.has_encoder else len(prompt))

    def prompt(self, text: str) -> Tokens:
        """Return the token ids of a prompt; see :func:`prompt_tokens`."""
        return prompt_tokens(self.tokenizer, text, self.runner)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Return the token ids of a conversation. Raises ValueError if the template rejects it."""
        return self.chat.prompt(self.tokenizer, messages, self.runner)

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters of a text per token, estimated from the longest token."""
        return max(_LEAST_LONGEST, *map(len, self.tokenizer.token_bytes))


class Service:
    """State of a server. All methods except :meth:`open` and :meth:`fail` must be called in the
    thread of its event loop."""

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
        """Start accepting requests."""
        self._model = model

    def drain(self) -> None:
        """Refuse new requests. Admitted ones continue."""
        self._draining = True

    async def end(self) -> None:
        """Cancel the remaining requests, which are answered with status 503."""
        self._has_ended = True
        for task in self._admitted:
            task.cancel()

    def fail(self, reason: str) -> None:
        """Record that the engine has failed and cannot answer further requests."""
        self._failure = reason

    @property
    def state(self) -> Literal["loading", "ok", "draining", "failed"]:
        if self._failure is not None or (self._model and self._model.thread.failed):
            return "failed"
        if self._draining:
            return "draining"
        return "loading" if self._model is None else "ok"

    def stats(self) -> EngineStats | None:
        """Return the engine's statistics, or None before the model is loaded."""
        return None if self._model is None else self._model.thread.stats

    @property
    def active(self) -> int:
        """Number of admitted requests that are not fully answered."""
        return len(self._active)

    def model(self) -> ServedModel:
        """Return the served model. Raises RequestError while requests are refused."""
        if self.state == "ok" and self._model is not None:
            return self._model
        reason = {
            "loading": "the model is being loaded; try again later",
            "draining": "the server is about to end and takes no more requests",
        }.get(self.state, "the model has failed; the server is about to end")
        raise RequestError(reason, 503, code=self.state, retry_after=5)

    @contextmanager
    def admitted(self) -> Iterator[ServedModel]:
        """Yield the served model for a block that answers one request. :meth:`drain` does not
        interrupt it. Raises RequestError while requests are refused, or if the server ends before
        the block does."""
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
        """Count a request as active during the block. Nested blocks count it only once: a streamed
        response enters this block again."""
        record = current_record.get(None) or RequestRecord()
        self._active[id(record)] += 1
        try:
            yield record
        finally:
            self._active[id(record)] -= 1
            if not self._active[id(record)]:
                del self._active[id(record)]

    async def prepared(self, request: Request, model: ServedModel, make: Make[T]) -> T:
        """Read a request's body, and return what ``make`` builds from its fields. Waits for the
        client's turn. Raises RequestError if the request is invalid or times out, and ClientGone if
        the client disconnects."""
        client = "" if request.client is None else request.client.host

        async def work() -> T:
            async with self.turns.of(client, body.size) as turn:
                parse = body.parsed
                fields = parse() if body.size <= SMALL_BODY else await turn.work(parse)
                return await make(fields, TextReader(model, turn, self.limits.tokens))

        async def in_time() -> T:
            try:
                return await asyncio.wait_for(_without_frames(work()), self._seconds_left())
            except asyncio.TimeoutError as error:
                raise self._error(error) from None

        with Body(self.bodies) as body:
            await body.read(request, self.limits)
            return await while_connected(request, in_time())

    def _seconds_left(self) -> float:
        record = current_record.get(None) or RequestRecord()
        return record.begun + self.limits.request_seconds - time.monotonic()

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return the results of requests, in their order. Raises RequestError if any fails."""
        updates: list[list[Update]] = [[] for _ in requests]
        async with aclosing(self.updates(requests)) as coming:
            async for index, update in coming:
                updates[index].append(update)
        return [completion_of(each) for each in updates]

    async def updates(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Update], None]:
        """Yield the updates of requests as they arrive, each with the index of its request. Closing
        the generator cancels all requests, and so does an error, which is raised as RequestError.
        If a request can never run, the error is raised before its first update."""
        thread = (self._model or self.model()).thread
        queue: asyncio.Queue[tuple[int, Update] | BaseException | None] = asyncio.Queue()

        async def follow(index: int, request: GenerationRequest) -> None:
            last, first = time.perf_counter(), True
            try:
                async with aclosing(thread.stream(request, source)) as stream:
                    async for update in stream:
                        if update.tokens:
                            now = time.perf_counter()
                            if first:
                                self.metrics.first_token.observe(now - last)
                            else:
                                self.metrics.next_token.observe((now - last) / len(update.tokens))
                            last, first = now, False
                        queue.put_nowait((index, update))
                queue.put_nowait(None)
            except Exception as error:  # the reader of the queue raises the error
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
                    event = await queue.get()
                    if isinstance(event, BaseException):
                        raise self._error(event) from None
                    if event is None:
                        running -= 1
                    elif event[1].finish == "cancelled":
                        raise _stopped()
                    else:
                        record.new_tokens += len(event[1].tokens)
                        yield event
            finally:
                timer.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _error(self, error: BaseException) -> RequestError:
        match error:
            case asyncio.TimeoutError():
                text = f"not finished within {self.limits.request_seconds:g} seconds"
                return RequestError(f"{text} (--request-timeout)", 504, code="timeout")
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
    """Tokenizer of a request's texts, limited by the request's turn. Methods raise RequestError if
    a text is too long, or if the tokenizer or the chat template rejects it."""

    def __init__(self, model: ServedModel, turn: RequestTurn, most_tokens: int) -> None:
        self._model, self._turn, self._most_tokens = model, turn, most_tokens

    async def tokenized(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of texts."""
        return await self._split(texts, self._model.tokenizer.tokenize)

    async def prompts(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of prompts, at least one token each."""
        return await self._split(texts, self._model.prompt)

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Return the token ids of a conversation, up to the start of the model's answer."""
        size = sum(len(message["content"]) for message in messages)
        # Rendering runs in another process, for which the event loop must not wait.
        return await self._result([size], False, lambda: self._model.chat_prompt(messages))

    async def _split(
        self, texts: Sequence[str], split: Callable[[str], Iterable[int]]
    ) -> list[Tokens]:
        sizes = [len(text) for text in texts]
        is_short = sum(sizes) <= _SHORT
        return await self._result(sizes, is_short, lambda: [tuple(split(text)) for text in texts])

    async def _result(self, sizes: Sequence[int], at_once: bool, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on texts of ``sizes`` characters. ``at_once`` runs it in
        the event loop. Raises RequestError if texts of these sizes are certain to have too many
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
        try:
            return work() if at_once else await self._turn.work(work)
        except ValueError as error:  # raised by the tokenizer or the chat template
            raise RequestError(str(error)) from None


async def _without_frames(work: Awaitable[T]) -> T:
    """Return the result of ``work``. Removes the traceback from a RequestError, whose frames would
    keep a large request in memory."""
    try:
        return await work
    except RequestError as error:
        refusal = error
    refusal.__traceback__ = refusal.__context__ = None
    raise refusal


def seed_of(seed: int | None, index: int) -> int | None:
    """Return the seed of the ``index``-th text of a request. The first text uses the request's own
    seed, so that it equals the text that the client would get alone."""
    return seed if seed is None or index == 0 else derive_seed(seed, "text", index)
