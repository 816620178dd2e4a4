"""Preference files in various layouts: parsed into prompts with answers, tokenized once, and mapped
into memory from the cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.features.instruction.columns import (
    CONVERSATIONS,
    NO_FLAGS,
    RecordColumns,
    RecordFields,
    keys_of,
    shown,
)
from megatron.features.instruction.conversations import (
    ANSWER,
    ANSWERS,
    Example,
    StatedPrompt,
    Turn,
    conversation_turns,
    message_key,
    messages_in,
    prompt_of,
    read_records,
    repeated_turns,
    repeats,
    template_variables,
    turns_of,
    until_last_answer,
    with_system,
)
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.examples import TokenizedExamples, offsets_of
from megatron.util.digests import digest, hash64

Turns = tuple[Turn, ...]

_TAGS = ("label", "kto_tag")
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_ANSWERING = (ANSWER, "tool")
"""Roles with which an answer can begin. An answer with another first role repeats its prompt."""
_LAYOUTS = (
    'a record has "chosen" and "rejected", next to "prompt", "instruction", "question", '
    '"conversations" or "messages", or with the prompt in both; or an answer with "label" or '
    '"kto_tag"; --prompt-column, --chosen-column, --rejected-column name other columns'
)


@dataclass(frozen=True)
class Preference:
    """Prompt and its answers: a better and a worse one, or a single judged one.

    Attributes:
        answers: the messages of each answer, at least one.
        is_text: True if prompt and answer form one text, not a conversation.
        good: True if the judged answer is good; None for a pair.
        margin: how much better the better answer of a pair is, if recorded.
        variables: see :class:`Example`.
    """

    prompt: Turns
    answers: tuple[Turns, ...]
    is_text: bool = False
    good: bool | None = None
    margin: float | None = None
    variables: tuple[tuple[str, Any], ...] = ()

    def judged(self) -> Iterator[Preference]:
        """Yield the judged answers: of a pair the better one as good, the worse one as bad."""
        if self.good is not None:
            yield self
            return
        for answer, good in zip(self.answers, (True, False), strict=True):
            yield Preference(self.prompt, (answer,), self.is_text, good, variables=self.variables)


def read_preferences(
    path: str, columns: RecordColumns = NO_FLAGS
) -> Iterator[tuple[str, Preference]]:
    """Yield (location, preference) for each record of a file; the location is for error messages.
    Raises ValueError if a record is malformed."""
    return read_records(path, lambda record: parse_preference(record, columns))


def parse_preference(record: Any, columns: RecordColumns = NO_FLAGS) -> Preference:
    """Return the preference of a record in any layout. Raises ValueError if the layout is unknown,
    if prompt or answer is missing, or if a key would be ignored that may matter."""
    fields = columns.record(record)
    good = None
    if "chosen" in fields or "rejected" in fields:
        for key in ("chosen", "rejected"):
            if key not in fields:
                raise ValueError(f'no key "{key}" (the keys: {fields.keys})')
        named = [(key, fields.take(key)) for key in ("chosen", "rejected")]
    elif "instruction" in fields and isinstance(record.get("output"), list):
        named = [("output", answer) for answer in fields.take("output")]
        if len(named) != 2:
            raise ValueError('"output" must be a list of the better and the worse answer')
    else:
        tag = fields.first(_TAGS)
        if tag is None:
            raise ValueError(
                f"unknown layout (its keys: {keys_of(record)}); {_LAYOUTS}; instructions with one "
                "answer are trained on without --preference"
            )
        good = _LABELS.get(str(fields.take(tag)).lower())
        if good is None:
            raise ValueError(f'"{tag}" must be true, false, 1 or 0, not {shown(fields.take(tag))}')
        named = [_judged(fields)]
    return _preference(fields, named, good)


def _margin(value: Any) -> float | None:
    """Return a margin, a number or (in tables) its text; None if empty. Raises ValueError."""
    try:
        margin = None if value in (None, "") else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if isinstance(value, bool) or (margin is not None and not math.isfinite(margin)):
        raise ValueError(f'"margin" must be a number, not {shown(value)}')
    return margin


def _judged(fields: RecordFields) -> tuple[str, Any]:
    """Return the column of a judged answer and its value: the answer, or a conversation that ends
    with it."""
    key = fields.first(ANSWERS) or fields.first(CONVERSATIONS)
    value = None if key is None else fields.take(key)
    if key is None or (not isinstance(value, str) and not turns_of(value, key, fields.ignored)):
        raise ValueError(f"there is no answer to judge (the keys: {fields.keys})")
    return key, value


def _preference(
    fields: RecordFields, named: Sequence[tuple[str, Any]], good: bool | None
) -> Preference:
    named = [(key, messages_in(value, key)) for key, value in named]
    margin = _margin(fields.take("margin"))
    variables = template_variables(fields)
    names = " and ".join(dict.fromkeys(f'"{key}"' for key, _ in named))
    answers = [_answer(value, key, fields.ignored) for key, value in named]
    if good is not None:
        answers = [until_last_answer(answer) for answer in answers]
    columns = [key for key in CONVERSATIONS if key in fields and key != named[0][0]]
    prompts = [StatedPrompt(conversation_turns(fields, key), key) for key in columns]
    prompts += [asked] if (asked := prompt_of(fields)) else []
    prompts = [prompt for prompt in prompts if prompt.turns]
    texts = all(isinstance(value, str) for _, value in named)
    if any(answer[0].role not in _ANSWERING for answer in answers):
        prompt, count = _inside(prompts, answers, names)
        prompt = StatedPrompt(with_system(fields, prompt.turns), names)
    elif texts and not prompts and good is None:
        (chosen,), (rejected,) = answers
        count = _shared_text(chosen.content, rejected.content)
        prompt = StatedPrompt((Turn("user", chosen.content[:count]),), names, is_text=True)
        answers = [(Turn(ANSWER, turn.content[count:]),) for turn in (chosen, rejected)]
        count = 0
    elif not prompts:
        raise ValueError(f'no "prompt" before {names} (the keys: {fields.keys})')
    else:
        prompt, count = _stated(prompts[0], answers, names), 0
    answers = [answer[count:] for answer in answers]
    _check_repeated(prompts, prompt, answers)
    is_text = texts and prompt.is_text and not variables
    result = Preference(
        prompt.turns, tuple(map(_checked, answers)), is_text, good, margin, variables
    )
    turns = (*prompt.turns, *(turn for answer in answers for turn in answer))
    fields.check(repeats=lambda value: repeats(value, turns), conversation=not texts)
    return result


def _inside(
    prompts: Sequence[StatedPrompt], answers: Sequence[Turns], names: str
) -> tuple[StatedPrompt, int]:
    """Return the prompt with which the answers' conversations begin, and its number of turns.

    If the answers begin with the prompt of another column, it is that one, else their common
    beginning, as in trl. For a single conversation it is everything before the last message."""
    for stated in prompts:
        count, *others = {repeated_turns(stated.turns, answer) for answer in answers}
        if stated.is_list and count and not others and all(len(a) > count for a in answers):
            return stated, count
    count = len(answers[0]) - 1 if len(answers) == 1 else _shared_turns(*answers)
    if count < 1:
        raise ValueError(
            f"{names} begin with different messages, so that there is no prompt"
            if len(answers) > 1
            else "there is no answer to judge: the conversation has one message"
        )
    return StatedPrompt(answers[0][:count], names), count


def _stated(prompt: StatedPrompt, answers: Sequence[Turns], names: str) -> StatedPrompt:
    """Return a prompt that the answers do not repeat. Raises ValueError if it ends with a different
    answer, or if the answers begin with its text."""
    last = prompt.turns[-1]
    if last.role == ANSWER:
        if last.content not in {answer[0].content for answer in answers} or not prompt.turns[:-1]:
            raise ValueError(
                f'"{prompt.column}" is the prompt of {names}, and ends with an answer: '
                f"leave out a column by --ignore-columns {prompt.column}"
            )
        return prompt._replace(turns=prompt.turns[:-1])
    asked = last.content.strip()
    if " " in asked and all(a[0].content.lstrip().startswith(asked) for a in answers):
        raise ValueError(
            f'{names} repeat the text of "{prompt.column}" ({shown(asked)}): the answers must '
            f"begin after it, or --ignore-columns {prompt.column} makes what both begin with the "
            "prompt"
        )
    return prompt


def _check_repeated(
    prompts: Sequence[StatedPrompt], prompt: StatedPrompt, answers: Sequence[Turns]
) -> None:
    """Raise ValueError if another column contains a different prompt."""
    known = _keys((*prompt.turns, *(turn for answer in answers for turn in answer)))
    for other in prompts:
        turns = other.turns
        if len(turns) > 1 and turns[-1].role == ANSWER:
            turns = turns[:-1]
        if not set(_keys(turns)) <= set(known) and other.column != prompt.column:
            column = prompt.column if '"' in prompt.column else f'"{prompt.column}"'
            raise ValueError(
                f'the prompt is in {column} and another in "{other.column}": leave out a column '
                f"by --ignore-columns {other.column}"
            )


def _keys(turns: Sequence[Turn]) -> list[tuple[object, ...]]:
    return [message_key(turn) for turn in turns]


def _answer(value: Any, key: str, ignored: frozenset[str]) -> Turns:
    """Return the turns of an answer: a text, a message or a list of messages."""
    if isinstance(value, str):
        return (Turn(ANSWER, value),)
    turns = tuple(turns_of([value] if isinstance(value, dict) else value, key, ignored))
    if not turns:
        raise ValueError(f'"{key}" has no message')
    return turns


def _checked(answer: Turns) -> Turns:
    if not any(turn.role == ANSWER for turn in answer):
        raise ValueError('an answer has no message of the role "assistant"')
    if not all(turn.counts for turn in answer):
        raise ValueError(
            "an answer of a preference has a weight of 0, or no text without the calls that "
            "--ignore-columns leaves out, and all of its tokens count: remove the record, or give "
            "--ignore-columns weight"
        )
    return answer


def _shared_text(chosen: str, rejected: str) -> int:
    """Return the number of characters of the prompt with which both texts begin, as in trl's
    ``extract_prompt``: up to the first difference, without a space right before it. If one text is
    the start of the other, their last common character belongs to the answers."""
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
    """Return the number of messages of the prompt with which both conversations begin. Each answer
    retains at least one message."""
    shortest = min(len(chosen), len(rejected))
    differ = (n for n in range(shortest) if chosen[n] != rejected[n])
    return max(0, next(differ, shortest - 1))


logger = logging.getLogger(__name__)

_AT_ONCE = 500


class EncodedPreference(NamedTuple):
    """Token ids, int32 [L] each. The model reads the prompt followed by an answer."""

    prompt: npt.NDArray[np.int32]
    answers: tuple[npt.NDArray[np.int32], ...]


class PreferenceExamples(TokenizedExamples):
    """Tokenized prompts and answers of preference files. A document has three sequences (prompt,
    better and worse answer), or with ``judged`` two (prompt and answer). Pickling stores only the
    path of the cache entry."""

    def __init__(self, prefix: str, judged: bool, index: StoredArrays) -> None:
        super().__init__(prefix, index, parts=2 if judged else 3)
        self.judged = judged
        self.values: npt.NDArray[np.float32] = index["values"]
        """One value for each document: for a judged answer 1 if it is good and 0 if it is bad; for
        a pair its margin, or NaN without one."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, judged: bool, cache: IndexCache | None = None
    ) -> PreferenceExamples:
        """Tokenize the records of a file, folder or glob, or read them from the cache, by default
        `index-cache/` next to the data. With ``judged``, a pair becomes two judged answers. Raises
        FileNotFoundError if no file matches, and ValueError if a record is malformed or not a pair,
        or if no records exist."""

        def arrays(records: Iterator[tuple[str, Preference]]) -> dict[str, np.ndarray]:
            return _arrays(_as_wanted(records, judged), encoder)

        known = path, "preference", encoder, {"judged": judged}
        return cls(path, judged, cls.stored(*known, read_preferences, arrays, cache))

    @cached_property
    def content_digest(self) -> str:
        """Digest of all arrays that the samples depend on."""
        parts = (self._index["tokens"], self._offsets, self.values)
        return digest(b"".join(digest(np.ascontiguousarray(p).data).encode() for p in parts))

    @cached_property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document's prompt and answers, [documents, parts]."""
        return self.sequence_lengths.reshape(-1, self.parts).astype(np.int64)

    def document(self, number: int) -> EncodedPreference:
        """Return a document's prompt and answers."""
        first = number * self.parts
        prompt, *answers = (self.get(index) for index in range(first, first + self.parts))
        return EncodedPreference(prompt, tuple(answers))

    def verify(self) -> None:
        documents, rest = divmod(len(self), self.parts)
        complete = documents == len(self.prompt_hashes) == len(self.values)
        self.check("preference", complete and not rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefix, self.judged, self._index)


