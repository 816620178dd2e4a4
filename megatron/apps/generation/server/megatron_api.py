"""Megatron's own API: ``PUT /api``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request

from megatron.apps.generation.decoding.text_stream import token_texts
from megatron.apps.generation.request import (
    Beams,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.server.config import RequestDefaults
from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.exchange import JSON, while_connected
from megatron.apps.generation.server.fields import (
    Fields,
    is_integer,
    is_number,
)
from megatron.apps.generation.server.service import (
    Answer,
    ServedModel,
    Service,
    TextReader,
    prepared,
    seed_of,
)

MAX_PROMPTS = 128
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("prompt", "messages", "inputs"), "prompts"),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_tokens"), "tokens_to_generate"
    ),
    "seed": "random_seed",
    "stop": "stop_on_eol, stop_on_double_eol or stop_token",
    "n": "an equal prompt for each text",
    "num_beams": "beam_width",
    "stream": "/v1/completions",
}
"""Of other APIs' fields, what to use here. A field that is not known is refused, since the answer
would not be what it asks for, and nothing in it would say so."""
_FLAGS = ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon")


@dataclass(frozen=True)
class MegatronRequest:
    """The fields of a request; ``top_k`` and ``top_p`` are 0 for all tokens."""

    prompts: tuple[str, ...]
    tokens_to_generate: int = 64
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False  # noqa: N815
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int | None = None
    no_log: bool = False
    beam_width: int | None = None
    stop_token: int | None = None
    length_penalty: float = 1.0
    adapter: str | None = None


def parsed(body: Mapping[str, Any], defaults: RequestDefaults) -> MegatronRequest:
    """Checks the fields in Megatron's order. Raises RequestError with Megatron's words."""
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        _require(old not in body, f"{old} is no longer used.  Replace with {new}")
    _require("prompts" in body, "prompts argument required")
    fields: dict[str, Any] = {"prompts": _prompts(body["prompts"])}
    fields |= _how_much(body) | _how_to_sample(body, defaults)
    fields["add_BOS"] = _flag(body, "add_BOS")
    _require(all(fields["prompts"]) or fields["add_BOS"], "Empty prompts require add_BOS=true")
    fields |= {name: _flag(body, name) for name in _FLAGS}
    if "random_seed" in body:
        fields["random_seed"] = seed = body["random_seed"]
        _require(is_integer(seed), "random_seed must be integer")
        _require(seed >= 0, "random_seed must be a positive integer")
    fields["no_log"] = _flag(body, "no_log")
    fields |= _beams(body, len(fields["prompts"]))
    fields["adapter"] = body.get("adapter")
    _require(isinstance(fields["adapter"], str | None), "adapter must be a string")
    for name, ours in _NAMES_ELSEWHERE.items():
        _require(name not in body, f"{name} is not a field of this request; use {ours}")
    Fields(body).end(MegatronRequest.__dataclass_fields__)
    return MegatronRequest(**fields)


def _require(right: bool, message: str) -> None:
    if not right:
        raise RequestError(message)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    _require(isinstance(value, bool), f"{name} must be a boolean value")
    return value


def _prompts(prompts: Any) -> tuple[str, ...]:
    _require(isinstance(prompts, list), "prompts is not a list of strings")
    _require(len(prompts) > 0, "prompts is empty")
    _require(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _require(all(isinstance(p, str) for p in prompts), "prompts is not a list of strings")
    return tuple(prompts)


def _how_much(body: Mapping[str, Any]) -> dict[str, Any]:
    tokens = body.get("tokens_to_generate", MegatronRequest.tokens_to_generate)
    _require(is_integer(tokens), "tokens_to_generate must be an integer greater than 0")
    _require(tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = _flag(body, "logprobs")
    _require(tokens > 0 or logprobs, "tokens_to_generate=0 implies logprobs should be True")
    return {"tokens_to_generate": tokens, "logprobs": logprobs}


def _how_to_sample(body: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, Any]:
    temperature = body.get("temperature", defaults.temperature)
    _require(
        is_number(temperature) and 0 < temperature <= 100,
        "temperature must be a positive number less than or equal to 100.0",
    )
    own = {"top_k", "top_p"} & body.keys()
    top_k = body.get("top_k", 0 if own else defaults.top_k)
    range_k = "equal to or greater than 0 and less than or equal to 1000"
    _require(is_integer(top_k), f"top_k must be an integer {range_k}")
    _require(0 <= top_k <= 1000, f"top_k must be {range_k}")
    top_p = body.get("top_p", 0.0 if own else defaults.top_p)
    _require(is_number(top_p), "top_p must be a positive float less than or equal to 1.0")
    _require(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _require(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if "top_p_decay" in body:
        fields["top_p_decay"] = decay = body["top_p_decay"]
        _require(is_number(decay), "top_p_decay must be a positive float less than or equal to 1.0")
        _require(top_p > 0, "top_p_decay cannot be set without top_p")
        _require(0 <= decay <= 1, "top_p_decay must be less than or equal to 1.0")
    if "top_p_bound" in body:
        fields["top_p_bound"] = bound = body["top_p_bound"]
        _require(
            is_number(bound), "top_p_bound must be a positive float less than or equal to top_p"
        )
        _require(top_p > 0, "top_p_bound cannot be set without top_p")
        _require(0 < bound <= top_p, "top_p_bound must be greater than 0 and less than top_p")
    return fields


def _beams(body: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    fields = {}
    if "beam_width" in body:
        fields["beam_width"] = width = body["beam_width"]
        _require(is_integer(width), "beam_width must be integer")
        _require(width >= 1, "beam_width must be an integer > 1")
        _require(prompts == 1, "When doing beam_search, batch size must be 1")
    if "stop_token" in body:
        fields["stop_token"] = body["stop_token"]
        _require(is_integer(body["stop_token"]), "stop_token must be an integer")
    if "length_penalty" in body:
        fields["length_penalty"] = body["length_penalty"]
        _require(is_number(body["length_penalty"]), "length_penalty must be a float")
    return fields


def generation_requests(
    asked: MegatronRequest, prompts: Sequence[tuple[int, ...]], model: ServedModel, limit: int
) -> list[GenerationRequest]:
    """What the engine is asked for, a request for each prompt. Raises RequestError if that is more
    than ``limit`` tokens or the model's positions."""
    new, beams = asked.tokens_to_generate, None
    longest = max(map(len, prompts)) + new
    if asked.beam_width is not None:
        beams = Beams(asked.beam_width, asked.length_penalty)
    if asked.beam_width is not None and (new == 0 or min(map(model.room, prompts)) < new):
        raise RequestError("context length + tokens_to_generate too large")
    if min(map(model.room, prompts)) < new:
        raise RequestError("Length of prompt + tokens_to_generate longer than allowed")
    total = longest * max(len(prompts), asked.beam_width or 1)
    if total > limit:
        raise RequestError(f"Too many tokens.  {total} is greater than {limit}")
    wanted = 0 if asked.logprobs else None
    return [
        GenerationRequest(
            prompt,
            _stopping(asked, index, model),
            _sampling(asked, index),
            beams,
            logprobs=wanted,
            prompt_logprobs=None if model.has_encoder else wanted,
            adapter=asked.adapter,
        )
        for index, prompt in enumerate(prompts)
    ]


