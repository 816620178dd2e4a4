"""Turns frozen dataclasses into command-line flags.

A field ``hidden_size`` becomes ``--hidden-size``; the string literal written under the field
is its help text. Parsing yields :class:`Setting` objects, a value together with where it came
from, so that later steps can tell a flag that was given from a default that was not.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

C = TypeVar("C")


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
    """What numbers a field takes."""

    hold: Callable[[Any], bool]
    rule: str


POSITIVE = Bounds(lambda value: value > 0, "must be positive")
NOT_NEGATIVE = Bounds(lambda value: value >= 0, "must not be negative")
FRACTION = Bounds(lambda value: 0 <= value < 1, "must be in [0, 1)")


Role = Literal["weights", "results", "layout", "schedule", "course"]
"""What a field decides: which parameters a network has and what they mean; what is computed with
them; how work is laid out over processes, as names of layouts say it; learning rate and weight
decay; when a run evaluates and ends, and what a step does not depend on."""


def option(
    default: Any = None,
    *,
    flag: str | None = None,
    aliases: Sequence[str] = (),
    off: str | None = None,
    choices: Sequence[Any] | None = None,
    spellings: Mapping[str, str] | None = None,
    note: str | None = None,
    derived: str | None = None,
    internal: bool = False,
    bounds: Bounds | None = None,
    role: Role | None = None,
    megatron: bool | Sequence[str] = False,
) -> Any:
    """A config field that is also a flag.

    Args:
        default: value when the flag is absent.
        flag: name of the flag where it is not ``--field-name``.
        aliases: further accepted names.
        off: for a boolean that defaults to True, the flag that makes it False.
        choices: the accepted values.
        spellings: other spellings of some choices, and which they mean.
        note: what happens instead, for flags accepted only because people's scripts pass them.
        derived: how the value is found when neither a flag nor the JSON gives one.
        internal: the field is filled by the program and has no flag.
        bounds: what numbers it takes.
        role: what it decides, where others ask for all fields that decide it.
        megatron: whether an argument in Megatron's checkpoints says the same, or its names, of
            which the first is written; it has the field's name where no other is given.
    """
    metadata = {
        "flag": flag,
        "aliases": tuple(aliases),
        "off": off,
        "choices": tuple(choices) if choices is not None else None,
        "spellings": dict(spellings or {}),
        "note": note,
        "derived": derived,
        "internal": internal,
        "bounds": bounds,
        "role": role,
        "megatron": megatron,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field) -> str:
    """The main flag of a config field."""
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
def field_help(cls: type) -> dict[str, str]:
    """Help text of each field of ``cls``: the string literal that follows it in the source."""
    body = _class_bodies(cls.__module__)[cls.__name__]
    texts: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= field_help(base)
    for statement, following in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            texts[statement.target.id] = " ".join(following.value.value.split())
    return texts


def flag_names(field: dataclasses.Field) -> tuple[tuple[str, ...], str | None]:
    """The flags that set a field, which may be none, and the flag that turns it off."""
    meta = field.metadata
    flag, off = meta.get("flag"), meta.get("off")
    return () if off and not flag else (flag or _dashed(field.name), *meta.get("aliases", ())), off


def flag_value(hint: Any) -> tuple[type, int | str | None]:
    """The type of a flag's value, or of its elements, and argparse's ``nargs``."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        return args[0], "+" if args[-1] is Ellipsis else len(args)
    return hint, 0 if hint is bool else None


def value_type(hint: Any) -> type:
    """The type of a field's value, or of its elements."""
    return flag_value(hint)[0]


def check_value(field: dataclasses.Field, hint: Any, setting: Setting) -> Setting:
    """A setting from a file, checked as the command line checks a flag's value.

    Args:
        field: the config field that it sets.
        hint: the field's type.
        setting: the value and where it came from.

    Raises:
        ConfigError: the value has another type, or is none of the choices.
    """
    value, (wanted, _) = setting.value, flag_value(hint)
    if wanted is float and type(value) is int:
        return Setting(float(value), setting.origin)
    if value is not None and type(value) is not wanted:
        raise ConfigError(f"{setting.origin} is {value!r}, not of type {wanted.__name__}")
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
