"""OpenAI's API: completions, chat, models."""

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
from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.exchange import JSON, while_connected
from megatron.apps.generation.server.openai_requests import (
    TextsAsked,
    chat_asked,
    completion_asked,
)
from megatron.apps.generation.server.service import (
    Answer,
    ServedModel,
    Service,
    TextReader,
    prepared,
)
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
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _Completions:
    """The form of answers of ``/v1/completions``."""

    whole = part = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, asked: TextsAsked) -> None:
        self._tokenizer, self._asked = tokenizer, asked

    def choice(self, index: int, piece: TextPiece) -> Json:
        logprobs = None if self._asked.top is None else self._logprobs(piece.tokens)
        return _choice(index, {"text": piece.text}, logprobs, piece)

    chunk = choice

    def first(self, index: int, echo: TextPiece | None) -> Json | None:
        """What a stream begins with; ``echo`` is the prompt, if it is part of the text."""
        return None if echo is None else self.chunk(index, echo)

    def _logprobs(self, placed: tuple[PlacedToken, ...]) -> Json:
        names = [name_there(self._tokenizer, p) for p in placed]
        return {
            "tokens": names,
            "token_logprobs": [None if p.score is None else p.score.logprob for p in placed],
            "top_logprobs": [self._top(p) for p in placed] if self._asked.top else None,
            "text_offset": [p.offset for p in placed],
        }

    def _top(self, placed: PlacedToken) -> dict[str, float] | None:
        if placed.score is None:
            return None
        here, found = name_there(self._tokenizer, placed), dict[str, float]()
        for token, logprob in placed.score.top:
            name = here if token == placed.token else token_name(self._tokenizer, token)
            found.setdefault(name, logprob)
        # As OpenAI: the token itself is always there.
        found.setdefault(here, placed.score.logprob)
        return found


