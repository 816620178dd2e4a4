"""How large an index becomes: its file, and what it takes in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.apps.profiling.tables import aligned
from megatron.apps.retro.index.config import IndexFlags
from megatron.apps.retro.index.strings import (
    MOST_WITHOUT_GRAPH,
    IndexParts,
    index_parts,
    large_indices,
    training_chunks,
)

GIB = 2**30
_FLOAT = _INT = 4
_NUMBER = 8
"""Bytes of a vector's number, and of the length of a list."""
_LARGEST_TABLE = 2**31


class IndexSize(NamedTuple):
    """Bytes of an index."""

    vectors: int
    """Vectors or their codes, and their numbers."""
    clusters: int
    """Centres of the clusters, and the lengths of their lists."""
    graph: int
    """Links between clusters (HNSW)."""
    codebooks: int
    """Rotation (OPQ), and what the codes stand for (PQ)."""
    table: int
    """Products of centres and codes, in memory only, which faiss computes when it loads an index,
    unless they take more than 2 GiB."""

    @property
    def file(self) -> int:
        """Of the file."""
        return self.memory - self.table

    @property
    def memory(self) -> int:
        """While it is searched."""
        return sum(self)


def index_size(parts: IndexParts, count: int) -> IndexSize:
    """The size of an index of ``count`` vectors.

    A cluster has 2 M links at the bottom of the graph, and is on each further level with
    probability 1/M of the level below, with M links there: M / (M - 1) more on average (Malkov and
    Yashunin 2018, arXiv:1603.09320).
    """
    width = parts.rotated or parts.width
    vector, codebooks = _FLOAT * width, 0
    if parts.code_parts is not None:
        vector = math.ceil(parts.code_parts * parts.code_bits / 8)
        codebooks = _FLOAT * width * 2**parts.code_bits
    if parts.rotated is not None:
        codebooks += _FLOAT * width * parts.width
    if parts.clusters is None:
        return IndexSize(count * vector, 0, 0, codebooks, 0)
    graph, links = 0, parts.links
    if links is not None:
        # Links, the level of the cluster, and where its links begin.
        above = links / (links - 1) if links > 1 else links
        graph = round(parts.clusters * (_INT * (2 * links + above) + _INT + _NUMBER))
    clusters = parts.clusters * (_FLOAT * width + _NUMBER)
    table = parts.clusters * (parts.code_parts or 0) * 2**parts.code_bits * _FLOAT
    if table > _LARGEST_TABLE:
        table = 0
    return IndexSize(count * (vector + _NUMBER), clusters, graph, codebooks, table)


def size_table(flags: IndexFlags, count: int, width: int) -> str:
    """The index of the flags, or the one that fits ``count`` vectors, beside others of the same
    number of clusters. ConfigError if it is not known or does not fit the width."""
    chosen = index_parts(flags, count, width)
    others = large_indices(count, width) if count > MOST_WITHOUT_GRAPH else ()
    names = dict.fromkeys([chosen.text, *others, "Flat"])
    rows = [["index", "bytes a chunk", "memory GiB", "file GiB", *IndexSize._fields]]
    for text in names:
        size = index_size(index_parts(IndexFlags(retro_index_str=text), count, width), count)
        sizes = (f"{each / GIB:,.2f}" for each in (size.memory, size.file, *size))
        rows.append([text, f"{size.memory / count:,.1f}", *sizes])
    origin = "the given one" if flags.retro_index_str else "chosen by their number"
    lines = [
        f"{count:,} vectors of {width:,} elements; the first index is {origin}\n",
        f"{aligned(rows)}\n",
        "table: in memory only",
    ]
    if chosen.learned_entries:
        learned = training_chunks(flags, count, width)
        gib = _FLOAT * learned * width / GIB
        lines.append(
            f"The first learns from {learned:,} chunks; their vectors take {gib:,.2f} GiB of disk "
            "meanwhile"
        )
    return "\n".join(lines)
