"""Tables of rules in ``tables/*.txt``: a line for the keys of another trainer that mean the same.

    KEY ...: --flag                     the value is the flag's
    KEY ...: --flag FROM=TO FROM=TO     values have other names; one that is not listed is lost
    KEY ...: --flag [default VALUE]     the value that the trainer has without the key
    KEY ...: --flag [off]               0, false and the like switch it off
    KEY ...: @rule words                a function converts them; words for the documentation
    KEY ...: = reason                   it changes nothing here
    KEY ...: ! reason                   there is no counterpart; where it is off that is harmless
    KEY ...: json PATH                  a key of the DeepSpeed JSON; of KEY.* the rest is added

A key may be a pattern (*). The first line that fits counts. ``include NAME`` inserts another table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import FunctionType

from megatron.apps.migration.translation import Translation, Unfit, flag_kinds, is_off
from megatron.config import ConfigError

TABLES = Path(__file__).with_name("tables")
_DEFAULT = re.compile(r" *\[default ([^\]]+)\]$")

Rule = Callable[[Translation], None]


@dataclass(frozen=True)
class TableRow:
    """A line of a table: keys, kind of action, its words, and the default of the other trainer."""

    keys: tuple[str, ...]
    action: str
    words: str
    default: str | None = None
    may_be_off: bool = False

    def fits(self, key: str) -> bool:
        return any(key == name or ("*" in name and fnmatchcase(key, name)) for name in self.keys)


@cache
def table(name: str) -> tuple[TableRow, ...]:
    """The rows of a table."""
    return tuple(_rows(name))


def _rows(name: str) -> Iterator[TableRow]:
    for line in (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        keys, colon, words = line.partition(": ")
        if not colon and line.startswith("include "):
            yield from table(line.split()[1])
        if not colon or line.startswith("#"):
            continue
        default = _DEFAULT.search(words)
        words = _DEFAULT.sub("", words)
        may_be_off, words = words.endswith(" [off]"), words.removesuffix(" [off]")
        first, _, rest = words.partition(" ")
        action = "flag" if first.startswith("--") else first
        yield TableRow(
            tuple(keys.split()),
            action,
            words if action == "flag" else rest,
            default[1] if default else None,
            may_be_off,
        )


def rules_of(module: str) -> Mapping[str, Rule]:
    """The functions of a module by name, which tables call with an @."""
    functions = vars(sys.modules[module]).items()
    return {
        name: rule
        for name, rule in functions
        if isinstance(rule, FunctionType) and rule.__module__ == module and name[0] != "_"
    }


def translate(name: str, translation: Translation, rules: Mapping[str, Rule]) -> None:
    """Applies a table. ConfigError names a value that no flag can have only where it contradicts
    another; otherwise the key is lost, with the reason."""
    rows, done = table(name), set[str]()
    for row in rows:
        if row.action.startswith("@") and row.action not in done:
            done.add(row.action)
            rules[row.action[1:]](translation)
    for key in translation.source:
        fitting = next((row for row in rows if row.fits(key)), None)
        if fitting is not None and key not in translation.outcomes:
            _apply(fitting, key, translation)
    for row in rows:
        if row.default is not None and not translation.given(row.keys) and row.action == "flag":
            flag, *_ = row.words.split()
            if not translation.has(flag):
                translation.put(row.keys[0], flag, *_default(row.default))
    translation.finish()


def _default(text: str) -> tuple[object, ...]:
    return ({"true": True, "false": False}.get(text, text),)


def _apply(row: TableRow, key: str, translation: Translation) -> None:
    value = translation.source[key]
    if row.action == "=":
        translation.harmless(key, row.words)
    elif row.action == "!":
        translation.lose(key, row.words)
    elif row.action == "json":
        pattern = next(name for name in row.keys if name == key or fnmatchcase(key, name))
        rest = key[len(pattern) - 1 :] if pattern.endswith("*") else ""
        path = ".".join(filter(None, (row.words, rest)))
        translation.put_json(key, path, value)
    elif row.may_be_off and is_off(value):
        translation.harmless(key, "it is off")
    elif row.action == "flag":
        put_value(translation, key, row.words, value)


def put_value(translation: Translation, key: str, words: str, value: object) -> None:
    """Gives a flag the value of a key, by the names in ``words``; a value that it cannot have is
    lost."""
    flag, *names = words.split()
    if value is None:
        translation.harmless(key, "it is not set")
        return
    if names:
        spellings = dict(each.split("=", 1) for each in names)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text not in spellings:
            translation.lose(
                key, f"{flag} has no counterpart of {text}: it has that of {', '.join(spellings)}"
            )
            return
        value = spellings[text]
        if value == "":
            translation.harmless(key, f"{text} is what happens without {flag}")
            return
        if value in ("on", "off"):
            value = value == "on"
    elif flag_kinds()[flag].type is bool and isinstance(value, str):
        value = not is_off(value.lower())
    try:
        translation.put(key, flag, value)
    except Unfit as error:
        translation.lose(key, str(error))


def check_tables(names: tuple[str, ...]) -> None:
    """Raises ConfigError if a row names a flag that does not exist; for the tests."""
    for name in names:
        for row in table(name):
            if row.action == "flag" and row.words.split()[0] not in flag_kinds():
                raise ConfigError(f"{name}.txt: {row.words.split()[0]} does not exist")
            if row.action not in ("flag", "=", "!", "json") and not row.action.startswith("@"):
                raise ConfigError(f"{name}.txt: {' '.join(row.keys)}: {row.action} is no action")
