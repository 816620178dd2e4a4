"""The folder of a retrieval project: its configuration, its files, its database and neighbours; and
what a Retro's run takes from it: data, sizes and numbers of samples."""

from __future__ import annotations

import dataclasses
import json
import logging
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
from megatron.features.retro.chunks import ChunkDatabase, NeighborTable
from megatron.features.retro.flags import RetroDataConfig
from megatron.features.retro.hdf5 import read_array
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.util.digests import digest_of_parts
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process

CONFIG_FILE = "config.json"
OLD_CONFIG_FILE = "args.json"
"""Its name in 2023."""
GPT = "retro_gpt_"
"""The begin of the names of the settings of the GPT's data."""
_COMPARED = 64
"""Documents of a dataset whose tokens are compared."""
_CHUNK_LENGTH = "retro_gpt_chunk_length"
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
_OTHER_LENGTHS = ("train_iters", "train_tokens")

logger = logging.getLogger(__name__)


class RetroProject:
    """A project folder of ``tools/retro/preprocess_data.py``. ``object_storage`` is a folder for
    what is fetched of data at URLs. ConfigError if it has no configuration, or one that cannot be
    read, or names data at URLs without that folder."""

    def __init__(self, folder: str | Path, object_storage: str | None = None) -> None:
        self.folder, self._object_storage = Path(folder), object_storage
        self.database_folder = self.folder / "db"
        self.database_file = self.database_folder / "merged" / "train.hdf5"
        self.datasets_file = self.database_folder / "indexed_dataset_infos.json"
        self.data_folder = self.folder / "data"  # data that belong to the project
        self.index_folder = self.folder / "index"
        self.query_folder = self.folder / "query"
        self.config_file = self.folder / CONFIG_FILE
        if not self.config_file.is_file():
            self.config_file = self.folder / OLD_CONFIG_FILE
        self.settings = _read_settings(self.config_file)

    @staticmethod
    def exists(folder: Path) -> bool:
        return any((folder / name).is_file() for name in (CONFIG_FILE, OLD_CONFIG_FILE))

    def record(self, values: Mapping[str, Any]) -> None:
        """Adds values to the configuration; of several processes the main one writes it."""
        before = dict(self.settings)
        self.settings |= values
        if self.settings != before and is_main_process():
            write_json(self.folder / CONFIG_FILE, self.settings)

    @property
    def chunk_length(self) -> int:
        return self._length(_CHUNK_LENGTH)

    @property
    def seq_length(self) -> int:
        return self._length("retro_gpt_seq_length")

    def database(self, eod: int | None = None) -> ChunkDatabase:
        """The chunks of the training documents, padded with the end-of-document token ``eod``, by
        default the project tokenizer's. Raises ConfigError if db-build has not run."""
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
        eod = self.tokenizer.eod if eod is None else eod
        return ChunkDatabase(table, datasets, self.chunk_length, eod, sources)

    def dataset_infos(self) -> list[dict[str, Any]]:
        """The datasets of the database. ValueError if their list cannot be read."""
        try:
            infos = parse_json(self.datasets_file.read_bytes(), str(self.datasets_file))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.datasets_file} cannot be read: {error}; run "
                "tools/retro/preprocess_data.py --retro-tasks db-build, which finishes the database"
            ) from None
        named = isinstance(infos, list) and all(isinstance(info, dict) for info in infos)
        if not named or not all(isinstance(info.get("prefix"), str) for info in infos):
            raise ConfigError(f"{self.datasets_file} is no list of datasets, each with its prefix")
        return infos

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

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The GPT's tokenizer."""
        return build_tokenizer(build(TokenizerConfig, self.data_settings()))

    def data_settings(self) -> Settings:
        """The settings of a run that the project decides, by field name: data, tokenizer, sizes of
        samples and batches, and the numbers of samples."""
        settings, known = {}, sample_fields() | TOKENIZER_FIELDS | {_CHUNK_LENGTH}
        for key, value in self.settings.items():
            name = key if key == _CHUNK_LENGTH else key.removeprefix(GPT)
            if not key.startswith(GPT) or value is None or name not in known:
                continue
            if name in FILES and isinstance(value, str):
                inside = self.folder / value
                value = str(inside) if inside.exists() else value
            elif name in PATHS and isinstance(value, str | list):
                words = value.split() if isinstance(value, str) else value
                value = tuple(self.data_path(str(word)) for word in words)
            elif isinstance(value, list):
                value = tuple(value)
            setting = Setting(value, f"{self.config_file}: {key}")
            if name in FLAG_FIELDS:
                setting = check_value(*FLAG_FIELDS[name], setting)
            settings[name] = setting
        return settings

    def data_path(self, prefix: str) -> str:
        """A word of --data-path, whose prefixes may be relative to the project's folder of data."""
        if "://" in prefix and self._object_storage is None:
            raise ConfigError(
                f"--retro-project-dir {self.folder} names data at {prefix:.200}, and no connection "
                "is opened because a file asks for it; if the project is to be trusted, say by "
                "--object-storage-cache-path DIR where to keep what is fetched"
            )
        inside = str(self.data_folder / prefix)
        return inside if idx_path(inside).is_file() else prefix

    def data_word(self, prefix: str) -> str:
        """The word that :meth:`data_path` makes this prefix of."""
        inside = Path(prefix).is_relative_to(self.data_folder)
        return str(Path(prefix).relative_to(self.data_folder)) if inside else prefix

    def check_unchanged(self, documents: Documents, info: Mapping[str, Any]) -> None:
        """Raises ConfigError if a dataset differs from the database's, described by ``info``, its
        entry in the list of datasets."""
        for name, value in dataset_identity(documents).items():
            if info.get(name, value) != value:
                raise ConfigError(
                    f"{documents.prefix} has changed since {self.database_folder} was made of it: "
                    "its chunks are other text now; restore the files, or make another "
                    "--retro-project-dir"
                )

    def _length(self, name: str) -> int:
        value = self.settings.get(name)
        if value is None:
            raise ConfigError(
                f"{self.config_file} has no {name}: it is not of tools/retro/preprocess_data.py"
            )
        if type(value) is not int or not 0 < value <= 1 << 20:
            raise ConfigError(
                f"{self.config_file}: {name} is {value!r:.60}, not a number of tokens"
            )
        return value


