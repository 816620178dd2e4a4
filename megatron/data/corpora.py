"""The files of a path, and corpora by name: a JSON file that lists the files of each.

    {
      "wikipedia": {"files": "wiki/*_text_document.bin", "weight": 2},
      "books":     {"files": ["books/a_text_document", "books/b_text_document"], "range": "0:0.9"},
      "questions": {"files": "questions.jsonl", "type": "instruction", "weight": 0.1},
      "all":       {"corpora": ["wikipedia", "books", "questions"]}
    }

Paths are relative to the file, and below its folder unless --corpora-outside is given. Files of a
corpus share its weight in proportion to their tokens; a corpus without a weight is weighted by its
tokens.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.flags import nearest
from megatron.util.json_text import parse_json

INDEXED = "indexed"
READ_IN_PLACE = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".tfrecord", ".tfrecords")
"""Endings of files in a folder of data that is not indexed."""
_KEYS = ("files", "type", "weight", "range", "text_key", "tokenizer", "corpora")
_TOKENIZER_KEYS = {f.name for f in fields(TokenizerConfig)}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class DataSource:
    """Files of one kind, which share a weight in proportion to their tokens."""

    paths: tuple[str, ...]
    """Prefixes of indexed files, or files."""
    kind: str = INDEXED
    """Name of the `SourceReader` that reads them."""
    weight: float | None = None
    """Relative to the other weights of a blend; None: its number of tokens."""
    share: tuple[float, float] = (0.0, 1.0)
    """Range of its documents that is used, in fractions of their number."""
    text_key: str | None = None
    """Key of the text in JSON; None: the one of the flags."""
    make: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """Called before the files are opened: writes them if they are a copy that does not exist."""


@dataclass(frozen=True)
class Corpora:
    path: str = "corpora.json"
    sources: Mapping[str, DataSource] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tokenizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tokenizer flags that a corpus was tokenized with, by field name (vocab_file ...)."""
    classes: Mapping[str, DataSource] = field(default_factory=dict)
    """Corpora that are not in the file: see `megatron/features/raw_text/named_corpora.py`."""
    exists: bool = True

    def __contains__(self, name: str) -> bool:
        return name in self.sources or name in self.groups or name in self.classes

    def find(self, name: str, weight: float | None, flag: str) -> list[tuple[str, DataSource]]:
        """The corpora of a name with their weights; ConfigError for an unknown name. A weight from
        the command line replaces that in the file; for a group it is divided in proportion to the
        weights of its corpora, which must all have one."""
        names = self.expand(name, flag)
        sources = [(n, self.sources[n] if n in self.sources else self.classes[n]) for n in names]
        if weight is None:
            return sources
        if len(sources) == 1:
            return [(each, replace(source, weight=weight)) for each, source in sources]
        missing = [each for each, source in sources if source.weight is None]
        if missing:
            raise ConfigError(
                f"{flag} {weight:g} {name}: to divide a weight over a group each of its corpora "
                f"needs one in {self.path}, and {missing[0]} has none"
            )
        own = [source.weight or 0.0 for _, source in sources]
        return [
            (each, replace(source, weight=weight * part / sum(own)))
            for (each, source), part in zip(sources, own, strict=True)
        ]

    def expand(self, name: str, flag: str, within: tuple[str, ...] = ()) -> Iterator[str]:
        """The names of the corpora of a name."""
        if name in within:
            raise ConfigError(f"{self.path}: the group {name} contains itself")
        if name in self.groups:
            for each in self.groups[name]:
                yield from self.expand(each, flag, (*within, name))
        elif name in self:
            yield name
        else:
            raise ConfigError(self._unknown(name, flag))

    def _unknown(self, name: str, flag: str) -> str:
        known = [*self.sources, *self.groups]
        hint = nearest(name, [*known, *self.classes], " Did you mean {}?")
        text = f"{flag}: {self.path} has no corpus {name}, but {', '.join(known) or 'none'}"
        if not self.exists:
            text = f"{flag} {name}: {_missing(self.path)}"
        if self.classes:
            text += f"; NAMED_CORPORA of {self.classes} has {', '.join(self.classes)}"
        return f"{text}.{hint}"