def _sampling(asked: MegatronRequest, index: int) -> Sampling:
    return Sampling(
        greedy=asked.top_k == 1,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p or 1.0,
        top_p_decay=asked.top_p_decay,
        top_p_bound=asked.top_p_bound if asked.top_p_decay else 0.0,
        prevent_newline_after_colon=asked.prevent_newline_after_colon,
        seed=seed_of(asked.random_seed, index),
    )


def _stopping(asked: MegatronRequest, index: int, model: ServedModel) -> StopRules:
    """As Megatron's: text ends it, or else tokens do. In a beam search ``stop_token`` alone, or
    else the tokens that end a text of the model."""
    if asked.beam_width is None and (asked.stop_on_eol or asked.stop_on_double_eol):
        if asked.stop_on_double_eol:  # which Megatron asks for first
            before = asked.prompts[index][-1:]
            return StopRules(asked.tokens_to_generate, texts=("\n\n",), before=before)
        return StopRules(asked.tokens_to_generate, texts=("\n",))
    tokens = set(model.ends)
    if asked.stop_token is not None:
        tokens = {asked.stop_token} | (tokens if asked.beam_width is None else set())
    known = frozenset(token for token in tokens if 0 <= token < model.tokenizer.vocab_size)
    return StopRules(asked.tokens_to_generate, known)


async def _prompts_of(
    asked: MegatronRequest, model: ServedModel, texts: TextReader
) -> list[tuple[int, ...]]:
    prompts = await (texts.prompts if model.has_encoder else texts.tokenized)(asked.prompts)
    if asked.add_BOS:
        if model.eod is None:
            raise RequestError("add_BOS: the tokenizer has no end-of-document token to begin with")
        prompts = [(model.eod, *prompt) for prompt in prompts]
    _require(all(prompts), "Empty prompts require add_BOS=true")
    return prompts


async def _answer(
    service: Service,
    model: ServedModel,
    asked: MegatronRequest,
    prompts: Sequence[tuple[int, ...]],
    requests: Sequence[GenerationRequest],
) -> dict[str, Any]:
    answers = await service.complete(requests)
    if asked.beam_width is not None:
        return _beam_answer(prompts[0], answers[0], asked, model)
    found = [
        _text(prompt, answer.tokens, model) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    logprobs = [[score.logprob for score in a.prompt_scores + a.scores] for a in answers]
    return {
        "text": [text for text, _ in found],
        "segments": [segments for _, segments in found],
        "logprobs": logprobs if asked.logprobs else None,
    }


def _beam_answer(
    prompt: tuple[int, ...], answer: Answer, asked: MegatronRequest, model: ServedModel
) -> dict[str, Any]:
    found = [_text(prompt, beam.tokens, model) for beam in answer.beams]
    named: dict[str, Any] = {
        "text": [text for text, _ in found],
        "segments": [segments for _, segments in found],
        "scores": [beam.score for beam in answer.beams],
    }
    if asked.logprobs:
        named["logprobs"] = [
            [score.logprob for score in answer.prompt_scores + beam.scores] for beam in answer.beams
        ]
    return named


def _text(
    prompt: tuple[int, ...], new: tuple[int, ...], model: ServedModel
) -> tuple[str, list[str]]:
    """A text with its prompt, which is not part of it where an encoder has read it, and the texts
    of its tokens."""
    segments = token_texts(model.tokenizer, new if model.has_encoder else prompt + new)
    return "".join(segments), segments


def megatron_router(service: Service) -> APIRouter:
    """The routes of Megatron's API."""
    router = APIRouter()

    @router.api_route("/api", methods=["PUT", "POST"])
    async def generate(request: Request) -> JSON:
        async def make(body: Mapping[str, Any], texts: TextReader) -> tuple[Any, ...]:
            asked = parsed(body, service.defaults)
            if service.log_prompts and not asked.no_log:
                service.log(f"prompts: {list(asked.prompts)}")
            prompts = await _prompts_of(asked, model, texts)
            requests = generation_requests(asked, prompts, model, service.limits.tokens)
            return replace(asked, prompts=()), prompts, requests

        with service.admitted() as model:
            made = await prepared(request, service, model, make)
            return JSON(await while_connected(request, _answer(service, model, *made)))

    return router