class _Chat:
    """The form of answers of ``/v1/chat/completions``."""

    whole, part = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, asked: TextsAsked) -> None:
        self._tokenizer, self._asked = tokenizer, asked

    def choice(self, index: int, piece: TextPiece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return _choice(index, {"message": message}, self._logprobs(piece), piece)

    def chunk(self, index: int, piece: TextPiece) -> Json:
        delta = {"content": piece.text} if piece.text or not piece.finish else {}
        return _choice(index, {"delta": delta}, self._logprobs(piece), piece)

    def first(self, index: int, echo: TextPiece | None) -> Json | None:
        """What a stream begins with."""
        delta = {"role": "assistant", "content": ""}
        return _choice(index, {"delta": delta}, None, TextPiece("", (), None))

    def _logprobs(self, piece: TextPiece) -> Json | None:
        if self._asked.top is None:
            return None
        content = []
        for placed in piece.tokens:
            assert placed.score is not None
            top = [self._one(*pair) for pair in placed.score.top]
            one = self._one(placed.token, placed.score.logprob, placed.name)
            content.append({**one, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float, placed_as: str | None = None) -> Json:
        found = bytes_of_token(self._tokenizer, token)
        if placed_as is not None:
            found = placed_as.encode()
        name = found.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(found)}


_Form = _Completions | _Chat


def _choice(index: int, content: Json, logprobs: Json | None, piece: TextPiece) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": piece.finish}


class _Exchange:
    """One request for texts, and its answer in either form."""

    def __init__(
        self, service: Service, model: ServedModel, asked: TextsAsked, form: type[_Form]
    ) -> None:
        self.service, self.asked, self._model = service, asked, model
        self.form, self._tokenizer = form(model.tokenizer, asked), model.tokenizer
        self._id = f"{form.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        name = self.asked.template.adapter or self.service.name
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": name,
            "choices": choices,
        }

    def _text(self, index: int) -> ChoiceText:
        shown = self.asked.shown[index // self.asked.choices] if self.asked.echo else ""
        stops = self.asked.template.stopping.texts
        # Of an encoder the prompt is no part of the text.
        encoded = self._model.has_encoder
        prompt = () if encoded else self.asked.prompts[index // self.asked.choices]
        return ChoiceText(self._tokenizer, prompt, stops, self.asked.hidden, len(shown))

    def _usage(self, new: int, cached: int) -> Json:
        prompt = sum(map(len, self.asked.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def whole(self) -> Json:
        """The answer at once."""
        answers = await self.service.complete(self.asked.requests())
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        new = sum(len(answer.tokens) for answer in answers)
        cached = sum(answer.cached for answer in answers[:: self.asked.choices])
        return self._envelope(self.form.whole, choices) | {"usage": self._usage(new, cached)}

    def _whole_choice(self, index: int, answer: Answer) -> Json:
        piece = self._text(index).add(answer)
        echo = self._echo(index, answer.prompt_scores)
        if echo is not None:
            piece = TextPiece(echo.text + piece.text, echo.tokens + piece.tokens, piece.finish)
        return self.form.choice(index, piece)

    def _echo(self, index: int, scores: tuple[TokenScore, ...]) -> TextPiece | None:
        """The prompt with the scores of its tokens, if it is part of the text."""
        if not self.asked.echo:
            return None
        number = index // self.asked.choices
        prompt, shown = self.asked.prompts[number], self.asked.shown[number]
        if self.asked.top is None or not shown:  # an empty prompt has a token that is not shown
            return TextPiece(shown, (), None)
        found = placed_prompt(self._tokenizer, prompt, (None, *scores), shown)
        return TextPiece(shown, tuple(found), None)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises RequestError before the first one only."""
        new, cached = 0, 0
        texts = [self._text(i) for i in range(len(self.asked.prompts) * self.asked.choices)]
        begun: set[int] = set()
        try:
            async with aclosing(self.service.updates(self.asked.requests())) as updates:
                async for index, update in updates:
                    new += len(update.tokens)
                    if index % self.asked.choices == 0:
                        cached += update.cached
                    for choice in self._chunks(index, update, texts[index], begun):
                        yield self._event(choice)
        except RequestError as error:
            if not begun:
                raise
            yield _event(error.openai())
        else:
            if self.asked.include_usage:
                usage = {"usage": self._usage(new, cached)}
                yield _event(self._envelope(self.form.part, []) | usage)
        yield b"data: [DONE]\n\n"

    def _chunks(self, index: int, update: Update, text: ChoiceText, begun: set[int]) -> list[Json]:
        chunks = []
        if index not in begun:
            begun.add(index)
            first = self.form.first(index, self._echo(index, update.prompt_scores))
            chunks += [] if first is None else [first]
        piece = text.add(update)
        if piece.text or piece.tokens or piece.finish is not None:
            chunks.append(self.form.chunk(index, piece))
        return chunks

    def _event(self, choice: Json) -> bytes:
        usage = {"usage": None} if self.asked.include_usage else {}
        return _event(self._envelope(self.form.part, [choice]) | usage)


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Begins with the first event, so that errors before it have their status."""
    try:
        first = await while_connected(request, _next(events))
    except BaseException:  # a cancelled request, too, must end its generation
        await events.aclose()
        raise

    async def all_events() -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    return StreamingResponse(all_events(), headers=_HEADERS, media_type="text/event-stream")


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def openai_router(service: Service) -> APIRouter:
    """The routes of OpenAI's API, with and without ``/v1``."""
    router = APIRouter()

    async def answer(
        request: Request,
        read: Callable[[Service, ServedModel, Json, TextReader], Awaitable[TextsAsked]],
        form: type[_Form],
    ) -> Response:
        async def make(fields: Json, texts: TextReader) -> TextsAsked:
            if service.log_prompts:
                service.log(f"prompts: {fields.get('prompt', fields.get('messages'))}")
            return await read(service, model, fields, texts)

        with service.admitted() as model:
            asked = await prepared(request, service, model, make)
            exchange = _Exchange(service, model, asked, form)
            if asked.stream:
                return await _streamed(request, exchange.stream())
            return JSON(await while_connected(request, exchange.whole()))

    def described(name: str) -> Json:
        found = {"id": name, "object": "model", "created": service.created}
        if name != service.name:
            found["parent"] = service.name
        positions = service.model().positions
        return {**found, "owned_by": "megatron-deepspeed", "max_model_len": positions}

    for prefix in ("/v1", ""):

        @router.post(f"{prefix}/completions")
        async def completions(request: Request) -> Response:
            return await answer(request, completion_asked, _Completions)

        @router.post(f"{prefix}/chat/completions")
        async def chat(request: Request) -> Response:
            return await answer(request, chat_asked, _Chat)

        @router.get(f"{prefix}/models")
        async def models() -> JSON:
            names = service.name, *service.model().adapters
            return JSON({"object": "list", "data": [described(name) for name in names]})

        @router.get(f"{prefix}/models/{{name:path}}")
        async def model(name: str) -> JSON:
            names = service.name, *service.model().adapters
            if name not in names:
                known = ", ".join(map(repr, names))
                text = f"the model {name[:200]!r} does not exist here; there is {known}"
                raise RequestError(text, 404, param="model", code="model_not_found")
            return JSON(described(name))

    return router
