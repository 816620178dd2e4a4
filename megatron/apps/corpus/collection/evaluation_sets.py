"""The texts of evaluation sets: JSON lines, tables of GLUE, folders of RACE, plain text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.apps.corpus.collection.json_files import read_lines, read_records
from megatron.data.json_lines import long_line


def task_texts(file: str) -> Iterator[str]:
    """The texts of FILE:KEY, FOLDER:KEY or FILE:

    - KEY of JSON lines: a string, or strings in lists, such as RACE's ``questions`` and
      ``options``; of a folder, in all of its .txt and .json files, as RACE has them.
    - KEY of a .tsv file: a column by its name in the first line, or by its number from 0 in a file
      without such a line, as CoLA's.
    - without KEY, the lines of a text file, such as WikiText's.

    Raises FileNotFoundError; ValueError, which names file and line, for a malformed line.
    """
    path, key = Path(file), ""
    if not path.exists() and ":" in file:
        name, _, key = file.rpartition(":")
        path = Path(name)
    if path.is_dir():
        yield from _of_folder(path, key)
    elif not path.is_file():
        raise FileNotFoundError(f"the evaluation set {path} is not a file")
    elif not key:
        yield from (line for _, line in _lines(path))
    elif ".tsv" in path.suffixes:
        yield from _of_table(path, key)
    else:
        yield from _of_records(path, key)


def _of_folder(folder: Path, key: str) -> Iterator[str]:
    if not key:
        raise ValueError(f"{folder} is a folder: give FOLDER:KEY, such as {folder}:article of RACE")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".json"))
    if not files:
        raise ValueError(f"{folder} has no .txt or .json file")
    for path in files:
        yield from _of_records(path, key)


def _of_records(path: Path, key: str) -> Iterator[str]:
    for record in read_records(path):
        if key not in record.fields:
            known = ", ".join(record.fields) or "none"
            raise ValueError(f'{path}, line {record.number}: no key "{key}"; its keys: {known}')
        found = list(_strings(record.fields[key]))
        if not found:
            raise ValueError(f'{path}, line {record.number}: "{key}" has no text')
        yield from found


def _strings(value: Any) -> Iterator[str]:
    """The strings in lists at any depth, in their order."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += reversed(value)


def _of_table(path: Path, key: str) -> Iterator[str]:
    lines = _lines(path)
    if key.isdecimal():
        column = int(key)
    else:
        names = next(lines, (1, ""))[1].split("\t")
        if key not in names:
            raise ValueError(f"{path}, line 1: no column {key!r}; its columns: {', '.join(names)}")
        column = names.index(key)
    for number, line in lines:
        cells = line.split("\t")
        if column >= len(cells):
            raise ValueError(f"{path}, line {number}: {len(cells)} columns, none is {key}")
        yield cells[column]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for batch in read_lines([path]):
        for number, line in enumerate(batch.lines, batch.first_line):
            if too_long := long_line(line, number):
                raise ValueError(f"{path}, line {number}: {too_long.reason} ({too_long.detail})")
            yield number, line.decode("utf-8", "replace").rstrip("\r\n")
