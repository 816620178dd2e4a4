"""Keys of records and messages: each is used, known to have no effect, or refused.

A key that is silently ignored may contain the passage that a question is about, or a loss weight.
The tables below list metadata keys of public data sets, which training ignores.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron.features.instruction.flags import InstructionConfig

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns that contain whole conversations."""
_METADATA = frozenset(
    """
    id ids idx index uid uuid guid hash md5 sha source sources origin version dataset dataset_name
    datasource data_source subset split category categories subcategory tag tags type difficulty
    quality lang
    language languages license licence url link timestamp created_at updated_at user_id worker_id
    annotator annotators model models model_name generator generation_model generation_models views
    avatarurl metadata meta token_count num_tokens turn num_turns rating ratings rank score scores
    safety llama_guard_2 input_quality other_task_category gen_input_configs gen_response_configs
    instruct_reward reward_model min_neighbor_distance min_similar_uuid repeat_count
    custom_instruction skip_prompt_formatting helpfulness correctness coherence complexity verbosity
    toxicity toxic redacted openai_moderation detoxify_moderation labelling_model in_gsm8k_train
    __index_level_0__ unnamed:_0
    """.split()
) | {""}
"""Names that public instruction and preference data sets use for metadata."""
_LONG_METADATA = frozenset(
    """
    quality_explanation pre_query_template original_question original_response original_chosen
    original_rejected labelling_prompt raw_labelling_response generation_prompt
    raw_generation_responses raw_generation_response new_generations
    """.split()
)
"""Names of metadata whose values are long texts (Magpie, MetaMath, distilabel)."""
_OBJECTS = frozenset(("metadata", "meta"))
"""Names of metadata objects, which may contain texts of any length."""
_MOST_WORDS = 12
"""Maximum number of words in a metadata value. Longer texts may matter, so they must be used."""
_METADATA_FORMS = re.compile(
    r".*_(id|ids|idx|index|uuid|hash|score|scores|rating|ratings|rank|model|models|source|license|"
    r"url|timestamp|category|generator|length|tokens|avg|average)|"
    r"(score|rating|ratings|num|avg|average)_.*"
)
_OF_CONVERSATIONS = frozenset(
    "task tasks task_name title topic topics subtopic domain country state hashed_ip header".split()
)
"""Names that count as metadata in records with a whole conversation, which needs no other
column."""
_NEXT_TO = {
    "knowledge": "intent",
    "intent": "knowledge",
    **dict.fromkeys(("rationale", "generations", "order", "status"), "labelling_model"),
}
"""Names that count as metadata if another key identifies the data set (Magpie, distilabel)."""
_REMEDY = (
    "if that is right, give --ignore-columns {keys}; else rename columns, or name them by "
    "--messages-column, --prompt-column, --context-column, --response-column"
)
_SHOWN = 20


@dataclass(frozen=True)
class RecordColumns:
    """Column names set by flags, and columns to ignore.

    Attributes:
        names: (column name, flag) by the key that readers use.
    """

    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: InstructionConfig) -> RecordColumns:
        """Return the columns set by flags."""
        flags = {
            "messages": "messages_column",
            "instruction": "prompt_column",
            "input": "context_column",
            "output": "response_column",
            "system": "system_column",
            "chosen": "chosen_column",
            "rejected": "rejected_column",
            "label": "label_column",
        }
        names = {key: (getattr(config, flag), flag) for key, flag in flags.items()}
        return cls(
            {
                key: (name, "--" + flag.replace("_", "-"))
                for key, (name, flag) in names.items()
                if name is not None
            },
            frozenset(config.ignore_columns),
        )

    @property
    def identity(self) -> list[Any]:
        """Column names and ignored columns as JSON values, for cache keys."""
        return [sorted((key, name) for key, (name, _) in self.names.items()), sorted(self.ignored)]

    def record(self, record: Any) -> RecordFields:
        """Return the fields of a record. Raises ValueError if the record is not an object, lacks a
        column that a flag names, or also has the default column that the flag replaces."""
        if not isinstance(record, dict):
            raise ValueError(f"a record must be a JSON object, not {json.dumps(record)[:40]}")
        for name, flag in self.names.values():
            if name not in record:
                raise ValueError(f"{flag} {name}: no such column (the columns: {keys_of(record)})")
        named = {name for name, _ in self.names.values()}
        values = {key: value for key, value in record.items() if key not in named}
        renamed = {key: record[name] for key, (name, _) in self.names.items()}
        replaced = [*renamed, *CONVERSATIONS] if "instruction" in renamed else [*renamed]
        for key in replaced:
            if values.get(key) is not None and key not in self.ignored:
                raise ValueError(
                    f'the key "{key}" is not read where flags name other columns: leave it out by '
                    f"--ignore-columns {key}"
                )
        return RecordFields(values | renamed, self.ignored.difference(renamed))


