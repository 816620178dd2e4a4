"""What clients of OpenAI's API ask for, as requests of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.apps.generation.request import (
    Constraint,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.server.config import RequestDefaults
from megatron.apps.generation.server.errors import RequestError
from megatron.apps.generation.server.fields import (
    Fields,
    is_integer,
    is_number,
)
from megatron.apps.generation.server.service import (
    ServedModel,
    Service,
    TextReader,
    seed_of,
)

MAX_CHOICES = 128
_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_MAX_MESSAGES = 2048
"""As OpenAI's API; the same for the parts of one."""
_MAX_STOPS = 16
_LONGEST_STOP = 1024
_MAX_TOP = 20
_MAX_BIAS = 1024
_SAYS_NOTHING = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "prompt_cache_retention",
)
_NO_TOOLS = "is not supported: the model calls no tools; describe them in a message"
_REFUSED_BY_CHAT = {
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _NO_TOOLS),
    "audio": "is not supported: the model writes text only",
    "prediction": "is not supported; leave it out",
    "web_search_options": "is not supported: the server reaches no network",
    "reasoning_effort": "is not supported: the chat template decides how the model answers",
    "verbosity": "is not supported; say it in a message",
}
_REFUSED_BY_COMPLETIONS = {
    "suffix": "is not supported: the model continues text and does not fill gaps",
    "use_beam_search": "is not supported; PUT /api has beam_width",
    "min_tokens": "is not supported; ignore_eos generates max_tokens",
}


@dataclass(frozen=True)
class TextsAsked:
    """A request for texts.

    Attributes:
        prompts: token ids of each, with the text to show where ``echo`` wants it.
        choices: texts of each prompt.
        template: of the requests of all, for the first prompt.
        hidden: tokens that end a text and are not part of it.
        top: most probable tokens to show; None for no log-probabilities.
    """

    prompts: tuple[tuple[int, ...], ...]
    shown: tuple[str, ...]
    choices: int
    template: GenerationRequest
    hidden: frozenset[int]
    top: int | None
    echo: bool
    stream: bool
    include_usage: bool

    def requests(self) -> list[GenerationRequest]:
        """All texts of the first prompt, then those of the second, and so on."""
        template, found = self.template, list[GenerationRequest]()
        for prompt in self.prompts:
            for _ in range(self.choices):
                seed = seed_of(template.sampling.seed, len(found))
                sampling = replace(template.sampling, seed=seed)
                found.append(replace(template, prompt=prompt, sampling=sampling))
        return found


async def completion_asked(
    service: Service, model: ServedModel, body: Mapping[str, Any], texts: TextReader
) -> TextsAsked:
    """What a body of ``/v1/completions`` asks for. Raises RequestError."""
    fields = Fields(body)
    adapter = _adapter(service, model, fields)
    fields.refuse(_REFUSED_BY_COMPLETIONS)
    echo = fields.flag("echo")
    prompts, shown = await _prompts(service, model, fields, texts, echo)
    choices = _choices(fields, len(prompts))
    if echo and model.has_encoder:
        raise fields.fault("echo", "is not supported: an encoder reads the prompt")
    top = fields.integer("logprobs", 0, _MAX_TOP)
    new = fields.integer("max_tokens", 0)
    new = 16 if new is None else new
    return _asked(service, model, fields, prompts, shown, choices, new, top, echo, adapter)


