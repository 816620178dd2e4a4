"""Flags as fields of frozen dataclasses, and how their values are resolved.

A field ``hidden_size`` is the flag ``--hidden-size``; the string literal under it is its help text.
A :class:`Setting` is a value with its origin, which tells a given value from a default.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import types
import typing
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

C = TypeVar("C")
T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that contradicts itself or cannot run; the message names flags and values."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value and its origin, such as ``flag --lr`` or ``ds_zero1.json: gradient_clipping``."""

    value: Any
    origin: str


Settings = dict[str, Setting]
"""Settings by field name. Field names are unique over all config classes of a program."""


class Bounds(NamedTuple):
    """The numbers that a field accepts, and a description for error messages."""

    hold: Callable[[Any], bool]
    rule: str


POSITIVE = Bounds(lambda value: value > 0, "must be positive")
NOT_NEGATIVE = Bounds(lambda value: value >= 0, "must not be negative")
FRACTION = Bounds(lambda value: 0 <= value < 1, "must be in [0, 1)")
SHARE = Bounds(lambda value: 0 <= value <= 1, "must be in [0, 1]")


class Need(NamedTuple):
    """Condition under which a flag has an effect.

    Attributes:
        text: other flags, for messages.
        met: returns True if the values of a run, by field name, satisfy it.
        refused: whether a run without it is refused; otherwise it gets a note, where scripts of
            other trainers often have such a flag.
    """

    text: str
    met: Callable[[Mapping[str, Any]], bool]
    refused: bool = True


def needs_value(name: str, *values: Any, refused: bool = True) -> Need:
    """One of these values of another field; without any, a value."""
    flag = _dashed(name)
    if values in ((), (True,)):
        return Need(flag, lambda all_values: bool(all_values[name]), refused)
    *others, last = map(str, values)
    text = f"{flag} {' or '.join(filter(None, (', '.join(others), last)))}"
    return Need(text, lambda all_values: all_values[name] in values, refused)


Role = Literal["weights", "results", "layout", "schedule", "course"]
"""Effect of a field: the network's parameters and their meaning; what is computed with them; the
layout over processes; learning rate and weight decay; when a run evaluates and ends, and other
things that no step depends on."""


def option(
    default: Any = None,
    *,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    off: str | None = None,
    choices: Sequence[Any] | None = None,
    spellings: Mapping[str, str] | None = None,
    bare: Any = None,
    note: str | None = None,
    derived: str | None = None,
    internal: bool = False,
    bounds: Bounds | None = None,
    needs: Need | None = None,
    role: Role | None = None,
    megatron: bool | Sequence[str] = False,
) -> Any:
    """A config field that is also a flag.

    Args:
        flag: name of the flag if it is not ``--field-name``.
        off: for a boolean that defaults to True, the flag that makes it False; with a space between
            them several.
        spellings: other spellings of some choices, and their meaning.
        bare: the value where the flag is given without one.
        note: for flags that are accepted and not used, what happens instead; needs no help text.
        derived: how the value is derived when neither a flag nor the JSON gives one.
        internal: the field is filled by the program and has no flag.
        needs: what a value other than the default needs to have an effect.
        role: what it affects, for code that needs all such fields.
        megatron: whether Megatron's checkpoints have an argument of this name and meaning, or its
            names there, the first of which is written.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "flag": flag,
            "aliases": tuple(aliases),
            "off": off,
            "choices": None if choices is None else tuple(choices),
            "spellings": dict(spellings or {}),
            "bare": bare,
            "note": note,
            "derived": derived,
            "internal": internal,
            "bounds": bounds,
            "needs": needs,
            "role": role,
            "megatron": megatron,
        },
    )


@functools.cache
def flag_of(field: dataclasses.Field) -> str:
    return field.metadata.get("flag") or field.metadata.get("off") or _dashed(field.name)


def names_of(role: Role, *classes: type) -> tuple[str, ...]:
    """The fields of config classes that have a role."""
    fields = (field for cls in classes for field in dataclasses.fields(cls))
    return tuple(field.name for field in fields if field.metadata.get("role") == role)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@functools.cache
def type_hints(cls: type) -> Mapping[str, Any]:
    """Types of the fields of a class; a command line reads them for every flag."""
    return typing.get_type_hints(cls)


@functools.cache
def field_help(cls: type) -> dict[str, str]:
    """Help text of each field: the string literal that follows it in the source, and the note."""
    body = _class_bodies(cls.__module__).get(cls.__name__, [])
    texts: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= field_help(base)
    for statement, following in zip(body, body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.metadata.get("note"):
            unused = f"Accepted, not used: {field.metadata['note']}."
            texts[field.name] = f"{texts.get(field.name, '')} {unused}".strip()
    return texts


def flag_names(field: dataclasses.Field) -> tuple[tuple[str, ...], str | None]:
    """Return the flags, if any, that set a field, and the flag that turns it off."""
    meta = field.metadata
    flag, off = meta.get("flag"), meta.get("off")
    return () if off and not flag else (flag or _dashed(field.name), *meta.get("aliases", ())), off


class Frequency:
    """Return the value of a flag as an integer or, if it is not one, as text."""

    def __new__(cls, text: str) -> Any:
        try:
            return integer("", text)
        except ArgumentTypeError:
            return text


def flag_value(hint: Any) -> tuple[type, int | str | None]:
    """The type of a flag's value, or of its elements, and argparse's ``nargs``; a
    :class:`Frequency` for ``int | str``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint, *others = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = Frequency if others else hint
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        return args[0], "+" if args[-1] is Ellipsis else len(args)
    return hint, 0 if hint is bool else None


