"""Megatron's text generation API: ``PUT /api``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request

from megatron.apps.generation.decoding.text_stream import token_texts
from megatron.apps.generation.request import Beams, GenerationRequest, Sampling, StopRules
from megatron.apps.generation.server.config import RequestDefaults
from megatron.apps.generation.server.exchange import (
    JSON,
    Fields,
    RequestError,
    is_integer,
    is_number,
    while_connected,
)
from megatron.apps.generation.server.service import (
    ServedModel,
    Service,
    TextReader,
    Tokens,
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
"""Field names of other APIs, and what to use instead. Unknown fields are refused, because ignoring
them would silently change the answer."""


@dataclass(frozen=True)
class MegatronRequest:
    """Fields of a request. ``top_k`` and ``top_p`` of 0 keep all tokens."""

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
    """Check and return the fields of a request body. The checks have Megatron's order and messages.
    Raises RequestError if one fails."""
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        _require(old not in body, f"{old} is no longer used.  Replace with {new}")
    _require("prompts" in body, "prompts argument required")
    prompts = body["prompts"]
    _check_prompts(prompts)
    tokens = body.get("tokens_to_generate", MegatronRequest.tokens_to_generate)
    _require(is_integer(tokens), "tokens_to_generate must be an integer greater than 0")
    _require(tokens >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = _flag(body, "logprobs")
    _require(tokens > 0 or logprobs, "tokens_to_generate=0 implies logprobs should be True")
    sampling = _checked_sampling(body, defaults)
    add_bos = _flag(body, "add_BOS")
    _require(all(prompts) or add_bos, "Empty prompts require add_BOS=true")
    for name in ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon"):
        _flag(body, name)
    seed = body.get("random_seed", 0)
    _require(is_integer(seed), "random_seed must be integer")
    _require(seed >= 0, "random_seed must be a positive integer")
    _flag(body, "no_log")
    width = body.get("beam_width", 1)
    _require(is_integer(width), "beam_width must be integer")
    _require(width >= 1, "beam_width must be an integer > 1")
    several = "beam_width" in body and len(prompts) > 1
    _require(not several, "When doing beam_search, batch size must be 1")
    _require(is_integer(body.get("stop_token", 0)), "stop_token must be an integer")
    _require(is_number(body.get("length_penalty", 1)), "length_penalty must be a float")
    _require(isinstance(body.get("adapter"), str | None), "adapter must be a string")
    for name, ours in _NAMES_ELSEWHERE.items():
        _require(name not in body, f"{name} is not a field of this request; use {ours}")
    Fields(body).end(MegatronRequest.__dataclass_fields__)
    return MegatronRequest(**{**body, **sampling, "prompts": tuple(prompts)})


def _require(right: bool, message: str) -> None:
    if not right:
        raise RequestError(message)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    _require(isinstance(value, bool), f"{name} must be a boolean value")
    return value


def _check_prompts(prompts: Any) -> None:
    _require(isinstance(prompts, list), "prompts is not a list of strings")
    _require(len(prompts) > 0, "prompts is empty")
    _require(len(prompts) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}")
    _require(all(isinstance(p, str) for p in prompts), "prompts is not a list of strings")


def _checked_sampling(body: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, Any]:
    """Check and return temperature, ``top_k`` and ``top_p``, by default the server's."""
    temperature = body.get("temperature", defaults.temperature)
    _require(
        is_number(temperature) and 0 < temperature <= 100,
        "temperature must be a positive number less than or equal to 100.0",
    )
    filters = {"top_k", "top_p"} & body.keys()
    top_k = body.get("top_k", 0 if filters else defaults.top_k)
    range_k = "equal to or greater than 0 and less than or equal to 1000"
    _require(is_integer(top_k), f"top_k must be an integer {range_k}")
    _require(0 <= top_k <= 1000, f"top_k must be {range_k}")
    top_p = body.get("top_p", 0.0 if filters else defaults.top_p)
    most_p = "must be a positive float less than or equal to"
    _require(is_number(top_p), f"top_p {most_p} 1.0")
    _require(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _require(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")
    if "top_p_decay" in body:
        decay = body["top_p_decay"]
        _require(is_number(decay), f"top_p_decay {most_p} 1.0")
        _require(top_p > 0, "top_p_decay cannot be set without top_p")
        _require(0 <= decay <= 1, "top_p_decay must be less than or equal to 1.0")
    if "top_p_bound" in body:
        bound = body["top_p_bound"]
        _require(is_number(bound), f"top_p_bound {most_p} top_p")
        _require(top_p > 0, "top_p_bound cannot be set without top_p")
        _require(0 < bound <= top_p, "top_p_bound must be greater than 0 and less than top_p")
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def generation_requests(
    asked: MegatronRequest, prompts: Sequence[Tokens], model: ServedModel, limit: int
) -> list[GenerationRequest]:
    """Return an engine request for each prompt. Raises RequestError if (longest prompt + new
    tokens) x texts exceeds ``limit``, or if a text exceeds the model's positions."""
    new, width = asked.tokens_to_generate, asked.beam_width
    too_long = min(map(model.room, prompts)) < new
    if width is not None and (new == 0 or too_long):
        raise RequestError("context length + tokens_to_generate too large")
    if too_long:
        raise RequestError("Length of prompt + tokens_to_generate longer than allowed")
    total = (max(map(len, prompts)) + new) * max(len(prompts), width or 1)
    if total > limit:
        raise RequestError(f"Too many tokens.  {total} is greater than {limit}")
    scored = 0 if asked.logprobs else None
    return [
        GenerationRequest(
            prompt,
            _stopping(asked, index, model),
            _sampling(asked, index),
            None if width is None else Beams(width, asked.length_penalty),
            logprobs=scored,
            prompt_logprobs=None if model.has_encoder else scored,
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
    """Return the stop rules as in Megatron: stop texts if requested, otherwise stop tokens. A beam
    search ignores stop texts, and stops only at ``stop_token`` if it is given, otherwise at the
    model's end tokens."""
    if asked.beam_width is None and (asked.stop_on_eol or asked.stop_on_double_eol):
        if asked.stop_on_double_eol:  # Megatron gives this flag precedence
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
) -> list[Tokens]:
    prompts = await (texts.prompts if model.has_encoder else texts.tokenized)(asked.prompts)
    if asked.add_BOS:
        eod = model.tokenizer.special_ids.eod
        if eod is None:
            raise RequestError("add_BOS: the tokenizer has no end-of-document token to begin with")
        prompts = [(eod, *prompt) for prompt in prompts]
    _require(all(prompts), "Empty prompts require add_BOS=true")
    return prompts


async def _answer(
    service: Service,
    model: ServedModel,
    asked: MegatronRequest,
    prompts: Sequence[Tokens],
    requests: Sequence[GenerationRequest],
) -> dict[str, Any]:
    answers = await service.complete(requests)
    if asked.beam_width is None:
        pairs = zip(prompts, answers, strict=True)
        texts = [(prompt, each.tokens, each.prompt_scores + each.scores) for prompt, each in pairs]
    else:
        (prompt,), (search,) = prompts, answers
        texts = [(prompt, each.tokens, search.prompt_scores + each.scores) for each in search.beams]
    # A prompt that an encoder has read is not part of the text.
    segments = [
        token_texts(model.tokenizer, new if model.has_encoder else prompt + new)
        for prompt, new, _ in texts
    ]
    answer: dict[str, Any] = {"text": ["".join(each) for each in segments], "segments": segments}
    if asked.beam_width is not None:
        answer["scores"] = [beam.score for beam in answers[0].beams]
    if asked.logprobs:
        answer["logprobs"] = [[score.logprob for score in scores] for _, _, scores in texts]
    elif asked.beam_width is None:
        answer["logprobs"] = None
    return answer


def megatron_router(service: Service) -> APIRouter:
    """Return the routes of Megatron's API."""
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
            prepared = await service.prepared(request, model, make)
            return JSON(await while_connected(request, _answer(service, model, *prepared)))

    return router
