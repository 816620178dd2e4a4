"""Parsing of instruction records in their various layouts into the turns of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from megatron.features.instruction.columns import (
    CONVERSATIONS,
    NO_FLAGS,
    RecordColumns,
    RecordFields,
    keys_of,
    shown,
)
from megatron.features.instruction.record_files import records_of

Parsed = TypeVar("Parsed")

ANSWER = "assistant"
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
ALPACA_PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
"""Preambles of the Stanford Alpaca data (Taori et al. 2023)."""
ANSWERS = ("output", "response", "completion", "answer")
_ASKED = ("instruction", "prompt", "question", "query", "input")
_SYSTEM = ("system", "system_prompt")
_CONTEXT = ("input", "context")
_CALLS = "function_call"
_CALL_KEYS = ("tool_calls", _CALLS)
_ROLE_OF_SPEAKER = {
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", _CALLS), ANSWER),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Roles of ShareGPT's speakers, including function calls as in LLaMA-Factory."""
_ROLES = ("human", "user", "gpt", "assistant", "system")
"""Speakers that "role" may contain in upper or lower case. Chat templates handle other roles."""
_PAIRS = (("input", "output"), ("human", "assistant"))
"""Keys of a message that contains a question and its answer (Capybara, MOSS)."""
_TRAINED = ("weight", "train", "training", "loss")
"""Keys of messages that tell whether an answer counts in the loss (OpenAI, axolotl)."""
_FORMS = (frozenset({"role", "content"}), frozenset({"from", "value"}))
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:""")
"""Beginning of a text that may be a list of messages as JSON."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_LAYOUTS = (
    'a record has "messages" or "conversations", or "instruction" (or "question", "query") and '
    '"output" (or "response", "answer"), or "prompt" and "completion"; --messages-column, '
    "--prompt-column, --context-column and --response-column name other columns"
)


class Turn(NamedTuple):
    role: str
    """"system", "user", "assistant", or another role that the chat template supports."""
    content: str
    context: str = ""
    """Alpaca's "input": the text that the instruction is about."""
    counts: bool = True
    """False for an answer that the record excludes from the loss."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Other message keys that the chat template may use: tool calls, reasoning, a name."""

    @property
    def text(self) -> str:
        return f"{self.content}\n{self.context}" if self.context else self.content


@dataclass(frozen=True)
class Example:
    turns: tuple[Turn, ...]
    is_pair: bool = False
    """True for a prompt and completion, which form one text."""
    variables: tuple[tuple[str, Any], ...] = ()
    """Variables of the chat template besides the messages, such as tools."""
    context: int = 0
    """Number of turns in the prompt, if it contains answers, which do not count in the loss, as in
    trl; else 0."""


class StatedPrompt(NamedTuple):
    """Turns before an answer.

    Attributes:
        column: column from which the turns were read.
        is_text: True if prompt and answer form one text rather than a conversation.
        is_list: True if the column is a list of messages.
    """

    turns: tuple[Turn, ...]
    column: str
    is_text: bool = False
    is_list: bool = False


def read_examples(path: str, columns: RecordColumns = NO_FLAGS) -> Iterator[tuple[str, Example]]:
    """Yield the examples of a file; see :func:`read_records`."""
    return read_records(path, lambda record: parse_example(record, columns))


def read_records(path: str, parse: Callable[[Any], Parsed]) -> Iterator[tuple[str, Parsed]]:
    """Yield (location, parsed record) for each record of a file. The location is for error
    messages. Raises ValueError with the location if a record is malformed."""
    for place, record in records_of(path):
        try:
            parsed = parse(record)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        yield place, parsed


