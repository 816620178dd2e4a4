"""The folder of a retrieval project: its configuration, its files, its database and neighbours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import FLAG_FIELDS, ConfigError, Setting, Settings, TokenizerConfig
from megatron.config.data import SOURCE_FIELDS
from megatron.config.features import kind_classes
from megatron.config.flags import build, check_value
from megatron.data.indexed.dataset import idx_path
from megatron.data.pipeline import open_indexed
from megatron.data.samples import Documents
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.flags import RetroDataConfig
from megatron.features.retro.hdf5 import read_array
from megatron.features.retro.neighbors import NeighborTable
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.util.digests import digest_of_parts
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process

CONFIG_FILE = "config.json"
OLD_CONFIG_FILE = "args.json"
"""Its name in 2023."""
GPT = "retro_gpt_"
"""What the names of the settings of the GPT's data begin with."""
_COMPARED = 64
"""Documents of a dataset whose tokens are compared."""
_OWN = frozenset({"retro_gpt_chunk_length"})
"""Settings whose name training has, too."""
PATHS = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})
TOKENIZER_FIELDS = frozenset(field.name for field in dataclasses.fields(TokenizerConfig))
_SAMPLE_FIELDS = frozenset(
    (
        *SOURCE_FIELDS,
        *("corpora_file", "corpora_outside", "split", "skip_samples"),
        *("multiple_validation_sets", "validation_set_names"),
        *("seq_length", "seed", "global_batch_size", "train_samples"),
        *("eval_interval", "eval_iters"),
    )
)
FILES = ("vocab_file", "merge_file", "tokenizer_model")


