"""What the command lines of the collection tools have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, parse_configs
from megatron.corpus.preprocessing.inputs import JSON_ENDINGS, expand_inputs


def with_flags(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Words before the first flag as values of `flags`, in this order.

    Megatron's scripts take their files without flags: `cleanup_dataset.py IN OUT` is
    `cleanup_dataset.py --input IN --output OUT`.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    if count > len(flags):
        raise ConfigError(f"'{argv[len(flags)]}' is one word too many; expected {' '.join(flags)}")
    named = zip(flags, argv[:count], strict=False)
    return [word for pair in named for word in pair] + list(argv[count:])


def run_tool(
    name: str,
    description: str,
    classes: Sequence[type],
    action: Callable[..., object],
    argv: Sequence[str] | None,
    positional: Sequence[str] = (),
) -> None:
    """Parses the command line, does the work, and prints what came of it.

    Args:
        classes: the config classes, whose instances `action` takes in this order.
        positional: flags that the first words stand for where they carry no flag.
    """
    try:
        words = with_flags(sys.argv[1:] if argv is None else argv, positional)
        configs: tuple[Any, ...] = parse_configs(classes, words, description=description, prog=name)
        print(action(*configs))
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: error: {error}")


def required(**flags: object) -> None:
    """Raises ConfigError on the first flag without a value; `output_dir` means --output-dir."""
    for name, value in flags.items():
        if value is None or value == () or value == "":
            raise ConfigError(f"--{name.replace('_', '-')} is missing")


def json_inputs(patterns: Iterable[str]) -> list[Path]:
    """JSON-lines files of paths, globs and folders.

    Raises:
        FileNotFoundError: one of them stands for no file.
    """
    return expand_inputs(list(patterns), JSON_ENDINGS)
