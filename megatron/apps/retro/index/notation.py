"""Indices in faiss's notation: their parts, the one that fits a number of vectors, their size."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from megatron.apps.profiling.tables import aligned
from megatron.apps.retro.config import IndexFlags
from megatron.config import ConfigError

_NOTATION = re.compile(
    r"(?:OPQ(?P<opq>\d+)(?:_(?P<rotated>\d+))?,)?"
    r"(?:IVF(?P<clusters>\d+)(?:_HNSW(?P<links>\d+))?,)?"
    r"(?:Flat|PQ(?P<parts>\d+)(?:x(?P<bits>\d+))?)"
)
_FORMS = "Flat, IVF4096,Flat, IVF65536_HNSW32,Flat or OPQ32_256,IVF65536_HNSW32,PQ32"
_MOST_BITS = 16
_EXACT_CHUNKS, _MOST_WITHOUT_GRAPH, _CODED_CHUNKS = 100_000, 1_000_000, 10_000_000
"""Vectors up to which all are compared, all clusters are, and vectors are kept whole."""
_CLUSTERS = ((10**7, 2**16), (10**8, 2**18), (10**9, 2**20), (math.inf, 2**22))
"""Clusters of an index with a graph, up to a number of vectors, as faiss's guidelines for choosing
an index say, and Wang et al. 2023 (arXiv:2304.06762) for more."""
_CODE_BYTES, _ROTATED = 32, 256
_LEAST_PROBES = 128
"""Clusters that find 85 to 90 of 100 neighbours of hashed words (benchmarks/retro_index.py)."""
_TRAINING_CHUNKS_PER_CLUSTER = 64
_LEAST_TRAINING_CHUNKS = 2**16
"""Enough for another index of the same database than the one that db-build was told."""
LEAST_CHUNKS_PER_CLUSTER = 39
"""Below which faiss calls the vectors that clusters are learned from too few."""
_GIB, _FLOAT, _INT, _NUMBER = 2**30, 4, 4, 8
_LARGEST_TABLE = 2 * _GIB


class IndexParts(NamedTuple):
    """The parts of an index; None for those that it lacks.

    Attributes:
        text: in faiss's notation.
        width: of a vector.
        rotated: elements of a vector after a learned rotation (OPQ).
        clusters: (IVF), of which a query is compared with the nearest.
        links: of a cluster in the graph (HNSW) by which the nearest clusters are found.
        code_parts: parts of a vector that have a code (PQ); without, vectors are kept whole.
        code_bits: of the code of a part.
    """

    text: str
    width: int
    rotated: int | None
    clusters: int | None
    links: int | None
    code_parts: int | None
    code_bits: int

    @property
    def is_exact(self) -> bool:
        """True if every query is compared with every vector."""
        return self.clusters is None and self.code_parts is None and self.rotated is None

    @property
    def learned_entries(self) -> int:
        """Clusters of vectors, or of their parts, that are learned: the least number of training
        vectors."""
        codes = 0 if self.code_parts is None else 2**self.code_bits
        return max(self.clusters or 0, codes)

    def check_training(self, count: int) -> None:
        """Raises ValueError if there are too few training vectors."""
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
    """The index of the flags, or the one that fits ``count`` vectors of this width. ConfigError if
    it is not known or does not fit the width."""
    text = flags.retro_index_str or fitting_index(count, width)
    shown = f"--retro-index-str {text}"
    match = _NOTATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{shown} is not known; known are {_FORMS}, with other numbers")
    numbers = {
        name: None if value is None else int(value) for name, value in match.groupdict().items()
    }
    if 0 in numbers.values():
        raise ConfigError(f"{shown} has a number that is 0")
    opq, parts = numbers["opq"], numbers["parts"]
    rotated = (numbers["rotated"] or width) if opq else None
    coded = rotated or width
    if coded > width:
        raise ConfigError(f"{shown}: vectors have {width} elements, not {coded} or more")
    for name, divisor in (("OPQ", opq), ("PQ", parts)):
        if divisor and coded % divisor:
            raise ConfigError(f"{shown}: {name}{divisor} does not divide the {coded} elements")
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
    if count <= _MOST_WITHOUT_GRAPH:
        return f"IVF{2 ** round(math.log2(4 * math.sqrt(count)))},Flat"
    whole, coded = _large_indices(count, width)
    return whole if count <= _CODED_CHUNKS else coded


def _large_indices(count: int, width: int) -> tuple[str, str]:
    """Indices with a graph of clusters: with whole vectors, and with codes."""
    clusters = next(clusters for most, clusters in _CLUSTERS if count <= most)
    code = math.gcd(_CODE_BYTES, width)
    rotated = min(_ROTATED, width) // code * code
    graph = f"IVF{clusters}_HNSW32"
    return f"{graph},Flat", f"OPQ{code}_{rotated},{graph},PQ{code}"


def training_chunks(flags: IndexFlags, count: int, width: int) -> int:
    """Return the number of chunks to learn from, given ``count`` in the database."""
    if flags.retro_index_ntrain is not None:
        return min(count, flags.retro_index_ntrain)
    entries = index_parts(flags, count, width).learned_entries
    return min(count, max(_TRAINING_CHUNKS_PER_CLUSTER * entries, _LEAST_TRAINING_CHUNKS))


class IndexSize(NamedTuple):
    """Bytes of an index: vectors or codes with their numbers; centres of clusters with the lengths
    of their lists; links of the graph; rotation and meaning of the codes; and the products of
    centres and codes, which faiss computes when it loads an index, unless they take over 2 GiB."""

    vectors: int
    clusters: int
    graph: int
    codebooks: int
    table: int

    @property
    def memory(self) -> int:
        """While it is searched; the file lacks the table."""
        return sum(self)

    @property
    def file(self) -> int:
        return self.memory - self.table


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
    """The index of the flags, or the one that fits ``count`` vectors, and others of the same number
    of clusters. ConfigError if it is not known or does not fit the width."""
    chosen = index_parts(flags, count, width)
    others = _large_indices(count, width) if count > _MOST_WITHOUT_GRAPH else ()
    rows = [["index", "bytes a chunk", "memory GiB", "file GiB", *IndexSize._fields]]
    for text in dict.fromkeys([chosen.text, *others, "Flat"]):
        size = index_size(index_parts(IndexFlags(retro_index_str=text), count, width), count)
        sizes = (f"{each / _GIB:,.2f}" for each in (size.memory, size.file, *size))
        rows.append([text, f"{size.memory / count:,.1f}", *sizes])
    origin = "the given one" if flags.retro_index_str else "chosen by their number"
    lines = [
        f"{count:,} vectors of {width:,} elements; the first index is {origin}\n",
        f"{aligned(rows)}\n",
        "table: in memory only",
    ]
    if chosen.learned_entries:
        learned = training_chunks(flags, count, width)
        gib = _FLOAT * learned * width / _GIB
        lines.append(
            f"The first learns from {learned:,} chunks; their vectors take {gib:,.2f} GiB of disk "
            "meanwhile"
        )
    return "\n".join(lines)
