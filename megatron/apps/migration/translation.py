"""Outcome of each key of another trainer's configuration: flags, keys of the DeepSpeed JSON, or a
reason. A key that no rule accounts for is reported as unknown, so that none is lost silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from megatron.apps.finetune.settings import TuningConfig
from megatron.config import FLAG_CLASSES, ConfigError
from megatron.config.flags import flag_names, flag_of, type_hints, value_type
from megatron.engine import deepspeed_json

State = Literal["translated", "harmless", "lost", "unknown"]

DEFAULT = "default of"
"""Mark of a line about a key that the file leaves out, where the two programs' defaults differ."""

OFF: tuple[Any, ...] = (None, False, 0, "", *"none None null no false False disabled".split())
"""Values with which a feature is not used, next to empty lists and objects."""


class Unfit(ValueError):
    """A value that its flag cannot have; the message says why."""


@dataclass(frozen=True)
class KeyOutcome:
    """State of a key after a translation.

    Attributes:
        state: see :data:`State`.
        text: flags, keys of the JSON, or the reason.
    """

    state: State
    text: str


@dataclass(frozen=True)
class FlagKind:
    """A flag of a program: the type of its value, and how a switch is turned on and off."""

    name: str
    type: type
    several: bool
    on: str | None
    off: tuple[str, ...]
    default: Any
    choices: tuple[Any, ...]
    bare: bool


@cache
def flag_kinds() -> Mapping[str, FlagKind]:
    """Every flag of ``pretrain_gpt.py`` and ``finetune.py`` by each of its names."""
    kinds: dict[str, FlagKind] = {}
    for cls in (TuningConfig, *FLAG_CLASSES):
        hints = type_hints(cls)
        for item in dataclasses.fields(cls):
            if item.metadata.get("internal"):
                continue
            names, off = flag_names(item)
            meta = item.metadata
            kind = FlagKind(
                flag_of(item),
                value_type(hints[item.name]),
                "tuple" in str(hints[item.name]),
                names[0] if names else None,
                tuple((off or "").split()),
                item.default,
                (*(meta.get("choices") or ()), *(meta.get("spellings") or ())),
                meta.get("bare") is not None,
            )
            for name in (*names, *kind.off):
                kinds.setdefault(name, kind)
    return kinds


def shown(value: Any) -> str:
    """A value as a word of a command line; numbers without a trailing ``.0``."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value!r}"
    return str(value)


def is_off(value: Any) -> bool:
    """True for a value with which nothing is switched on."""
    return value == [] or value == {} or any(value is off or value == off for off in OFF)


def number(value: Any) -> float | int | None:
    """The number that a value means, also a text as ``5e-6``, which YAML does not read as one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        read = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return int(read) if read.is_integer() and str(value).strip().lstrip("+-").isdigit() else read


