"""Approximate search with faiss: clusters, a graph to find them, and compressed codes of vectors.

Shape suffixes: N vectors of the index, Q queries, D elements of a vector, K neighbours, E bytes of
a vector's code.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.index.exact import Nearest, Vectors
from megatron.apps.retro.index.notation import IndexParts
from megatron.config import ConfigError
from megatron.util.files import open_regular, replacing, sync_path

_QUIET_COMPARISONS = 10**9
"""Number of comparisons of vectors with clusters per training iteration above which faiss shows
progress."""
_HEADER = struct.Struct("<4siq")
"""Beginning of a faiss file: type of the index, width and number of vectors."""


class FaissIndex:
    """A faiss index. With one thread (OMP_NUM_THREADS=1), equal vectors give identical files."""

    def __init__(self, parts: IndexParts, probes: int, graph_search: int) -> None:
        """Create an empty index. A search compares a query with ``probes`` clusters. If the index
        has a graph, the search visits ``graph_search`` clusters to find them. Raises ConfigError if
        faiss is not installed."""
        try:
            import faiss
        except ImportError as error:
            raise ConfigError(
                f"--retro-index-str {parts.text} needs faiss: pip install faiss-cpu, or choose Flat"
            ) from error
        self._faiss: Any = faiss
        self._parts, self._probes, self._graph_search = parts, probes, graph_search
        self._index: Any = self._faiss.index_factory(parts.width, parts.text)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def train(self, vectors_ND: Vectors) -> None:
        """Train the index. Clusters are computed on GPUs if faiss supports them."""
        self._parts.check_training(len(vectors_ND))
        inner, rotation = self._inner, self._rotation
        learners = [part.cp for part in (inner, getattr(inner, "pq", inner)) if hasattr(part, "cp")]
        if rotation is not None:
            codes = self._faiss.ProductQuantizer(rotation.d_out, rotation.M, self._parts.code_bits)
            rotation.pq = codes
            learners.append(codes.cp)
        slow = len(vectors_ND) * self._parts.learned_entries > _QUIET_COMPARISONS
        for learner in learners:
            learner.verbose = slow
            learner.min_points_per_centroid = 1  # avoid a warning in each training iteration
        if self._parts.clusters is None and self._parts.code_parts is not None:
            # this only orders codes for a kind of search that is not used
            inner.do_polysemous_training = False
        if self._parts.clusters is not None and getattr(self._faiss, "get_num_gpus", int)():
            flat = self._faiss.IndexFlatL2(inner.d)
            inner.clustering_index = self._faiss.index_cpu_to_all_gpus(flat)
        self._index.train(_rows(vectors_ND))
        if rotation is not None:
            rotation.pq = None

    @property
    def _inner(self) -> Any:
        """Index without the rotation, if there is one."""
        if self._parts.rotated is None:
            return self._index
        return self._faiss.downcast_index(self._index.index)

    @property
    def _rotation(self) -> Any:
        if self._parts.rotated is None:
            return None
        return self._faiss.downcast_VectorTransform(self._index.chain.at(0))

    def add(self, vectors_ND: Vectors) -> None:
        self._index.add(_rows(vectors_ND))

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        rows = _rows(vectors_ND)
        if self._rotation is not None:
            rows = self._rotation.apply(rows)
        return np.asarray(self._inner.sa_encode(rows))

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        self._inner.add_sa_codes(np.ascontiguousarray(codes_NE))
        self._index.ntotal = self._inner.ntotal

    def holds(self, first: int, codes_NE: npt.NDArray[np.uint8]) -> bool:
        inner, numbers_N = self._inner, np.arange(first, first + len(codes_NE))
        if self._parts.clusters is None:
            stored = self._faiss.vector_to_array(inner.codes).reshape(-1, inner.code_size)
            return np.array_equal(stored[first : first + len(codes_NE)], codes_NE)
        cluster_bytes = inner.coarse_code_size()
        digits = 256 ** np.arange(cluster_bytes, dtype=np.int64)
        clusters_N = codes_NE[:, :cluster_bytes].astype(np.int64) @ digits
        for cluster in np.unique(clusters_N).tolist():
            here = clusters_N == cluster
            size = inner.invlists.list_size(cluster)
            if not size:
                return False
            stored = self._faiss.rev_swig_ptr(inner.invlists.get_ids(cluster), size)
            places = np.minimum(np.searchsorted(stored, numbers_N[here]), size - 1)
            codes = self._faiss.rev_swig_ptr(
                inner.invlists.get_codes(cluster), size * inner.code_size
            ).reshape(size, -1)
            known = np.array_equal(stored[places], numbers_N[here])
            if not known or not np.array_equal(codes[places], codes_NE[here, cluster_bytes:]):
                return False
        return True

    def search(self, queries_QD: Vectors, k: int) -> Nearest:
        if self._parts.clusters is not None:
            inner = self._inner
            inner.nprobe = self._probes
            if self._parts.links is not None:
                graph = self._faiss.downcast_index(inner.quantizer).hnsw
                graph.efSearch = max(self._graph_search, self._probes)
        distances_QK, numbers_QK = self._index.search(_rows(queries_QD), k)
        distances_QK[numbers_QK < 0] = np.inf
        return numbers_QK, distances_QK

    def save(self, path: Path) -> None:
        with replacing(path) as part:
            try:
                self._faiss.write_index(self._index, str(part))
            except RuntimeError as error:
                raise OSError(
                    f"{path} cannot be written: {error}; free space on the disk, or allow writing "
                    "there, and run the stage again"
                ) from error
            sync_path(part)

    def load(self, path: Path) -> None:
        damaged = f"{path} is damaged; remove it and repeat its stage"
        with open_regular(path) as file:
            head, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        if len(head) < _HEADER.size:
            raise ValueError(damaged)
        _, width, rows = _HEADER.unpack(head)
        if width != self._parts.width:
            raise ValueError(
                f"{path} has vectors of width {width}, the embedder gives {self._parts.width}; "
                "remove it and repeat the stages index-train and index-add"
            )
        if not 0 <= rows <= size:  # each vector takes at least one byte
            raise ValueError(f"{damaged}: it says that it has {rows:,} vectors in {size:,} bytes")
        try:
            index = self._faiss.read_index(str(path), self._faiss.IO_FLAG_READ_ONLY)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(damaged) from error
        inner = self._faiss.try_extract_index_ivf(index)
        if inner is not None and not isinstance(
            self._faiss.downcast_InvertedLists(inner.invlists), self._faiss.ArrayInvertedLists
        ):
            raise ValueError(f"{path} keeps its lists in another file, as no stage does; remove it")
        self._index = index


def _rows(vectors: Vectors) -> Vectors:
    """Return vectors as contiguous float32. Raises ValueError if an element is not finite."""
    rows = np.ascontiguousarray(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise ValueError("a vector has elements that are not finite")
    return rows
