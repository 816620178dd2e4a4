"""What the commands ask alike."""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron.checkpoint.source import Source, run_of
from megatron.config import ConfigError
from megatron.inference.load import training_dtype


def required(config: Any, field: str) -> str:
    """The value of a flag that a command cannot do without.

    Raises:
        ConfigError: it was not given.
    """
    value = getattr(config, field)
    if value is None:
        raise ConfigError(f"--{field.replace('_', '-')} is missing")
    return value


def need(command: str, package: str) -> None:
    """Asks for an installed package.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{command} needs {package}: pip install {package.replace('_', '-')}")


def dtype_of(source: Source) -> str:
    """The number format that a checkpoint's run computed in, or else that it is stored in."""
    return str(training_dtype(run_of(source))).removeprefix("torch.")
