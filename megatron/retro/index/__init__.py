"""Indices of the vectors of a database's chunks."""

from __future__ import annotations

import torch

from megatron.retro.index.approximate import FaissIndex
from megatron.retro.index.config import IndexFlags
from megatron.retro.index.exact import ExactIndex
from megatron.retro.index.strings import index_parts
from megatron.retro.index.vector_index import VectorIndex


def build_index(flags: IndexFlags, count: int, width: int) -> VectorIndex:
    """An empty index for ``count`` vectors. Raises ConfigError if ``--retro-index-str`` is not
    known, does not fit the width, or needs faiss where that is not installed."""
    parts = index_parts(flags, count, width)
    if parts.is_exact:
        return ExactIndex(width, "cuda" if torch.cuda.is_available() else "cpu")
    return FaissIndex(parts, parts.probes(flags), flags.retro_query_ef_search)
