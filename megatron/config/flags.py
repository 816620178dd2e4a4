"""Turns frozen dataclasses into command-line flags.

A field ``hidden_size`` becomes ``--hidden-size``; the string literal written under the field
is its help text. Parsing yields :class:`Setting` objects, a value together with where it came
from, so that later steps can tell a flag that was given from a default that was not.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from megatron.util.nearest import nearest

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


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a field's type hint means on a command line."""

    parse: type
    count: int | str | None  # argparse nargs


def _kind(hint: Any) -> _Kind:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        return _Kind(args[0], "+" if args[-1] is Ellipsis else len(args))
    return _Kind(hint, 0 if hint is bool else None)


def value_type(hint: Any) -> type:
    """The type of a field's value, or of its elements, where it is given."""
    return _kind(hint).parse


def check_value(field: dataclasses.Field, hint: Any, setting: Setting) -> Setting:
    """A setting from a file, checked as the command line checks a flag's value.

    Args:
        field: the config field that it sets.
        hint: the field's type.
        setting: the value and where it came from.

    Raises:
        ConfigError: the value has another type, or is none of the choices.
    """
    value, kind = setting.value, _kind(hint)
    if kind.parse is float and type(value) is int:
        return Setting(float(value), setting.origin)
    if value is not None and type(value) is not kind.parse:
        raise ConfigError(f"{setting.origin} is {value!r}, not of type {kind.parse.__name__}")
    choices = field.metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise ConfigError(
            f"{setting.origin} is {value!r}; it must be one of {', '.join(map(str, choices))}"
        )
    return setting


class _Record(argparse.Action):
    """Stores a Setting that remembers under which name the flag was given."""

    def __call__(self, parser, namespace, values, option_string=None):
        previous: Setting | None = getattr(namespace, self.dest, None)
        if self.nargs == 0:
            values = self.const
        elif isinstance(values, list):
            values = tuple(values)
        # The same flag again overrides, as scripts that append to a common line expect.
        if (
            previous is not None
            and previous.origin != f"flag {option_string}"
            and previous.value != values
        ):
            parser.error(
                f"{previous.origin.removeprefix('flag ')} {previous.value} and {option_string} "
                f"{values} set the same thing; give one of them"
            )
        setattr(namespace, self.dest, Setting(values, f"flag {option_string}"))


def _parser(parse: type, spellings: Mapping[str, str]) -> Callable[[str], Any]:
    return (lambda text: spellings.get(text, text)) if spellings else parse


class FlagParser(argparse.ArgumentParser):
    """An argument parser over config classes whose errors name the nearest known flag."""

    def __init__(self, *classes: type, description: str | None = None, prog: str | None = None):
        super().__init__(
            prog=prog,
            usage="%(prog)s [flags]",
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for cls in classes:
            self._add_class(cls)

    def _add_class(self, cls: type) -> None:
        group = self.add_argument_group((cls.__doc__ or cls.__name__).split("\n")[0].rstrip("."))
        hints = typing.get_type_hints(cls)
        texts = field_help(cls)
        for field in dataclasses.fields(cls):
            if field.metadata.get("internal"):
                continue
            meta = field.metadata
            text = texts[field.name]
            if meta.get("note"):
                text += f" Accepted, not used: {meta['note']}."
            elif meta.get("derived"):
                text += f" (default: {meta['derived']})"
            elif field.default not in (None, ()) and not isinstance(field.default, bool):
                text += f" (default: {_plain(field.default)})"
            kind = _kind(hints[field.name])
            common: dict[str, Any] = {"dest": field.name, "action": _Record}
            text = text.replace("%", "%%")
            if kind.parse is bool:
                names = (meta.get("flag") or _dashed(field.name), *meta.get("aliases", ()))
                if meta.get("off"):
                    off_text = f"Turn {names[0]} off." if meta.get("flag") else text
                    group.add_argument(meta["off"], nargs=0, const=False, help=off_text, **common)
                if meta.get("flag") or not meta.get("off"):
                    group.add_argument(*names, nargs=0, const=True, help=text, **common)
                continue
            names = (meta.get("flag") or _dashed(field.name), *meta.get("aliases", ()))
            choices = "|".join(map(str, meta["choices"])) if meta.get("choices") else None
            group.add_argument(
                *names,
                type=_parser(kind.parse, meta.get("spellings") or {}),
                nargs=kind.count,
                choices=meta.get("choices"),
                metavar=choices or kind.parse.__name__.upper(),
                help=text,
                **common,
            )

    def settings(self, argv: Sequence[str] | None = None) -> Settings:
        """Parses ``argv``; exits with a message on an unknown flag or a malformed value."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self._refuse(unknown)
        return dict(vars(namespace))

    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, without the long list of flags, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        word = next((w for w in unknown if w.startswith("-")), unknown[0])
        if not word.startswith("-"):
            self.error(f"'{word}' follows no flag that takes it")
        name = word.split("=", 1)[0]
        known = self._option_string_actions
        hint = nearest(name, known, "; the nearest known flag is {}", cutoff=0.5)
        self.error(f"unknown flag {name}{hint} (--help lists all)")


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_configs(
    classes: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    prog: str | None = None,
) -> tuple[Any, ...]:
    """Parses a tool's command line into one instance of each config class."""
    settings = FlagParser(*classes, description=description, prog=prog).settings(argv)
    return tuple(build(cls, settings) for cls in classes)


def build(cls: type[C], settings: Settings) -> C:
    """An instance of ``cls`` from the settings that carry its field names."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: s.value for name, s in settings.items() if name in names})
