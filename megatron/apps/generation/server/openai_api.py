"""OpenAI's API: completions, chat completions and models."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from megatron.apps.generation.decoding.text_stream import bytes_of_token
from megatron.apps.generation.request import TokenScore, Update
from megatron.apps.generation.server.exchange import JSON, RequestError, while_connected
from megatron.apps.generation.server.openai_requests import BodyReader, TextsAsked, check_model_name
from megatron.apps.generation.server.service import ServedModel, Service, TextReader
from megatron.apps.generation.server.texts import (
    ChoiceText,
    PlacedToken,
    TextPiece,
    name_there,
    placed_prompt,
    token_name,
)
from megatron.tokenizer import Tokenizer

Json = dict[str, Any]


class _Completions:
    """Response format of ``/v1/completions``."""

    whole = part = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer, self._top = tokenizer, top

    def choice(self, index: int, piece: TextPiece) -> Json:
        return _choice(index, {"text": piece.text}, self._logprobs(piece.tokens), piece)

    chunk = choice

    def first(self, index: int, echo: TextPiece | None) -> Json | None:
        """Return a stream's first choice: the prompt ``echo``, or None if it is not requested."""
        return None if echo is None else self.chunk(index, echo)

    def _logprobs(self, placed: tuple[PlacedToken, ...]) -> Json | None:
        if self._top is None:
            return None
        return {
            "tokens": [name_there(self._tokenizer, p) for p in placed],
            "token_logprobs": [None if p.score is None else p.score.logprob for p in placed],
            "top_logprobs": [self._most_probable(p) for p in placed] if self._top else None,
            "text_offset": [p.offset for p in placed],
        }

    def _most_probable(self, placed: PlacedToken) -> dict[str, float] | None:
        if placed.score is None:
            return None
        here, logprobs = name_there(self._tokenizer, placed), dict[str, float]()
        for token, logprob in placed.score.top:
            name = here if token == placed.token else token_name(self._tokenizer, token)
            logprobs.setdefault(name, logprob)
        # As in OpenAI's API, the token itself is always included.
        logprobs.setdefault(here, placed.score.logprob)
        return logprobs


class _Chat:
    """Response format of ``/v1/chat/completions``."""

    whole, part = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer, self._top = tokenizer, top

    def choice(self, index: int, piece: TextPiece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return _choice(index, {"message": message}, self._logprobs(piece), piece)

    def chunk(self, index: int, piece: TextPiece) -> Json:
        delta = {"content": piece.text} if piece.text or not piece.finish else {}
        return _choice(index, {"delta": delta}, self._logprobs(piece), piece)

    def first(self, index: int, echo: TextPiece | None) -> Json | None:
        """Return the first choice of a stream, which sets the role."""
        delta = {"role": "assistant", "content": ""}
        return _choice(index, {"delta": delta}, None, TextPiece("", (), None))

    def _logprobs(self, piece: TextPiece) -> Json | None:
        if self._top is None:
            return None
        content = []
        for placed in piece.tokens:
            assert placed.score is not None
            one = self._one(placed.token, placed.score.logprob, placed.name)
            content.append(one | {"top_logprobs": [self._one(*top) for top in placed.score.top]})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float, name: str | None = None) -> Json:
        text = bytes_of_token(self._tokenizer, token) if name is None else name.encode()
        return {"token": text.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(text)}


_Form = _Completions | _Chat


def _choice(index: int, content: Json, logprobs: Json | None, piece: TextPiece) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": piece.finish}


