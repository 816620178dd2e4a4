"""Approximate search by faiss: clusters, a graph to find them, and codes of vectors.

Shape suffixes: N vectors of the index, Q queries, D elements of a vector, K neighbours, E bytes of
a vector's code.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.retro.index.strings import LEAST_CHUNKS_PER_CLUSTER, IndexParts
from megatron.retro.index.vector_index import Vectors
from megatron.util.files import replacing, sync_path

logger = logging.getLogger(__name__)


class FaissIndex:
    """An index of faiss. With one thread (OMP_NUM_THREADS=1) equal vectors give equal files."""

    def __init__(self, parts: IndexParts, probes: int, graph_search: int) -> None:
        """
        Args:
            parts: what it consists of.
            probes: clusters that a query is compared with.
            graph_search: clusters that the graph visits to find these, if it has a graph.

        Raises:
            ConfigError: faiss is not installed.
        """
        self._faiss = _faiss(parts.text)
        self._parts, self._probes, self._graph_search = parts, probes, graph_search
        self._index: Any = self._faiss.index_factory(parts.width, parts.text)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def train(self, vectors_ND: Vectors) -> None:
        """As :meth:`VectorIndex.train`; on GPUs where faiss has them."""
        least = self._parts.learned_entries
        text, count = self._parts.text, len(vectors_ND)
        if count < least:
            raise ValueError(
                f"--retro-index-str {text} learns from at least {least} chunks and gets {count}; "
                "raise --retro-index-ntrain, or choose fewer clusters, or Flat"
            )
        if count < LEAST_CHUNKS_PER_CLUSTER * least:
            logger.warning(
                "--retro-index-str %s learns from %d chunks; %d or more make better clusters "
                "(--retro-index-ntrain)",
                text,
                count,
                LEAST_CHUNKS_PER_CLUSTER * least,
            )
        for learner in self._learners():
            learner.min_points_per_centroid = 1  # faiss would warn once for each of its steps
        self._learn_on_gpus()
        self._index.train(_rows(vectors_ND))

    def _learners(self) -> list[Any]:
        """What finds clusters: of vectors, and of their parts."""
        inner, learners = self._inner, []
        if inner is not self._index:
            transform = self._faiss.downcast_VectorTransform(self._index.chain.at(0))
            transform.pq = self._faiss.ProductQuantizer(transform.d_out, transform.M, 8)
            transform.pq.cp.min_points_per_centroid = 1
            learners.append(transform.pq.cp)
        if hasattr(inner, "cp"):
            learners.append(inner.cp)
        if hasattr(inner, "pq"):
            learners.append(inner.pq.cp)
        return learners

    @property
    def _inner(self) -> Any:
        """The index behind the rotation, if there is one."""
        if self._parts.rotated is None:
            return self._index
        return self._faiss.downcast_index(self._index.index)

    def _learn_on_gpus(self) -> None:
        gpus = getattr(self._faiss, "get_num_gpus", int)()
        if gpus and self._parts.clusters is not None:
            inner = self._inner
            flat = self._faiss.IndexFlatL2(inner.d)
            inner.clustering_index = self._faiss.index_cpu_to_all_gpus(flat)

    def add(self, vectors_ND: Vectors) -> None:
        """As :meth:`VectorIndex.add`."""
        self._index.add(_rows(vectors_ND))

    def encode(self, vectors_ND: Vectors) -> npt.NDArray[np.uint8]:
        """The codes [N, E] by which vectors are added with :meth:`add_codes`."""
        rows = _rows(vectors_ND)
        if self._parts.rotated is not None:
            rows = self._faiss.downcast_VectorTransform(self._index.chain.at(0)).apply(rows)
        return np.asarray(self._inner.sa_encode(rows))

    def add_codes(self, codes_NE: npt.NDArray[np.uint8]) -> None:
        """Adds vectors by their codes; the index is as if the vectors were added."""
        self._inner.add_sa_codes(np.ascontiguousarray(codes_NE))
        self._index.ntotal = self._inner.ntotal

    def search(
        self, queries_QD: Vectors, k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """As :meth:`VectorIndex.search`."""
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
        """As :meth:`VectorIndex.save`."""
        with replacing(path) as part:
            try:
                self._faiss.write_index(self._index, str(part))
            except RuntimeError as error:
                raise OSError(f"{path} cannot be written: {error}") from error
            sync_path(part)

    def load(self, path: Path) -> None:
        """As :meth:`VectorIndex.load`."""
        try:
            index = self._faiss.read_index(str(path))
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged; remove it and repeat its stage") from error
        if index.d != self._parts.width:
            raise ValueError(
                f"{path} has vectors of width {index.d}, the embedder gives {self._parts.width}; "
                "remove it and repeat the stages index-train and index-add"
            )
        self._index = index


def _faiss(text: str) -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"--retro-index-str {text} needs faiss: pip install faiss-cpu, or choose Flat"
        ) from error
    return faiss


def _rows(vectors: Vectors) -> Vectors:
    """Vectors as faiss reads them: contiguous. Raises ValueError if one is not finite."""
    rows = np.ascontiguousarray(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise ValueError("a vector has elements that are not finite")
    return rows
