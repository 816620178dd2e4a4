"""Corpora defined by classes: NAMED_CORPORA in data_utils/corpora.py, as in Megatron-LM of 2019.

A class's texts are written once, to a JSON lines file. From then on they are raw text, and neither
loader processes nor resumed runs need the class. The file name includes a digest of everything that
affects the texts.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.config import ConfigError
from megatron.data.corpora import DataSource
from megatron.data.index_cache import FOLDER, IndexCache, single_writer
from megatron.features.raw_text.flags import RawTextConfig
from megatron.util.digests import digest, digest_of_parts
from megatron.util.files import replacing, sync
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

MODULE = "data_utils.corpora"
_TEXT = "text"
_VERSION = 1
_NOT_OURS = {"torch", *sys.stdlib_module_names}


@dataclass(frozen=True)
class NamedCorpora(Mapping[str, DataSource]):
    """Mapping from the names in NAMED_CORPORA to data sources. It is empty if data_utils/corpora.py
    does not exist. A file in the working directory takes precedence over others on Python's path.
    `str()` returns the file's path."""

    config: RawTextConfig
    cache_path: str | None = None
    """Value of `--data-cache-path`."""

    def __getitem__(self, name: str) -> DataSource:
        """Return the source for a corpus. Its file is written when `DataSource.make` is called.
        Raises ConfigError if the corpus's class cannot be used."""
        corpus = _Corpus(name, _classes()[name], str(self), self._arguments())
        folder = IndexCache.next_to(corpus.path, self.cache_path).folder
        assert folder is not None
        file = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{corpus.digest()}.jsonl"
        kind = RawTextConfig.files
        assert kind is not None
        make = partial(_write_once, file, corpus)
        return DataSource((str(file),), kind, text_key=_TEXT, make=make)

    def __contains__(self, name: object) -> bool:
        return name in _classes()

    def __iter__(self) -> Iterator[str]:
        return iter(_classes())

    def __len__(self) -> int:
        return len(_classes())

    def __str__(self) -> str:
        return str(getattr(_module(), "__file__", MODULE))

    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that Megatron-LM of 2019 passed to its dataset classes."""
        return {
            "text_key": self.config.text_key,
            "label_key": "label",
            "binarize_sent": False,
            "delim": self.config.delim,
            "drop_unlabeled": False,
            "loose_json": True,
        }


@contextmanager
def _working_directory_first() -> Iterator[None]:
    """Within this context, import data_utils/ from the working directory if it has a corpora.py."""
    here = os.getcwd()
    if not Path(here, *MODULE.split(".")).with_suffix(".py").is_file():
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


@cache
def _module() -> ModuleType | None:
    try:
        with _working_directory_first():
            return import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name in (MODULE, MODULE.partition(".")[0]):
            return None
        raise ConfigError(f"{MODULE}: {error}; install it, or correct the import") from error
    except Exception as error:
        lines = [
            f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename
        ]
        place = f"{lines[-1].filename}, line {lines[-1].lineno}"
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error


def _classes() -> Mapping[str, Any]:
    module = _module()
    classes = {} if module is None else getattr(module, "NAMED_CORPORA", {})
    if module is not None and not isinstance(classes, Mapping):
        raise ConfigError(
            f"{module.__file__}: NAMED_CORPORA is a {type(classes).__name__}; it must be a dict of "
            "names and classes"
        )
    return classes


@dataclass(frozen=True)
class _Corpus:
    name: str
    cls: Any
    file: str
    """Path of the module that defines NAMED_CORPORA."""
    offered: Mapping[str, Any]
    """Keyword arguments for the constructor. Those that it does not accept are omitted."""

    def __post_init__(self) -> None:
        from torch.utils.data import Dataset

        if not (isinstance(self.cls, type) and issubclass(self.cls, Dataset)):
            raise ConfigError(
                f"{self.file}: NAMED_CORPORA[{self.name!r}] is {self.cls!r}; it must be a class "
                "derived from torch.utils.data.Dataset"
            )
        path = getattr(self.cls, "PATH", None)
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"{self}: the class has no PATH; set it in that file to the file or folder that "
                "its texts come from, so that a change of them is noticed"
            )
        if not os.path.exists(path):
            raise ConfigError(
                f"{self}: its PATH {os.fspath(path)} does not exist; set PATH in that file to "
                "where the data is"
            )

    def __str__(self) -> str:
        return f"{self.file}, class {self.cls.__name__} (corpus {self.name})"

    @property
    def path(self) -> str:
        return os.fspath(self.cls.PATH)

    def arguments(self) -> dict[str, Any]:
        known = inspect.signature(self.cls).parameters
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            return dict(self.offered)
        return {name: value for name, value in self.offered.items() if name in known}

    def digest(self) -> str:
        """Return a digest of the class's code, its arguments, and the names, sizes and modification
        times of the data files."""
        root = Path(self.path)
        files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
        states = [
            (str(file.relative_to(root.parent)), stat.st_size, stat.st_mtime_ns)
            for file in files
            if FOLDER not in file.relative_to(root).parts
            for stat in [file.stat()]
        ]
        modules = {self.file} | {str(inspect.getsourcefile(cls)) for cls in self._own_classes()}
        code = digest_of_parts(Path(name).read_bytes() for name in sorted(modules))
        return digest(json.dumps([_VERSION, self.cls.__qualname__, code, self.arguments(), states]))

    def texts(self) -> Iterator[str]:
        """Yield the texts in order. Raises ValueError if an item is not a text, or if the class
        cannot read a file."""
        try:
            yield from self._texts()
        except OSError as error:  # the caller takes an OSError for one of the output file
            raise ValueError(f"{self}: {error}") from error

    def _own_classes(self) -> list[type]:
        """Return the class and its base classes, except those from torch and Python."""
        return [c for c in self.cls.__mro__ if c.__module__.split(".")[0] not in _NOT_OURS]

    def _texts(self) -> Iterator[str]:
        from torch.utils.data import IterableDataset

        dataset = self.cls(**self.arguments())
        if isinstance(dataset, IterableDataset):
            items, count = iter(dataset), None
        else:
            count = len(dataset)
            items = (dataset[number] for number in range(count))
        for number, item in enumerate(progress_bar(self.name, items, total=count, unit=" texts")):
            text = item.get(_TEXT) if isinstance(item, Mapping) else item
            if not isinstance(text, str):
                raise ValueError(
                    f"{self}: item {number} is {_short(item)}; it must be a string, or a dict "
                    f"with a string under '{_TEXT}'"
                )
            yield text


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _write_once(file: Path, corpus: _Corpus) -> None:
    if file.exists():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with single_writer(file):
            if not file.exists():
                logger.info("writing the texts of %s to %s, once", corpus.name, file)
                _warn_of_older(file, corpus)
                _write(file, corpus)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the texts of the corpus {corpus.name} cannot be written to {file} "
            f"({error.strerror or error}); --data-cache-path names another folder",
        ) from error


def _warn_of_older(file: Path, corpus: _Corpus) -> None:
    stem = file.stem.rpartition("-")[0]
    if any(other.stem.rpartition("-")[0] == stem for other in file.parent.glob(f"{stem}-*.jsonl")):
        logger.warning(
            "the corpus %s changed since its texts were last written: a run that continues with it "
            "now sees different samples from the ones it would have seen",
            corpus.name,
        )


def _write(file: Path, corpus: _Corpus) -> None:
    with replacing(file) as part, part.open("xb") as lines, _working_directory_first():
        for number, text in enumerate(corpus.texts()):
            try:
                line = json.dumps({_TEXT: text}, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{corpus}: item {number} is not valid text ({error})") from None
            lines.write(line + b"\n")
        sync(lines)
