"""Which samples a job consumes, and in which order, whatever becomes of its processes."""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from samples import sampled

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.build import DatasetBuilder, SourceReader
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import MicroBatches
from megatron.data.sampler import SkippedSamples, parse_skipped
from megatron.data.samples import SampleDataset
from megatron.data.sources import INDEXED, Blend, DataSource

GLOBAL_BATCH = 16
STEPS = 24
NUM_SAMPLES = GLOBAL_BATCH * STEPS


class Numbered:
    """A dataset whose samples say their number and where they come from."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int, /) -> tuple[int, tuple, bytes]:
        return index, tuple(self.dataset.origin(index)), self.dataset[index].tobytes()

    def origin(self, index: int, /) -> list:
        return []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(7)
    for name, documents in (("a", 12), ("b", 60)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for _ in range(documents):
                writer.add_document([rng.integers(0, 60_000, rng.integers(1, 90))])
    return folder


def samples(folder: Path) -> Numbered:
    """A blend of two files, several epochs of the first, some of it skipped; as a process makes it
    out of the files and the index cache."""
    kind = SourceReader(lambda path, source: IndexedDataset(path), GPTRecipe(seq_length=8, seed=5))
    sources = tuple(
        DataSource((str(folder / name),), weight=w) for name, w in (("a", 2.0), ("b", 1.0))
    )
    blend = DatasetBuilder({INDEXED: lambda: kind}).samples(
        Blend("--data-path", sources), "train", 400
    )
    assert blend is not None
    return Numbered(SkippedSamples(blend, parse_skipped(["40:45", "200:231"])))


def digest(consumed: list) -> str:
    return hashlib.sha256(repr(consumed).encode()).hexdigest()


def consume(dataset, consumed_samples: int, steps: int, micro: int, ranks: int, workers: int):
    """What the ranks of a job consume in some steps, in the order of micro steps and ranks."""
    streams = [
        MicroBatches(
            dataset,
            list,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=ranks,
            consumed_samples=consumed_samples,
            num_workers=workers,
        )
        for rank in range(ranks)
    ]
    found = [
        sample
        for _ in range(steps * GLOBAL_BATCH // (micro * ranks))
        for stream in streams
        for sample in next(stream)
    ]
    for stream in streams:
        stream.close()
    return found


@pytest.mark.parametrize("seed", sampled(range(20), lambda seed: seed < 8))
def test_consumed_samples_do_not_depend_on_restarts_or_layout(files: Path, seed: int) -> None:
    """One process without a stop is the reference."""
    dataset = samples(files)
    reference = digest([dataset[i] for i in range(NUM_SAMPLES)])
    rng = random.Random(seed)
    consumed: list = []
    while len(consumed) < NUM_SAMPLES:
        left = (NUM_SAMPLES - len(consumed)) // GLOBAL_BATCH
        steps, ranks = rng.randint(1, min(left, 9)), rng.choice([1, 2, 4])
        micro = rng.choice([m for m in (1, 2, 4) if m * ranks <= GLOBAL_BATCH])
        workers = int(seed % 10 == 0)
        consumed += consume(samples(files), len(consumed), steps, micro, ranks, workers)
        if rng.random() < 0.3:  # killed after its last checkpoint: these are consumed once more
            consumed = consumed[: len(consumed) - rng.randrange(steps) * GLOBAL_BATCH]
    assert digest(consumed) == reference
