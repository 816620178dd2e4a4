"""Folder of a retrieval project: its configuration, data files, database and neighbours. It
determines the data, sequence length and numbers of samples of a RETRO run."""

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
from megatron.data.indexed import idx_path
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
"""Name of the configuration file as written in 2023."""
GPT = "retro_gpt_"
"""Prefix of the settings for the GPT's data."""
_COMPARED = 64
"""Number of documents per dataset whose tokens are hashed to detect a change."""
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
    """Project folder of ``tools/retro/preprocess_data.py``. ``object_storage`` is a folder that
    caches data from URLs. Raises ConfigError if the configuration is missing or cannot be read."""

    def __init__(self, folder: str | Path, object_storage: str | None = None) -> None:
        self.folder, self._object_storage = Path(folder), object_storage
        self.database_folder = self.folder / "db"
        self.database_file = self.database_folder / "merged" / "train.hdf5"
        self.datasets_file = self.database_folder / "indexed_dataset_infos.json"
        self.data_folder = self.folder / "data"  # data files stored in the project
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
        """Add values to the configuration in memory. Only the main process updates the file."""
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
        """Return the database, whose short chunks are padded with ``eod``, by default the
        end-of-document token of the project's tokenizer. Raises ConfigError if db-build has not
        run, or if a dataset has changed since."""
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
        """Return the database's list of datasets. Raises ConfigError if it cannot be read."""
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
        """Return the neighbours of a split's samples: ``train``, ``valid`` or ``test``. Raises
        ConfigError if query-neighbors has not run for this split, or if it has run several times
        and the configuration does not select a result."""
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
        # Projects of 2023 have no folder names in their configuration, so search for the folder.
        elif "retro_neighbor_dirs" not in self.settings:
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
        """Tokenizer for the GPT's text."""
        return build_tokenizer(build(TokenizerConfig, self.data_settings()))

    def data_settings(self) -> Settings:
        """Return the run settings that the project determines, by field name: data, tokenizer,
        sequence length, batch size and numbers of samples."""
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
        """Resolve a --data-path prefix, which may be relative to the project's data folder. Raises
        ConfigError for a URL, unless there is a cache folder for data from URLs."""
        if "://" in prefix and self._object_storage is None:
            raise ConfigError(
                f"--retro-project-dir {self.folder} names data at {prefix:.200}, and no connection "
                "is opened because a file asks for it; if the project is to be trusted, say by "
                "--object-storage-cache-path DIR where to keep what is fetched"
            )
        inside = str(self.data_folder / prefix)
        return inside if idx_path(inside).is_file() else prefix

    def data_word(self, prefix: str) -> str:
        """Return the --data-path prefix that :meth:`data_path` resolves to this prefix."""
        inside = Path(prefix).is_relative_to(self.data_folder)
        return str(Path(prefix).relative_to(self.data_folder)) if inside else prefix

    def check_unchanged(self, documents: Documents, info: Mapping[str, Any]) -> None:
        """Check that a dataset is the one from which the database was built. Raises ConfigError if
        it differs from ``info``, its entry in the list of datasets."""
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
    """Return the names of the fields that determine a GPT's samples and their number, without the
    tokenizer's fields."""
    kinds: list[Any] = [cls for cls in kind_classes().values() if cls is not RetroDataConfig]
    return _SAMPLE_FIELDS.union(field.name for cls in kinds for field in dataclasses.fields(cls))


def write_json(path: Path, content: Any) -> None:
    """Write or replace a JSON file atomically."""
    write_whole(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def dataset_identity(documents: Documents) -> dict[str, str]:
    """Return digests that identify a dataset's version: one of all document lengths, and one of the
    tokens of evenly spaced documents."""
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
    """Return the settings of a RETRO run, in which the project's settings override the flags.
    Without ``--retro-add-retriever``, the family becomes a GPT that trains on the same samples.
    Raises ConfigError if flags contradict the project, or if its configuration is missing."""
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
    """Return the project in a folder. With ``--object-storage-cache-path``, data may be at URLs."""
    cache = settings.get("object_storage_cache_path")
    return RetroProject(folder, None if cache is None else cache.value)


def without_project() -> ConfigError:
    """Return the error for a run that needs neighbours but has no project."""
    return ConfigError(
        "--retro-add-retriever needs --retro-project-dir, a folder of "
        "tools/retro/preprocess_data.py (or --mock-data)"
    )


def _with_project(settings: Settings, project: RetroProject) -> Settings:
    """Return the settings with the project's settings in place of the flags. Differences are
    logged. Raises ConfigError if flags select data other than the project's."""
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
    """Convert ``--retro-cyclic-train-iters`` to the run's length. Without --dataloader-type cyclic,
    the flag is ignored, which is logged."""
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
    """Return the numbers of training, validation and test samples that a run with the project's
    settings reads; the project has neighbours for these. Raises ConfigError if the project lacks a
    setting for them."""
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
