#!/usr/bin/env python
"""Speed of the data of BERT and T5: the index of a corpus, and single samples.

    python benchmarks/masked_data.py
    python benchmarks/masked_data.py --sentences 1e8 --json out.json

The corpus is made up: sentences of 25 tokens and documents of 30 sentences in the mean, both
geometrically distributed; lengths and boundaries are memory-mapped, as they are from an .idx. Each
index is built by a process of its own, for one epoch and 512 tokens; its peak memory is all that
the process takes more than after its imports, mapped pages included. Samples are drawn at random.
"""

import argparse
import json
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron.data.index_cache import IndexCache
from megatron.features.masked.bert import BertRecipe
from megatron.features.masked.flags import PAIR_TASKS, MaskedDataConfig
from megatron.features.masked.segments import SegmentRules, build_segments
from megatron.features.masked.sentence_numbers import Sentences
from megatron.features.masked.t5 import T5Recipe

SEQ_LENGTH = 512
MEAN_TOKENS, MEAN_SENTENCES = 25, 30
VOCAB_SIZE = 30_522
TOKENIZER = SimpleNamespace(
    cls=101,
    sep=102,
    pad=0,
    mask=103,
    eos=104,
    vocab_size=VOCAB_SIZE,
    sentinels=list(range(1, 101)),
    word_starts=np.arange(VOCAB_SIZE) % 5 != 0,
)


@dataclass
class MadeUpDocuments:
    """Lengths without a file; tokens are random numbers, in memory."""

    sequence_lengths: np.ndarray
    document_indices: np.ndarray
    tokens: np.ndarray
    prefix: str = "made-up"
    lengths_digest: str = ""

    @classmethod
    def of(cls, sentences: int) -> "MadeUpDocuments":
        rng = np.random.default_rng(0)
        lengths = rng.geometric(1 / MEAN_TOKENS, sentences).astype(np.int32)
        counts = rng.geometric(1 / MEAN_SENTENCES, sentences // MEAN_SENTENCES)
        boundaries = np.concatenate([[0], np.cumsum(counts)])
        boundaries = boundaries[: np.searchsorted(boundaries, sentences)]
        return cls(lengths, boundaries, rng.integers(1000, VOCAB_SIZE, 1 << 20).astype(np.uint16))

    def save(self, folder: Path) -> None:
        np.save(folder / "lengths.npy", self.sequence_lengths)
        np.save(folder / "boundaries.npy", self.document_indices)

    @classmethod
    def saved(cls, folder: Path) -> "MadeUpDocuments":
        lengths, boundaries = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("lengths", "boundaries")
        )
        return cls(lengths, boundaries, np.empty(0, np.uint16))

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        length = int(self.sequence_lengths[index]) - offset if length is None else length
        start = index * MEAN_TOKENS % (len(self.tokens) - 10_000) + offset
        return self.tokens[start : start + length]

    def verify(self) -> None:
        pass


def index_build(folder: Path, pairs: str) -> dict[str, float]:
    """CPU and wall seconds and peak memory of an index."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    documents = MadeUpDocuments.saved(folder)
    sentences = len(documents.sequence_lengths)
    units = range(len(documents.document_indices) - 1)
    wanted = sentences * MEAN_TOKENS // SEQ_LENGTH
    rules = SegmentRules(SEQ_LENGTH - 3, 0.1, pairs)  # type: ignore[arg-type]
    wall, cpu = time.perf_counter(), time.process_time()
    numbered = Sentences.of(documents, units, rules.max_tokens)  # type: ignore[arg-type]
    index = build_segments(numbered, rules, wanted, 1, "train", documents.prefix)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "samples": len(index),
        "cpu_s": cpu,
        "wall_s": wall,
        "sentences_per_cpu_s": sentences / cpu,
        "peak_mib": peak / 1024,
        "index_mib": index.nbytes / 2**20,
    }


def samples(kind: str, count: int) -> dict[str, float]:
    """CPU seconds of one sample of 512 tokens."""
    documents = MadeUpDocuments.of(300_000)
    config = MaskedDataConfig(
        bert_pair_task=kind if kind in PAIR_TASKS else "next-sentence",
    )
    recipe: T5Recipe | BertRecipe
    if kind == "T5":
        recipe = T5Recipe.from_config(config, TOKENIZER, SEQ_LENGTH, 1)  # type: ignore[arg-type]
    else:
        paired = kind != "none"
        recipe = BertRecipe.from_config(config, TOKENIZER, SEQ_LENGTH, 1, paired)  # type: ignore[arg-type]
    units = range(len(documents.document_indices) - 1)
    dataset = recipe.build(documents, units, 10_000, "train", IndexCache(None))  # type: ignore[arg-type]
    chosen = np.random.default_rng(0).integers(0, len(dataset), count).tolist()
    cpu = time.process_time()
    for i in chosen:
        dataset[i]
    cpu = time.process_time() - cpu
    return {"samples": count, "cpu_s": cpu, "samples_per_cpu_s": count / cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sentences", type=float, default=1e7)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    # A process per index: the peak of one is not that of another.
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        MadeUpDocuments.of(int(args.sentences)).save(Path(folder))
        for pairs in ("none", *PAIR_TASKS):
            found = pool.submit(index_build, Path(folder), pairs).result()
            results[f"index {pairs}"] = found
            print(
                f"index  {pairs:15} {args.sentences:.3g} sentences, {found['samples']:.0f} samples"
                f": {found['cpu_s']:.1f} CPU s, {found['wall_s']:.1f} s, "
                f"{found['sentences_per_cpu_s'] / 1e6:.1f} M sentences per CPU s, "
                f"peak {found['peak_mib']:.0f} MiB, index {found['index_mib']:.0f} MiB",
                flush=True,
            )
    for kind in ("none", *PAIR_TASKS, "T5"):
        found = samples(kind, args.samples)
        results[f"sample {kind}"] = found
        print(f"sample {kind:15} {found['samples_per_cpu_s']:.0f} per CPU s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