class _Exchange:
    """One request to either completion endpoint, and its response."""

    def __init__(
        self, service: Service, model: ServedModel, asked: TextsAsked, form: type[_Form]
    ) -> None:
        self._service, self._asked, self._model = service, asked, model
        self._form = form(model.tokenizer, asked.top)
        self._id = f"{form.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.template.adapter or self._service.name,
            "choices": choices,
        }

    def _text(self, index: int) -> ChoiceText:
        number = index // self._asked.choices
        shown = self._asked.shown[number] if self._asked.echo else ""
        # A prompt that an encoder has read is not part of the text.
        prompt = () if self._model.has_encoder else self._asked.prompts[number]
        stops, hidden = self._asked.template.stopping.texts, self._asked.hidden
        return ChoiceText(self._model.tokenizer, prompt, stops, hidden, len(shown))

    def _usage(self, new: int, cached: int) -> Json:
        prompt = sum(map(len, self._asked.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def whole(self) -> Json:
        """Return the whole response once all texts are complete."""
        answers = await self._service.complete(self._asked.requests())
        choices = []
        for index, answer in enumerate(answers):
            piece, echo = self._text(index).add(answer), self._echo(index, answer.prompt_scores)
            if echo is not None:
                piece = TextPiece(echo.text + piece.text, echo.tokens + piece.tokens, piece.finish)
            choices.append(self._form.choice(index, piece))
        new = sum(len(answer.tokens) for answer in answers)
        cached = sum(answer.cached for answer in answers[:: self._asked.choices])
        return self._envelope(self._form.whole, choices) | {"usage": self._usage(new, cached)}

    def _echo(self, index: int, scores: tuple[TokenScore, ...]) -> TextPiece | None:
        """Return the prompt with its tokens' scores, or None if the response does not echo it."""
        if not self._asked.echo:
            return None
        number = index // self._asked.choices
        prompt, shown = self._asked.prompts[number], self._asked.shown[number]
        # an empty prompt consists of one token without text
        if self._asked.top is None or not shown:
            return TextPiece(shown, (), None)
        placed = placed_prompt(self._model.tokenizer, prompt, (None, *scores), shown)
        return TextPiece(shown, tuple(placed), None)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events. Raises RequestError only before the first
        event; later errors are sent as an event."""
        asked, new, cached = self._asked, 0, 0
        texts = [self._text(i) for i in range(len(asked.prompts) * asked.choices)]
        begun: set[int] = set()
        extra = {"usage": None} if asked.include_usage else {}
        try:
            async with aclosing(self._service.updates(asked.requests())) as updates:
                async for index, update in updates:
                    new += len(update.tokens)
                    if index % asked.choices == 0:
                        cached += update.cached
                    for choice in self._chunks(index, update, texts[index], begun):
                        yield _event(self._envelope(self._form.part, [choice]) | extra)
        except RequestError as error:
            if not begun:
                raise
            yield _event(error.openai())
        else:
            if asked.include_usage:
                usage = {"usage": self._usage(new, cached)}
                yield _event(self._envelope(self._form.part, []) | usage)
        yield b"data: [DONE]\n\n"

    def _chunks(self, index: int, update: Update, text: ChoiceText, begun: set[int]) -> list[Json]:
        chunks = []
        if index not in begun:
            begun.add(index)
            first = self._form.first(index, self._echo(index, update.prompt_scores))
            chunks += [] if first is None else [first]
        piece = text.add(update)
        if piece.text or piece.tokens or piece.finish is not None:
            chunks.append(self._form.chunk(index, piece))
        return chunks


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Return a streaming response. Waits for the first event, so that an error can still set the
    HTTP status."""

    async def next_event() -> bytes:
        return await anext(events)

    try:
        first = await while_connected(request, next_event())
    except BaseException:  # also if cancelled: generation must be stopped
        await events.aclose()
        raise

    async def all_events() -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(all_events(), headers=headers, media_type="text/event-stream")


def openai_router(service: Service) -> APIRouter:
    """Return the routes of OpenAI's API, with and without the prefix ``/v1``."""
    router = APIRouter()

    async def answer(
        request: Request,
        read: Callable[[BodyReader], Awaitable[TextsAsked]],
        form: type[_Form],
    ) -> Response:
        async def make(fields: Json, texts: TextReader) -> TextsAsked:
            if service.log_prompts:
                service.log(f"prompts: {fields.get('prompt', fields.get('messages'))}")
            return await read(BodyReader(service, model, fields, texts))

        with service.admitted() as model:
            asked = await service.prepared(request, model, make)
            exchange = _Exchange(service, model, asked, form)
            if asked.stream:
                return await _streamed(request, exchange.stream())
            return JSON(await while_connected(request, exchange.whole()))

    def described(name: str) -> Json:
        parent = {} if name == service.name else {"parent": service.name}
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            **parent,
            "owned_by": "megatron-deepspeed",
            "max_model_len": service.model().runner.max_positions,
        }

    for prefix in ("/v1", ""):

        @router.post(f"{prefix}/completions")
        async def completions(request: Request) -> Response:
            return await answer(request, BodyReader.completion, _Completions)

        @router.post(f"{prefix}/chat/completions")
        async def chat(request: Request) -> Response:
            return await answer(request, BodyReader.chat, _Chat)

        @router.get(f"{prefix}/models")
        async def models() -> JSON:
            names = service.name, *service.model().runner.adapters
            return JSON({"object": "list", "data": [described(name) for name in names]})

        @router.get(f"{prefix}/models/{{name:path}}")
        async def model(name: str) -> JSON:
            check_model_name(service, service.model(), name, "there is")
            return JSON(described(name))

    return router
