"""Reading and writing the files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.util.files import write_whole


def required(config: TokenizerConfig, field: str, what: str) -> str:
    """The value of a path field that this tokenizer type cannot do without.

    Raises:
        ConfigError: the flag was not given.
    """
    value = getattr(config, field)
    if not value:
        flag = "--" + field.replace("_", "-")
        raise ConfigError(f"--tokenizer-type {config.tokenizer_type} needs {flag}: {what}")
    return value


def refuse_extra_ids(config: TokenizerConfig) -> None:
    """For the families whose vocabulary is fixed by their files.

    Raises:
        ConfigError: --vocab-extra-ids is given.
    """
    if config.vocab_extra_ids:
        raise ConfigError(
            f"--vocab-extra-ids {config.vocab_extra_ids} does not go with --tokenizer-type "
            f"{config.tokenizer_type}: its vocabulary is what its files hold; leave the flag out"
        )


def read_text(path: str | Path, flag: str) -> str:
    """A whole UTF-8 file, line ends as they are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{flag} {path} {found}; it must be a file")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8 text: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Replaces a UTF-8 file at once: nobody ever sees half of it."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON by `write_text`."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
