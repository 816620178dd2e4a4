"""Prompts in files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeVar

from megatron.apps.generation.generation.config import GenerateConfig
from megatron.tokenizer.base import read_text
from megatron.util.json_text import parse_json

T = TypeVar("T")


def prompts_of(options: GenerateConfig) -> list[str] | None:
    """The prompts of the flags; None without any. Raises ValueError or OSError if a file cannot be
    used."""
    if options.prompt is not None:
        return [options.prompt]
    if options.prompt_file is not None:
        return _lines_of(options.prompt_file)
    if options.sample_input_file is not None:
        return _samples_of(options.sample_input_file)
    if options.genfile is not None and options.num_samples != 0:
        return [""] * (options.num_samples or 1)
    return None


def _lines_of(path: str) -> list[str]:
    lines = _numbered(path, "--prompt-file")
    if Path(path).suffix != ".jsonl":
        return [line for _, line in lines]
    return _json_prompts("--prompt-file", path, lines, '{"prompt": "..."}')


def _samples_of(path: str) -> list[str]:
    """Of JSON where the first line is an object, or else the lines themselves."""
    lines = _numbered(path, "--sample-input-file")
    if not isinstance(_json(lines[0][1]), dict):
        return [line for _, line in lines]
    return _json_prompts("--sample-input-file", path, lines, '{"prompt": {"text": "..."}}')


def _json_prompts(flag: str, path: str, lines: list[tuple[int, str]], form: str) -> list[str]:
    found = []
    for number, line in lines:
        match _json(line):
            case {"prompt": str(text)} | {"prompt": {"text": str(text)}}:
                found.append(text)
            case _ if line.strip():
                raise ValueError(f"{flag} {path}, line {number} is not of the form {form}")
    return _some(found, flag, path)


def _numbered(path: str, flag: str) -> list[tuple[int, str]]:
    """The lines of a file, with their numbers from 1."""
    # str.splitlines would also cut at characters that JSON may contain.
    lines = (line.rstrip("\n") for line in io.StringIO(read_text(path, flag), newline=None))
    return _some(list(enumerate(lines, 1)), flag, path)


def _some(found: list[T], flag: str, path: str) -> list[T]:
    if not found:
        raise ValueError(f"{flag} {path} has no prompt")
    return found


def _json(line: str) -> Any:
    try:
        return parse_json(line, "a line", lenient=True)
    except ValueError:
        return None
