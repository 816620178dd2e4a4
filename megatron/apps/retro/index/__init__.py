"""Indices of the embeddings of a database's chunks: building and opening them, and their files.

Files have upstream's names: index-train writes ``TYPE/STRING/empty_TRAIN.faissindex``, and
index-add ``added_TRAIN_ADD.faissindex``, where TRAIN and ADD are the fractions that were loaded.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.retro.config import INDEX_TYPES, IndexFlags
from megatron.apps.retro.embedding import Embedder
from megatron.apps.retro.index.approximate import FaissIndex
from megatron.apps.retro.index.exact import ExactIndex, VectorIndex
from megatron.apps.retro.index.notation import index_parts
from megatron.config import ConfigError
from megatron.engine.environment import training_device
from megatron.features.retro.project import RetroProject, write_json
from megatron.util.json_text import parse_json

_NAMES = {
    "index-train": re.compile(r"empty_(?P<train>\d\.\d{3})\.faissindex"),
    "index-add": re.compile(r"added_(?P<train>\d\.\d{3})_(?P<add>\d\.\d{3})\.faissindex"),
}


def build_index(flags: IndexFlags, count: int, width: int) -> VectorIndex:
    """Return an empty index for ``count`` vectors. Raises ConfigError if ``--retro-index-str`` is
    unknown, does not fit ``width``, or needs faiss and faiss is not installed."""
    parts = index_parts(flags, count, width)
    if parts.is_exact:
        return ExactIndex(width, training_device())
    return FaissIndex(parts, parts.probes(flags), flags.retro_query_ef_search)


def open_index(
    project: RetroProject, embedder: Embedder, flags: IndexFlags | None = None
) -> VectorIndex:
    """Open the project's finished index that matches the flags, with the flags' search settings.
    Raises ConfigError unless exactly one index matches and was built with this embedder, and
    ValueError if a file is damaged."""
    flags = flags or IndexFlags()
    files = existing_files(project.index_folder, flags, "index-add")
    description = files.read_description()
    identity = json.loads(json.dumps(dict(embedder.identity)))
    if description is not None and description["embedder"] != identity:
        raise ConfigError(
            f"{files.added} is of the embedder {description['embedder']}, this is {identity}; name "
            "that one (--bert-embedder-type, --bert-load), or run index-train and index-add in "
            "another --retro-project-dir"
        )
    flags = dataclasses.replace(flags, retro_index_str=files.text)
    index = build_index(flags, 0, embedder.width)
    index.load(files.added)
    return index


@dataclass(frozen=True)
class IndexFiles:
    """Files of an index in a project's index folder. ``text`` is the index in faiss's notation."""

    folder: Path
    type: str
    text: str
    train_fraction: float
    add_fraction: float

    @property
    def index_folder(self) -> Path:
        return self.folder / self.type / self.text

    @property
    def empty(self) -> Path:
        """Trained but empty index, written by index-train."""
        return self.index_folder / f"empty_{self.train_fraction:.3f}.faissindex"

    @property
    def added(self) -> Path:
        """Index with all vectors, written by index-add."""
        name = f"added_{self.train_fraction:.3f}_{self.add_fraction:.3f}.faissindex"
        return self.index_folder / name

    @property
    def description(self) -> Path:
        """Description of the index that index-add wrote. It is written after the index itself."""
        return self.added.with_suffix(".json")

    @property
    def codes(self) -> Path:
        """Folder of the codes or embeddings to add to the index, one file per block."""
        fraction = "" if self.train_fraction == 1 else f"_{self.train_fraction:.3f}"
        return self.index_folder / f"add_codes{fraction}"

    @property
    def training(self) -> Path:
        """Folder of the embeddings that the index is trained on."""
        return self.folder / "train_emb"

    @property
    def training_vectors(self) -> Path:
        """File with all embeddings that the index is trained on, float32 [n, width]."""
        return self.training / f"train_{self.train_fraction:.3f}.bin"

    def read_description(self) -> dict[str, Any] | None:
        """Return the description of the index, or None if index-add has not finished. Raises
        ValueError if a file is damaged."""
        if not (self.description.is_file() and self.added.is_file()):
            return None
        try:
            content = parse_json(self.description.read_bytes(), str(self.description), lenient=True)
        except ValueError as error:
            raise ValueError(
                f"{self.description} is damaged; delete it and run index-add again"
            ) from error
        if not isinstance(content, dict) or content.get("bytes") != self.added.stat().st_size:
            raise ValueError(
                f"{self.added} is damaged: it has not the size that {self.description} says; "
                "delete both and run index-add again"
            )
        return content

    def write_description(self, values: dict[str, Any]) -> None:
        write_json(self.description, {**values, "bytes": self.added.stat().st_size})


def new_files(folder: Path, flags: IndexFlags, text: str) -> IndexFiles:
    """Return the file names for a new index that the flags describe."""
    return IndexFiles(
        folder,
        flags.retro_index_type or INDEX_TYPES[0],
        text,
        flags.retro_index_train_load_fraction or 1.0,
        flags.retro_index_add_load_fraction or 1.0,
    )


def existing_files(folder: Path, flags: IndexFlags, stage: str) -> IndexFiles:
    """Return the files of a finished ``stage`` (``index-train`` or ``index-add``) that match all
    flags that are set. Raises ConfigError if no index matches, or if several do."""
    fitting = [files for files in _indices(folder, flags, stage) if _fits(files, flags, stage)]
    if not fitting:
        given = f" --retro-index-str {flags.retro_index_str}" if flags.retro_index_str else ""
        raise ConfigError(
            f"{folder} has no index of the stage {stage}{given and ' for'}{given}: run "
            f"tools/retro/preprocess_data.py --retro-tasks {stage}{given}"
        )
    if len(fitting) > 1:
        paths = [each.empty if stage == "index-train" else each.added for each in fitting]
        names = ", ".join(str(path.relative_to(folder)) for path in paths)
        raise ConfigError(
            f"{folder} has several indices ({names}): name one with --retro-index-type, "
            "--retro-index-str, --retro-index-train-load-fraction and "
            "--retro-index-add-load-fraction, which tools/retro/preprocess_data.py has; for text "
            "generation move the others out of that folder"
        )
    return fitting[0]


def _indices(folder: Path, flags: IndexFlags, stage: str) -> list[IndexFiles]:
    add = flags.retro_index_add_load_fraction or 1.0
    indices = []
    for path in sorted(folder.glob("*/*/*.faissindex")):
        if match := _NAMES[stage].fullmatch(path.name):
            train, added = float(match["train"]), float(match.groupdict().get("add", add))
            text, kind = path.parent.name, path.parent.parent.name
            indices.append(IndexFiles(folder, kind, text, train, added))
    return indices


def _fits(files: IndexFiles, flags: IndexFlags, stage: str) -> bool:
    pairs: list[tuple[Any, Any]] = [
        (flags.retro_index_type, files.type),
        (flags.retro_index_str, files.text),
        (_rounded(flags.retro_index_train_load_fraction), files.train_fraction),
    ]
    if stage == "index-add":
        pairs.append((_rounded(flags.retro_index_add_load_fraction), files.add_fraction))
    return all(given in (None, value) for given, value in pairs)


def _rounded(fraction: float | None) -> float | None:
    """Return a fraction, rounded like in file names."""
    return None if fraction is None else float(f"{fraction:.3f}")
