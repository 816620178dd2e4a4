r"""Rule tables in ``tables/*.txt``. Each line maps keys of another trainer to their meaning here.

    KEY ...: --flag                     the flag gets the key's value
    KEY ...: --flag FROM=TO FROM=TO     values are renamed; a value that is not listed is lost
    KEY ...: --flag [default VALUE]     the value that the trainer has without the key
    KEY ...: --flag [off]               0, false and similar values mean off, and set no flag
    KEY ...: = reason                   the key has no effect here
    KEY ...: ! reason                   there is no counterpart; harmless if it is off
    KEY ...: json PATH                  a key of the DeepSpeed JSON; the rest of KEY.* is appended
    KEY ...: keep                       the same key of the DeepSpeed JSON
    KEY ...: @name words                the indented lines below, or a function; words are a comment

A key may be a pattern (*). The first matching line is used. Lines that depend on other keys are
indented. All of them are applied in order, whether or not the file has the keys:

        KEY ... if CONDITION: --flag    the value of the first key that has one, or a default
        KEY ... if CONDITION: --flag VALUE --flag VALUE      a constant, or an {EXPRESSION}
        KEY ... if CONDITION: --flag    # a note for the user
        KEY ...: = reason               unless a line above used the key; also "!" without "if"
        let NAME = EXPRESSION
        @function
        KEY ...: processes EXPRESSION   number of processes; also without keys
        program NAME

Conditions and expressions are Python, in which the keys of the file, including dotted ones, are
names. A key that is not in the file is None, unless ``default KEY=VALUE`` sets a default. ``value``
is the value of the line's keys, and ``tuning`` is true for ``finetune.py``. Reasons may contain
{EXPRESSIONS}. ``include TABLE`` inserts another table, and ``blocks TABLE`` only its indented
lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron.apps.migration.expressions import Values
from megatron.apps.migration.translation import Translation, Unfit, flag_kinds, is_off
from megatron.config import ConfigError

TABLES = Path(__file__).with_name("tables")
_DEFAULT = re.compile(r"(?<! ) *\[default ([^\[\]]+)\]$")
_FLAGS = re.compile(r" (?=--)")
_FILLED = re.compile(r"\{([^{}\"]*)\}")

Function = Callable[[Translation], None]


@dataclass(frozen=True)
class TableRow:
    """Line of a table: its keys, its condition, the type of action, the action's text, and the
    other trainer's default."""

    keys: tuple[str, ...]
    action: str
    words: str
    condition: str = ""
    default: str | None = None
    may_be_off: bool = False

    def fits(self, key: str) -> bool:
        return any(key == name or ("*" in name and fnmatchcase(key, name)) for name in self.keys)


@dataclass(frozen=True)
class RuleTable:
    """Rule table: rows, indented lines by their @name, and defaults of keys for expressions."""

    rows: tuple[TableRow, ...]
    blocks: Mapping[str, tuple[TableRow, ...]]
    defaults: Mapping[str, Any]


