"""The command lines of the project's programs: which flags each has.

A program is run as far as its argument parser and no further, so what is found is what it accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[2]

PROGRAMS: tuple[tuple[str, ...], ...] = (
    ("pretrain_gpt.py",),
    ("finetune.py",),
    ("finetune_llama.py",),
    *((f"tools/{path.name}",) for path in sorted((ROOT / "tools").glob("[a-bd-z]*.py"))),
    ("tools/check_parity.py",),
    ("tools/convert_megatron_gpt2_checkpoint.py",),
    *(
        ("tools/convert_checkpoint.py", command)
        for command in (
            *("to-hf", "from-hf", "to-peft", "to-megatron", "to-deepspeed", "to-universal"),
            *("to-torch-dist", "to-dcp", "to-gguf", "upcycle", "clean"),
        )
    ),
    ("tools/checkpoint/util.py",),
    *(
        (f"tools/retro/{path.name}",)
        for path in sorted((ROOT / "tools" / "retro").glob("*.py"))
        if path.name != "main.py"  # another name of preprocess_data.py
    ),
    ("tools/bert_embedding/embed.py",),
    ("tasks/main.py",),
    ("tasks/ensemble_classifier.py",),
    ("tasks/msdp/main.py",),
    ("tasks/msdp/preprocessing.py",),
    *(
        (f"tasks/eval_harness/{path.name}",)
        for path in sorted((ROOT / "tasks" / "eval_harness").glob("*.py"))
    ),
    ("scripts/run_gpt2_eval.py",),
    *(
        (f"tools/openwebtext/{path.name}",)
        for path in sorted((ROOT / "tools" / "openwebtext").glob("[a-z]*.py"))
    ),
    *(
        (str(path.relative_to(ROOT)),)
        for path in sorted((ROOT / "examples_deepspeed/megatron/detxoify_lm").rglob("*.py"))
        if path.parent.name != "detoxifying"  # what the programs import
    ),
)
"""Every program of the documentation: its file, and its subcommand where it has some."""


@dataclass(frozen=True)
class Parsed:
    """Result of a program's parser for a command line.

    Attributes:
        parser: the parser.
        unknown: words that it does not know.
        values: destinations and values of the others.
    """

    parser: argparse.ArgumentParser
    unknown: list[str]
    values: dict[str, object]


class _Stop(BaseException):
    """Carries the result out of a program; nothing in between catches it."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed


class Refused(Exception):
    """The parser ended the program; the message is what it printed."""


def load(file: str) -> ModuleType:
    """The module of a program."""
    name = "program_" + file.replace("/", "_").removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # help texts are read from a class's module
        try:
            with _first_on_path(str((ROOT / file).parent)):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # the next caller gets the reason too, not half a module
            raise
    return sys.modules[name]


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Imports from the folder of a script, as Python does when it runs the script."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def parse(program: Sequence[str], words: Sequence[str]) -> Parsed:
    """Parses a command line by a program's own parser, without running the program.

    Args:
        program: file of the program, and its subcommand if it has one.
        words: what follows on the command line.

    Raises:
        Refused: the parser does not accept it.
    """
    module, depth = load(program[0]), 0
    original = argparse.ArgumentParser.parse_known_args

    def stopping(self, args=None, namespace=None):
        nonlocal depth
        depth += 1
        try:
            found, unknown = original(self, args, namespace)
        finally:
            depth -= 1
        if depth == 0:
            raise _Stop(Parsed(self, unknown, vars(found)))
        return found, unknown

    argv, errors = [*program[1:], *words], io.StringIO()
    with (
        _first_on_path(str((ROOT / program[0]).parent)),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stopping),
        mock.patch.object(sys, "argv", [program[0], *argv]),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(errors),
    ):
        try:
            module.main()
        except _Stop as stop:
            return stop.parsed
        except SystemExit as end:
            raise Refused(f"{errors.getvalue()}{end.code}") from None
    raise Refused(f"{program[0]} parses no command line")


def parser_of(program: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a program."""
    parser: argparse.ArgumentParser | None = None
    original = argparse.ArgumentParser.parse_known_args

    def noting(self, args=None, namespace=None):
        nonlocal parser
        parser = parser or self
        return original(self, args, namespace)

    noted = mock.patch.object(argparse.ArgumentParser, "parse_known_args", noting)
    with noted, contextlib.suppress(Refused):
        parser = parse(program, []).parser
    assert parser is not None, program
    return parser


def flags_of(program: Sequence[str]) -> set[str]:
    """All names of a program's flags."""
    return {name for name in parser_of(program)._option_string_actions if name.startswith("-")}
