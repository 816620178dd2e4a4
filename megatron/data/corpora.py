"""Corpora by name: a JSON file that lists the files of each.

    {
      "wikipedia": {"files": "wiki/*_text_document.bin", "weight": 2},
      "books":     {"files": ["books/a_text_document", "books/b_text_document"], "range": "0:0.9"},
      "questions": {"files": "questions.jsonl", "type": "instruction", "weight": 0.1},
      "all":       {"corpora": ["wikipedia", "books", "questions"]}
    }

Paths are relative to the file. Files of a corpus share its weight in proportion to their tokens; a
corpus without a weight is weighted by its tokens.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, TokenizerConfig
from megatron.util.nearest import nearest

_KEYS = ("files", "type", "weight", "range", "text_key", "tokenizer", "corpora")


@dataclass(frozen=True)
class Corpus:
    """One corpus of files."""

    name: str
    files: tuple[str, ...]
    """Prefixes of indexed files, or files."""
    type: str | None = None
    """Kind of the files; None: inferred from their names."""
    weight: float | None = None
    share: tuple[float, float] = (0.0, 1.0)
    """Range of its documents that is used, in fractions of their number."""
    text_key: str | None = None
    """Key of the text in JSON files."""
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Tokenizer flags that the files were tokenized with, by field name (vocab_file ...)."""


@dataclass(frozen=True)
class Corpora:
    """The content of a corpora file."""

    path: str = "corpora.json"
    corpora: Mapping[str, Corpus] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, name: str, weight: float | None, flag: str) -> list[tuple[Corpus, float | None]]:
        """The corpus or group of a name, each corpus with its weight.

        Args:
            weight: from the command line, in place of that in the file. For a group it is divided
                in proportion to the weights of its corpora.

        Raises:
            ConfigError: the name is unknown, or a corpus of a group lacks a weight.
        """
        found = [self.corpora[each] for each in self._expand(name, flag, ())]
        if weight is None:
            return [(corpus, corpus.weight) for corpus in found]
        if len(found) == 1:
            return [(found[0], weight)]
        own = [corpus.weight for corpus in found]
        if None in own:
            missing = found[own.index(None)].name
            raise ConfigError(
                f"{flag} {weight:g} {name}: to divide a weight over a group each of its corpora "
                f"needs one in {self.path}, and {missing} has none"
            )
        total = sum(w for w in own if w is not None)
        return [(c, weight * (c.weight or 0.0) / total) for c in found]

    def tokenizers(self, names: list[str], flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and tokenizer flags of each corpus that has such flags."""
        for name in names:
            for each in self._expand(name, flag, ()):
                if self.corpora[each].tokenizer:
                    yield each, self.corpora[each].tokenizer

    def _expand(self, name: str, flag: str, within: tuple[str, ...]) -> Iterator[str]:
        if name in within:
            raise ConfigError(f"{self.path}: the group {name} contains itself")
        if name in self.corpora:
            yield name
        elif name in self.groups:
            for each in self.groups[name]:
                yield from self._expand(each, flag, (*within, name))
        else:
            known = [*self.corpora, *self.groups]
            hint = nearest(name, known, " Did you mean {}?")
            raise ConfigError(
                f"{flag}: {self.path} has no corpus {name}, but {', '.join(known) or 'none'}.{hint}"
            )


def read_corpora(path: str, kinds: tuple[str, ...]) -> Corpora:
    """Reads a corpora file.

    Args:
        kinds: the known types.

    Raises:
        ConfigError: it is missing or malformed; the message names the corpus.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise ConfigError(
            f"--corpora-file {path} does not exist; it lists the files of the names in "
            '--train-data: {"wikipedia": {"files": "wiki_text_document"}}'
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--corpora-file {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--corpora-file {path} must contain one JSON object, corpora by name")
    corpora, groups = {}, {}
    for name, values in content.items():
        where = f"--corpora-file {path}: {name}"
        if not isinstance(values, dict) or not set(values) <= set(_KEYS):
            raise ConfigError(f"{where} must be an object with keys among {', '.join(_KEYS)}")
        if "corpora" in values:
            if set(values) != {"corpora"} or not _are_strings(values["corpora"]):
                raise ConfigError(f"{where}: a group must have only a list of corpora")
            groups[name] = tuple(values["corpora"])
        else:
            corpora[name] = _corpus(name, values, Path(path).parent, kinds, where)
    return Corpora(path, corpora, groups)


def parse_range(first: str, last: str, where: str) -> tuple[float, float]:
    """A range of documents in fractions of their number; a missing end is 0 or 1.

    Args:
        where: what gave it, for the message.

    Raises:
        ConfigError: it is not 0 <= first < last <= 1.
    """
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f'the key "{key}" is there twice')
    return dict(pairs)


def _corpus(
    name: str, values: dict[str, Any], folder: Path, kinds: tuple[str, ...], where: str
) -> Corpus:
    files = values.get("files")
    files = [files] if isinstance(files, str) else files
    if not files or not _are_strings(files):
        raise ConfigError(f"{where} needs files, a path or a list of paths")
    kind, weight = values.get("type"), values.get("weight")
    if kind is not None and kind not in kinds:
        raise ConfigError(f"{where}: type {kind!r} must be one of {', '.join(kinds)}")
    if weight is not None and not (isinstance(weight, int | float) and 0 < weight < float("inf")):
        raise ConfigError(f"{where}: weight {weight!r} is not a finite number above 0")
    text_key, tokenizer = values.get("text_key"), values.get("tokenizer", {})
    if text_key is not None and not isinstance(text_key, str):
        raise ConfigError(f"{where}: text_key {text_key!r} is not a string")
    known = {f.name for f in fields(TokenizerConfig)}
    if not isinstance(tokenizer, dict) or not set(tokenizer) <= known:
        raise ConfigError(f"{where}: tokenizer must be an object with keys among {sorted(known)}")
    text = values.get("range", ":")
    first, colon, last = str(text).partition(":")
    if not colon:
        raise ConfigError(f"{where}: range {text!r} is not FIRST:LAST")
    return Corpus(
        name,
        tuple(path for pattern in files for path in _paths(pattern, folder, where)),
        kind,
        weight,
        parse_range(first, last, where),
        text_key,
        {key: _relative(key, value, folder) for key, value in tokenizer.items()},
    )


def _paths(pattern: str, folder: Path, where: str) -> list[str]:
    """Files of a glob, or the one path; of indexed files the prefix, without .bin or .idx."""
    if "://" in pattern:
        return [pattern]
    path = str(folder / pattern)
    found = [path]
    if glob.escape(pattern) != pattern:
        found = sorted(glob.glob(path))
        if not found:
            raise ConfigError(f"{where}: {pattern} matches no file")
    return list(dict.fromkeys(f.removesuffix(".bin").removesuffix(".idx") for f in found))


def _relative(key: str, value: Any, folder: Path) -> Any:
    is_path = key.endswith(("_file", "_model", "_path")) and isinstance(value, str)
    return str(folder / value) if is_path else value


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
