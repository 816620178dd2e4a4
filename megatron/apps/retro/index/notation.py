"""Indices in faiss's notation: parse the notation, choose an index for a number of vectors, and
compute its size."""

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
"""Maximum number of vectors of an index that is exact, has no graph, or stores uncompressed
vectors."""
_CLUSTERS = ((10**7, 2**16), (10**8, 2**18), (10**9, 2**20), (math.inf, 2**22))
"""(Maximum number of vectors, number of clusters) of an index with a graph, from faiss's guidelines
for choosing an index, and above these from Wang et al. 2023 (arXiv:2304.06762)."""
_CODE_BYTES, _ROTATED = 32, 256
_LEAST_PROBES = 128
"""Number of clusters to search that finds 85 to 90 of the 100 nearest neighbours of hashed words
(benchmarks/retro_index.py)."""
_TRAINING_CHUNKS_PER_CLUSTER = 64
_LEAST_TRAINING_CHUNKS = 2**16
"""Enough to train a different index on the same database later, without another db-build."""
LEAST_CHUNKS_PER_CLUSTER = 39
"""Training vectors per cluster below which faiss warns that there are too few."""
_GIB, _FLOAT, _INT, _NUMBER = 2**30, 4, 4, 8
_LARGEST_TABLE = 2 * _GIB


class IndexParts(NamedTuple):
    """Components of an index. A component that the index lacks is None.

    Attributes:
        text: the index in faiss's notation.
        width: number of elements of a vector.
        rotated: number of elements after a learned rotation (OPQ).
        clusters: number of clusters (IVF). A query is compared only with vectors in the nearest
            ones.
        links: links per cluster in the graph (HNSW) that finds the nearest clusters.
        code_parts: number of coded parts per vector (PQ); None stores vectors uncompressed.
        code_bits: bits per code of a part.
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
        """Number of cluster or codebook entries that are trained. At least as many training vectors
        are needed."""
        codes = 0 if self.code_parts is None else 2**self.code_bits
        return max(self.clusters or 0, codes)

    def check_training(self, count: int) -> None:
        """Raise ValueError if there are fewer training vectors than trained entries."""
        if count < self.learned_entries:
            raise ValueError(
                f"--retro-index-str {self.text} learns from at least {self.learned_entries:,} "
                f"chunks and gets {count:,}; raise --retro-index-ntrain and run db-build again, or "
                "choose fewer clusters, or Flat"
            )

    def probes(self, flags: IndexFlags) -> int:
        """Return the number of clusters to search for each query."""
        clusters = self.clusters or 1
        return min(clusters, flags.retro_query_nprobe or max(_LEAST_PROBES, clusters // 64))


def index_parts(flags: IndexFlags, count: int, width: int) -> IndexParts:
    """Return the components of the index that the flags set, or of one suitable for ``count``
    vectors. Raises ConfigError if the index is unknown or does not fit ``width``."""
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
    """Choose an index for ``count`` vectors: exact while that is fast enough; then with clusters,
    whose number grows with the square root of ``count``; and with compressed codes once
    uncompressed vectors would need too much memory."""
    if count <= _EXACT_CHUNKS:
        return "Flat"
    if count <= _MOST_WITHOUT_GRAPH:
        return f"IVF{2 ** round(math.log2(4 * math.sqrt(count)))},Flat"
    whole, coded = _large_indices(count, width)
    return whole if count <= _CODED_CHUNKS else coded


def _large_indices(count: int, width: int) -> tuple[str, str]:
    """Return two indices with a graph of clusters: with uncompressed vectors, and with codes."""
    clusters = next(clusters for most, clusters in _CLUSTERS if count <= most)
    code = math.gcd(_CODE_BYTES, width)
    rotated = min(_ROTATED, width) // code * code
    graph = f"IVF{clusters}_HNSW32"
    return f"{graph},Flat", f"OPQ{code}_{rotated},{graph},PQ{code}"


def training_chunks(flags: IndexFlags, count: int, width: int) -> int:
    """Return the number of training chunks for an index of ``count`` chunks."""
    if flags.retro_index_ntrain is not None:
        return min(count, flags.retro_index_ntrain)
    entries = index_parts(flags, count, width).learned_entries
    return min(count, max(_TRAINING_CHUNKS_PER_CLUSTER * entries, _LEAST_TRAINING_CHUNKS))


class IndexSize(NamedTuple):
    """Bytes of an index, by component: vectors or codes with their numbers; cluster centres with
    the lengths of their lists; links of the graph; rotation and codebooks; and the table of
    products of centres and codes. Faiss computes the table on loading, unless it would exceed 2
    GiB."""

    vectors: int
    clusters: int
    graph: int
    codebooks: int
    table: int

    @property
    def memory(self) -> int:
        """Bytes of memory during a search. The file does not contain the table."""
        return sum(self)

    @property
    def file(self) -> int:
        return self.memory - self.table


def index_size(parts: IndexParts, count: int) -> IndexSize:
    """Return the size of an index of ``count`` vectors.

    With M links, a cluster has 2 M links on the bottom level of the graph. It appears on each
    higher level with 1/M of the probability of the level below, with M links there, which adds M /
    (M - 1) links on average (Malkov and Yashunin 2018, arXiv:1603.09320).
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
        # links, the cluster's level, and the offset of its links
        above = links / (links - 1) if links > 1 else links
        graph = round(parts.clusters * (_INT * (2 * links + above) + _INT + _NUMBER))
    clusters = parts.clusters * (_FLOAT * width + _NUMBER)
    table = parts.clusters * (parts.code_parts or 0) * 2**parts.code_bits * _FLOAT
    if table > _LARGEST_TABLE:
        table = 0
    return IndexSize(count * (vector + _NUMBER), clusters, graph, codebooks, table)


def size_table(flags: IndexFlags, count: int, width: int) -> str:
    """Return a table with the sizes of the index that the flags set, or of one suitable for
    ``count`` vectors, and of alternatives with the same number of clusters. Raises ConfigError if
    the index is unknown or does not fit ``width``."""
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
