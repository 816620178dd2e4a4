"""Corpora by name, from a JSON file that lists the files of each corpus.

    {
      "wikipedia": {"files": "wiki/*_text_document.bin", "weight": 2},
      "books":     {"files": ["books/a_text_document", "books/b_text_document"], "range": "0:0.9"},
      "questions": {"files": "questions.jsonl", "type": "instruction", "weight": 0.1},
      "all":       {"corpora": ["wikipedia", "books", "questions"]}
    }

Paths are relative to the JSON file, and must be below its folder unless --corpora-outside is given.
The files of a corpus share its weight in proportion to their tokens. A corpus without a weight is
weighted by its tokens.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, RunConfig, Setting, Settings, TokenizerConfig
from megatron.config.features import features, file_kinds
from megatron.config.flags import nearest
from megatron.data.corpora import INDEXED, DataSource, parse_range
from megatron.data.sources import number_of, source_of, weighted_words
from megatron.features.corpora.flags import CorporaFlags
from megatron.util.json_text import parse_json

_KEYS = ("files", "type", "weight", "range", "text_key", "tokenizer", "corpora")


_TOKENIZER_KEYS = {f.name for f in fields(TokenizerConfig)}


@dataclass(frozen=True)
class Corpora:
    path: str = "corpora.json"
    sources: Mapping[str, DataSource] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tokenizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flags of the tokenizer with which each corpus was tokenized, by field name (vocab_file
    ...)."""
    classes: Mapping[str, DataSource] = field(default_factory=dict)
    """Corpora that are not in the file; see `megatron/features/raw_text/named_corpora.py`."""
    exists: bool = True

    def __contains__(self, name: str) -> bool:
        return name in self.sources or name in self.groups or name in self.classes

    def find(self, name: str, weight: float | None, flag: str) -> list[tuple[str, DataSource]]:
        """Return the corpora that a name refers to, with their weights. A weight from the command
        line replaces the one in the file. For a group it is divided in proportion to the weights of
        its corpora, which must all have one. Raises ConfigError for an unknown name."""
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
        """Yield the names of the corpora that a name refers to, which may be a group."""
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
    """Read a corpora file. `kinds` are the known types, and `kind_of` returns the type of a path
    for a corpus without one. Raises ConfigError if the file is missing or malformed, or if a path
    is outside of its folder and `outside` is false."""
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
    """Folder that contains a corpora file. Symbolic links inside it may point anywhere."""

    folder: Path
    outside: bool

    def path(self, path: str, where: str) -> str:
        """Return a path relative to the folder. Raises ConfigError if it is outside."""
        joined = os.path.join(self.folder, path)
        here = os.path.abspath(self.folder)
        if not self.outside and os.path.commonpath((here, os.path.abspath(joined))) != here:
            raise ConfigError(
                f"{where}: {path} is not below {here}, the folder of this file; if you trust the "
                "file, give --corpora-outside"
            )
        return joined


def _paths(pattern: str, folder: _Folder, where: str) -> list[str]:
    """Return the files that match a glob, or the one path. Indexed files lose their suffixes .bin
    and .idx."""
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


_NAMED = ("train_data", "valid_data", "test_data")


def with_corpora(settings: Settings) -> Settings:
    """Add the tokenizer flags of the corpora in --train-data, --valid-data and --test-data. Raises
    ConfigError if they contradict flags of the run or each other."""
    given = {name: settings[name].value for name in _NAMED if name in settings}
    if not any(given.values()):
        return settings
    file = (
        settings["corpora_file"].value if "corpora_file" in settings else CorporaFlags.corpora_file
    )
    outside = "corpora_outside" in settings and settings["corpora_outside"].value
    corpora = corpora_of(file, _classes(), outside=outside)
    completed = dict(settings)
    for name, words in given.items():
        flag = "--" + name.replace("_", "-")
        names = [word for word in words if number_of(word) is None]
        names = [name for name in names if name in corpora or not os.path.exists(name)]
        for corpus in [each for name in names for each in corpora.expand(name, flag)]:
            origin = f"{file}: {corpus}"
            for key, value in corpora.tokenizers.get(corpus, {}).items():
                before = completed.setdefault(key, Setting(value, origin))
                if before.value != value:
                    raise ConfigError(
                        f"{before.origin} has {key} {before.value}, but {origin} was tokenized "
                        f"with {value}: all data of a run must have the same tokenizer"
                    )
    return completed


def _classes(config: RunConfig | None = None) -> Mapping[str, DataSource]:
    """Return the corpora that a feature provides without a file."""
    named = (feature.corpora(config) for feature in features().values())
    return next((corpora for corpora in named if corpora is not None), {})


def corpora_of(
    file: str,
    classes: Mapping[str, DataSource],
    kind_of: Callable[[str], str] = lambda path: INDEXED,
    outside: bool = False,
) -> Corpora:
    """Return the corpora in a file, together with ``classes``. The default file may be missing."""
    if file == CorporaFlags.corpora_file and not os.path.exists(file):
        return Corpora(file, classes=classes, exists=False)
    kinds = (INDEXED, *file_kinds())
    return replace(read_corpora(file, kinds, kind_of, outside=outside), classes=classes)


@dataclass(frozen=True)
class NamedSources:
    """Converter of names on the command line to data sources. `kind_of` returns the type of a
    path's files if the corpora file does not specify it."""

    corpora: Corpora
    kind_of: Callable[[str], str] = lambda path: INDEXED

    def __call__(self, values: Sequence[str], flag: str) -> tuple[DataSource, ...]:
        """Return the sources for `NAME NAME ...` or `WEIGHT NAME WEIGHT NAME ...`. A name is a
        corpus or a file of raw text."""
        form = "give NAME NAME ..., or WEIGHT NAME pairs with a weight before every name"
        has_weights = any(number_of(word) is not None for word in values)
        pairs = (
            weighted_words(values, flag, form) if has_weights else [(None, name) for name in values]
        )
        sources = [each for weight, name in pairs for each in self._find(name, weight, flag)]
        names = [name for name, _ in sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{flag} {' '.join(values)} names {twice} twice, perhaps within a group: it would "
                "be trained on twice"
            )
        return tuple(source for _, source in sources)

    def _find(self, name: str, weight: float | None, flag: str) -> list[tuple[str, DataSource]]:
        if name not in self.corpora and os.path.exists(name) and self.kind_of(name) != INDEXED:
            return [(name, replace(source_of(name, flag, self.kind_of), weight=weight))]
        return self.corpora.find(name, weight, flag)


def named_sources(config: RunConfig, kind_of: Callable[[str], str]) -> NamedSources:
    """Return the converter of names for a run."""
    flags, classes = CorporaFlags.of(config.data), _classes(config)
    return NamedSources(
        corpora_of(flags.corpora_file, classes, kind_of, flags.corpora_outside), kind_of
    )