def value_type(hint: Any) -> type:
    return flag_value(hint)[0]


def check_value(field: dataclasses.Field, hint: Any, setting: Setting) -> Setting:
    """Checks a setting from a file as the command line checks a flag's value; ConfigError if it is
    not of the type ``hint``, or not one of the choices."""
    value, (wanted, count) = setting.value, flag_value(hint)
    if wanted is float and type(value) is int:
        return Setting(float(value), setting.origin)
    several = isinstance(value, tuple) and count not in (0, None)
    allowed = {int, str} if wanted is Frequency else {wanted}
    if value is not None and {type(each) for each in (value if several else [value])} - allowed:
        raise ConfigError(f"{setting.origin} is {value!r:.60}, not of type {wanted.__name__}")
    choices = field.metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise ConfigError(
            f"{setting.origin} is {value!r}; it must be one of {', '.join(map(str, choices))}"
        )
    return setting


def build(cls: type[C], settings: Settings) -> C:
    """An instance of ``cls`` from the settings that carry its field names."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: s.value for name, s in settings.items() if name in names})


class ConfigResolver:
    """Values and origins of all flags while a configuration is resolved, for messages and
    ``--explain-config``; lines for the user are in ``notes``. ConfigError if a number is out of its
    bounds."""

    def __init__(self, classes: Sequence[type], settings: Settings) -> None:
        self._fields = fields = [field for cls in classes for field in dataclasses.fields(cls)]
        self._flags = {field.name: flag_of(field) for field in fields}
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        for field in fields:
            origin = "derived" if field.metadata.get("internal") else "default"
            setting = settings.get(field.name, Setting(field.default, origin))
            self.values[field.name], self.origins[field.name] = setting.value, setting.origin
        for field in fields:
            bounds, value = field.metadata.get("bounds"), self.values[field.name]
            if bounds is not None and value is not None and not bounds.hold(value):
                raise ConfigError(f"{self.show(field.name)} {bounds.rule}")

    def given(self, name: str) -> bool:
        return self.origins[name] != "default"

    def put(self, name: str, value: T, how: str) -> T:
        """Records a derived value and returns it."""
        self.values[name], self.origins[name] = value, f"derived: {how}"
        return value

    def fill(self, name: str, given: T | None, value: T, how: str) -> T:
        """The given value, or else a derived one, which is recorded."""
        return self.put(name, value, how) if given is None else given

    def require(self, instead: str = "", /, **given: T | None) -> tuple[T, ...]:
        """Return the values by field name. Raises ConfigError, with alternatives, if some are
        missing."""
        missing = [self.flag(name) for name, value in given.items() if value is None]
        if missing:
            raise ConfigError(f"missing {', '.join(missing)}{instead and f', or {instead}'}")
        return tuple(value for value in given.values() if value is not None)

    def flag(self, name: str) -> str:
        return self._flags.get(name) or _dashed(name)

    def show(self, name: str) -> str:
        """The flag of a field, its value, and where that is from; of a feature that is missing the
        name alone."""
        if name not in self.values:
            return self.flag(name)
        origin, flag = self.origins[name], self.flag(name)
        place = "" if origin == f"flag {flag}" else f" ({origin})"
        value = self.values[name]
        return flag + ("" if value is True else f" {_words(value)}") + place

    def check(self, condition: bool, message: str) -> None:
        """Raises ConfigError with ``message`` unless the condition holds."""
        if not condition:
            raise ConfigError(message)

    def check_unused(self, name: str, needs: str) -> None:
        """Refuses a value that is given where the flag ``needs``, without which it does nothing, is
        not."""
        unused = self.values[name] is None or not self.given(name)
        self.check(unused, f"{self.show(name)} has an effect with {needs} only")

    def check_needs(self) -> None:
        """Refuses flags whose values do nothing because another flag is missing, or adds a note
        about them; the other values must be complete."""
        for field in self._fields:
            need, value = field.metadata.get("needs"), self.values[field.name]
            if need is None or value == field.default:
                continue
            if not self.origins[field.name].startswith("flag "):
                continue
            idle = not need.met(self.values)
            typed = self.origins[field.name].removeprefix("flag ")
            shown = typed if isinstance(value, bool) else f"{typed} {_words(value)}"
            self.check(
                not (idle and need.refused),
                f"{shown} has an effect with {need.text} only; leave it out, or give that too",
            )
            if idle:
                self.notes.append(f"{shown} changes nothing without {need.text}")

    def check_divides(self, divisor: str, whole: str) -> None:
        """Refuses a value that does not divide the other."""
        self.check(
            self.values[whole] % self.values[divisor] == 0,
            f"{self.show(divisor)} must divide {self.show(whole)}",
        )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def shared(flags: Any, cls: type) -> dict[str, Any]:
    """Return an object's values for the fields of a class that it has, by name."""
    names = (field.name for field in dataclasses.fields(cls))
    return {name: getattr(flags, name) for name in names if hasattr(flags, name)}


