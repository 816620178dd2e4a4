"""Keys of records and of their messages: each is read, known to be without effect, or refused.

A key that is left out without a word may be the passage that a question is about, or a weight. The
tables below name what public data sets have next to their texts and what training does not read.
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
"""Columns with whole conversations."""
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
"""Names that public sets of instructions and preferences use for what no model reads."""
_LONG_METADATA = frozenset(
    """
    quality_explanation pre_query_template original_question original_response original_chosen
    original_rejected labelling_prompt raw_labelling_response generation_prompt
    raw_generation_responses raw_generation_response new_generations
    """.split()
)
"""Such names whose values are long texts (Magpie, MetaMath, distilabel)."""
_OBJECTS = frozenset(("metadata", "meta"))
"""Names of objects of metadata, which may have texts of any length."""
_MOST_WORDS = 12
"""A text of more words next to an instruction is more than a label."""
_METADATA_FORMS = re.compile(
    r".*_(id|ids|idx|index|uuid|hash|score|scores|rating|ratings|rank|model|models|source|license|"
    r"url|timestamp|category|generator|length|tokens|avg|average)|"
    r"(score|rating|ratings|num|avg|average)_.*"
)
_OF_CONVERSATIONS = frozenset(
    "task tasks task_name title topic topics subtopic domain country state hashed_ip header".split()
)
"""Names of the same kind next to whole conversations, which need no further text."""
_NEXT_TO = {
    "knowledge": "intent",
    "intent": "knowledge",
    **dict.fromkeys(("rationale", "generations", "order", "status"), "labelling_model"),
}
"""Names of the same kind next to another one, by which the set (Magpie, distilabel) is known."""
_REMEDY = (
    "if that is right, give --ignore-columns {keys}; else rename columns, or name them by "
    "--messages-column, --prompt-column, --context-column, --response-column"
)
_SHOWN = 20


@dataclass(frozen=True)
class RecordColumns:
    """Names of columns that flags give, and columns to leave out.

    Attributes:
        names: the name of a column and the flag that gives it, by the key that readers know.
    """

    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: InstructionConfig) -> RecordColumns:
        """Columns that the flags name."""
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
        """The flags as JSON values."""
        return [sorted((key, name) for key, (name, _) in self.names.items()), sorted(self.ignored)]

    def record(self, record: Any) -> RecordFields:
        """The fields of a record. Raises ValueError if it is not an object, or lacks a column that
        a flag names."""
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
    """Keys of an object that are taken one by one. A key without a value (null) is absent."""

    def __init__(self, values: Mapping[str, Any], ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self._values = {key: v for key, v in values.items() if v is not None and key not in ignored}
        self._present = values.keys()
        self._left = dict.fromkeys(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has_key(self, key: str) -> bool:
        """True also for a key without a value."""
        return key in self._present

    @property
    def keys(self) -> str:
        """For messages."""
        return keys_of(self._values)

    def first(self, keys: Sequence[str]) -> str | None:
        """The first of some keys that the object has."""
        return next((key for key in keys if key in self._values), None)

    def take(self, key: str) -> Any:
        """Return the value of a key, or None, and mark it as read."""
        self._left.pop(key, None)
        return self._values.get(key)

    def text(self, key: str) -> str:
        """The string of a key. Raises ValueError if it is missing, or not a string."""
        if key not in self._values:
            raise ValueError(f'no key "{key}" (the keys: {self.keys})')
        value = self.take(key)
        if not isinstance(value, str):
            raise ValueError(f'"{key}" must be a string, not {shown(value)}')
        return value

    def optional_text(self, *keys: str) -> str:
        """The string of the first of some keys that has one; empty without any."""
        key = next((key for key in keys if self._values.get(key)), None)
        return "" if key is None else self.text(key)

    def check(
        self,
        where: str = "",
        repeats: Callable[[Any], bool] = lambda value: False,
        conversation: bool = False,
        remedy: str = _REMEDY,
    ) -> None:
        """Raises ValueError for unread keys, except those that are empty, known to have no effect,
        or that repeat a read key according to ``repeats``."""
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
    """True for the names of what no model reads, such as ``id``, unless the value is a text as long
    as a passage that a model should read, and no whole ``conversation`` is next to it."""
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
    """Words of the longest text in a value, which may be JSON."""
    if isinstance(value, str):
        if value.startswith(("{", "[")):
            with suppress(ValueError, RecursionError):
                return _longest_text(json.loads(value))
        return len(value.split())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_longest_text, items), default=0)


def keys_of(record: Mapping[str, Any]) -> str:
    """The keys of an object, for messages."""
    more = ", ..." * (len(record) > _SHOWN)
    return ", ".join(f'"{key}"' for key in list(record)[:_SHOWN]) + more or "none"


def shown(value: Any) -> str:
    """The beginning of a value, for messages."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]