def parse_example(record: Any, columns: RecordColumns = NO_FLAGS) -> Example:
    """Parse a record in any supported layout. Raises ValueError if the layout is unknown, the
    record has no answer, or a key that may matter would be ignored."""
    fields = columns.record(record)
    if "chosen" in fields and "rejected" in fields:
        raise ValueError(
            'a better and a worse answer ("chosen", "rejected"), which --preference trains on, '
            "for example --preference dpo; instructions have one answer"
        )
    variables = template_variables(fields)
    conversation = fields.first(CONVERSATIONS)
    if conversation is not None:
        turns = conversation_turns(fields, conversation)
        example = Example(until_last_answer(turns), variables=variables)
    else:
        prompt = prompt_of(fields)
        if prompt is None:
            raise ValueError(f"unknown layout (its keys: {keys_of(record)}); {_LAYOUTS}")
        default = "completion" if prompt.column == "prompt" else "output"
        key = fields.first(ANSWERS) or default
        if key not in fields:
            raise ValueError(
                f'no key "{key}" (the keys: {fields.keys}); --response-column names another'
            )
        answer = fields.take(key)
        if prompt.is_list:
            answer = messages_in(answer, key)
        if isinstance(answer, list):
            completion = turns_of(answer, key, fields.ignored)
            completion = completion[repeated_turns(prompt.turns, completion) :]
        else:
            completion = [Turn(ANSWER, fields.text(key))]
        before = len(prompt.turns) if prompt.is_list else 0
        example = Example(
            (*prompt.turns, *until_last_answer(completion)),
            prompt.is_text and isinstance(answer, str) and not variables,
            variables,
            before if any(turn.role == ANSWER for turn in prompt.turns[:before]) else 0,
        )
    turns = example.turns
    fields.check(repeats=lambda value: repeats(value, turns), conversation=conversation is not None)
    return example


