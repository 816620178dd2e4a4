#!/usr/bin/env python
"""Time and memory of building the sample index of a huge corpus.

    python benchmarks/index.py
    python benchmarks/index.py --tokens 100e9 --documents 100e6 --seq-length 2048 --json out.json

It makes up the lengths of documents (lognormal, sigma 1), no tokens: an index depends on lengths
alone. A process of its own then does what a run does with such a corpus for the first time, through
the same code: digest of the lengths, document order, sample index, sample order, files in
the cache. Shown are CPU and wall seconds of each phase, the peak of memory over that of the imports
and the lengths, and all of it per trillion tokens, from this run in proportion: the shuffles are a
little slower per sample the larger their arrays are, so that several --tokens show the trend.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.gpt_dataset import GPTIndex, GPTRecipe
from megatron.data.index_cache import Blocks, IndexCache
from megatron.data.indexed import digest_of_lengths

TRILLION = 10**12
GB = 10**9


class LengthsOnly:
    """Documents whose tokens nobody asks for."""

    prefix = "made-up"

    def __init__(self, lengths: np.ndarray) -> None:
        self.sequence_lengths = lengths
        self.document_indices = np.arange(2, dtype=np.int64)  # of no use to GPT samples

    @property
    def lengths_digest(self) -> str:
        return digest_of_lengths(self.sequence_lengths)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        raise AssertionError("there are no tokens")

    def verify(self) -> None: ...


class Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._last = self._now()

    @staticmethod
    def _now() -> np.ndarray:
        return np.array([time.process_time(), time.perf_counter()])

    def end(self, name: str) -> None:
        """End a phase: everything since the end of the one before."""
        now = self._now()
        spent = now - self._last
        self.seconds[name] = (np.array(self.seconds.get(name, [0, 0])) + spent).tolist()
        self._last = now


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    tokens, documents = int(options.tokens), int(options.documents)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="index-benchmark-"))
    try:
        make_lengths(folder / "lengths", tokens, documents, options.seed)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=measure, args=(folder, options.seq_length, options.samples, sender)
        )
        process.start()
        sender.close()
        found: dict[str, Any] = receiver.recv()
        process.join()
    finally:
        shutil.rmtree(folder)
    found = {"tokens": tokens, "documents": documents, "seq_length": options.seq_length} | found
    found |= {"python": platform.python_version(), "numpy": np.__version__}
    print(report(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--tokens", type=float, default=100e9)
    result.add_argument("--documents", type=float, default=100e6)
    result.add_argument("--seq-length", type=int, default=2048)
    result.add_argument("--samples", type=int, help="wanted (default: as many as an epoch has)")
    result.add_argument("--seed", type=int, default=1234)
    result.add_argument("--folder", help="for the files (default: the system's temporary folder)")
    result.add_argument("--json", help="file for the numbers")
    return result


def make_lengths(path: Path, tokens: int, documents: int, seed: int) -> None:
    """int32[documents] that sum to about `tokens`."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start in range(0, documents, 1 << 20):
            count = min(1 << 20, documents - start)
            lengths = rng.lognormal(np.log(tokens / documents) - 0.5, 1.0, count)
            file.write(np.maximum(lengths.round(), 1).astype(np.int32).tobytes())


def measure(folder: Path, seq_length: int, wanted: int | None, sender: Any) -> None:
    """Builds the index, by phase, and then the same by the recipe, for its peak of memory."""
    lengths = np.fromfile(folder / "lengths", np.int32)
    total = int(lengths.sum(dtype=np.int64))
    samples = wanted or (total - 1) // seq_length
    before = peak()
    began = time.process_time(), time.perf_counter()
    documents = LengthsOnly(lengths)
    dataset = GPTRecipe(seq_length, 1234).build(
        documents, range(len(documents)), samples, "train", IndexCache(folder / "cache")
    )
    whole = time.process_time() - began[0], time.perf_counter() - began[1]
    memory = peak() - before
    size = sum(file.stat().st_size for file in (folder / "cache").rglob("*.npy"))
    count = len(dataset)
    began = time.process_time(), time.perf_counter()
    GPTRecipe(seq_length, 1234).build(
        documents, range(len(documents)), samples, "train", IndexCache(folder / "cache")
    )
    again = time.process_time() - began[0], time.perf_counter() - began[1]
    shutil.rmtree(folder / "cache")
    seconds = by_phase(documents, seq_length, samples, folder)
    sender.send(
        {
            "real_tokens": total,
            "samples": count,
            "whole": whole,
            "found_in_the_cache": again,
            "phases": seconds,
            "peak_bytes": memory,
            "lengths_bytes": lengths.nbytes,
            "index_bytes": size,
        }
    )


def by_phase(
    documents: LengthsOnly, seq_length: int, samples: int, folder: Path
) -> dict[str, list[float]]:
    """CPU and wall seconds of each phase, in a second build."""
    phases = Phases()
    documents.lengths_digest  # noqa: B018
    phases.end("digest of the lengths")
    index = GPTIndex.of(
        documents.sequence_lengths, range(len(documents)), seq_length, samples, 1234
    )

    def timed(blocks: Blocks) -> Blocks:
        def each() -> Iterator[np.ndarray]:
            for block in blocks.blocks:
                phases.end("sample index")
                yield block
                phases.end("writing")

        return blocks._replace(blocks=each())

    def pairs() -> Iterator[tuple[str, np.ndarray | Blocks]]:
        phases.end("count of the tokens")
        for name, array in index.arrays():
            if isinstance(array, Blocks):
                phases.end("writing")
                yield name, timed(array)
                continue
            phases.end("shuffle of the documents" if name[0] == "d" else "shuffle of the samples")
            yield name, array
            phases.end("writing")

    IndexCache(folder / "phases").arrays("gpt", {}, pairs, index.layout)
    phases.end("writing")
    return phases.seconds


def peak() -> int:
    """Bytes of memory that this process held at most."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def report(found: dict[str, Any]) -> str:
    """The numbers, and in proportion those of a trillion tokens."""
    factor = TRILLION / found["real_tokens"]
    lines = [
        f"{found['real_tokens'] / 1e9:,.1f} billion tokens in {found['documents']:,} documents, "
        f"{found['samples']:,} samples of {found['seq_length']}; Python {found['python']}, NumPy "
        f"{found['numpy']}, {os.cpu_count()} cores",
        f"{'':28}{'CPU s':>10}{'wall s':>10}{'CPU s per trillion tokens':>28}",
    ]
    rows = {"whole": found["whole"], **found["phases"]}
    rows["(found in the cache)"] = found["found_in_the_cache"]
    for name, (cpu, wall) in rows.items():
        lines.append(f"{name:28}{cpu:10.2f}{wall:10.2f}{cpu * factor:28.1f}")
    shuffle = found["phases"]["shuffle of the samples"][0] / found["whole"][0]
    lines += [
        f"the shuffle of the samples, which the order fixes, is {shuffle:.0%} of the CPU time",
        f"peak of memory over the lengths' {found['lengths_bytes'] / GB:.2f} GB: "
        f"{found['peak_bytes'] / GB:.2f} GB, per trillion tokens "
        f"{found['peak_bytes'] / GB * factor:.1f} GB; index files "
        f"{found['index_bytes'] / GB:.2f} GB, {found['index_bytes'] / GB * factor:.1f} GB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