def _as_wanted(
    records: Iterable[tuple[str, Preference]], judged: bool
) -> Iterator[tuple[str, Preference]]:
    for place, preference in records:
        if judged:
            yield from ((place, each) for each in preference.judged())
        elif preference.good is not None:
            raise ValueError(
                f"{place}: an answer with a label and nothing to compare it with; --preference kto "
                'trains on such answers, the other losses need "chosen" and "rejected"'
            )
        else:
            yield place, preference


def encode_preferences(
    preferences: Sequence[tuple[str, Preference]], encoder: ExampleEncoder
) -> list[EncodedPreference]:
    """Encode (location, preference) pairs. As in trl (1.16), an answer is everything after the
    prompt: it starts at the first token, in any answer, that differs from the prompt alone, and
    ends with the template's output. Raises ValueError, which names the location, if a preference
    cannot be formatted or tokenized."""
    conversations = [
        (place, Example((*each.prompt, *answer), each.is_text, each.variables), len(each.prompt))
        for place, each in preferences
        for answer in each.answers
    ]
    continued = iter(encoder.continued(conversations))
    encoded = []
    for _, each in preferences:
        encodings = [next(continued) for _ in each.answers]
        # No model predicts the first token of a text.
        start = max(1, min(one.start for one in encodings))
        answers = tuple(one.tokens[start:] for one in encodings)
        encoded.append(EncodedPreference(encodings[0].tokens[:start], answers))
    return encoded


def _arrays(
    preferences: Iterator[tuple[str, Preference]], encoder: ExampleEncoder
) -> dict[str, np.ndarray]:
    tokens: list[np.ndarray] = []
    hashes, values, lengths = [], [], []
    while batch := list(islice(preferences, _AT_ONCE)):
        encoded = encode_preferences(batch, encoder)
        parts = [part for each in encoded for part in (each.prompt, *each.answers)]
        tokens.append(np.concatenate(parts))
        lengths += [len(part) for part in parts]
        hashes += [hash64(each.prompt.tobytes()) for each in encoded]
        for _, each in batch:
            value = each.margin if each.good is None else each.good
            values.append(np.nan if value is None else float(value))
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "offsets": offsets_of(lengths),
        "prompt_hashes": np.array(hashes, np.uint64),
        "values": np.array(values, np.float32),
    }
