"""Indices in faiss's notation: what their parts are, and which one fits a number of vectors."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from megatron.apps.retro.index.config import IndexFlags
from megatron.config import ConfigError

_NOTATION = re.compile(
    r"(?:OPQ(?P<opq>\d+)(?:_(?P<rotated>\d+))?,)?"
    r"(?:IVF(?P<clusters>\d+)(?:_HNSW(?P<links>\d+))?,)?"
    r"(?:Flat|PQ(?P<parts>\d+)(?:x(?P<bits>\d+))?)"
)
_FORMS = "Flat, IVF4096,Flat, IVF65536_HNSW32,Flat or OPQ32_256,IVF65536_HNSW32,PQ32"
_MOST_BITS = 16
_EXACT_CHUNKS = 100_000
MOST_WITHOUT_GRAPH = 1_000_000
"""Vectors whose clusters are compared one by one."""
_CLUSTERS = ((10**7, 2**16), (10**8, 2**18), (10**9, 2**20), (math.inf, 2**22))
"""Clusters of an index with a graph, up to a number of vectors, as faiss's guidelines for choosing
an index say, and Wang et al. 2023 (arXiv:2304.06762) for more."""
_CODED_CHUNKS = 10**7
_CODE_BYTES, _ROTATED = 32, 256
_LEAST_PROBES = 128
"""Clusters that find 85 to 90 of 100 neighbours of hashed words (benchmarks/retro_index.py)."""
_TRAINING_CHUNKS_PER_CLUSTER = 64
_LEAST_TRAINING_CHUNKS = 2**16
"""Enough for another index of the same database than the one that db-build was told."""
LEAST_CHUNKS_PER_CLUSTER = 39
"""Below which faiss calls the vectors that clusters are learned from too few."""


class IndexParts(NamedTuple):
    """What an index consists of."""

    text: str
    """In faiss's notation."""
    width: int
    """Of a vector."""
    rotated: int | None
    """Elements of a vector after a rotation (OPQ), which is learned; None without one."""
    clusters: int | None
    """Clusters (IVF), of which a query is compared with the nearest; None without."""
    links: int | None
    """Links of a cluster in the graph (HNSW) by which the nearest clusters are found; None without
    a graph."""
    code_parts: int | None
    """Parts of a vector that have a code (PQ); None where vectors are kept whole."""
    code_bits: int
    """Of the code of a part."""

    @property
    def is_exact(self) -> bool:
        """Whether every query is compared with every vector."""
        return self.clusters is None and self.code_parts is None and self.rotated is None

    @property
    def learned_entries(self) -> int:
        """Clusters of vectors, or of their parts, that are learned: the least number of training
        vectors."""
        codes = 0 if self.code_parts is None else 2**self.code_bits
        return max(self.clusters or 0, codes)

    def check_training(self, count: int) -> None:
        """ValueError if so many training vectors are too few."""
        if count < self.learned_entries:
            raise ValueError(
                f"--retro-index-str {self.text} learns from at least {self.learned_entries:,} "
                f"chunks and gets {count:,}; raise --retro-index-ntrain and run db-build again, or "
                "choose fewer clusters, or Flat"
            )

    def probes(self, flags: IndexFlags) -> int:
        """Clusters that a query is compared with."""
        clusters = self.clusters or 1
        return min(clusters, flags.retro_query_nprobe or max(_LEAST_PROBES, clusters // 64))


def index_parts(flags: IndexFlags, count: int, width: int) -> IndexParts:
    """The index of the flags, or the one that fits ``count`` vectors of this width. Raises
    ConfigError if it is not known or does not fit the width."""
    text = flags.retro_index_str or fitting_index(count, width)
    shown = f"--retro-index-str {text}"
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{shown} is not known; known are {_FORMS}, with other numbers")
    numbers = {
        name: None if value is None else int(value) for name, value in found.groupdict().items()
    }
    if 0 in numbers.values():
        raise ConfigError(f"{shown} has a number that is 0")
    opq, parts = numbers["opq"], numbers["parts"]
    rotated = (numbers["rotated"] or width) if opq else None
    coded = rotated or width
    if rotated is not None and rotated > width:
        raise ConfigError(f"{shown}: vectors have {width} elements, not {rotated} or more")
    for name, divisor, elements in (("OPQ", opq, coded), ("PQ", parts, coded)):
        if divisor and elements % divisor:
            raise ConfigError(f"{shown}: {name}{divisor} does not divide the {elements} elements")
    bits = numbers["bits"] or 8
    if bits > _MOST_BITS:
        raise ConfigError(f"{shown}: codes of {bits} bits; {_MOST_BITS} is the most")
    return IndexParts(text, width, rotated, numbers["clusters"], numbers["links"], parts, bits)


def fitting_index(count: int, width: int) -> str:
    """The index for ``count`` vectors of this width: exact where that is fast enough; clusters, the
    number of which grows with the root of ``count``; and codes where whole vectors would need too
    much memory."""
    if count <= _EXACT_CHUNKS:
        return "Flat"
    if count <= MOST_WITHOUT_GRAPH:
        return f"IVF{2 ** round(math.log2(4 * math.sqrt(count)))},Flat"
    whole, coded = large_indices(count, width)
    return whole if count <= _CODED_CHUNKS else coded


def large_indices(count: int, width: int) -> tuple[str, str]:
    """Indices with a graph of clusters for ``count`` vectors of this width: with whole vectors, and
    with codes."""
    clusters = next(clusters for most, clusters in _CLUSTERS if count <= most)
    code = math.gcd(_CODE_BYTES, width)
    rotated = min(_ROTATED, width) // code * code
    graph = f"IVF{clusters}_HNSW32"
    return f"{graph},Flat", f"OPQ{code}_{rotated},{graph},PQ{code}"


def training_chunks(flags: IndexFlags, count: int, width: int) -> int:
    """Chunks to learn from, of ``count`` in the database."""
    if flags.retro_index_ntrain is not None:
        return min(count, flags.retro_index_ntrain)
    entries = index_parts(flags, count, width).learned_entries
    return min(count, max(_TRAINING_CHUNKS_PER_CLUSTER * entries, _LEAST_TRAINING_CHUNKS))