@cache
def table(name: str) -> RuleTable:
    """Read a table's rules, including those of tables that it includes."""
    rows = list[TableRow]()
    own, blocks = dict[str, list[TableRow]](), dict[str, tuple[TableRow, ...]]()
    defaults = dict[str, Any]()
    for line in (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        word, _, rest = line.partition(" ")
        if word in ("include", "blocks") and ": " not in line:
            name, _, start = rest.partition(" ")
            other = table(name)
            if word == "include":
                rows += (row for row in other.rows if row.keys[0].startswith(start))
            blocks, defaults = {**other.blocks, **blocks}, {**other.defaults, **defaults}
        elif word == "default":
            pairs = (pair.partition("=") for pair in rest.split())
            defaults |= {key: _literal(text) for key, _, text in pairs}
        elif line.startswith(" "):
            own.setdefault(rows[-1].action, []).append(_row(line.strip()))
        elif line and word != "#":
            rows.append(_row(line))
    for row in rows:
        if row.default is not None:
            defaults = {**dict.fromkeys(row.keys, _literal(row.default)), **defaults}
    return RuleTable(
        tuple(rows), {**blocks, **{name: tuple(lines) for name, lines in own.items()}}, defaults
    )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def _row(line: str) -> TableRow:
    if line.startswith(("let ", "@", "program ", "processes ")):
        action, _, words = line.partition(" ")
        return TableRow((), action, words)
    head, _, words = line.partition(": ")
    keys, _, condition = head.partition(" if ")
    default = _DEFAULT.search(words)
    words = _DEFAULT.sub("", words)
    may_be_off, words = words.endswith(" [off]"), words.removesuffix(" [off]")
    first, _, rest = words.partition(" ")
    flag = first.startswith("--")
    return TableRow(
        tuple(keys.split()),
        "flag" if flag else first,
        words if flag else rest,
        condition,
        default[1] if default else None,
        may_be_off,
    )


class _Engine:
    def __init__(
        self, name: str, t: Translation, functions: Mapping[str, Function], prefix: str
    ) -> None:
        self.table, self.t, self.functions, self.prefix = table(name), t, functions, prefix
        self.values = Values(t, self.table.defaults, prefix)

    def run(self, flags_win: bool) -> None:
        for key in self._keys():
            known = any(row.fits(self._name(key)) for row in self.table.rows)
            if known and self.t.source[key] == "auto" and (self.prefix or key.startswith("zero_")):
                reason = "auto: the flags say it, or DeepSpeed's default is used"
                self.t.harmless([key], reason)
        for name in dict.fromkeys(row.action for row in self.table.rows if row.action[0] == "@"):
            for row in self.table.blocks.get(name, (TableRow((), name, ""),)):
                with_keys = [key for key in self._keys() if row.fits(self._name(key))]
                self._tried(row, with_keys, flags_win, self._line)
        for key in self._keys():
            rows = (row for row in self.table.rows if row.fits(self._name(key)))
            first = next(rows, None)
            if first is not None and first.action[0] != "@" and key not in self.t.outcomes:
                self._tried(first, [key], flags_win, self._single)
        for row in self.table.rows:
            if row.action == "flag" and row.default is not None:
                flag = row.words.split()[0]
                if not self.t.given(row.keys) and not self.t.has(flag):
                    self.t.put(row.keys, flag, _literal(row.default))

    def _keys(self) -> Iterator[str]:
        return (key for key in list(self.t.source) if key.startswith(self.prefix))

    def _name(self, key: str) -> str:
        return key[len(self.prefix) :]

    def _tried(
        self,
        row: TableRow,
        keys: list[str],
        flags_win: bool,
        apply: Callable[[TableRow, list[str]], None],
    ) -> None:
        try:
            apply(row, keys)
        except Unfit as error:
            self.t.lose(keys, str(error))
        except ConfigError:
            if not flags_win:
                raise
            self.t.harmless(
                keys, "the command line has another value, which Megatron-DeepSpeed used"
            )

    def _single(self, row: TableRow, keys: list[str]) -> None:
        """Apply a row to a single key."""
        (key,) = keys
        value, t = self.t.source[key], self.t
        section = f"{self.prefix}{self._name(key).split('.')[0]}.enabled"
        if row.may_be_off and is_off(value):
            t.harmless(key, "it is off")
        elif value in (None, "") and row.action == "flag":
            t.harmless(key, "it is not set")
        elif row.action == "!" and t.source.get(section) is False:
            t.harmless(key, "it is off")
        else:
            self._line(row, keys)

    def _line(self, row: TableRow, given: list[str]) -> None:
        t = self.t
        keys = [key for key in given if t.state_of(key) != "harmless"]
        if row.action == "let":
            name, _, text = row.words.partition(" = ")
            self.values[name] = self.values.of(text)
        elif row.action == "processes":
            t.processes = self.values.of(row.words) or t.processes
            for key in keys:
                t.tell(key, f"{t.processes} processes in all")
        elif row.action[0] == "@":
            self.functions[row.action[1:]](t)
        elif row.action == "program" and not row.keys:
            t.program = row.words
        if not row.keys or (given and not keys):
            return
        defaults = (self.table.defaults.get(key) for key in row.keys)
        sources = (t.source[key] for key in keys)
        self.values["value"] = next((v for v in (*sources, *defaults) if v not in (None, "")), None)
        if row.condition and not self.values.of(row.condition):
            return
        if row.action == "program":
            t.program = row.words
        elif row.action == "=":
            t.harmless(keys, self._text(row.words))
        elif row.action == "!":
            after_flags = bool(row.condition)
            t.lose([k for k in keys if after_flags or k not in t.outcomes], self._text(row.words))
        elif row.action in ("json", "keep"):
            self._json(row, keys)
        elif row.action == "flag":
            words, _, note = row.words.partition(" # ")
            usual = sorted(row.keys, key=lambda key: self.table.defaults.get(key) is None)
            for part in re.split(_FLAGS, words):
                self._flag(part, keys or usual, self._text(note))
                note = ""

    def _json(self, row: TableRow, keys: list[str]) -> None:
        path, _, constant = row.words.partition(" ")
        for key in keys:
            pattern = next(name for name in row.keys if fnmatchcase(self._name(key), name))
            rest = self._name(key)[len(pattern) - 1 :] if pattern.endswith("*") else ""
            whole = (
                self._name(key) if row.action == "keep" else ".".join(filter(None, (path, rest)))
            )
            self.t.put_json(key, whole, constant or self.t.source[key])

    def _flag(self, words: str, keys: list[str], note: str) -> None:
        """Set a flag to the value of its line. ``words`` may replace the value, or map it to
        another name. A value that the map does not contain is lost."""
        t, value = self.t, self.values["value"]
        flag, _, names = words.partition(" ")
        names = names.strip()
        if names.startswith("{"):
            value = self.values.of(names[1:-1])
        elif names and not all("=" in name for name in names.split()):
            value = names if len(names.split()) == 1 else names.split()
        elif names and value is not None:
            spellings = dict(name.split("=", 1) for name in names.split())
            text = str(value).lower() if isinstance(value, bool) else str(value)
            value = spellings.get(text, spellings.get(text.lower()))
            if value is None:
                known = ", ".join(spellings)
                t.lose(keys, f"{flag} has no counterpart of {text}, only of {known}")
                return
            if value == "":
                t.harmless(keys, f"{text} is what happens without {flag}")
                return
        if flag_kinds()[flag].type is bool and isinstance(value, str):
            value = value != "off" and not is_off(value.lower())
        if value is not None:
            t.put(keys, flag, value, note=note)

    def _text(self, words: str) -> str:
        return _FILLED.sub(lambda match: str(self.values.of(match[1])), words)


def translate(
    name: str,
    t: Translation,
    functions: Mapping[str, Function],
    prefix: str = "",
    flags_win: bool = False,
) -> None:
    """Apply a table to the keys that begin with a prefix, such as ``ds.json:``. With ``flags_win``,
    a flag that is already set takes precedence over a key, as in Megatron-DeepSpeed, where flags
    override the JSON.

    Raises ConfigError if two keys contradict each other, or a value has an unexpected type. A value
    that no flag can express is recorded as lost, with the reason."""
    _Engine(name, t, functions, prefix).run(flags_win)


def flags_in(row: TableRow) -> list[str]:
    """Return the flags that a row sets."""
    return (
        re.findall(r"(?:^| )(--[\w-]+)", row.words.split(" # ")[0]) if row.action == "flag" else []
    )


def expressions_in(row: TableRow) -> list[str]:
    """Return the expressions in a row, to check them."""
    words, _, note = row.words.partition(" # ")
    texts = [row.condition]
    if row.action in ("let", "processes"):
        texts.append(words.partition(" = ")[2] or words)
    elif row.action == "flag":
        parts = (part.partition(" ")[2].strip() for part in re.split(_FLAGS, words))
        texts += [part[1:-1] for part in parts if part.startswith("{")] + _FILLED.findall(note)
    elif row.action in ("=", "!"):
        texts += _FILLED.findall(row.words)
    return list(filter(None, texts))
