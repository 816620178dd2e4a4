"""Command lines of all programs: flags generated from config classes, ``--help``, ``--version``,
shell completion, and error messages that suggest the nearest flag."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import megatron
from megatron.config.flags import (
    Setting,
    Settings,
    build,
    field_help,
    flag_names,
    flag_value,
    integer,
    nearest,
    nearest_flag,
    type_hints,
)
from megatron.util.errors import name_output, one_line, spelled

MANY_FLAGS = 40
"""Number of flags above which --help repeats the examples at its end."""

UNUSED_LIST = "megatron/config/accepted_flags.txt"
"""List of the flags that are accepted but unused. They would be a third of --help."""

SECONDS_OF_OTHERS = 3.0
"""Seconds before a process other than the main one prints an error. If the error is in the shared
command line, the launcher has ended the process by then, so that the error is printed once."""

_EXAMPLE = re.compile(
    r"^ *((?:\w+=\S+ )*(?:python|deepspeed|torchrun)(?: -\S+(?: [^-\s]\S*)?)* \S+\.py\b"
    r"(?:.*\\\n)*.*)$",
    re.MULTILINE,
)
"""Command that starts a program, including the lines continued after a backslash."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser with ``--version``, shell completion, and one-line errors.

    Args:
        description: the program's docstring. Commands in it are shown verbatim, each in a block of
            its own.
    """

    def __init__(self, description: str | None = None, prog: str | None = None, **others: Any):
        super().__init__(
            prog=prog,
            description=_with_blocks(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **others,
        )
        self.add_argument(
            "--version", action=_Version, nargs=0, help="show the versions of this project, "
            "torch, deepspeed and Python, and exit",
        )  # fmt: skip

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        name_output()
        self.complete()
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return namespace

    def complete(self) -> None:
        """Print completions and exit if the shell requests them; otherwise do nothing."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete  # only needed here

            for action in self._actions:
                if action.metavar in ("INT", "FLOAT"):
                    # Suggest no file names. SuppressCompleter would hide the flag itself.
                    action.completer = argcomplete.ChoicesCompleter({})  # type: ignore[attr-defined]
            argcomplete.autocomplete(self)

    def format_help(self) -> str:
        text = super().format_help()
        examples = [match[0] for match in _EXAMPLE.finditer(self.description or "")]
        if examples and len(self._actions) > MANY_FLAGS:
            text = "\n\n".join([f"{text}\nexamples:", *examples]) + "\n"
        return spelled(text)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            means = (action.help or "").split(". ")[0].rstrip(".")
            raise argparse.ArgumentError(
                action,
                f"{error.message}, {self._get_formatter()._format_args(action, '')}: {means}",
            ) from error

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(SECONDS_OF_OTHERS)
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error about the first unknown flag, or else the first unexpected word. The
        message contains a feature's advice if there is any, or else the nearest flag."""
        word = next((w for w in unknown if w.startswith("-")), unknown[0])
        known, name = self._option_string_actions, word.split("=", 1)[0]
        from megatron.config.features import features  # avoids an import cycle

        instead = None
        if word.startswith("-") or "=" in word:
            asked = (
                each.advice(name, self.prog, known, _flags_of_training)
                for each in features().values()
            )
            instead = next(filter(None, asked), None)
        if not word.startswith("-"):
            hint = "" if instead is None else f"; flags begin with --: {instead}"
            self.error(f"'{word}' is not a value of any flag{hint} (--help lists all)")
        if instead is not None:
            self.error(f"{name} {instead}")
        hint = nearest_flag(name, known)
        hint = hint and f"; the nearest known flag is {hint}"
        self.error(f"unknown flag {name}{hint} (--help lists all)")


