"""Outcome of each key of another trainer's configuration: flags, keys of the DeepSpeed JSON, or a
reason. A key that no rule covers is reported as unknown, so that none is lost silently.
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
"""Prefix of a flag's origin if the file omits the key and the two programs' defaults differ."""

OFF: tuple[Any, ...] = (None, False, 0, "", *"none None null no false False disabled".split())
"""Values that turn an option off, in addition to empty lists and objects."""


class Unfit(ValueError):
    """Raised for a value that a flag cannot have. The message explains why."""


@dataclass(frozen=True)
class KeyOutcome:
    """Outcome of translating a key.

    Attributes:
        state: see :data:`State`.
        text: flags, keys of the JSON, or the reason.
    """

    state: State
    text: str


@dataclass(frozen=True)
class FlagKind:
    """Description of a flag: the type of its value, and spellings that turn a switch on or off."""

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
    """Return all flags of ``pretrain_gpt.py`` and ``finetune.py``, under each of their names."""
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
    """Format a value as a command-line argument. A trailing ``.0`` of a float is dropped."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value!r}"
    return str(value)


def is_off(value: Any) -> bool:
    """Return whether a value turns an option off."""
    return value == [] or value == {} or any(value is off or value == off for off in OFF)


def number(value: Any) -> float | int | None:
    """Convert a value to a number. Return None if it is not one. Text such as ``5e-6``, which YAML
    does not parse as a number, is accepted."""
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
    """Configuration that is being translated into a command.

    Attributes:
        source: values in the file, by dotted key.
        trainer: name of the other trainer.
        program: this project's program that the command starts.
        processes: number of processes. None if the file does not specify it.
        launcher: the launcher's arguments.
        words: arguments of each flag, by its name, in order.
        content: the DeepSpeed JSON. Empty if it is not needed.
        outcomes: outcome of each key.
        origins: key that set each flag.
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
        """Return the value of a key, or ``default``, without recording an outcome."""
        value = self.source.get(key)
        return default if value is None else value

    def given(self, keys: str | Iterable[str]) -> list[str]:
        """Return the keys in the file that match these names or patterns (*)."""
        given: dict[str, None] = {}
        for name in self._named(keys):
            if name in self.source:
                given[name] = None
            elif "*" in name:
                given |= dict.fromkeys(key for key in self.source if fnmatchcase(key, name))
        return list(given)

    def _named(self, keys: str | Iterable[str]) -> list[str]:
        """Split text into keys at spaces. Text that is itself a key of the file, even one with
        spaces, is not split."""
        if isinstance(keys, str):
            return [keys] if keys in self.source else keys.split()
        return list(keys)

    def has(self, flag: str) -> bool:
        """Return whether the command contains the flag."""
        return flag_kinds()[flag].name in self.words

    def value_of(self, flag: str) -> str | None:
        """Return the first value of a flag in the command, or None."""
        return next(iter(self.words.get(flag_kinds()[flag].name, ())[1:]), None)

    def state_of(self, key: str) -> State | None:
        """Return the state of a key, or None if it is still undecided."""
        return self.outcomes[key].state if key in self.outcomes else None

    def put(self, keys: str | Iterable[str], flag: str, *values: Any, note: str = "") -> None:
        """Add a flag for keys of the file, and record their outcome. Raises ConfigError if another
        key has set the flag to a different value, or Unfit if the flag cannot have the value."""
        kind = flag_kinds()[flag]
        words = self._words(kind, flag, values)
        # A key that the file omits has the other trainer's default.
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
        """Set a key in the DeepSpeed JSON, and record it as the outcome of ``keys``."""
        deepspeed_json.put(self.content, path, value)
        for name in self.given(keys):
            self.tell(name, f"{path} in the DeepSpeed JSON" + (f" ({note})" if note else ""))

    def tell(self, key: str, text: str) -> None:
        """Record that a key was translated. Text is appended to an earlier record."""
        before = self.outcomes.get(key)
        if before is not None and before.state == "translated" and text not in before.text:
            text = f"{before.text}, {text}"
        if before is None or before.state != "lost":
            self.outcomes[key] = KeyOutcome("translated", text)

    def harmless(self, keys: str | Iterable[str], reason: str) -> None:
        """Record that keys have no effect on the training here, unless they have an outcome."""
        for key in self.given(keys):
            self.outcomes.setdefault(key, KeyOutcome("harmless", reason))

    def lose(self, keys: str | Iterable[str], reason: str) -> None:
        """Record that keys, or parts of their values, have no counterpart here. Keys that are off
        are recorded as harmless."""
        for key in self.given(keys):
            if is_off(self.source[key]):
                self.harmless(key, "it is off")
            elif self.state_of(key) != "harmless":
                self.outcomes[key] = KeyOutcome("lost", reason)

    def finish(self) -> None:
        """Record all keys that have no outcome yet as unknown."""
        for key in self.source:
            self.outcomes.setdefault(
                key, KeyOutcome("unknown", f"not a key of {self.trainer} that is known here")
            )

    def of_state(self, *states: State) -> dict[str, str]:
        """Return the outcome texts of all keys in the given states."""
        return {key: each.text for key, each in self.outcomes.items() if each.state in states}