def template_variables(fields: RecordFields) -> tuple[tuple[str, Any], ...]:
    """Return the template variables of a record: ``tools``, a list or JSON text, and the entries of
    ``chat_template_kwargs``."""
    tools = _from_json(fields.take("tools"), "tools")
    if not isinstance(tools, list | None):
        raise ValueError(f'"tools" must be a list of tools, not {shown(tools)}')
    others = _from_json(fields.take("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(others, dict):
        raise ValueError(f'"chat_template_kwargs" must be an object, not {shown(others)}')
    values = {key: value for key, value in others.items() if value is not None}
    return tuple(values.items()) + ((("tools", tools),) if tools else ())


def prompt_of(fields: RecordFields) -> StatedPrompt | None:
    """Return the prompt of a record without a conversation column, or None if it has no prompt
    column."""
    key = fields.first(_ASKED)
    if key is None:
        return None
    asked = messages_in(fields.take(key), key)
    if isinstance(asked, list):
        turns = with_system(fields, turns_of(asked, key, fields.ignored))
        return StatedPrompt(turns, key, is_list=True)
    history = history_turns(_from_json(fields.take("history"), "history") or [])
    context = fields.optional_text(*(name for name in _CONTEXT if name != key))
    turns = with_system(fields, (*history, Turn("user", fields.text(key), context)))
    return StatedPrompt(turns, key, is_text=key == "prompt" and len(turns) == 1 and not context)


def conversation_turns(fields: RecordFields, key: str) -> tuple[Turn, ...]:
    """Return the turns of a conversation column, preceded by the record's system message."""
    return with_system(fields, turns_of(fields.take(key), key, fields.ignored))


def with_system(fields: RecordFields, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Prepend the record's system message to ``turns``, unless they already begin with it. Raises
    ValueError if they begin with a different system message."""
    system = fields.optional_text(*_SYSTEM)
    if not system:
        return tuple(turns)
    first = turns[0] if turns else None
    if first is None or first.role not in ("system", "developer"):
        return (Turn("system", system), *turns)
    if _normal(first.content) != _normal(system):
        raise ValueError(
            f"two system messages: {shown(system)} and, as the first message, "
            f"{shown(first.content)}; --ignore-columns leaves out a column"
        )
    return tuple(turns)


def turns_of(messages: Any, key: str, ignored: frozenset[str] = frozenset()) -> list[Turn]:
    """Return the turns in a list of messages. Keys in ``ignored`` are left out. Raises ValueError
    if a message is malformed, or has an unknown key that is not in ``ignored``."""
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = _from_json(messages, key)
    if not isinstance(messages, list):
        raise ValueError(f'"{key}" must be a list of messages')
    if key in ("", *CONVERSATIONS) and all(isinstance(text, str) for text in messages):
        return [Turn(("user", ANSWER)[n % 2], text) for n, text in enumerate(messages)]
    turns: list[Turn] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(
                f'"{key}" must be a list of objects, with "role" and "content", not of '
                f"{shown(message)}"
            )
        fields = RecordFields(message, ignored)
        pair = next((pair for pair in _PAIRS if all(each in fields for each in pair)), None)
        if pair is None:
            turns.append(_turn(fields))
        else:
            turns += [Turn("user", fields.text(pair[0])), Turn(ANSWER, fields.text(pair[1]))]
        fields.check(f'"{key}", message {number}: ')
    return turns


def _turn(fields: RecordFields) -> Turn:
    content_key = "value" if "from" in fields else "content"
    speaker = fields.text("from" if "from" in fields else "role")
    role = _role(speaker, is_sharegpt="from" in fields)
    is_call = speaker == _CALLS and "from" in fields
    content = "" if is_call else _content(fields, content_key)
    more: dict[str, Any] = {}
    reasoning = fields.optional_text(*REASONING)
    if reasoning:
        more[REASONING[0]] = reasoning
    key = content_key if is_call else fields.first(_CALL_KEYS)
    calls = None if key is None else _from_json(fields.take(key), key)
    if (calls or is_call) and _CALL_KEYS[0] not in fields.ignored:
        more["tool_calls"] = _calls([calls] if isinstance(calls, dict) else calls)
    for key in ("name", "tool_call_id"):
        if fields.take(key):
            more[key] = fields.text(key)
    counts = _counts(fields, role)
    if role == ANSWER and not content and not more.keys() & {REASONING[0], "tool_calls"}:
        had_calls = is_call or any(fields.has_key(key) for key in _CALL_KEYS)
        if had_calls and fields.ignored.intersection(_CALL_KEYS):
            counts = False
        elif counts and fields.take(content_key) is None:
            raise ValueError(f'an answer has neither "{content_key}" nor "tool_calls"')
    return Turn(role, content, counts=counts, fields=tuple(more.items()))


def _role(speaker: str, is_sharegpt: bool) -> str:
    """Return the role of a speaker. Raises ValueError if ShareGPT's layout does not define the
    speaker."""
    lower = speaker.lower()
    if is_sharegpt and lower not in _ROLE_OF_SPEAKER:
        raise ValueError(
            f'a message is from "{speaker}"; expected one of {", ".join(_ROLE_OF_SPEAKER)}'
        )
    return _ROLE_OF_SPEAKER[lower] if is_sharegpt or lower in _ROLES else speaker


def _content(fields: RecordFields, key: str) -> str:
    """Return the text of a message, whose content is a string, a list of text parts, or null."""
    if not fields.has_key(key):
        if any(fields.has_key(key) for key in _CALL_KEYS):
            return ""
        raise ValueError(f'no key "{key}" (the keys: {fields.keys})')
    content = fields.take(key)
    if content is None:
        return ""
    if not isinstance(content, list):
        return fields.text(key)
    texts = []
    for part in content:
        values = RecordFields(part if isinstance(part, dict) else {}, fields.ignored)
        if values.take("type") != "text":
            raise ValueError(f'"{key}" has a part that is not a text: {shown(part)}')
        texts.append(values.text("text"))
        values.check(f'a part of "{key}": ')
    return "".join(texts)


def _counts(fields: RecordFields, role: str) -> bool:
    """Return whether a message counts in the loss by its own keys; True if it has none."""
    key = fields.first(_TRAINED)
    if key is None:
        return True
    value = fields.take(key)
    if value not in (0, 1):
        raise ValueError(f'"{key}" of a message must be 0 or 1, false or true, not {shown(value)}')
    if value and role != ANSWER:
        raise ValueError(
            f'"{key}" is {shown(value)} in a message of the role "{role}", and only answers count '
            f"in the loss: remove it, or give --ignore-columns {key}"
        )
    return bool(value) or role != ANSWER


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments parsed, which may be an object or JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f'"tool_calls" must be a list of calls, not {shown(calls)}')
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    return call | {"arguments": _from_json(arguments, "arguments")}


def messages_in(value: Any, key: str) -> Any:
    """Parse a text that contains messages as JSON, because table cells cannot contain lists. Return
    other values unchanged. Raises ValueError if messages are in Python's notation."""
    if not isinstance(value, str) or not (start := _MESSAGES.match(value)):
        return value
    if start[1] == "'" and any(all(f"'{key}':" in value for key in form) for form in _FORMS):
        raise ValueError(
            f'"{key}" is a list of messages as Python prints it, not JSON: {shown(value)}'
        )
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_messages = all(isinstance(m, dict) and any(k <= m.keys() for k in _FORMS) for m in messages)
    return messages if is_messages else value


def repeated_turns(prompt: Sequence[Turn], answer: Sequence[Turn]) -> int:
    """Return the number of turns at the start of ``answer`` that repeat the whole prompt, possibly
    without its system message. Return 0 if ``answer`` does not begin with the prompt."""
    if prompt and prompt[0].role == "system" and answer and answer[0].role != "system":
        prompt = prompt[1:]
    begin = answer[: len(prompt)]
    return len(prompt) * ([*map(message_key, begin)] == [*map(message_key, prompt)])


def _from_json(value: Any, key: str) -> Any:
    """Return a value, parsed if it is JSON text. Raises ValueError if a text is not JSON."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f'"{key}" is a string that is not JSON: {shown(value)}') from None


def history_turns(pairs: Any) -> list[Turn]:
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise ValueError('"history" must be a list of pairs: an instruction and its answer')
    return [Turn(*turn) for q, a in pairs for turn in (("user", q), (ANSWER, a))]


def until_last_answer(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns up to the last answer. Raises ValueError if there is no answer."""
    answers = [number for number, turn in enumerate(turns) if turn.role == ANSWER]
    if not answers:
        raise ValueError('there is no answer: no message has the role "assistant"')
    return tuple(turns[: answers[-1] + 1])


def repeats(value: Any, turns: Sequence[Turn]) -> bool:
    """Return whether a column only repeats some of the turns, or all of them as Stanford Alpaca's
    "text" column does."""
    if isinstance(value, str):
        if any(value == turn.content for turn in turns):
            return True
        whole = ["".join(pair) for pair in plain_texts(Example(tuple(turns)), alpaca=True)]
        texts = {_normal(text) for turn in turns for text in (turn.content, turn.text)}
        texts |= {_normal("".join(whole[: n + 1])) for n in range(len(whole))}
        texts |= {_normal(prompt) for prompt, _ in plain_texts(Example(tuple(turns)), alpaca=True)}
        return _normal(value) in texts
    try:
        said = {message_key(turn) for turn in turns_of(value, "")}
    except ValueError:
        return False
    return said <= {message_key(turn) for turn in turns}


def message_key(turn: Turn) -> tuple[object, ...]:
    """Return a key that is equal for repeated messages."""
    return turn.role, turn.text.strip(), turn.counts, repr(turn.fields)


def _normal(text: str) -> str:
    return " ".join(text.split())


def plain_texts(example: Example, alpaca: bool) -> Iterator[tuple[str, str]]:
    """Yield the (prompt, answer) pairs of an example as plain text. A prompt-completion pair is
    unchanged, and in a conversation a line break follows each turn that is not an answer. With
    ``alpaca``, Alpaca's headings are used, and a system message replaces the preamble."""
    if example.is_pair and not alpaca:
        yield example.turns[0].content, example.turns[1].content
        return
    prompt: list[str] = []
    is_first = True
    for turn in example.turns:
        if turn.role == ANSWER:
            if alpaca:
                prompt = ["\n\n".join([*prompt, "### Response:\n"])]
            yield "".join(prompt), turn.content
            prompt, is_first = [], False
        elif not alpaca:
            prompt.append(f"{turn.text}\n")
        elif turn.role == "system":
            prompt.append(turn.content)
        else:
            if is_first and not prompt:
                prompt.append(ALPACA_PREAMBLE_WITH_INPUT if turn.context else ALPACA_PREAMBLE)
            heading = "Instruction" if turn.role == "user" else turn.role.capitalize()
            prompt.append(f"### {heading}:\n{turn.content}")
            if turn.context:
                prompt.append(f"### Input:\n{turn.context}")
