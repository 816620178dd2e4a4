"""Flags as fields of frozen dataclasses, and the resolution of their values.

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
    """Contradictory or unsupported configuration. The message names flags and values."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Value of a field and its origin, such as ``flag --lr`` or ``ds1.json: gradient_clipping``."""

    value: Any
    origin: str


Settings = dict[str, Setting]
"""Settings by field name. Field names are unique across all of a program's config classes."""


class Bounds(NamedTuple):
    """Condition on a numeric field, and its description for error messages."""

    hold: Callable[[Any], bool]
    rule: str


POSITIVE = Bounds(lambda value: value > 0, "must be positive")
NOT_NEGATIVE = Bounds(lambda value: value >= 0, "must not be negative")
FRACTION = Bounds(lambda value: 0 <= value < 1, "must be in [0, 1)")
SHARE = Bounds(lambda value: 0 <= value <= 1, "must be in [0, 1]")


class Need(NamedTuple):
    """Condition under which a flag has an effect.

    Attributes:
        text: the flags that are needed, for messages.
        met: returns True if the values of a run, by field name, satisfy the condition.
        refused: whether a run that does not satisfy the condition is refused. Otherwise it gets a
            note, for flags that are common in scripts of other trainers.
    """

    text: str
    met: Callable[[Mapping[str, Any]], bool]
    refused: bool = True


def needs_value(name: str, *values: Any, refused: bool = True) -> Need:
    """Return the need for field ``name`` to have one of ``values``, by default any truthy one."""
    flag = _dashed(name)
    if values in ((), (True,)):
        return Need(flag, lambda all_values: bool(all_values[name]), refused)
    *others, last = map(str, values)
    text = f"{flag} {' or '.join(filter(None, (', '.join(others), last)))}"
    return Need(text, lambda all_values: all_values[name] in values, refused)


Role = Literal["weights", "results", "layout", "schedule", "course"]
"""Effect of a field. weights: the model's parameters and their meaning; results: the computation
with these parameters; layout: the distribution over processes; schedule: learning rate and weight
decay; course: evaluation, when a run ends, and other things that no step depends on."""


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
    """Return a config field that is also a flag.

    Args:
        flag: name of the flag if it is not ``--field-name``.
        off: for a boolean that defaults to True, the flag that makes it False, or several flags
            separated by spaces.
        spellings: other spellings of some choices, each with the choice that it means.
        bare: value of the flag if it is given without one.
        note: for a flag that is accepted but unused, what happens instead. It needs no help text.
        derived: how the value is derived if neither a flag nor the JSON gives one.
        internal: the field is filled by the program and has no flag.
        needs: condition under which a value other than the default has an effect.
        role: effect of the field, for code that needs all fields with this effect.
        megatron: whether Megatron's checkpoints have an argument of this name and meaning, or its
            names there. The first of these names is written.
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
    """Return the names of the config classes' fields that have the role ``role``."""
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
    """Return the types of a class's fields. Cached, since every flag of a parser needs them."""
    return typing.get_type_hints(cls)


@functools.cache
def field_help(cls: type) -> dict[str, str]:
    """Return each field's help text: the string literal below it in the source, plus its note."""
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
    """Return the flags that set a field, if any, and the flag that turns it off, or None."""
    meta = field.metadata
    flag, off = meta.get("flag"), meta.get("off")
    return () if off and not flag else (flag or _dashed(field.name), *meta.get("aliases", ())), off


class Frequency:
    """Flag type for integers or other text. Calling it returns an int if possible, else a str."""

    def __new__(cls, text: str) -> Any:
        try:
            return integer("", text)
        except ArgumentTypeError:
            return text


def flag_value(hint: Any) -> tuple[type, int | str | None]:
    """Return the type of a flag's value (of its elements, for a tuple) and argparse's ``nargs``.
    The type is :class:`Frequency` for ``int | str``."""
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
    """Check a setting from a file as the command line checks a flag's value, and return it with an
    int converted to float where needed. Raises ConfigError on a wrong type or choice."""
    value, (wanted, count) = setting.value, flag_value(hint)
    if value is None:
        return setting
    if wanted is float and type(value) is int:
        return Setting(float(value), setting.origin)
    several = value if isinstance(value, tuple) and count not in (0, None) else (value,)
    allowed = {int, str} if wanted is Frequency else {wanted}
    if {type(each) for each in several} - allowed:
        raise ConfigError(f"{setting.origin} is {value!r:.60}, not of type {wanted.__name__}")
    choices = field.metadata.get("choices")
    if choices and not set(several) <= set(choices):
        raise ConfigError(
            f"{setting.origin} is {value!r}; it must be one of {', '.join(map(str, choices))}"
        )
    return setting