_INTEGER = re.compile(r"([+-]?[\d_]+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)([kKMBT]?)")
_LENGTHS = re.compile(r"(seq_length|position_embeddings|sliding_window)$")
"""Fields of lengths in tokens, of which 64k is a power of two: 65,536."""
_COUNTS = re.compile(r"^(train|lr)_|_(iters|interval|samples|tokens)$|^(limit|epochs)$")
"""Fields of counts, of which 64k is 64,000."""
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "T": 4}


def integer(name: str, text: str) -> int:
    """The number that the value of a field means: 2_048, 1e6, 64k, 1.5M. Raises
    argparse.ArgumentTypeError where it is not an integer, or k may be 1,000 or 1,024."""
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f"invalid int value: {text!r}")
    try:
        number, power = Fraction(match[1].replace("_", "")), _POWERS[match[2]]
        int(match[1]) if match[1].lstrip("+-").replace("_", "").isdecimal() else None
    except ValueError:
        raise ArgumentTypeError(f"invalid int value: {text!r}") from None
    decimal, binary = number * 1000**power, number * 1024**power
    if power and not _COUNTS.search(name) and not _LENGTHS.search(name):
        raise ArgumentTypeError(
            f"{text} may be {_shown(decimal)} or {_shown(binary)}; give the number itself"
        )
    value = binary if _LENGTHS.search(name) else decimal
    if value.denominator != 1:
        raise ArgumentTypeError(f"{text} is not an integer")
    return int(value)


def _shown(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else f"{float(value):,}"


def nearest_flag(name: str, known: Iterable[str]) -> str:
    """Return the known flag that an unknown one probably misspells, with up to a quarter of wrong
    letters or missing words; or an empty text."""
    typed = name.lower().replace("_", "-")
    flags = [flag for flag in known if flag.startswith("--")]
    most = max(1, len(typed.strip("-")) // 4)
    by_distance = [(edit_distance(typed, flag.lower().replace("_", "-")), flag) for flag in flags]
    distance, flag = min(by_distance, default=(most + 1, ""))
    if distance <= most:
        return flag
    words = set(typed.strip("-").split("-"))
    longer = [flag for flag in flags if words < set(flag[2:].replace("_", "-").split("-"))]
    fewest = min((flag.count("-") for flag in longer), default=0)
    longer = [flag for flag in longer if flag.count("-") == fewest]
    return longer[0] if len(longer) == 1 and len(words) > 1 else ""


def edit_distance(one: str, other: str) -> int:
    """Number of letters to insert, delete, replace or swap (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        earlier, before, row = before, row, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(name: str, known: Iterable[str], hint: str, cutoff: float = 0.6) -> str:
    """The known name that is most similar to an unknown one, in ``hint`` for its ``{}``; empty when
    none has a similarity of ``cutoff`` (0 to 1)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return hint.format(near[0]) if near else ""
