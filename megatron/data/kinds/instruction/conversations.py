"""Files of instructions in their various layouts, to one form: turns of a conversation."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from megatron.data.json_lines import (
    BYTE_ORDER_MARK,
    ArrayReader,
    is_too_deep,
    long_line,
    read_lines,
)
from megatron.util.json_text import MAX_DEPTH

Parsed = TypeVar("Parsed")

ANSWER = "assistant"
_ROLE_OF_SPEAKER = {
    "human": "user",
    "user": "user",
    "gpt": ANSWER,
    "assistant": ANSWER,
    "model": ANSWER,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Speakers of ShareGPT's layout."""
_LAYOUTS = (
    'a record has "messages" or "conversations", or "instruction" and "output", or "prompt" and '
    '"completion"'
)


class Turn(NamedTuple):
    role: str
    """"system", "user", "assistant", or another that a chat template knows."""
    content: str
    context: str = ""
    """Alpaca's "input": the text that an instruction is about."""

    @property
    def text(self) -> str:
        return f"{self.content}\n{self.context}" if self.context else self.content


@dataclass(frozen=True)
class Example:
    turns: tuple[Turn, ...]
    is_pair: bool = False
    """A prompt and its completion, which are one text."""


def read_examples(path: str) -> Iterator[tuple[str, Example]]:
    """See :func:`read_records`."""
    return read_records(path, parse_example)


def read_records(path: str, parse: Callable[[Any], Parsed]) -> Iterator[tuple[str, Parsed]]:
    """Each record of a JSON array or of JSON lines as ``parse`` reads it, after its place for
    messages. Raises ValueError, which names the place, if a record is malformed."""
    for place, record in records_of(path):
        try:
            parsed = parse(record)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        yield place, parsed


def parse_example(record: Any) -> Example:
    """A record in any layout. Raises ValueError if the layout is unknown, or the record contains no
    answer."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, not {json.dumps(record)[:40]}")
    if "chosen" in record and "rejected" in record:
        raise ValueError(
            'a better and a worse answer ("chosen", "rejected"), which --preference trains on, '
            "for example --preference dpo; instructions have one answer"
        )
    for key in ("messages", "conversations"):
        if key in record:
            return _until_last_answer(system_turns(record) + turns_of(record[key], key))
    response = "response" if "response" in record else None
    if "instruction" in record:
        turns = system_turns(record) + history_turns(record.get("history") or [])
        context = string_of(record, "input") if record.get("input") else ""
        turns.append(Turn("user", string_of(record, "instruction"), context))
        turns.append(Turn(ANSWER, string_of(record, response or "output")))
        return Example(tuple(turns))
    if "prompt" in record:
        answer = response or "completion"
        if isinstance(record["prompt"], list):
            turns = turns_of(record["prompt"], "prompt") + turns_of(record.get(answer), answer)
            return _until_last_answer(turns)
        pair = (Turn("user", string_of(record, "prompt")), Turn(ANSWER, string_of(record, answer)))
        return Example(pair, is_pair=True)
    raise ValueError(f"unknown layout (its keys: {keys_of(record)}); {_LAYOUTS}")


def system_turns(record: Mapping[str, Any]) -> list[Turn]:
    return [Turn("system", string_of(record, "system"))] if record.get("system") else []


def turns_of(messages: Any, key: str) -> list[Turn]:
    if not isinstance(messages, list):
        raise ValueError(f'"{key}" must be a list of messages')
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f'"{key}" must be a list of objects, with "role" and "content"')
        if "from" in message:
            speaker = string_of(message, "from")
            if speaker not in _ROLE_OF_SPEAKER:
                raise ValueError(
                    f'a message is from "{speaker}"; expected one of {", ".join(_ROLE_OF_SPEAKER)}'
                )
            turns.append(Turn(_ROLE_OF_SPEAKER[speaker], string_of(message, "value")))
        else:
            turns.append(Turn(string_of(message, "role"), string_of(message, "content")))
    return turns


def history_turns(pairs: Any) -> list[Turn]:
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise ValueError('"history" must be a list of pairs: an instruction and its answer')
    return [Turn(*turn) for q, a in pairs for turn in (("user", q), (ANSWER, a))]


def _until_last_answer(turns: list[Turn]) -> Example:
    while turns and turns[-1].role != ANSWER:
        turns.pop()
    if not turns:
        raise ValueError('there is no answer: no message has the role "assistant"')
    return Example(tuple(turns))


def keys_of(record: Mapping[str, Any]) -> str:
    return ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"


def string_of(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        raise ValueError(f'no key "{key}" (the keys: {keys_of(record)})')
    if not isinstance(record[key], str):
        raise ValueError(f'"{key}" must be a string, not {json.dumps(record[key])[:40]}')
    return record[key]


def records_of(path: str) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        start = len(BYTE_ORDER_MARK) if file.peek(3)[:3] == BYTE_ORDER_MARK else 0
        file.seek(start)
        while (byte := file.read(1)).isspace():
            pass
        file.seek(start)
        if byte == b"[":
            for number, item in enumerate(_items(file, path), 1):
                place = f"{path}, record {number}"
                yield place, _parsed(item, place)
        else:
            for number, (_, line) in enumerate(read_lines(file), 1):
                place = f"{path}, line {number}"
                if too_long := long_line(line, number):
                    raise ValueError(f"{place}: {too_long.reason}")
                if line and not line.isspace():
                    yield place, _parsed(line, place)


def _items(file: io.BufferedReader, path: str) -> Iterator[bytes]:
    try:
        yield from ArrayReader(file)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def _parsed(text: bytes, place: str) -> Any:
    if is_too_deep(text, MAX_DEPTH):
        raise ValueError(f"{place}: nested more than {MAX_DEPTH} levels deep")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text[:60].decode("utf-8", "replace").rstrip()
        raise ValueError(f"{place}: not JSON ({error}): {shown!r}") from None
