"""A model that many clients ask at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megatron.inference.prompts import prompt_tokens
from megatron.inference.request import BeamResult, Finish, GenerationRequest, TokenScore, Update
from megatron.inference.scheduling.engine import QueueFull
from megatron.inference.scheduling.engine_stats import EngineStats
from megatron.inference.scheduling.engine_thread import EngineStopped, EngineThread
from megatron.inference.server.config import RequestDefaults, ServiceLimits
from megatron.inference.server.errors import RequestError
from megatron.inference.server.exchange import HeldBodies
from megatron.inference.server.metrics import Metrics, RequestRecord, current_record
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.inference.decoding.chat import ChatFormat

T = TypeVar("T")
Tokens = tuple[int, ...]
State = Literal["loading", "ok", "draining", "failed"]
_SHORT = 4096
"""Characters that are split into tokens in less than a millisecond or two."""


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
        self.active = 0
        self.bodies = HeldBodies(self.limits.held_bytes)
        self._draining = False
        self._failure: str | None = None
        self._model: ServedModel | None = None
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    def open(self, model: ServedModel) -> None:
        """Takes requests from now on."""
        self._model = model

    def drain(self) -> None:
        """Takes no more requests from now on."""
        self._draining = True

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

    def model(self) -> ServedModel:
        """Raises RequestError while requests are not taken."""
        if self.state == "ok" and self._model is not None:
            return self._model
        reason = {
            "loading": "the model is being loaded; try again later",
            "draining": "the server is about to end and takes no more requests",
        }.get(self.state, "the model has failed; the server is about to end")
        raise RequestError(reason, 503, code=self.state, retry_after=5)

    async def tokenized(self, text: str) -> Tokens:
        """Ids of a text. Raises RequestError if the tokenizer cannot split it."""
        return await self._split(len(text), self.model().tokenizer.tokenize, text)

    async def prompt(self, text: str) -> Tokens:
        """Ids of a prompt, at least one. Raises RequestError if the tokenizer cannot make one."""
        return await self._split(len(text), self.model().prompt, text)

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Tokens:
        """Ids of a conversation, up to the model's next message. Raises RequestError if the chat
        template refuses it."""
        model = self.model()
        # A template is rendered in another process, which this thread must not wait for.
        return await self._split(_SHORT + 1, model.chat_prompt, messages)

    async def _split(
        self, characters: int, split: Callable[..., Iterable[int]], *arguments: Any
    ) -> Tokens:
        try:
            return tuple(await self._apart(characters, split, *arguments))
        except ValueError as error:
            raise RequestError(str(error)) from None

    async def _apart(self, characters: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work on texts, in another thread if they are long."""
        if characters <= _SHORT:
            return work(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, work, *arguments)

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
        thread = self.model().thread
        queue: asyncio.Queue[tuple[int, Update] | BaseException | None] = asyncio.Queue()

        async def follow(index: int, request: GenerationRequest) -> None:
            clock = _Clock(self.metrics)
            try:
                async with aclosing(thread.stream(request)) as stream:
                    async for update in stream:
                        clock.note(update)
                        queue.put_nowait((index, update))
                queue.put_nowait(None)
            except Exception as error:  # to be raised by whoever reads the queue
                queue.put_nowait(error)

        self.active += 1
        record = current_record.get(None) or RequestRecord()
        record.prompt_tokens += sum(len(request.prompt) for request in requests)
        seconds = self.limits.request_seconds
        timer = asyncio.get_running_loop().call_later(seconds, queue.put_nowait, TimeoutError())
        tasks = [asyncio.create_task(follow(*item)) for item in enumerate(requests)]
        try:
            running = len(tasks)
            while running:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise self._error(found) from None
                if found is None:
                    running -= 1
                elif found[1].finish == "cancelled":
                    text = "the server has ended before this text did"
                    raise RequestError(text, 503, code="stopped", retry_after=5)
                else:
                    record.new_tokens += len(found[1].tokens)
                    yield found
        finally:
            timer.cancel()
            self.active -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _error(self, error: BaseException) -> RequestError:
        match error:
            case TimeoutError():
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
