#!/usr/bin/env python
"""Cost of reading real data in a training step, and the speed of the loader by itself.

    python benchmarks/dataloader.py
    python benchmarks/dataloader.py --layers 4 --hidden-size 256 --rounds 9 --json out.json
    python benchmarks/dataloader.py --retro --json retro.json

Steps: one trainer takes the same steps on --mock-data and on a real .bin/.idx by turns, in blocks
of steps in another order every round, with the loader's processes running. Shown are wall seconds,
and CPU seconds of all processes. A block waits for its samples before its clock stops; the share of
the loader is (real - mock) / mock of the medians, and the seconds in which the training process
waits for batches, over the whole. Both are given: the difference of two noisy times is no better
than their noise, which is shown too.

Loader: samples per second that the dataset gives in one process, and that a loader gives with
several, at the sequence length given; the file (made up, one lognormal length per document) is in
the page cache.

With --retro the model is a Retro, and the samples have neighbours: the real ones of a database of
the whole file, drawn at random, which no cache helps to read.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.gpt_batch import GPTCollator
from megatron.data.gpt_dataset import GPTRecipe, MockGPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import MicroBatches
from megatron.data.samples import SampleDataset
from megatron.engine.environment import distributed
from megatron.features.retro.hdf5 import write_arrays
from megatron.run.run import parse_run, run_data
from megatron.training.build import build_trainer

VOCABULARY = 8_191
CHUNK = 64
"""Tokens of a chunk that has neighbours."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="loader-benchmark-") as folder:
        prefix = Path(folder) / "corpus"
        make_corpus(prefix, int(options.tokens), options.mean_document)
        found: dict[str, Any] = {
            "options": vars(options),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, torch {torch.__version__}",
            "loader": loader_alone(*whole_samples(prefix, options), options),
            "steps": steps(prefix, options),
        }
    print(report(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--layers", type=int, default=4)
    result.add_argument("--hidden-size", type=int, default=256)
    result.add_argument("--seq-length", type=int, default=512)
    result.add_argument("--micro-batch-size", type=int, default=4)
    result.add_argument("--num-workers", type=int, default=2)
    result.add_argument("--retro", action="store_true", help="samples with neighbours")
    result.add_argument("--threads", type=int, default=1, help="of the training process")
    result.add_argument("--block", type=int, default=5, help="steps of a block")
    result.add_argument("--rounds", type=int, default=7)
    result.add_argument("--tokens", type=float, default=50e6)
    result.add_argument("--mean-document", type=float, default=1000.0)
    result.add_argument("--loader-seq-length", type=int, default=2048)
    result.add_argument("--loader-workers", default="0,1,2,4")
    result.add_argument("--samples", type=int, default=20_000, help="that the loader alone reads")
    result.add_argument("--folder", help="for the corpus (default: the temporary folder)")
    result.add_argument("--json", help="file for the numbers")
    return result


def make_corpus(prefix: Path, tokens: int, mean: float) -> None:
    """Tokens like those of --mock-data: what the model computes with must not make a difference."""
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        while tokens > 0:
            lengths = np.maximum(rng.lognormal(np.log(mean) - 0.5, 1.0, 1000), 1).astype(np.int64)
            ids = MockGPTDataset(1 << 62, int(lengths.sum()) - 1, VOCABULARY, seed=2)[tokens]
            writer.add_documents(ids, lengths, np.ones(1000, np.int64))
            tokens -= len(ids)


def make_project(
    folder: Path, prefix: Path, seq_length: int, samples: int, batch_size: int
) -> Path:
    """A Retro project of the whole corpus; its neighbours are random chunks of the database."""
    documents, rng = IndexedDataset(prefix), np.random.default_rng(3)
    counts = -(-documents.sequence_lengths.astype(np.int64) // CHUNK)
    document = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(document)) - first[document]) * CHUNK
    stop = np.minimum(start + CHUNK, documents.sequence_lengths[document])
    table = np.column_stack([np.zeros_like(document), document, start, stop, stop - start])
    rows = samples * seq_length // CHUNK
    database, query = folder / "db" / "merged", folder / "query" / "train_random"
    for made in (database, query):
        made.mkdir(parents=True)
    write_arrays(database / "train.hdf5", {"chunks": table.astype(np.uint32)})
    (folder / "db" / "indexed_dataset_infos.json").write_text(json.dumps([{"prefix": str(prefix)}]))
    neighbors = rng.integers(0, len(table), (rows, 20))
    write_arrays(query / f"{0:09d}-{rows:09d}.hdf5", {"neighbors": neighbors})
    settings = {
        "data_path": [str(prefix)],
        "split": "1,0,0",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY,
        "seq_length": seq_length,
        "seed": 1234,
        "train_samples": samples,
        "global_batch_size": batch_size,
        "eval_interval": samples,
        "eval_iters": 0,
        "chunk_length": CHUNK,
    }
    config = {f"retro_gpt_{name}": value for name, value in settings.items()}
    config["retro_neighbor_dirs"] = {"train": str(query.relative_to(folder))}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whole_samples(prefix: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    """The dataset that the loader reads by itself, and its collator."""
    s = options.loader_seq_length
    if options.retro:
        project = make_project(prefix.parent / "alone", prefix, s, options.samples, 4)
        flags = (
            "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 4 --lr 1 "
        )
        flags += f"--lr 1 --max-position-embeddings {s} --data-cache-path {prefix.parent} "
        flags += f"--model-family retro --retro-project-dir {project}"
        data = run_data(parse_run(None, flags.split()))
        return data.datasets.train, data.collate
    documents = IndexedDataset(prefix)
    recipe, cache = GPTRecipe(s, 1234), IndexCache(prefix.parent)
    dataset = recipe.build(documents, range(len(documents)), options.samples, "train", cache)
    return dataset, GPTCollator(None, False, False, False)


def loader_alone(
    dataset: SampleDataset[Any], collate: Any, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Samples per second, wall and CPU, by number of workers."""
    found = {}
    began = time.perf_counter(), time.process_time()
    for index in range(options.samples):
        dataset[index]
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    found["dataset"] = {"wall": options.samples / wall, "cpu": options.samples / cpu}
    for workers in map(int, options.loader_workers.split(",")):
        batches = MicroBatches(dataset, collate, micro_batch_size=4, num_workers=workers)
        next(batches)
        # The rates over time; workers have read ahead a little when the clock starts.
        count = options.samples // 4 - 1
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter(), time.process_time()
        for _ in range(count):
            next(batches)
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        batches.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu += after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
        found[f"{workers} workers"] = {"wall": 4 * count / wall, "cpu": 4 * count / cpu}
    return found


class Stream:
    """A trainer's batches, and how long it waited for them."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches
        self.waited = 0.0
        self.consumed_samples = batches.consumed_samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - began
        self.consumed_samples = self._batches.consumed_samples
        return batch


def steps(prefix: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Wall seconds, CPU seconds of the training process and seconds of waiting, by block."""
    iterations = 2 * (options.rounds + 1) * options.block + 1
    flags = (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} "
        f"--num-attention-heads 4 --zero-stage 1 --micro-batch-size {options.micro_batch_size} "
        f"--lr 1e-4 --num-workers {options.num_workers} --peak-tflops 1 "
    )
    sizes = (
        f"--seq-length {options.seq_length} --global-batch-size {options.micro_batch_size} "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --train-iters {iterations} "
        "--eval-iters 0 "
    )
    sources = {
        "mock": f"{flags} {sizes} --mock-data",
        "real": f"{flags} {sizes} --data-path {prefix} --split 1,0,0",
    }
    if options.retro:
        samples = iterations * options.micro_batch_size
        project = make_project(
            prefix.parent / "steps", prefix, options.seq_length, samples, options.micro_batch_size
        )
        flags += f"--model-family retro --max-position-embeddings {options.seq_length}"
        sources["mock"] = f"{flags} {sizes} --mock-data"
        sources["real"] = f"{flags} --retro-project-dir {project}"
    sources["real"] += f" --data-cache-path {prefix.parent}"
    run = parse_run(None, sources["real"].split())
    found: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": [], "waited": []} for name in sources
    }
    with distributed(run.config.parallel) as mesh:
        trainer = build_trainer(run, mesh)
        streams = {}
        for name, line in sources.items():
            data, collate = run_data(parse_run(None, line.split()))[:2]
            assert data.train is not None
            streams[name] = Stream(
                MicroBatches(
                    data.train,
                    collate,
                    micro_batch_size=options.micro_batch_size,
                    num_workers=options.num_workers,
                )
            )
        chance = random.Random(1)
        for number in range(options.rounds + 1):
            for name in chance.sample(list(streams), 2):
                with measured(found[name] if number else None, streams[name]):
                    for _ in range(options.block):
                        trainer.step(streams[name])
    return found


@contextmanager
def measured(found: dict[str, list[float]] | None, stream: Stream) -> Iterator[None]:
    """Notes what a block took; the first round warms up."""
    wall, cpu, waited = time.perf_counter(), time.process_time(), stream.waited
    yield
    if found is not None:
        found["wall"].append(time.perf_counter() - wall)
        found["cpu"].append(time.process_time() - cpu)
        found["waited"].append(stream.waited - waited)


def report(found: dict[str, Any]) -> str:
    """The tables."""
    options, blocks = found["options"], found["steps"]
    samples = options["micro_batch_size"] * options["block"]
    lines = [
        found["machine"],
        f"steps of {options['micro_batch_size']} samples of {options['seq_length']} tokens, "
        f"{options['layers']} layers of width {options['hidden_size']}, "
        f"{options['num_workers']} loader processes, {options['rounds']} blocks of "
        f"{options['block']} steps each",
        f"{'':8}{'wall ms a step':>16}{'range':>20}{'CPU ms':>10}{'range':>20}"
        f"{'waiting for data ms':>22}",
    ]
    for name, times in blocks.items():
        per = {key: [1e3 * t / options["block"] for t in values] for key, values in times.items()}
        middle = {key: statistics.median(values) for key, values in per.items()}
        spread = {k: f"{min(per[k]):.1f}-{max(per[k]):.1f}" for k in ("wall", "cpu")}
        lines.append(
            f"{name:8}{middle['wall']:16.2f}{spread['wall']:>20}{middle['cpu']:10.2f}"
            f"{spread['cpu']:>20}{middle['waited']:22.3f}"
        )
    real, mock = blocks["real"], blocks["mock"]
    for key, title in (("wall", "wall time"), ("cpu", "CPU time of the training process")):
        relative = statistics.median(real[key]) / statistics.median(mock[key]) - 1
        lines.append(f"real data against mock data: {relative:+.2%} {title}")
    waiting = statistics.median(w / t for w, t in zip(real["waited"], real["wall"], strict=True))
    rate = found["loader"]["dataset"]["cpu"]
    tokens = options["loader_seq_length"]
    work = samples * options["seq_length"] / (rate * tokens) / statistics.median(real["cpu"])
    lines += [
        f"waiting for real data: {waiting:.2%} of the step",
        f"making the samples: {work:.4%} of the step's CPU time, in the loader's processes",
        f"\nthe loader alone, samples of {tokens} tokens",
        f"{'':12}{'samples per wall s':>20}{'per CPU s':>12}{'M tokens per wall s':>22}",
    ]
    for name, rates in found["loader"].items():
        lines.append(
            f"{name:12}{rates['wall']:20,.0f}{rates['cpu']:12,.0f}"
            f"{rates['wall'] * tokens / 1e6:22,.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
