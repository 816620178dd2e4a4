#!/usr/bin/env python
"""Growth of memory and time of a Retro's preprocessing with the corpus.

    python benchmarks/retro_scale.py --chunks 1e6 10e6 --json scale.json

It makes up corpora of random words in bytes, in documents of 640 tokens, and runs two stages of
each, each in a process of its own:

- db-build as a user starts it, in blocks of 10,000 documents: chunks, lengths in the embedder's
  tokens, merged files;
- query-neighbors with an index that answers at once: the samples, their texts, the documents of
  what was found, files. It runs ``--blocks`` blocks of 100,000 chunks, evenly spaced over all. The
  search itself is not in it: its time and memory are those of the index.

Shown are the peak of the process's own memory (files that are mapped are not in it: the system
takes their pages back when it needs them), CPU seconds a million chunks, and bytes a chunk in
files; and from the largest corpus, in proportion, those of a billion chunks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK, SEQ_LENGTH, DOCUMENT = 64, 512, 640
DOCUMENTS_OF_A_BLOCK = 10_000
"""Documents of a block; a million chunks are ten blocks."""
EOD = 258
"""End token of ByteLevelTokenizer."""
BILLION = 10**9
MIB = 2**20
_DOCUMENTS_AT_ONCE = 10_000


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    rows = []
    for chunks in map(int, options.chunks):
        folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="retro-scale-"))
        try:
            rows.append(measure_corpus(folder, chunks, options.blocks))
        finally:
            shutil.rmtree(folder)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(report(rows))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--chunks", type=float, nargs="+", default=[1e6, 10e6])
    result.add_argument("--blocks", type=int, default=3, help="of neighbours, for each corpus")
    result.add_argument("--folder", help="for the files (default: the system's temporary folder)")
    result.add_argument("--json", help="file for the numbers")
    return result


def measure_corpus(folder: Path, chunks: int, blocks: int) -> dict[str, Any]:
    """The numbers of a corpus with so many chunks."""
    write_corpus(folder / "corpus", chunks)
    project, samples = folder / "project", chunks * CHUNK // SEQ_LENGTH
    argv = (
        f"--retro-project-dir {project} --retro-tasks db-build --data-path {folder / 'corpus'} "
        f"--split 100,0,0 --seq-length {SEQ_LENGTH} --train-samples {samples} --eval-iters 0 "
        "--global-batch-size 1 --tokenizer-type ByteLevelTokenizer --bert-embedder-type hashing "
        f"--retro-gpt-chunk-length {CHUNK} --retro-doc-block-size {DOCUMENTS_OF_A_BLOCK}"
    ).split()
    return {
        "chunks": chunks,
        "db-build": measured(partial(build_database, argv), project / "db"),
        "query": measured(partial(query, argv, blocks), project / "query"),
    }


def write_corpus(prefix: Path, chunks: int) -> None:
    """Documents of words of random letters, of which chunks are cut."""
    from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

    rng = np.random.default_rng(0)
    left = chunks * CHUNK // DOCUMENT
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        while left:
            count = min(left, _DOCUMENTS_AT_ONCE)
            tokens = rng.integers(ord("a"), ord("z") + 7, (count, DOCUMENT + 1), np.uint16)
            tokens[tokens > ord("z")] = ord(" ")
            tokens[:, -1] = EOD
            writer.add_documents(tokens.ravel(), [DOCUMENT + 1] * count, [1] * count)
            left -= count


def build_database(argv: Sequence[str]) -> int:
    """The stage db-build; the number of its chunks."""
    from megatron.apps.retro.command import run_preprocessing
    from megatron.apps.retro.preprocessing import configured

    run_preprocessing(None, argv)
    return len(configured(settings_of(argv)).database)


def settings_of(argv: Sequence[str]) -> Any:
    """The settings of the stage's flags."""
    from megatron.apps.retro.config import RetroPreprocessConfig
    from megatron.run.run import RunToolParser

    return RunToolParser(RetroPreprocessConfig, None).settings(argv)


class AnyChunks:
    """An index whose answers are random chunks."""

    def __init__(self, count: int) -> None:
        self._count, self._rng = count, np.random.default_rng(0)

    def search(
        self, vectors: npt.NDArray[np.float32], k: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Numbers of chunks, and no distances."""
        numbers = self._rng.integers(0, self._count, (len(vectors), k))
        return numbers, np.zeros(numbers.shape, np.float32)


def query(argv: Sequence[str], blocks: int) -> int:
    """Some blocks of the stage query-neighbors; the number of their chunks."""
    from megatron.apps.retro.blocks import blocks_of, run_blocks
    from megatron.apps.retro.preprocessing import configured
    from megatron.apps.retro.query import Retriever, SampleChunks, gpt_samples, neighbors_of

    work = configured(settings_of(argv))
    retriever = Retriever(work.project, work.embedder)
    vars(retriever)["index"] = AnyChunks(len(retriever.database))  # in place of the file
    numbers = {prefix: number for number, prefix in enumerate(retriever.database.sources)}
    chunks = SampleChunks(gpt_samples(work.run)["train"], SEQ_LENGTH // CHUNK, CHUNK, numbers)
    found = blocks_of(work.project.query_folder / "train", len(chunks), 100_000)
    chosen = [found[i * len(found) // blocks] for i in range(blocks)]
    run_blocks(chosen, partial(neighbors_of, chunks, retriever, 20), "neighbours")
    return sum(map(len, chosen))


def measured(work: Callable[[], int], folder: Path) -> dict[str, float]:
    """Measure a process that returns the number of its chunks: their number, its peak of own memory
    over that of its imports in bytes, its CPU seconds, and the bytes of a folder's files."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sender))
    process.start()
    sender.close()
    assert process.pid is not None
    before, peak = receiver.recv(), 0
    while not receiver.poll(0.02):
        peak = max(peak, own_memory(process.pid))
    chunks, seconds = receiver.recv()
    process.join()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"chunks": chunks, "peak": peak - before, "cpu_seconds": seconds, "bytes": size}


def _work(work: Callable[[], int], sender: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import megatron.apps.retro.query  # noqa: F401

    sender.send(own_memory(os.getpid()))
    begin = time.process_time()
    chunks = work()
    sender.send((chunks, time.process_time() - begin))


def own_memory(process: int) -> int:
    """Bytes of a process that are of no file."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table: a line for each corpus and stage, and a billion chunks in proportion."""
    lines = [
        "| stage | chunks | peak MiB | CPU s per million | bytes a chunk |",
        "|---|---|---|---|---|",
    ]
    for stage in ("db-build", "query"):
        for row in rows:
            found = row[stage]
            per_million = found["cpu_seconds"] / found["chunks"] * 1e6
            lines.append(
                f"| {stage} | {row['chunks']:,} | {found['peak'] / MIB:,.0f} | {per_million:,.0f} "
                f"| {found['bytes'] / found['chunks']:.1f} |"
            )
    for stage in ("db-build", "query"):
        found = rows[-1][stage]
        hours = found["cpu_seconds"] / found["chunks"] * BILLION / 3600
        size = found["bytes"] / found["chunks"] * BILLION / 2**30
        lines.append(f"{stage}, a billion chunks: {hours:,.0f} CPU hours, {size:,.0f} GiB of files")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