def sample_fields() -> frozenset[str]:
    """Fields, besides the tokenizer's, that determine a GPT's samples and their number."""
    kinds: list[Any] = [cls for cls in kind_classes().values() if cls is not RetroDataConfig]
    return _SAMPLE_FIELDS.union(field.name for cls in kinds for field in dataclasses.fields(cls))


def write_json(path: Path, content: Any) -> None:
    """Writes or replaces a file atomically."""
    write_whole(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def dataset_identity(documents: Documents) -> dict[str, str]:
    """Digests that differ between versions of a dataset: of all lengths, and of the tokens of some
    documents."""
    count = len(documents)
    some = [i * count // _COMPARED for i in range(_COMPARED)] if count else []
    tokens = (documents.get(i).astype(np.int64).data for i in dict.fromkeys(some))
    return {"lengths_digest": documents.lengths_digest, "tokens_digest": digest_of_parts(tokens)}


def _read_settings(path: Path) -> dict[str, Any]:
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


def retro_settings(settings: Settings) -> Settings:
    """The settings of a Retro's run, in which its project's settings replace the flags. A program
    that trains Retros trains a GPT without ``--retro-add-retriever``, on the same samples.
    ConfigError if flags contradict the project, or it has no configuration."""
    folder = settings.get("retro_project_dir")
    if folder is not None:
        settings = _with_project(settings, project_of(settings, folder.value))
    settings = _cyclic_settings(settings)
    retriever, family = settings.get("retro_add_retriever"), settings.get("family")
    program = family is not None and family.origin == "this program"
    if retriever is not None and retriever.value:
        mock = settings.get("mock_data")
        if program and folder is None and not (mock and mock.value):
            raise without_project()
        return settings
    if not program:
        return settings | {"retro_add_retriever": Setting(True, "family retro")}
    unused = {field.name for field in dataclasses.fields(RetroDataConfig)}
    kept = {name: value for name, value in settings.items() if name not in unused}
    return kept | {"family": Setting("gpt", "derived: without --retro-add-retriever")}


def project_of(settings: Settings, folder: str) -> RetroProject:
    """A project that may name data at URLs if the settings say where to keep what is fetched."""
    cache = settings.get("object_storage_cache_path")
    return RetroProject(folder, None if cache is None else cache.value)


def without_project() -> ConfigError:
    """The error of a run whose samples need neighbours and that names no project."""
    return ConfigError(
        "--retro-add-retriever needs --retro-project-dir, a folder of "
        "tools/retro/preprocess_data.py (or --mock-data)"
    )


def _with_project(settings: Settings, project: RetroProject) -> Settings:
    """Return the settings of a run, some replaced by its project's; the log reports contradictions.
    ConfigError if flags name other data."""
    taken = project.data_settings()
    for name in ("mock_data", *SOURCE_FIELDS):
        given = settings.get(name)
        if given is not None and given.value and name not in taken:
            raise ConfigError(
                f"{_shown(given)} contradicts --retro-project-dir {project.folder}, whose data "
                "have the neighbours: give one of them"
            )
    logger.info(
        "%s gives %s",
        project.config_file,
        ", ".join(f"--{name.replace('_', '-')} {_text(taken[name].value)}" for name in taken),
    )
    for name, setting in taken.items():
        given = settings.get(name)
        if given is not None and given.value != setting.value:
            logger.info(
                "%s is not used: %s is %s", _shown(given), setting.origin, _text(setting.value)
            )
    kept = dict(settings)
    if "train_samples" in taken:
        for name in _OTHER_LENGTHS:
            if name in kept:
                logger.info(
                    "%s is not used: %s is the length of the run, which --exit-interval ends "
                    "earlier",
                    _shown(kept.pop(name)),
                    taken["train_samples"].origin,
                )
    return kept | taken


def _cyclic_settings(settings: Settings) -> Settings:
    """The settings of a run of ``--retro-cyclic-train-iters``, where that has an effect."""
    iters, order = settings.get("retro_cyclic_train_iters"), settings.get("dataloader_type")
    if iters is None or iters.value is None:
        return settings
    if order is None or order.value != "cyclic":
        logger.info("%s is not used: it needs --dataloader-type cyclic", _shown(iters))
        return settings
    batch = settings.get("global_batch_size")
    if "train_samples" not in settings or batch is None:
        kept = {name: value for name, value in settings.items() if name != "train_samples"}
        return kept | {"train_iters": iters}
    return settings | {"train_samples": Setting(iters.value * batch.value, iters.origin)}


def project_counts(project: RetroProject) -> tuple[int, int, int]:
    """The numbers of samples for training, validation and test for which a project has neighbours:
    a run with its settings reads as many. Raises ConfigError if one is missing."""
    taken = project.data_settings()
    names = ("train_samples", "global_batch_size", "eval_interval", "eval_iters")
    missing = [f"retro_gpt_{name}" for name in names if name not in taken]
    if missing:
        raise ConfigError(
            f"{project.config_file} has no {', '.join(missing)}: make the project again with "
            "tools/retro/preprocess_data.py"
        )
    samples, batch, interval, iters = (taken[name].value for name in names)
    steps, evaluation = samples // batch, iters * batch
    return steps * batch, (steps // interval + 1) * evaluation, evaluation


def _shown(setting: Setting) -> str:
    return f"{setting.origin.removeprefix('flag ')} {_text(setting.value)}"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