NO_FLAGS = RecordColumns()


class RecordFields:
    """Fields of a JSON object, which track whether each has been read. A key with the value null
    counts as absent."""

    def __init__(self, values: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self._values = {key: v for key, v in values.items() if v is not None and key not in ignored}
        self._present = values.keys()
        self._left = dict.fromkeys(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has_key(self, key: str) -> bool:
        """Return whether the object has a key, even with the value null."""
        return key in self._present

    @property
    def keys(self) -> str:
        """Comma-separated keys, for error messages."""
        return keys_of(self._values)

    def first(self, keys: Sequence[str]) -> str | None:
        """Return the first of ``keys`` that the object has, or None."""
        return next((key for key in keys if key in self._values), None)

    def take(self, key: str) -> Any:
        """Return the value of a key, or None, and mark it as read."""
        self._left.pop(key, None)
        return self._values.get(key)

    def text(self, key: str) -> str:
        """Return the string of a key. Raises ValueError if it is missing or not a string."""
        if key not in self._values:
            raise ValueError(f'no key "{key}" (the keys: {self.keys})')
        value = self.take(key)
        if not isinstance(value, str):
            raise ValueError(f'"{key}" must be a string, not {shown(value)}')
        return value

    def optional_text(self, *keys: str) -> str:
        """Return the string of the first of ``keys`` with a non-empty value, or an empty string."""
        key = next((key for key in keys if self._values.get(key)), None)
        return "" if key is None else self.text(key)

    def check(
        self,
        where: str = "",
        repeats: Callable[[Any], bool] = lambda value: False,
        conversation: bool = False,
        remedy: str = _REMEDY,
    ) -> None:
        """Raise ValueError if a key was not read. Keys are exempt if they are empty or metadata, or
        if ``repeats`` says that their value repeats a key that was read."""
        unknown = {}
        for key in self._left:
            value = self._values[key]
            known = is_metadata(key, value, conversation) or _NEXT_TO.get(key) in self._values
            if not known and value not in ("", [], {}) and not repeats(value):
                unknown[key] = value
        if unknown:
            names = ", ".join(f'"{key}" ({shown(value)})' for key, value in unknown.items())
            many = len(unknown) > 1
            raise ValueError(
                f"{where}the key{'s' * many} {names} {'are' if many else 'is'} not known here and "
                f"would have no effect: {remedy.format(keys=shlex.join(unknown))}"
            )


def is_metadata(key: str, value: Any, conversation: bool) -> bool:
    """Return whether a key is metadata, such as ``id``. A value that contains a longer text is not,
    unless the record also has a whole ``conversation``."""
    name = re.sub(r"[-\s.]", "_", key.strip().lower())
    if name in _LONG_METADATA or (conversation and name in _OF_CONVERSATIONS):
        return True
    if name not in _METADATA and _METADATA_FORMS.fullmatch(name) is None:
        return False
    is_object = isinstance(value, dict) or (isinstance(value, str) and value.startswith("{"))
    if conversation or (is_object and name in _OBJECTS):
        return True
    return _longest_text(value) <= _MOST_WORDS


def _longest_text(value: Any) -> int:
    """Return the number of words in the longest text of a value, which may be JSON text."""
    if isinstance(value, str):
        if value.startswith(("{", "[")):
            with suppress(ValueError, RecursionError):
                return _longest_text(json.loads(value))
        return len(value.split())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_longest_text, items), default=0)


def keys_of(record: Mapping[str, Any]) -> str:
    """Return the keys of an object, separated by commas, for error messages."""
    more = ", ..." * (len(record) > _SHOWN)
    return ", ".join(f'"{key}"' for key in list(record)[:_SHOWN]) + more or "none"


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON, for error messages."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]