def build(cls: type[C], settings: Settings) -> C:
    """Return an instance of ``cls``, built from the settings of its fields."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: s.value for name, s in settings.items() if name in names})


class ConfigResolver:
    """Values and origins of all flags while a configuration is resolved, for messages and
    ``--explain-config``. ``notes`` collects lines for the user. The constructor raises ConfigError
    for numbers out of bounds."""

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
        """Record a derived value and return it."""
        self.values[name], self.origins[name] = value, f"derived: {how}"
        return value

    def fill(self, name: str, given: T | None, value: T, how: str) -> T:
        """Return ``given``. If it is None, record and return the derived ``value``."""
        return self.put(name, value, how) if given is None else given

    def imply(self, name: str, value: Any, flag: str) -> None:
        """Record the value that ``flag`` implies. Raises ConfigError on a different value."""
        self.check(
            self.values[name] in (None, value),
            f"{flag} contradicts {self.show(name)}; give one of them",
        )
        self.put(name, value, flag)

    def require(self, instead: str = "", /, **given: T | None) -> tuple[T, ...]:
        """Return the values. Raises ConfigError if any is None; the message lists their flags, and
        ``instead`` as an alternative."""
        missing = [self.flag(name) for name, value in given.items() if value is None]
        if missing:
            raise ConfigError(f"missing {', '.join(missing)}{instead and f', or {instead}'}")
        return tuple(value for value in given.values() if value is not None)

    def flag(self, name: str) -> str:
        return self._flags.get(name) or _dashed(name)

    def show(self, name: str) -> str:
        """Return a field's flag, value and origin for messages. If the feature that defines the
        field is missing, return only the flag."""
        if name not in self.values:
            return self.flag(name)
        origin, flag = self.origins[name], self.flag(name)
        place = "" if origin == f"flag {flag}" else f" ({origin})"
        value = self.values[name]
        return flag + ("" if value is True else f" {_words(value)}") + place

    def check(self, condition: bool, message: str) -> None:
        """Raise ConfigError with ``message`` unless the condition holds."""
        if not condition:
            raise ConfigError(message)

    def check_unused(self, name: str, needs: str) -> None:
        """Raise ConfigError if field ``name`` is given, which only has an effect with ``needs``."""
        unused = self.values[name] is None or not self.given(name)
        self.check(unused, f"{self.show(name)} has an effect with {needs} only")

    def check_needs(self) -> None:
        """Raise ConfigError if a given flag has no effect because its :class:`Need` is not met, or
        only add a note if the need is not strict. All values must be resolved before."""
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
        """Raise ConfigError unless the value of ``divisor`` divides the value of ``whole``."""
        self.check(
            self.values[whole] % self.values[divisor] == 0,
            f"{self.show(divisor)} must divide {self.show(whole)}",
        )


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def shared(flags: Any, cls: type) -> dict[str, Any]:
    """Return the object's values for the fields of ``cls`` that it has, by name."""
    names = (field.name for field in dataclasses.fields(cls))
    return {name: getattr(flags, name) for name in names if hasattr(flags, name)}


_INTEGER = re.compile(r"([+-]?[\d_]+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)([kKMBT]?)")
_LENGTHS = re.compile(r"(seq_length|position_embeddings|sliding_window)$")
"""Fields that are sequence lengths or positions; 64k means a power of two, 65,536."""
_COUNTS = re.compile(r"^(train|lr)_|_(iters|interval|samples|tokens)$|^(limit|epochs)$")
"""Fields that are other counts; 64k means 64,000."""
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "T": 4}


def integer(name: str, text: str) -> int:
    """Return the integer that a flag's text means, such as 2_048, 1e6, 64k or 1.5M. Raises
    argparse.ArgumentTypeError if it is not an integer, or if k could mean 1,000 or 1,024."""
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
    """Return the known flag that an unknown flag probably misspells: up to a quarter of its letters
    may be wrong, or words may be missing. Return an empty string if no flag fits."""
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
    """Return the number of insertions, deletions, replacements and transpositions of letters that
    turn one word into the other (optimal string alignment distance)."""
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
    """Return ``hint`` with ``{}`` replaced by the known name that is most similar to ``name``, or
    an empty string if no similarity reaches ``cutoff`` (0 to 1)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return hint.format(near[0]) if near else ""
