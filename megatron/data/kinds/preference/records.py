"""Preference files in their various layouts, to one form: a prompt with its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.kinds.instruction.conversations import (
    ANSWER,
    Turn,
    history_turns,
    keys_of,
    read_records,
    string_of,
    system_turns,
    turns_of,
)

Turns = tuple[Turn, ...]

_TAGS = ("label", "kto_tag")
_LAYOUTS = (
    'a record has "chosen" and "rejected", beside "prompt", "instruction", "conversations" or '
    '"messages", or with the prompt in both; or an answer with "label" or "kto_tag"'
)


@dataclass(frozen=True)
class Preference:
    """A prompt and its answers: the better and the worse one, or one that is judged.

    Attributes:
        answers: each one message or more.
        is_text: prompt and answer are one text, not a conversation.
        good: whether the judged answer is; None for a pair.
        margin: of a pair, where the record says by how much the better answer is better.
    """

    prompt: Turns
    answers: tuple[Turns, ...]
    is_text: bool = False
    good: bool | None = None
    margin: float | None = None

    def judged(self) -> Iterator[Preference]:
        """Each answer by itself: of a pair the better one is good, the worse one bad."""
        if self.good is not None:
            yield self
            return
        for answer, good in zip(self.answers, (True, False), strict=True):
            yield Preference(self.prompt, (answer,), self.is_text, good)


def read_preferences(path: str) -> Iterator[tuple[str, Preference]]:
    """Each record of a JSON array or of JSON lines, after its place for messages. Raises ValueError
    if a record is malformed."""
    return read_records(path, parse_preference)


def parse_preference(record: Any) -> Preference:
    """A record in any layout. Raises ValueError if the layout is unknown, or there is no prompt or
    no answer."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, not {json.dumps(record)[:40]}")
    if "chosen" in record or "rejected" in record:
        for key in ("chosen", "rejected"):
            if key not in record:
                raise ValueError(f'no key "{key}" (the keys: {keys_of(record)})')
        return _pair(record, record["chosen"], record["rejected"])
    if "instruction" in record and isinstance(record.get("output"), list):
        if len(record["output"]) != 2:
            raise ValueError('"output" must be a list of the better and the worse answer')
        return _pair(record, *record["output"])
    tags = [key for key in _TAGS if key in record]
    if not tags:
        raise ValueError(
            f"unknown layout (its keys: {keys_of(record)}); {_LAYOUTS}; instructions with one "
            "answer are trained on without --preference"
        )
    good = record[tags[0]]
    if not isinstance(good, bool):
        raise ValueError(f'"{tags[0]}" must be true or false, not {json.dumps(good)[:40]}')
    return _judged(record, good)


def _pair(record: Mapping[str, Any], chosen: Any, rejected: Any) -> Preference:
    margin = record.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise ValueError(f'"margin" must be a number, not {json.dumps(margin)[:40]}')
    prompt, is_text = _prompt(record)
    both_text = isinstance(chosen, str) and isinstance(rejected, str)
    if is_text and both_text and not prompt:
        shared = _shared_text(chosen, rejected)
        prompt = (Turn("user", chosen[:shared]),)
        chosen, rejected = chosen[shared:], rejected[shared:]
    answers = [_answer(chosen, "chosen"), _answer(rejected, "rejected")]
    if is_text and not both_text:
        # The messages repeat the prompt, or they are a conversation without any before it.
        shared = _shared_turns(*answers)
        stated, prompt = prompt, tuple(answers[0][:shared]) or prompt
        answers, is_text = [answer[shared:] for answer in answers], False
        if not prompt:
            raise ValueError(
                '"chosen" and "rejected" begin with different messages, so that there is no prompt'
            )
        if prompt is not stated:
            prompt = (*system_turns(record), *prompt)
    return Preference(prompt, tuple(map(_checked, answers)), is_text, margin=margin)


def _judged(record: Mapping[str, Any], good: bool) -> Preference:
    prompt, is_text = _prompt(record)
    for key in ("completion", "response", "output"):
        if key in record:
            answer = _answer(record[key], key)
            if not prompt:
                raise ValueError(f'no "prompt" before "{key}" (the keys: {keys_of(record)})')
            is_text = is_text and isinstance(record[key], str)
            return Preference(prompt, (_checked(answer),), is_text, good)
    turns = list(prompt)
    while turns and turns[-1].role != ANSWER:
        turns.pop()
    if is_text or len(turns) < 2:
        raise ValueError(f"there is no answer to judge (the keys: {keys_of(record)})")
    return Preference(tuple(turns[:-1]), (tuple(turns[-1:]),), False, good)


def _prompt(record: Mapping[str, Any]) -> tuple[Turns, bool]:
    """The conversation up to the answers, and whether it is mere text. Empty text if no key has
    it."""
    for key in ("conversations", "messages"):
        if key in record:
            return (*system_turns(record), *turns_of(record[key], key)), False
    if "instruction" in record:
        turns = [*system_turns(record), *history_turns(record.get("history") or [])]
        context = string_of(record, "input") if record.get("input") else ""
        return (*turns, Turn("user", string_of(record, "instruction"), context)), False
    if isinstance(record.get("prompt"), list):
        return (*system_turns(record), *turns_of(record["prompt"], "prompt")), False
    if "prompt" not in record:
        return (), True
    text = Turn("user", string_of(record, "prompt"))
    system = system_turns(record)
    return (*system, text), not system


def _answer(value: Any, key: str) -> Sequence[Turn]:
    """Text, a message, or messages."""
    if isinstance(value, str):
        return (Turn(ANSWER, value),)
    return turns_of([value] if isinstance(value, dict) else value, key)


def _checked(answer: Sequence[Turn]) -> Turns:
    if not any(turn.role == ANSWER for turn in answer):
        raise ValueError('an answer has no message of the role "assistant"')
    return tuple(answer)


def _shared_text(chosen: str, rejected: str) -> int:
    """Characters of the prompt that both texts begin with, as trl's ``extract_prompt`` finds them:
    up to the first difference, without a space before it. Of texts that are equal as far as both
    go, the last character belongs to the answers."""
    shortest = min(len(chosen), len(rejected))
    differ = (n for n in range(shortest) if chosen[n] != rejected[n])
    shared = next(differ, shortest - 1)
    if shared > 0 and shared < shortest and chosen[shared] != rejected[shared]:
        shared -= chosen[shared - 1] == " "
    if shared < 1:
        raise ValueError(
            '"chosen" and "rejected" share no beginning, which is the prompt where there is no '
            '"prompt"'
        )
    return shared


def _shared_turns(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> int:
    """Messages of the prompt that both conversations begin with; at least one is left for each
    answer."""
    shortest = min(len(chosen), len(rejected))
    differ = (n for n in range(shortest) if chosen[n] != rejected[n])
    return max(0, next(differ, shortest - 1))
