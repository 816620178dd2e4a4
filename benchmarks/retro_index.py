#!/usr/bin/env python
"""Recall, size and time of approximate indices of a Retro project.

    python tools/retro/preprocess_data.py --retro-project-dir retro --retro-index-str Flat \\
        --retro-tasks db-build,index-build ...
    python benchmarks/retro_index.py --retro-project-dir retro

The vectors are those of the project's exact index, so that nothing is embedded again. Every index
learns from all of them. Searched for are chunks spread over the database, each without itself;
recall at k is the share of the k nearest chunks that are among the k first of the index. Times are
CPU seconds of one thread.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402  # which reads the number of threads

from megatron.apps.profiling.tables import aligned  # noqa: E402
from megatron.apps.retro.config import IndexFlags  # noqa: E402
from megatron.apps.retro.index import build_index, existing_files  # noqa: E402
from megatron.apps.retro.index.exact import ExactIndex  # noqa: E402
from megatron.apps.retro.index.notation import index_parts  # noqa: E402
from megatron.apps.retro.index.stages import (
    RECALL_AT,
    SEARCHED,
    nearest_others,
    recall_at,
    without_own,
)  # noqa: E402
from megatron.features.retro.project import RetroProject  # noqa: E402

HEADER = ["index", "clusters searched", "recall at 2", "at 20", "bytes a chunk", "learn s",
          "add ms a chunk", "search ms a query"]  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--retro-project-dir", type=Path, required=True)
    arguments.add_argument("--index", nargs="+", metavar="STRING", default=[
        "IVF512,Flat", "IVF1024_HNSW32,Flat", "OPQ32_64,IVF1024_HNSW32,PQ32x6"])  # fmt: skip
    arguments.add_argument("--probes", type=int, nargs="+", default=[8, 32, 128])
    arguments.add_argument("--queries", type=int, default=1000)
    given = arguments.parse_args()

    project = RetroProject(given.retro_project_dir)
    only_flat = IndexFlags(retro_index_str="Flat")
    files = existing_files(project.index_folder, only_flat, "index-add")
    exact = ExactIndex((files.read_description() or {})["width"])
    exact.load(files.added)
    count = len(exact)
    chunks_Q = np.arange(min(given.queries, count)) * count // min(given.queries, count)
    queries_QD, vectors_ND = exact.vectors(chunks_Q), exact.vectors(np.arange(count))

    start = time.process_time()
    nearest = nearest_others(chunks_Q, *exact.search(queries_QD, SEARCHED))
    rows = [HEADER, row("Flat", "", (1.0, 1.0), files.added.stat().st_size / count, 0.0, 0.0,
                        (time.process_time() - start) / len(chunks_Q))]  # fmt: skip
    for text in given.index:
        flags = IndexFlags(retro_index_str=text)
        parts = index_parts(flags, count, exact.width)
        index = build_index(flags, count, exact.width)
        learned = seconds(lambda index=index: index.train(vectors_ND))
        added = seconds(lambda index=index: index.add(vectors_ND))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "index"
            index.save(file)
            for probes in given.probes:
                more = replace(flags, retro_query_nprobe=probes)
                index = build_index(more, count, exact.width)
                index.load(file)
                start = time.process_time()
                found_QK, _ = index.search(queries_QD, max(RECALL_AT) + 1)
                spent = (time.process_time() - start) / len(chunks_Q)
                recall = recall_at(*nearest, without_own(chunks_Q, found_QK))
                clusters = f"{parts.probes(more)} of {parts.clusters}"
                size = file.stat().st_size / count
                rows.append(row(text, clusters, tuple(recall.values()), size, learned,
                                added / count, spent))  # fmt: skip
    print(f"{count:,} vectors of {exact.width} elements; {len(chunks_Q):,} searched for\n")
    print(aligned(rows))


def row(
    text: str,
    clusters: str,
    recall: tuple[float, ...],
    size: float,
    learned: float,
    added: float,
    search: float,
) -> list[str]:
    shares = [f"{share:.3f}" for share in recall]
    times = [f"{learned:.1f}", f"{1000 * added:.3f}", f"{1000 * search:.2f}"]
    return [text, clusters, *shares, f"{size:.0f}", *times]


def seconds(work) -> float:
    """CPU seconds that a call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