async def chat_asked(
    service: Service, model: ServedModel, body: Mapping[str, Any], texts: TextReader
) -> TextsAsked:
    """What a body of ``/v1/chat/completions`` asks for. Raises RequestError."""
    fields = Fields(body)
    adapter = _adapter(service, model, fields)
    fields.refuse(_REFUSED_BY_CHAT)
    fields.ignore("parallel_tool_calls")
    if fields.take("modalities") not in (None, ["text"]):
        raise fields.fault("modalities", 'can only be ["text"]: the model writes text only')
    prompt = await _chat_prompt(fields, texts)
    choices = _choices(fields, 1)
    top = fields.integer("top_logprobs", 0, _MAX_TOP)
    if not fields.flag("logprobs"):
        if top is not None:
            raise fields.fault("top_logprobs", "needs logprobs: true")
    else:
        top = top or 0
    new = fields.integer("max_completion_tokens", 1)
    older = fields.integer("max_tokens", 1)
    new = older if new is None else new
    if new is None:
        new = max(1, min(model.room(prompt), service.limits.tokens // choices - len(prompt)))
    asked = _asked(service, model, fields, (prompt,), ("",), choices, new, top, False, adapter)
    stopping = asked.template.stopping
    stopping = replace(stopping, texts=(*stopping.texts, *model.chat.stops))
    return replace(asked, template=replace(asked.template, stopping=stopping))


def _asked(
    service: Service,
    model: ServedModel,
    fields: Fields,
    prompts: tuple[tuple[int, ...], ...],
    shown: tuple[str, ...],
    choices: int,
    new: int,
    top: int | None,
    echo: bool,
    adapter: str | None,
) -> TextsAsked:
    _check_size(service, model, prompts, choices, new)
    hidden = frozenset[int]() if fields.flag("ignore_eos") else model.ends
    stops = fields.texts("stop", _MAX_STOPS, _LONGEST_STOP)
    stop_ids = _tokens(fields, "stop_token_ids", model)
    ends = hidden | frozenset(stop_ids)
    template = GenerationRequest(
        prompts[0],
        StopRules(new, ends, stops),
        _sampling(fields, service.defaults, model),
        constraint=_constraint(fields),
        logprobs=top,
        prompt_logprobs=top if echo else None,
        adapter=adapter,
    )
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.fault("stream_options", "needs stream: true")
    inner = Fields(options or {}, "stream_options.")
    include_usage = inner.flag("include_usage")
    inner.flag("continuous_usage_stats")
    inner.end()
    fields.ignore(*_SAYS_NOTHING)
    fields.end()
    return TextsAsked(prompts, shown, choices, template, ends, top, echo, stream, include_usage)


def _adapter(service: Service, model: ServedModel, fields: Fields) -> str | None:
    """The adapter that the field ``model`` names; None for the model itself."""
    name = fields.text("model")
    if name is None or name == service.name:
        return None
    if name in model.adapters:
        return name
    known = ", ".join(map(repr, (service.name, *model.adapters)))
    text = f"the model {name[:200]!r} does not exist here; this server has {known}"
    raise RequestError(text, 404, param="model", code="model_not_found")


async def _prompts(
    service: Service, model: ServedModel, fields: Fields, texts: TextReader, echo: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Prompts of a text, a list of texts, ids, or a list of lists of ids; and the texts, if
    ``echo``."""
    given = fields.take("prompt")
    if given is None:
        raise fields.fault("prompt", f"is missing: it {_PROMPT}")
    if isinstance(given, str) or (isinstance(given, list) and given and is_integer(given[0])):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.fault("prompt", _PROMPT)
    if len(given) > MAX_CHOICES:
        raise fields.fault(
            "prompt", f"has {len(given)} prompts; at most {MAX_CHOICES} are possible"
        )
    if not all(isinstance(one, str | list) for one in given):
        raise fields.fault("prompt", _PROMPT)
    lists = [one for one in given if isinstance(one, list)]
    if lists:
        _check_ids(service, model, fields, lists)
    # An empty list of ids is an empty text.
    split = iter(await texts.prompts([one or "" for one in given if not _has_ids(one)]))
    prompts = tuple(tuple(one) if _has_ids(one) else next(split) for one in given)
    if not echo:
        return prompts, ("",) * len(prompts)
    detokenize = model.tokenizer.detokenize
    return prompts, tuple(one if isinstance(one, str) else detokenize(one) for one in given)


def _has_ids(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, list) and bool(prompt)


def _check_ids(
    service: Service, model: ServedModel, fields: Fields, prompts: Sequence[list[Any]]
) -> None:
    _check_size(service, model, prompts, 1, 0)  # before each of them is looked at
    size = model.tokenizer.vocab_size
    if not all(is_integer(token) and 0 <= token < size for ids in prompts for token in ids):
        raise fields.fault("prompt", f"must have token ids from 0 to {size - 1}")


async def _chat_prompt(fields: Fields, texts: TextReader) -> tuple[int, ...]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.fault("messages", "must be a list of messages, not empty")
    _check_count(fields, "messages", messages)
    plain = [_message(message, index) for index, message in enumerate(messages)]
    try:
        return await texts.chat_prompt(plain)
    except RequestError as error:
        raise fields.fault("messages", f"cannot be made a prompt: {error}") from None


def _check_count(fields: Fields, name: str, parts: Sequence[Any]) -> None:
    if len(parts) > _MAX_MESSAGES:
        what = f"has {len(parts):,} entries; at most {_MAX_MESSAGES:,} are possible"
        raise fields.fault(name, what)


def _message(message: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]."
    if not isinstance(message, dict):
        raise RequestError(f"messages[{index}] must be an object", param="messages")
    fields = Fields(message, where)
    fields.refuse(dict.fromkeys(("tool_calls", "tool_call_id", "function_call"), _NO_TOOLS))
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant"):
        what = _NO_TOOLS if role in ("tool", "function") else "must be system, user or assistant"
        raise fields.fault("role", what)
    content = fields.take("content")
    if isinstance(content, list):
        _check_count(fields, "content", content)
        content = "".join(_part(part, f"{where}content[{i}].") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise fields.fault("content", "must be a string, or a list of parts of type text")
    found = {"role": role, "content": content}
    name = fields.text("name")
    fields.ignore("refusal", "annotations", "audio", "reasoning", "reasoning_content")
    fields.end()
    return found if name is None else {**found, "name": name}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        text = f"{where}type must be text: the model reads nothing else"
        raise RequestError(text, param=f"{where}type")
    fields = Fields(part, where)
    fields.take("type")
    content = fields.text("text")
    fields.end()
    if content is None:
        raise fields.fault("text", "is missing")
    return content


def _choices(fields: Fields, prompts: int) -> int:
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best = fields.integer("best_of", 1)
    if best not in (None, n):
        raise fields.fault(
            "best_of", f"is not supported; use n, or beam_width of PUT /api, not {best}"
        )
    if n * prompts > MAX_CHOICES:
        what = f"times the number of prompts is {n * prompts}; at most {MAX_CHOICES} are possible"
        raise fields.fault("n", what)
    return n


def _check_size(
    service: Service,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    choices: int,
    new: int,
) -> None:
    for prompt in prompts:
        if new > model.room(prompt):
            text = (
                f"This model's maximum context length is {model.positions} tokens, and "
                f"{len(prompt) + new} are asked for: {len(prompt)} in the prompt and {new} new ones"
            )
            if model.has_encoder:
                longest = f"This model's longest answer has {model.room(prompt)} tokens"
                text = f"{longest}, and {new} are asked for"
            code = "context_length_exceeded"
            raise RequestError(text, param="max_tokens", code=code)
    total = len(prompts) * choices * (max(map(len, prompts)) + new)
    if total > service.limits.tokens:
        text = f"Too many tokens.  {total} is greater than {service.limits.tokens}"
        raise RequestError(text, param="max_tokens", code="too_many_tokens")


def _sampling(fields: Fields, defaults: RequestDefaults, model: ServedModel) -> Sampling:
    temperature = fields.number("temperature", 0, 2)
    top_p, top_k = fields.number("top_p", 0, 1), fields.integer("top_k", -1)
    if top_p is None and top_k is None:
        top_p, top_k = defaults.top_p or 1.0, defaults.top_k
    temperature = defaults.temperature if temperature is None else temperature
    penalty = fields.number("repetition_penalty", 0.01, 100)
    return Sampling(
        # The limit at which only the most probable token is left.
        greedy=temperature == 0 or top_p == 0 or top_k == 1,
        temperature=temperature or 1.0,
        top_k=max(top_k or 0, 0),
        top_p=top_p or 1.0,
        min_p=fields.number("min_p", 0, 1) or 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        bias=_bias(fields, model),
        seed=fields.integer("seed", 0, 2**63 - 1),
    )


def _bias(fields: Fields, model: ServedModel) -> dict[int, float]:
    given, size = fields.object("logit_bias") or {}, model.tokenizer.vocab_size
    if len(given) > _MAX_BIAS:
        what = f"has {len(given)} tokens; at most {_MAX_BIAS} are possible"
        raise fields.fault("logit_bias", what)
    for token, addend in given.items():
        known = token.isascii() and token.isdecimal() and len(token) < 12 and int(token) < size
        if not known or not is_number(addend) or not -100 <= addend <= 100:
            what = f"must have numbers from -100 to 100 by token ids below {size}"
            raise fields.fault("logit_bias", what)
    return {int(token): float(addend) for token, addend in given.items()}


def _tokens(fields: Fields, name: str, model: ServedModel) -> list[int]:
    given, size = fields.take(name) or [], model.tokenizer.vocab_size
    right = isinstance(given, list) and len(given) <= _MAX_STOPS
    if not right or not all(is_integer(t) and 0 <= t < size for t in given):
        raise fields.fault(name, f"must be a list of at most {_MAX_STOPS} token ids below {size}")
    return given


def _constraint(fields: Fields) -> Constraint | None:
    """What the text must match: of OpenAI's field, vLLM's, or its older ones."""
    found = {
        "response_format": _response_format(fields),
        "structured_outputs": _structured(
            fields.object("structured_outputs"), "structured_outputs."
        ),
        "guided_json": _schema(fields, "guided_json"),
        "guided_regex": _source(fields, "guided_regex", "regex"),
        "guided_grammar": _source(fields, "guided_grammar", "grammar"),
    }
    given = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise fields.fault(first, f"and {second}: give one of them")
    return next(iter(given.values()), None)


def _response_format(fields: Fields) -> Constraint | None:
    given = fields.object("response_format")
    if given is None:
        return None
    inner = Fields(given, "response_format.")
    kind = inner.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", "{}")
    if kind != "json_schema":
        raise inner.fault("type", "must be text, json_object or json_schema")
    named = inner.object("json_schema")
    if named is None or not isinstance(named.get("schema"), dict):
        raise inner.fault("json_schema.schema", "must be a JSON schema")
    return Constraint("json_schema", json.dumps(named["schema"]))


def _structured(given: Mapping[str, Any] | None, where: str) -> Constraint | None:
    if given is None:
        return None
    fields = Fields(given, where)
    anything = Constraint("json_schema", "{}") if fields.flag("json_object") else None
    found = (
        *(_schema(fields, "json"), _source(fields, "regex", "regex"), anything),
        _source(fields, "grammar", "grammar"),
    )
    fields.end()
    given_ones = [constraint for constraint in found if constraint is not None]
    if len(given_ones) != 1:
        names = "json, regex, grammar, json_object"
        raise RequestError(f"{where[:-1]}: give one of {names}", param=where[:-1])
    return given_ones[0]


def _schema(fields: Fields, name: str) -> Constraint | None:
    given = fields.take(name)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise fields.fault(name, f"is not JSON: {error}") from None
    if given is None or isinstance(given, dict):
        return None if given is None else Constraint("json_schema", json.dumps(given))
    raise fields.fault(name, "must be a JSON schema")


def _source(fields: Fields, name: str, kind: Any) -> Constraint | None:
    text = fields.text(name)
    return None if text is None else Constraint(kind, text)
