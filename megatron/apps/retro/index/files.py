"""The files of a project's indices, as upstream names them: ``TYPE/STRING/empty_TRAIN.faissindex``
of index-train and ``added_TRAIN_ADD.faissindex`` of index-add, with the fractions that were
loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.retro.index.config import INDEX_TYPES, IndexFlags
from megatron.config import ConfigError
from megatron.features.retro.project import write_json
from megatron.util.json_text import parse_json

_NAMES = {
    "index-train": re.compile(r"empty_(?P<train>\d\.\d{3})\.faissindex"),
    "index-add": re.compile(r"added_(?P<train>\d\.\d{3})_(?P<add>\d\.\d{3})\.faissindex"),
}


@dataclass(frozen=True)
class IndexFiles:
    """Where the files of an index are."""

    folder: Path
    """Of the project's indices."""
    type: str
    text: str
    """The index in faiss's notation."""
    train_fraction: float
    add_fraction: float

    @property
    def own(self) -> Path:
        """The folder of this index."""
        return self.folder / self.type / self.text

    @property
    def empty(self) -> Path:
        """The index of index-train."""
        return self.own / f"empty_{self.train_fraction:.3f}.faissindex"

    @property
    def added(self) -> Path:
        """The index of index-add."""
        name = f"added_{self.train_fraction:.3f}_{self.add_fraction:.3f}.faissindex"
        return self.own / name

    @property
    def description(self) -> Path:
        """What is known of the index of index-add; written after it."""
        return self.added.with_suffix(".json")

    @property
    def codes(self) -> Path:
        """The folder of what is added to the index, a file for each block."""
        fraction = "" if self.train_fraction == 1 else f"_{self.train_fraction:.3f}"
        return self.own / f"add_codes{fraction}"

    @property
    def training(self) -> Path:
        """The folder of the vectors that the index learns from."""
        return self.folder / "train_emb"

    @property
    def training_vectors(self) -> Path:
        """These vectors in one file, float32 [n, width]."""
        return self.training / f"train_{self.train_fraction:.3f}.bin"

    def read_description(self) -> dict[str, Any] | None:
        """What is known of the index; None if index-add has not ended. ValueError if the file is
        damaged."""
        if not (self.description.is_file() and self.added.is_file()):
            return None
        try:
            found = parse_json(self.description.read_bytes(), str(self.description), lenient=True)
        except ValueError as error:
            raise ValueError(
                f"{self.description} is damaged; delete it and run index-add again"
            ) from error
        if not isinstance(found, dict) or found.get("bytes") != self.added.stat().st_size:
            raise ValueError(
                f"{self.added} is damaged: it has not the size that {self.description} says; "
                "delete both and run index-add again"
            )
        return found

    def write_description(self, values: dict[str, Any]) -> None:
        """Says what is known of the finished index."""
        write_json(self.description, {**values, "bytes": self.added.stat().st_size})


def new_files(folder: Path, flags: IndexFlags, text: str) -> IndexFiles:
    """Where the files of an index belong that the flags describe."""
    return IndexFiles(
        folder,
        flags.retro_index_type or INDEX_TYPES[0],
        text,
        flags.retro_index_train_load_fraction or 1.0,
        flags.retro_index_add_load_fraction or 1.0,
    )


def existing_files(folder: Path, flags: IndexFlags, stage: str) -> IndexFiles:
    """The index of a finished stage, ``index-train`` or ``index-add``, that the flags describe.
    ConfigError if no index, or more than one, is so."""
    found = [files for files in _indices(folder, flags, stage) if _fits(files, flags, stage)]
    if not found:
        given = f" --retro-index-str {flags.retro_index_str}" if flags.retro_index_str else ""
        raise ConfigError(
            f"{folder} has no index of the stage {stage}{given and ' for'}{given}: run "
            f"tools/retro/preprocess_data.py --retro-tasks {stage}{given}"
        )
    if len(found) > 1:
        names = ", ".join(str((f.empty if stage == "index-train" else f.added).relative_to(folder))
                          for f in found)  # fmt: skip
        raise ConfigError(
            f"{folder} has several indices ({names}): name one with --retro-index-type, "
            "--retro-index-str, --retro-index-train-load-fraction and "
            "--retro-index-add-load-fraction, which tools/retro/preprocess_data.py has; for text "
            "generation move the others out of that folder"
        )
    return found[0]


def _indices(folder: Path, flags: IndexFlags, stage: str) -> list[IndexFiles]:
    add = flags.retro_index_add_load_fraction or 1.0
    found = []
    for path in sorted(folder.glob("*/*/*.faissindex")):
        if match := _NAMES[stage].fullmatch(path.name):
            fractions = {name: float(value) for name, value in match.groupdict().items()}
            text, kind = path.parent.name, path.parent.parent.name
            found.append(
                IndexFiles(folder, kind, text, fractions["train"], fractions.get("add", add))
            )
    return found


def _fits(files: IndexFiles, flags: IndexFlags, stage: str) -> bool:
    """Whether an index is what the flags say, as far as they say it."""
    pairs = [
        (flags.retro_index_type, files.type),
        (flags.retro_index_str, files.text),
        (_rounded(flags.retro_index_train_load_fraction), files.train_fraction),
    ]
    if stage == "index-add":
        pairs.append((_rounded(flags.retro_index_add_load_fraction), files.add_fraction))
    return all(given in (None, found) for given, found in pairs)


def _rounded(fraction: float | None) -> float | None:
    """A fraction as names of files have it."""
    return None if fraction is None else float(f"{fraction:.3f}")
