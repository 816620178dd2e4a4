"""What the files of the tasks are read into, before there is a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ConfigError


@dataclass(frozen=True)
class LabelledExample:
    """A text or a pair of texts with its label: the number of one, or the number to be predicted;
    None in a test file. ``identity`` is what predictions are written under: the value of the file's
    first column, or the number of the line."""

    texts: tuple[str, ...]
    label: int | float | None
    identity: str


@dataclass(frozen=True)
class RaceQuestion:
    """A question about an article, with options, of which one, counted from 0, is the answer; None
    in a test file."""

    article: str
    question: str
    options: tuple[str, ...]
    label: int | None
    identity: str


def clean_text(text: str) -> str:
    """The text with single spaces for white space, and without the space in front of a full stop
    that stands alone."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers from 1; only a line feed ends one. Raises ConfigError
    if it is not a file of UTF-8 text."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {found}; it must be a file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path}, line {number} is not UTF-8 text ({error.reason}): convert the file"
                ) from None
            yield number, text.rstrip("\r\n")