def read_corpora(
    path: str,
    kinds: tuple[str, ...],
    kind_of: Callable[[str], str] = lambda path: INDEXED,
    *,
    outside: bool = False,
) -> Corpora:
    """Reads a corpora file. `kinds` are the known types, `kind_of` gives the type of a path for a
    corpus without one. Raises ConfigError if the file is missing or malformed, or if a path leads
    out of its folder and `outside` is false."""
    try:
        content = parse_json(Path(path).read_bytes(), f"--corpora-file {path}")
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except OSError as error:
        raise ConfigError(f"--corpora-file {path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict):
        raise ConfigError(f"--corpora-file {path} must contain one JSON object, corpora by name")
    folder = _Folder(Path(path).parent, outside)
    sources: dict[str, DataSource] = {}
    groups: dict[str, tuple[str, ...]] = {}
    tokenizers: dict[str, dict[str, Any]] = {}
    for name, values in content.items():
        where = f"--corpora-file {path}: {name}"
        if not isinstance(values, dict) or not set(values) <= set(_KEYS):
            raise ConfigError(f"{where} must be an object with keys among {', '.join(_KEYS)}")
        if "corpora" in values:
            if set(values) != {"corpora"} or not _are_strings(values["corpora"]):
                raise ConfigError(f"{where}: a group must have only a list of corpora")
            groups[name] = tuple(values["corpora"])
            continue
        sources[name] = _source(values, folder, kinds, kind_of, where)
        tokenizer = values.get("tokenizer", {})
        if not isinstance(tokenizer, dict) or not set(tokenizer) <= _TOKENIZER_KEYS:
            raise ConfigError(
                f"{where}: tokenizer must be an object with keys among {sorted(_TOKENIZER_KEYS)}"
            )
        if tokenizer:
            tokenizers[name] = {
                key: folder.path(value, where) if _is_path(key, value) else value
                for key, value in tokenizer.items()
            }
    return Corpora(path, sources, groups, tokenizers)


def parse_range(first: str, last: str, where: str) -> tuple[float, float]:
    """A range of documents in fractions of their number; a missing end is 0 or 1. Raises
    ConfigError, whose message begins with `where`, if it is not a range."""
    try:
        start, end = float(first or 0), float(last or 1)
    except ValueError:
        start, end = 1.0, 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"{where}: the range {first}:{last} must be FIRST:LAST with 0 <= FIRST < LAST <= 1, "
            "fractions of the documents"
        )
    return start, end


def _missing(path: str) -> str:
    return (
        f"--corpora-file {path} does not exist; it lists the files of the names in "
        '--train-data: {"wikipedia": {"files": "wiki_text_document"}}'
    )


def _source(
    values: dict[str, Any],
    folder: _Folder,
    kinds: tuple[str, ...],
    kind_of: Callable[[str], str],
    where: str,
) -> DataSource:
    files = values.get("files")
    files = [files] if isinstance(files, str) else files
    if not files or not _are_strings(files):
        raise ConfigError(f"{where} needs files, a path or a list of paths")
    kind, weight = values.get("type"), values.get("weight")
    if kind is not None and kind not in kinds:
        raise ConfigError(f"{where}: type {kind!r} must be one of {', '.join(kinds)}")
    if weight is not None and not (isinstance(weight, int | float) and 0 < weight < float("inf")):
        raise ConfigError(f"{where}: weight {weight!r} is not a finite number above 0")
    text_key, text = values.get("text_key"), values.get("range", ":")
    if text_key is not None and not isinstance(text_key, str):
        raise ConfigError(f"{where}: text_key {text_key!r} is not a string")
    first, colon, last = str(text).partition(":")
    if not colon:
        raise ConfigError(f"{where}: range {text!r} is not FIRST:LAST")
    paths = tuple(path for pattern in files for path in _paths(pattern, folder, where))
    share = parse_range(first, last, where)
    return DataSource(paths, kind or kind_of(paths[0]), weight, share, text_key)


@dataclass(frozen=True)
class _Folder:
    """The folder of a corpora file; links in it lead where they like."""

    folder: Path
    outside: bool

    def path(self, path: str, where: str) -> str:
        """A path relative to the folder. Raises ConfigError if it leads out of it."""
        joined = os.path.join(self.folder, path)
        here = os.path.abspath(self.folder)
        if not self.outside and os.path.commonpath((here, os.path.abspath(joined))) != here:
            raise ConfigError(
                f"{where}: {path} is not below {here}, the folder of this file; if you trust the "
                "file, give --corpora-outside"
            )
        return joined


def _paths(pattern: str, folder: _Folder, where: str) -> list[str]:
    """Files of a glob, or the one path; of indexed files the prefix, without .bin or .idx."""
    if "://" in pattern:
        return [pattern]
    path = folder.path(pattern, where)
    paths = [path]
    if glob.escape(pattern) != pattern:
        paths = sorted(glob.glob(path))
        if not paths:
            raise ConfigError(f"{where}: {pattern} matches no file")
    return list(dict.fromkeys(f.removesuffix(".bin").removesuffix(".idx") for f in paths))


def _is_path(key: str, value: Any) -> bool:
    return key.endswith(("_file", "_model", "_path")) and isinstance(value, str)


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def expand(pattern: str, endings: Sequence[str]) -> list[Path]:
    """The sorted files of a path: a file, a folder (its files at any depth with one of some
    endings), or a glob; FileNotFoundError if without any, ValueError for a URL."""
    if "://" in pattern:
        raise ValueError(
            f"{pattern} is a URL; only .bin/.idx files can be read from URLs, by --data-path and "
            "its like: copy the data here first"
        )
    path = Path(pattern)
    if path.is_dir():
        files = (p for p in path.rglob("*") if p.is_file() and not _is_ours(p, path))
        matches = sorted(p for p in files if p.name.endswith(tuple(endings)))
        if not matches:
            raise FileNotFoundError(f"{pattern} is a folder without files *{' *'.join(endings)}")
        return matches
    if path.exists():
        return [path]
    matches = sorted(p for p in map(Path, glob.glob(pattern, recursive=True)) if not p.is_dir())
    if not matches:
        is_glob = glob.escape(pattern) != pattern
        raise FileNotFoundError(f"{pattern} {'matches no file' if is_glob else 'does not exist'}")
    return matches


def _is_ours(path: Path, folder: Path) -> bool:
    *folders, name = path.relative_to(folder).parts
    return ".partial" in name or any(
        each == "index-cache" or each.endswith(".preprocessing") for each in folders
    )