class RetroProject:
    """A project folder of ``tools/retro/preprocess_data.py``. ConfigError if it has no
    configuration, or one that cannot be read; if it names data at URLs without
    ``object_storage``, a folder for what is fetched of them."""

    def __init__(self, folder: str | Path, object_storage: str | None = None) -> None:
        self.folder, self._object_storage = Path(folder), object_storage
        self.config_file = self.folder / CONFIG_FILE
        if not self.config_file.is_file():
            self.config_file = self.folder / OLD_CONFIG_FILE
        self.settings = read_settings(self.config_file)
        """The values of ``config.json``, by name."""

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder has a project's configuration."""
        return any((folder / name).is_file() for name in (CONFIG_FILE, OLD_CONFIG_FILE))

    def record(self, values: Mapping[str, Any]) -> None:
        """Adds values to the configuration; of several processes the main one writes it."""
        before = dict(self.settings)
        self.settings |= values
        if self.settings != before and is_main_process():
            write_json(self.folder / CONFIG_FILE, self.settings)

    @property
    def chunk_length(self) -> int:
        """Tokens of a chunk."""
        return self._length("retro_gpt_chunk_length")

    @property
    def seq_length(self) -> int:
        """Tokens of a sample that the model reads."""
        return self._length("retro_gpt_seq_length")

    @property
    def database_folder(self) -> Path:
        return self.folder / "db"

    @property
    def data_folder(self) -> Path:
        """Data that belong to the project."""
        return self.folder / "data"

    @property
    def index_folder(self) -> Path:
        return self.folder / "index"

    @property
    def query_folder(self) -> Path:
        return self.folder / "query"

    @property
    def database_file(self) -> Path:
        """The chunks that neighbours are numbers of."""
        return self.database_folder / "merged" / "train.hdf5"

    @property
    def datasets_file(self) -> Path:
        """The datasets of the database, in their order."""
        return self.database_folder / "indexed_dataset_infos.json"

    def database(self, eod: int | None = None) -> ChunkDatabase:
        """The chunks of the training documents, padded with the end-of-document token ``eod``, by
        default that of the project's tokenizer. ConfigError if db-build has not run."""
        if not self.database_file.is_file():
            raise ConfigError(
                f"--retro-project-dir {self.folder} has no database ({self.database_file}); run "
                "tools/retro/preprocess_data.py --retro-tasks db-build"
            )
        datasets, sources = [], []
        for info in self.dataset_infos():
            prefix = self.data_path(info["prefix"])
            datasets.append(open_indexed(prefix, self._object_storage))
            sources.append(info.get("source", prefix))
            self.check_unchanged(datasets[-1], info)
        table = read_array(self.database_file, "chunks")
        found = self.eod if eod is None else eod
        return ChunkDatabase(table, datasets, self.chunk_length, found, sources)

    def dataset_infos(self) -> list[dict[str, Any]]:
        """The datasets of the database. ValueError if their list cannot be read."""
        try:
            found = parse_json(self.datasets_file.read_bytes(), str(self.datasets_file))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.datasets_file} cannot be read: {error}; run "
                "tools/retro/preprocess_data.py --retro-tasks db-build, which finishes the database"
            ) from None
        named = isinstance(found, list) and all(isinstance(info, dict) for info in found)
        if not named or not all(isinstance(info.get("prefix"), str) for info in found):
            raise ConfigError(f"{self.datasets_file} is no list of datasets, each with its prefix")
        return found

    def neighbors(self, part: str) -> NeighborTable:
        """The neighbours of the samples of a part: ``train``, ``valid`` or ``test``. ConfigError if
        they have not been searched for, or were so several times and nothing says which to take."""
        every = self.settings.get("retro_neighbor_dirs") or {}
        named = every.get(part) if isinstance(every, dict) else every
        if not isinstance(named, str | None):
            raise ConfigError(
                f"{self.config_file}: retro_neighbor_dirs is {every!r:.60}; expected the name of a "
                "folder for each part"
            )
        folders = []
        if named is not None:
            folders = [self.query_folder / Path(named).name]
        elif "retro_neighbor_dirs" not in self.settings:  # a project of 2023, which names none
            folders = sorted(self.query_folder.glob(f"{part}_*"))
        if not folders:
            raise ConfigError(
                f"--retro-project-dir {self.folder} has no neighbours for {part}; run "
                "tools/retro/preprocess_data.py --retro-tasks query-neighbors"
            )
        if len(folders) > 1:
            raise ConfigError(
                f"--retro-project-dir {self.folder} has several searches for neighbours of {part}, "
                f"{', '.join(folder.name for folder in folders)}: name one in {self.config_file}: "
                f'"retro_neighbor_dirs": {{"{part}": "{folders[0].name}"}}'
            )
        return NeighborTable(folders[0], self.seq_length // self.chunk_length)

    @property
    def eod(self) -> int:
        """The end-of-document token of the GPT's tokenizer."""
        return self.tokenizer.eod

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The GPT's tokenizer."""
        return build_tokenizer(build(TokenizerConfig, self.data_settings()))

    def data_settings(self) -> Settings:
        """What a run takes from the project over its flags, by field name: data, tokenizer, sizes
        of samples and batches, and the numbers of samples."""
        found, known = {}, sample_fields() | TOKENIZER_FIELDS
        for key, value in self.settings.items():
            name = key if key in _OWN else key.removeprefix(GPT)
            if not key.startswith(GPT) or value is None or not (name in known or key in _OWN):
                continue
            if name in FILES and isinstance(value, str):
                value = self._inside(value)
            elif name in PATHS and isinstance(value, str | list):
                words = value.split() if isinstance(value, str) else value
                value = tuple(self.data_path(str(word)) for word in words)
            elif isinstance(value, list):
                value = tuple(value)
            setting = Setting(value, f"{self.config_file}: {key}")
            if name in FLAG_FIELDS:
                setting = check_value(*FLAG_FIELDS[name], setting)
            found[name] = setting
        return found

    def data_path(self, prefix: str) -> str:
        """A word of --data-path, whose prefixes may be relative to the project's folder of data."""
        if "://" in prefix and self._object_storage is None:
            raise ConfigError(
                f"--retro-project-dir {self.folder} names data at {prefix:.200}, and no connection "
                "is opened because a file asks for it; if the project is to be trusted, say by "
                "--object-storage-cache-path DIR where to keep what is fetched"
            )
        beside = str(self.data_folder / prefix)
        return beside if idx_path(beside).is_file() else prefix

    def data_word(self, prefix: str) -> str:
        """What :meth:`data_path` gives the prefix for."""
        inside = Path(prefix).is_relative_to(self.data_folder)
        return str(Path(prefix).relative_to(self.data_folder)) if inside else prefix

    def check_unchanged(self, documents: Documents, info: Mapping[str, Any]) -> None:
        """ConfigError if a dataset is not the one that the database was made of, of which ``info``
        is the entry in the list of datasets."""
        for name, value in dataset_identity(documents).items():
            if info.get(name, value) != value:
                raise ConfigError(
                    f"{documents.prefix} has changed since {self.database_folder} was made of it: "
                    "its chunks are other text now; restore the files, or make another "
                    "--retro-project-dir"
                )

    def _inside(self, path: str) -> str:
        """A path that may be relative to the project."""
        beside = self.folder / path
        return str(beside) if beside.exists() else path

    def _length(self, name: str) -> int:
        value = self._value(name)
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise ConfigError(
                f"{self.config_file}: {name} is {value!r:.60}, not a number of tokens"
            )
        return value

    def _value(self, name: str) -> Any:
        if self.settings.get(name) is None:
            raise ConfigError(
                f"{self.config_file} has no {name}: it is not of tools/retro/preprocess_data.py"
            )
        return self.settings[name]


def sample_fields() -> frozenset[str]:
    """The fields that say which samples a GPT reads, and how many, besides its tokenizer's."""
    kinds: list[Any] = [cls for cls in kind_classes().values() if cls is not RetroDataConfig]
    return _SAMPLE_FIELDS.union(field.name for cls in kinds for field in dataclasses.fields(cls))


def write_json(path: Path, content: Any) -> None:
    """Writes or replaces a file atomically."""
    write_whole(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """What :func:`write_json` writes."""
    return json.dumps(content, indent=2).encode() + b"\n"


def dataset_identity(documents: Documents) -> dict[str, str]:
    """Digests that differ between versions of a dataset: of all lengths, and of the tokens of some
    documents."""
    count = len(documents)
    some = [i * count // _COMPARED for i in range(_COMPARED)] if count else []
    tokens = (documents.get(i).astype(np.int64).data for i in dict.fromkeys(some))
    return {"lengths_digest": documents.lengths_digest, "tokens_digest": digest_of_parts(tokens)}


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a project's ``config.json``. ConfigError if it does not exist or is no JSON
    object."""
    try:
        content = parse_json(path.read_bytes(), str(path), non_finite=True)
    except FileNotFoundError:
        raise ConfigError(
            f"--retro-project-dir {path.parent}: {path.parent / CONFIG_FILE} does not exist; "
            "tools/retro/preprocess_data.py writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--retro-project-dir {path.parent}: {path} cannot be read: {error}; restore the file, "
            "or make the project again"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"--retro-project-dir {path.parent}: {path} is no JSON object")
    return content
