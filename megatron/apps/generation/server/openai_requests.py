"""Convert requests of OpenAI's API to requests of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron.apps.generation.request import Constraint, GenerationRequest, Sampling, StopRules
from megatron.apps.generation.server.exchange import Fields, RequestError, is_integer, is_number
from megatron.apps.generation.server.service import (
    ServedModel,
    Service,
    TextReader,
    Tokens,
    seed_of,
)

MAX_CHOICES = 128
_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_MAX_MESSAGES = 2048  # as in OpenAI's API; also the maximum number of content parts of a message
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
    """Validated request to either completion endpoint.

    Attributes:
        prompts: token ids of each prompt.
        shown: text of each prompt, if ``echo`` is set.
        choices: number of texts for each prompt.
        template: engine request for the first prompt, from which all others are derived.
        hidden: tokens that end a text and are not part of it.
        top: number of most probable tokens to report. None reports no log-probabilities.
    """

    prompts: tuple[Tokens, ...]
    shown: tuple[str, ...]
    choices: int
    template: GenerationRequest
    hidden: frozenset[int]
    top: int | None
    echo: bool
    stream: bool
    include_usage: bool

    def requests(self) -> list[GenerationRequest]:
        """Return the engine requests, ordered by prompt: ``choices`` requests for each."""
        template, requests = self.template, list[GenerationRequest]()
        for prompt in self.prompts:
            for _ in range(self.choices):
                seed = seed_of(template.sampling.seed, len(requests))
                sampling = replace(template.sampling, seed=seed)
                requests.append(replace(template, prompt=prompt, sampling=sampling))
        return requests


def check_model_name(service: Service, model: ServedModel, name: str, has: str) -> None:
    """Check a model name. Raises RequestError unless the model or an adapter has this name."""
    names = service.name, *model.runner.adapters
    if name not in names:
        known = ", ".join(map(repr, names))
        text = f"the model {name[:200]!r} does not exist here; {has} {known}"
        raise RequestError(text, 404, param="model", code="model_not_found")


class BodyReader:
    """Reader of the fields of a request body, in a fixed order that determines which error is
    reported. Methods raise RequestError if a field is invalid."""

    def __init__(
        self, service: Service, model: ServedModel, body: Mapping[str, Any], texts: TextReader
    ) -> None:
        self.service, self.model, self.texts = service, model, texts
        self.fields = Fields(body)
        self.vocab_size = model.tokenizer.vocab_size

    async def completion(self) -> TextsAsked:
        """Parse a body of ``/v1/completions``."""
        fields = self.fields
        adapter = self._adapter()
        fields.refuse(_REFUSED_BY_COMPLETIONS)
        echo = fields.flag("echo")
        prompts, shown = await self._prompts(echo)
        choices = self._choices(len(prompts))
        if echo and self.model.has_encoder:
            raise fields.fault("echo", "is not supported: an encoder reads the prompt")
        top = fields.integer("logprobs", 0, _MAX_TOP)
        new = fields.integer("max_tokens", 0)
        new = 16 if new is None else new
        return self._asked(prompts, shown, choices, new, top, echo, adapter)

    async def chat(self) -> TextsAsked:
        """Parse a body of ``/v1/chat/completions``."""
        fields, model = self.fields, self.model
        adapter = self._adapter()
        fields.refuse(_REFUSED_BY_CHAT)
        fields.ignore("parallel_tool_calls")
        if fields.take("modalities") not in (None, ["text"]):
            raise fields.fault("modalities", 'can only be ["text"]: the model writes text only')
        prompt = await self._chat_prompt()
        choices = self._choices(1)
        top = fields.integer("top_logprobs", 0, _MAX_TOP)
        if fields.flag("logprobs"):
            top = top or 0
        elif top is not None:
            raise fields.fault("top_logprobs", "needs logprobs: true")
        new = fields.integer("max_completion_tokens", 1)
        older = fields.integer("max_tokens", 1)
        new = older if new is None else new
        if new is None:
            most = self.service.limits.tokens // choices - len(prompt)
            new = max(1, min(model.room(prompt), most))
        return self._asked(
            (prompt,), ("",), choices, new, top, False, adapter, stops=model.chat.stops
        )

    def _asked(
        self,
        prompts: tuple[Tokens, ...],
        shown: tuple[str, ...],
        choices: int,
        new: int,
        top: int | None,
        echo: bool,
        adapter: str | None,
        stops: Sequence[str] = (),
    ) -> TextsAsked:
        """Read the fields that both endpoints share, and return the request. ``stops`` contains
        additional stop texts."""
        fields = self.fields
        self._check_size(prompts, choices, new)
        hidden = frozenset[int]() if fields.flag("ignore_eos") else self.model.ends
        texts = fields.texts("stop", _MAX_STOPS, _LONGEST_STOP)
        ends = hidden | frozenset(self._stop_tokens())
        template = GenerationRequest(
            prompts[0],
            StopRules(new, ends, (*texts, *stops)),
            self._sampling(),
            constraint=self._constraint(),
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

    def _adapter(self) -> str | None:
        """Return the adapter that the field ``model`` selects, or None for the model itself."""
        name = self.fields.text("model")
        if name is None or name == self.service.name:
            return None
        check_model_name(self.service, self.model, name, "this server has")
        return name

    async def _prompts(self, echo: bool) -> tuple[tuple[Tokens, ...], tuple[str, ...]]:
        """Return the prompts' token ids and, with ``echo``, their texts. The field contains a text,
        a list of texts, a list of token ids, or a list of such lists."""
        fields = self.fields
        value = fields.take("prompt")
        if value is None:
            raise fields.fault("prompt", f"is missing: it {_PROMPT}")
        if isinstance(value, str) or (isinstance(value, list) and value and is_integer(value[0])):
            value = [value]
        if not isinstance(value, list) or not value:
            raise fields.fault("prompt", _PROMPT)
        if len(value) > MAX_CHOICES:
            what = f"has {len(value)} prompts; at most {MAX_CHOICES} are possible"
            raise fields.fault("prompt", what)
        if not all(isinstance(one, str | list) for one in value):
            raise fields.fault("prompt", _PROMPT)
        if lists := [one for one in value if isinstance(one, list)]:
            self._check_size(lists, 1, 0)  # before the slower check of each token
            size = self.vocab_size
            if not all(is_integer(token) and 0 <= token < size for ids in lists for token in ids):
                raise fields.fault("prompt", f"must have token ids from 0 to {size - 1}")
        # An empty list of token ids counts as an empty text.
        texts = [one or "" for one in value if isinstance(one, str) or not one]
        split = iter(await self.texts.prompts(texts))
        prompts = tuple(
            tuple(one) if isinstance(one, list) and one else next(split) for one in value
        )
        if not echo:
            return prompts, ("",) * len(prompts)
        detokenize = self.model.tokenizer.detokenize
        return prompts, tuple(one if isinstance(one, str) else detokenize(one) for one in value)

    async def _chat_prompt(self) -> Tokens:
        fields = self.fields
        messages = fields.take("messages")
        if not isinstance(messages, list) or not messages:
            raise fields.fault("messages", "must be a list of messages, not empty")
        _check_count(fields, "messages", messages)
        plain = [_message(message, index) for index, message in enumerate(messages)]
        try:
            return await self.texts.chat_prompt(plain)
        except RequestError as error:
            raise fields.fault("messages", f"cannot be made a prompt: {error}") from None

    def _choices(self, prompts: int) -> int:
        fields = self.fields
        n = fields.integer("n", 1, MAX_CHOICES) or 1
        best = fields.integer("best_of", 1)
        if best not in (None, n):
            what = f"is not supported; use n, or beam_width of PUT /api, not {best}"
            raise fields.fault("best_of", what)
        if n * prompts > MAX_CHOICES:
            count = f"times the number of prompts is {n * prompts}"
            raise fields.fault("n", f"{count}; at most {MAX_CHOICES} are possible")
        return n

    def _check_size(self, prompts: Sequence[Sequence[int]], choices: int, new: int) -> None:
        model = self.model
        for prompt in prompts:
            room = model.room(prompt)
            if new > room:
                text = (
                    f"This model's maximum context length is {model.runner.max_positions} tokens, "
                    f"and {len(prompt) + new} are asked for: {len(prompt)} in the prompt and {new} "
                    "new ones"
                )
                if model.has_encoder:
                    text = f"This model's longest answer has {room} tokens, and {new} are asked for"
                raise RequestError(text, param="max_tokens", code="context_length_exceeded")
        total = len(prompts) * choices * (max(map(len, prompts)) + new)
        if total > self.service.limits.tokens:
            text = f"Too many tokens.  {total} is greater than {self.service.limits.tokens}"
            raise RequestError(text, param="max_tokens", code="too_many_tokens")

    def _sampling(self) -> Sampling:
        fields, defaults = self.fields, self.service.defaults
        temperature = fields.number("temperature", 0, 2)
        top_p, top_k = fields.number("top_p", 0, 1), fields.integer("top_k", -1)
        if top_p is None and top_k is None:
            top_p, top_k = defaults.top_p or 1.0, defaults.top_k
        temperature = defaults.temperature if temperature is None else temperature
        penalty = fields.number("repetition_penalty", 0.01, 100)
        return Sampling(
            # In these cases only the most probable token could be sampled.
            greedy=temperature == 0 or top_p == 0 or top_k == 1,
            temperature=temperature or 1.0,
            top_k=max(top_k or 0, 0),
            top_p=top_p or 1.0,
            min_p=fields.number("min_p", 0, 1) or 0.0,
            repetition_penalty=1.0 if penalty is None else penalty,
            presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
            frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
            bias=self._bias(),
            seed=fields.integer("seed", 0, 2**63 - 1),
        )

    def _bias(self) -> dict[int, float]:
        fields, size = self.fields, self.vocab_size
        biases = fields.object("logit_bias") or {}
        if len(biases) > _MAX_BIAS:
            what = f"has {len(biases)} tokens; at most {_MAX_BIAS} are possible"
            raise fields.fault("logit_bias", what)
        for token, addend in biases.items():
            known = token.isascii() and token.isdecimal() and len(token) < 12 and int(token) < size
            if not known or not is_number(addend) or not -100 <= addend <= 100:
                what = f"must have numbers from -100 to 100 by token ids below {size}"
                raise fields.fault("logit_bias", what)
        return {int(token): float(addend) for token, addend in biases.items()}

    def _stop_tokens(self) -> list[int]:
        name, size = "stop_token_ids", self.vocab_size
        tokens = self.fields.take(name) or []
        right = isinstance(tokens, list) and len(tokens) <= _MAX_STOPS
        if not right or not all(is_integer(t) and 0 <= t < size for t in tokens):
            what = f"must be a list of at most {_MAX_STOPS} token ids below {size}"
            raise self.fields.fault(name, what)
        return tokens

    def _constraint(self) -> Constraint | None:
        """Return the constraint from OpenAI's field or from one of vLLM's current and older fields.
        Returns None if none is set."""
        fields = self.fields
        constraints = {
            "response_format": _response_format(fields.object("response_format")),
            "structured_outputs": _structured(fields.object("structured_outputs")),
            "guided_json": _schema(fields, "guided_json"),
            "guided_regex": _source(fields, "guided_regex", "regex"),
            "guided_grammar": _source(fields, "guided_grammar", "grammar"),
        }
        names = [name for name, constraint in constraints.items() if constraint is not None]
        if len(names) > 1:
            raise fields.fault(names[0], f"and {names[1]}: give one of them")
        return constraints[names[0]] if names else None


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
    name = fields.text("name")
    fields.ignore("refusal", "annotations", "audio", "reasoning", "reasoning_content")
    fields.end()
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


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


def _response_format(value: Mapping[str, Any] | None) -> Constraint | None:
    if value is None:
        return None
    fields = Fields(value, "response_format.")
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", "{}")
    if kind != "json_schema":
        raise fields.fault("type", "must be text, json_object or json_schema")
    named = fields.object("json_schema")
    if named is None or not isinstance(named.get("schema"), dict):
        raise fields.fault("json_schema.schema", "must be a JSON schema")
    return Constraint("json_schema", json.dumps(named["schema"]))


def _structured(value: Mapping[str, Any] | None) -> Constraint | None:
    if value is None:
        return None
    fields = Fields(value, "structured_outputs.")
    anything = Constraint("json_schema", "{}") if fields.flag("json_object") else None
    constraints = (
        _schema(fields, "json"),
        _source(fields, "regex", "regex"),
        anything,
        _source(fields, "grammar", "grammar"),
    )
    fields.end()
    present = [constraint for constraint in constraints if constraint is not None]
    if len(present) != 1:
        text = "structured_outputs: give one of json, regex, grammar, json_object"
        raise RequestError(text, param="structured_outputs")
    return present[0]


def _schema(fields: Fields, name: str) -> Constraint | None:
    value = fields.take(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise fields.fault(name, f"is not JSON: {error}") from None
    if value is None or isinstance(value, dict):
        return None if value is None else Constraint("json_schema", json.dumps(value))
    raise fields.fault(name, "must be a JSON schema")


def _source(fields: Fields, name: str, kind: Literal["regex", "grammar"]) -> Constraint | None:
    text = fields.text(name)
    return None if text is None else Constraint(kind, text)
