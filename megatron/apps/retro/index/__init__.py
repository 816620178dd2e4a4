"""Indices of the vectors of a database's chunks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron.apps.retro.embedding import Embedder
from megatron.apps.retro.index.approximate import FaissIndex
from megatron.apps.retro.index.config import IndexFlags
from megatron.apps.retro.index.exact import ExactIndex
from megatron.apps.retro.index.files import existing_files
from megatron.apps.retro.index.strings import index_parts
from megatron.apps.retro.index.vector_index import VectorIndex
from megatron.config import ConfigError
from megatron.engine.environment import training_device
from megatron.features.retro.project import RetroProject

__all__ = ["VectorIndex", "build_index", "index_file", "open_index"]


def build_index(flags: IndexFlags, count: int, width: int) -> VectorIndex:
    """An empty index for ``count`` vectors. Raises ConfigError if ``--retro-index-str`` is not
    known, does not fit the width, or needs faiss where that is not installed."""
    parts = index_parts(flags, count, width)
    if parts.is_exact:
        return ExactIndex(width, training_device())
    return FaissIndex(parts, parts.probes(flags), flags.retro_query_ef_search)


def index_file(project: RetroProject, flags: IndexFlags) -> Path:
    """The finished index of a project that the flags describe, as far as they do. ConfigError if
    no index, or more than one, is so."""
    return existing_files(project.index_folder, flags, "index-add").added


def open_index(
    project: RetroProject, embedder: Embedder, flags: IndexFlags | None = None
) -> VectorIndex:
    """The finished index of a project that the flags describe, with their thoroughness of search.
    Raises ConfigError if no index, or more than one, is so, or it is of another embedder, and
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
    parts_flags = dataclasses.replace(flags, retro_index_str=files.text)
    index = build_index(parts_flags, 0, embedder.width)
    index.load(files.added)
    return index