@dataclass
class Translation:
    """A configuration on its way to a command.

    Attributes:
        source: values of the file by dotted key.
        trainer: name of the other trainer.
        program: program here that the command starts.
        processes: number of processes; None where the file does not say.
        launcher: words between the launcher and the program.
        words: flags with their values, in order.
        content: the DeepSpeed JSON; empty for none.
        outcomes: what has become of each key.
    """

    source: Mapping[str, Any]
    trainer: str
    program: str = "pretrain_gpt.py"
    processes: int | None = None
    launcher: list[str] = field(default_factory=list)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, KeyOutcome] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which accounts for nothing; ``default`` where it is left out."""
        value = self.source.get(key)
        return default if value is None else value

    def given(self, keys: str | Iterable[str]) -> list[str]:
        """Return the keys that the file has, by their names or patterns (*)."""
        given: dict[str, None] = {}
        for name in self._named(keys):
            if name in self.source:
                given[name] = None
            elif "*" in name:
                given |= dict.fromkeys(key for key in self.source if fnmatchcase(key, name))
        return list(given)

    def _named(self, keys: str | Iterable[str]) -> list[str]:
        """Keys of a text with spaces between them; a key may have some, too."""
        if isinstance(keys, str):
            return [keys] if keys in self.source else keys.split()
        return list(keys)

    def has(self, flag: str) -> bool:
        """True if the command has the flag."""
        return flag_kinds()[flag].name in self.words

    def value_of(self, flag: str) -> str | None:
        """The word behind a flag of the command."""
        return next(iter(self.words.get(flag_kinds()[flag].name, ())[1:]), None)

    def state_of(self, key: str) -> State | None:
        """The state of a key; None where nothing is decided yet."""
        return self.outcomes[key].state if key in self.outcomes else None

    def put(self, keys: str | Iterable[str], flag: str, *values: Any, note: str = "") -> None:
        """Adds a flag that keys of the file lead to. ConfigError if another key has led to another
        value of it; Unfit if the flag cannot have the value."""
        kind = flag_kinds()[flag]
        words = self._words(kind, flag, values)
        # Keys that the file leaves out have the other trainer's default.
        names = self._named(keys)
        key = next(iter(self.given(names)), f"{DEFAULT} {names[0]}" if names else "")
        before = self.words.get(kind.name)
        if before is not None and before != words:
            if key.startswith(DEFAULT):
                return
            raise ConfigError(
                f"{self.origins[kind.name]} and {key} contradict each other: {' '.join(before)} "
                f"and {' '.join(words) or f'no {kind.name}'}; leave one of them out"
            )
        if words or before is None:
            self.words[kind.name] = words
            self.origins[kind.name] = key
        text = " ".join(words) or f"the default here, without {flag}"
        for name in self.given(names) or ([key] if key and words else []):
            self.tell(name, text + (f" ({note})" if note else ""))

    def _words(self, kind: FlagKind, flag: str, values: tuple[Any, ...]) -> tuple[str, ...]:
        if kind.type is bool:
            on = (bool(values[0]) if values else True) != (flag in kind.off)
            word = kind.on if on else next(iter(kind.off), None)
            return (word,) if word and on != kind.default else ()
        values = tuple(
            each
            for value in values
            for each in (value if isinstance(value, list | tuple) else (value,))
        )
        return (kind.name, *(shown(self._checked(kind, value)) for value in values))

    def _checked(self, kind: FlagKind, value: Any) -> Any:
        if kind.type in (int, float):
            read = number(value)
            if read is None or not math.isfinite(read):
                raise Unfit(f"{value!r} is not a number, as {kind.name} needs")
            if kind.type is int and not float(read).is_integer():
                raise Unfit(f"{kind.name} is an integer, not {shown(read)}")
            value = int(read) if kind.type is int else read
        elif isinstance(value, dict | list | bool):
            raise Unfit(f"{value!r:.60} is not a value of {kind.name}")
        if kind.choices and value not in kind.choices:
            raise Unfit(f"{kind.name} has no {value}: {', '.join(map(str, kind.choices))}")
        return value

    def put_json(self, keys: str | Iterable[str], path: str, value: Any, note: str = "") -> None:
        """Sets a key of the DeepSpeed JSON."""
        deepspeed_json.put(self.content, path, value)
        for name in self.given(keys):
            self.tell(name, f"{path} in the DeepSpeed JSON" + (f" ({note})" if note else ""))

    def tell(self, key: str, text: str) -> None:
        """Records what a key has become, after what is recorded already."""
        before = self.outcomes.get(key)
        if before is not None and before.state == "translated" and text not in before.text:
            text = f"{before.text}, {text}"
        if before is None or before.state != "lost":
            self.outcomes[key] = KeyOutcome("translated", text)

    def harmless(self, keys: str | Iterable[str], reason: str) -> None:
        """Records that keys change nothing of the training here."""
        for key in self.given(keys):
            self.outcomes.setdefault(key, KeyOutcome("harmless", reason))

    def lose(self, keys: str | Iterable[str], reason: str) -> None:
        """Records that keys have no counterpart, also of a part of their value that a flag has;
        those that are off are harmless."""
        for key in self.given(keys):
            if is_off(self.source[key]):
                self.harmless(key, "it is off")
            elif self.state_of(key) != "harmless":
                self.outcomes[key] = KeyOutcome("lost", reason)

    def finish(self) -> None:
        """Names the keys that nothing accounts for."""
        for key in self.source:
            self.outcomes.setdefault(
                key, KeyOutcome("unknown", f"not a key of {self.trainer} that is known here")
            )

    def of_state(self, *states: State) -> dict[str, str]:
        """The texts of the keys in these states."""
        return {key: each.text for key, each in self.outcomes.items() if each.state in states}