class FlagParser(CommandParser):
    """Parser for the flags of config classes, one --help group per class. Fields in ``hidden`` are
    parsed but not in --help. If classes share a field name, the first class defines the flag."""

    def __init__(
        self,
        *classes: type,
        description: str | None = None,
        prog: str | None = None,
        hidden: Container[str] = (),
    ):
        super().__init__(
            description, prog, usage="%(prog)s [flags]", argument_default=argparse.SUPPRESS
        )
        self._notes: dict[str, str] = {}
        self._hidden = hidden
        self._taken: set[str] = set()
        for cls in classes:
            self._add_class(cls)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not among the choices. The message says why an accepted but unused
        flag does not support the value, or suggests the nearest choice."""
        note = self._notes.get(action.dest)
        if note and action.choices and value not in action.choices:
            expected = " or ".join(map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"{value} is not supported here, {expected} is: {note}"
            )
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = {str(choice).lower(): str(choice) for choice in action.choices or ()}
            near = nearest(str(value).lower(), choices, "{}")
            error.message += f"; did you mean {choices[near]}?" if near else ""
            raise

    def _add_class(self, cls: type) -> None:
        fields = [
            field
            for field in dataclasses.fields(cls)
            if not field.metadata.get("internal") and field.name not in self._taken
        ]
        self._taken.update(field.name for field in fields)
        unused = all(field.metadata.get("note") for field in fields)
        group = self.add_argument_group(
            (cls.__doc__ or cls.__name__).split("\n")[0].rstrip("."),
            f"{len(fields)} flags; a run that is given one says why. {UNUSED_LIST} lists them"
            if unused
            else None,
        )
        hints = type_hints(cls)
        texts = field_help(cls)
        for field in fields:
            meta = field.metadata
            names, off = flag_names(field)
            text = (texts[field.name] + _default_text(field)).replace("%", "%%")
            if unused:
                self._notes[field.name] = meta["note"]
            if unused or field.name in self._hidden:
                text = argparse.SUPPRESS
            parse, count = flag_value(hints[field.name])
            common: dict[str, Any] = {"dest": field.name, "action": _Record}
            if parse is bool:
                if off is not None:
                    visible = names and text != argparse.SUPPRESS
                    off_text = f"Turn {names[0]} off." if visible else text
                    group.add_argument(*off.split(), nargs=0, const=False, help=off_text, **common)
                if names:
                    group.add_argument(*names, nargs=0, const=True, help=text, **common)
                continue
            choices, bare = meta.get("choices"), meta.get("bare")
            group.add_argument(
                *names,
                type=_parser(parse, meta.get("spellings") or {}, field.name),
                nargs=count if bare is None else "?",
                const=bare,
                choices=choices,
                metavar="|".join(map(str, choices)) if choices else parse.__name__.upper(),
                help=text,
                **common,
            )

    def settings(self, argv: Sequence[str] | None = None) -> Settings:
        """Parse ``argv`` or this process's arguments. Exits on an unknown flag or wrong value."""
        values = dict(vars(self.parse_args(argv)))
        _parsed[:] = sys.argv[1:] if argv is None else argv
        return values


_parsed: list[str] = []


def parsed_words() -> tuple[str, ...]:
    """Return the flags and values of the command line that this process parsed last."""
    return tuple(_parsed)


def parse_configs(
    classes: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    prog: str | None = None,
) -> tuple[Any, ...]:
    """Parse a tool's command line into one instance of each config class."""
    settings = FlagParser(*classes, description=description, prog=prog).settings(argv)
    return tuple(build(cls, settings) for cls in classes)


def versions() -> str:
    """Return the versions of this project, torch, deepspeed and Python. Nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version  # the import takes 20 ms

    names = [f"megatron-deepspeed {megatron.__version__}"]
    for package in ("torch", "deepspeed"):
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(f"{package} not installed")
    return ", ".join([*names, f"Python {sys.version.split()[0]}"])


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(versions())
        parser.exit()


class _Record(argparse.Action):
    """Action that stores a :class:`Setting`, with the flag as the user spelled it as the origin."""

    def __call__(self, parser, namespace, values, option_string=None):
        previous: Setting | None = getattr(namespace, self.dest, None)
        if self.nargs == 0:
            values = self.const
        elif isinstance(values, list):
            values = tuple(values)
        # Repeating a flag overrides it: scripts append to a common command line.
        if (
            previous is not None
            and previous.origin != f"flag {option_string}"
            and previous.value != values
        ):
            parser.error(
                f"{previous.origin.removeprefix('flag ')}{_words(previous.value)} and "
                f"{option_string}{_words(values)} set the same thing; give one of them"
            )
        setattr(namespace, self.dest, Setting(values, f"flag {option_string}"))


def _words(value: Any) -> str:
    # A flag without a value is shown by its name alone.
    values = value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,)
    return "".join(f" {each}" for each in values)


def _parser(parse: type, spellings: Mapping[str, str], name: str) -> Callable[[str], Any]:
    if parse is int:
        convert = partial(integer, name)
        convert.__name__ = "int"  # type: ignore[attr-defined]
        return convert
    return (lambda text: spellings.get(text, text)) if spellings else parse


def _default_text(field: dataclasses.Field) -> str:
    meta = field.metadata
    if meta.get("derived"):
        return f" (default: {meta['derived']})"
    if meta.get("note") or field.default in (None, ()) or isinstance(field.default, bool):
        return ""
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return f" (default: {' '.join(map(str, values))})"


def _with_blocks(text: str) -> str:
    def block(found: re.Match[str]) -> str:
        lines = (line.strip() for line in found[1].splitlines())
        return "\n    {}\n".format("\n        ".join(lines))

    return re.sub(r"\n{3,}", "\n\n", _EXAMPLE.sub(block, text)).strip()


def _flags_of_training() -> set[str]:
    from megatron.config.run import FLAG_CLASSES

    return set(FlagParser(*FLAG_CLASSES)._option_string_actions) - {"-h", "--help", "--version"}
