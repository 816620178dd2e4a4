"""The order of samples from flags to tokens, on 200 random configurations, against a slow reference
that is written down here from the definition: plain loops over lists, one token after the other.

Tokens of a file count up from a number of its own, so that a sample shows where it was read.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from samples import sampled

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import DataConfig
from megatron.data import gpt_dataset
from megatron.data.build import DatasetBuilder, Datasets, SourceReader
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import INDEXED, BlendReader

CONFIGURATIONS = 200
FILE = 1_000_000  # first token of file f: f * FILE


class Configuration(NamedTuple):
    lengths: list[list[int]]
    """Of the documents of each file."""
    weights: list[float] | None
    split: str
    wanted: tuple[int, int, int]
    seq_length: int
    seed: int
    in_64_bits: bool


def configuration(number: int) -> Configuration:
    """Ranges that reach every branch; `test_all_branches_are_reached` counts them."""
    rng = np.random.default_rng([20, number])
    files = int(rng.choice([1, 1, 2, 3, 5]))
    longest = int(rng.choice([1, 4, 20, 300]))
    lengths = []
    for _ in range(files):
        one = rng.integers(0 if rng.random() < 0.5 else 1, longest + 1, rng.integers(20, 45))
        if rng.random() < 0.2:
            one[rng.integers(len(one))] = 3000  # one huge document among the others
        one[::2] += 1  # every part of every file has tokens
        one[-1] += 1
        lengths.append(one.tolist())
    weights = None if files == 1 and rng.random() < 0.8 else rng.uniform(0.05, 3, files).tolist()
    split = str(rng.choice(["80,10,10", "100,0,0", "1,1,1", "50/30/20", "969,300,100", "2,1"]))
    s = int(rng.choice([1, 3, 8, 16, 200]))
    epoch = max(1, (sum(lengths[0]) - 1) // s)
    share = float(rng.choice([0.3, 1.0, 1.2, 1.7, 1.95, 3.4, 5.9]))
    wanted = (max(1, min(int(epoch * share), 400)), *rng.integers(0, 12, 2).tolist())
    seed = int(rng.choice([0, 1234, 2**32 - 1, rng.integers(2**31)]))
    return Configuration(lengths, weights, split, wanted, s, seed, bool(rng.random() < 0.2))


def split_by_definition(split: str, total: int) -> list[list[int]]:
    shares = [float(share) for share in split.replace("/", ",").split(",")]
    shares += [0.0] * (3 - len(shares))
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * total))
    surplus = bounds[3] - total
    bounds = [0] + [bound - surplus for bound in bounds[1:]]
    return [list(range(bounds[k], bounds[k + 1])) for k in range(3)]


def one_file_by_definition(
    lengths: list[int], first: int, documents: list[int], s: int, wanted: int, seed: int
) -> tuple[list[list[int]], str]:
    """All samples in the order they are seen, and which branch made them."""
    starts = [sum(lengths[:d]) for d in range(len(lengths))]
    tokens = sum(lengths[d] for d in documents)
    epochs = 1
    while (epochs * tokens - 1) // s < wanted:
        epochs += 1
    total = (epochs * tokens - 1) // s
    before_last = ((epochs - 1) * tokens - 1) // s
    separate = epochs > 1 and wanted - before_last < int(0.80 * ((tokens - 1) // s))
    rng = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values, np.int64)
        rng.shuffle(array)
        return array.tolist()

    if separate:
        order = shuffled(documents * (epochs - 1)) + shuffled(documents)
    else:
        order = shuffled(documents * epochs)
    stream = [first + starts[d] + i for d in order for i in range(lengths[d])]
    if separate:
        numbers = shuffled(list(range(before_last))) + shuffled(list(range(before_last, total)))
    else:
        numbers = shuffled(list(range(total)))
    branch = "separate" if separate else "together" if epochs > 1 else "one epoch"
    return [stream[i * s : i * s + s + 1] for i in numbers], branch


def by_definition(c: Configuration, part: int, branches: list[str]) -> list[list[int]]:
    """The samples of a part, as many as are wanted."""
    wanted = c.wanted[part]
    documents = [split_by_definition(c.split, len(lengths))[part] for lengths in c.lengths]
    weights = c.weights or [1.0]
    weights = [weight / sum(weights) for weight in weights]
    files = []
    for f, lengths in enumerate(c.lengths):
        asked = wanted if c.weights is None else math.ceil(wanted * weights[f] * 1.005)
        samples, branch = one_file_by_definition(
            lengths, f * FILE, documents[f], c.seq_length, asked, c.seed
        )
        files.append(samples)
        branches.append(branch)
    if c.weights is None:
        return files[0]
    taken, blended = [0] * len(files), []
    for i in range(wanted):
        behind = [w * max(i, 1) - t for w, t in zip(weights, taken, strict=True)]
        best = behind.index(max(behind))
        blended.append(files[best][taken[best]])
        taken[best] += 1
    branches.append("blend")
    return blended


def build(c: Configuration, folder: Path) -> Datasets:
    prefixes = []
    for f, lengths in enumerate(c.lengths):
        prefixes.append(str(folder / str(f)))
        with IndexedDatasetWriter(prefixes[-1], "int32") as writer:
            tokens = np.arange(f * FILE, f * FILE + sum(lengths))
            writer.add_documents(tokens, lengths, [1] * len(lengths))
    paths: list[str] = []
    for f, prefix in enumerate(prefixes):
        paths += [prefix] if c.weights is None else [repr(c.weights[f]), prefix]
    parts = BlendReader().parts(DataConfig(data_path=tuple(paths), split=c.split))
    kind = SourceReader(lambda path, _: IndexedDataset(path), GPTRecipe(c.seq_length, c.seed))
    return DatasetBuilder({INDEXED: lambda: kind}, str(folder / "cache")).datasets(parts, c.wanted)


@pytest.mark.parametrize("number", sampled(range(CONFIGURATIONS), lambda n: n < 60))
def test_against_the_definition(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = configuration(number)
    if c.in_64_bits:
        monkeypatch.setattr(gpt_dataset, "MOST_INT32", 5)
        monkeypatch.setattr(gpt_dataset, "SAMPLES_IN_INT64", 5)
    if number % 3 == 0:  # in several blocks
        monkeypatch.setattr(gpt_dataset, "_DOCUMENTS_AT_ONCE", 7)
        monkeypatch.setattr(gpt_dataset, "_ROWS_AT_ONCE", 3)
    train, valid, test = build(c, tmp_path)
    for part, dataset in enumerate((train, valid.get("valid"), test.get("test"))):
        share = c.split.replace("/", ",").split(",")[part : part + 1]
        if not c.wanted[part] or not share or not float(share[0]):
            assert dataset is None
            continue
        assert dataset is not None
        expected = by_definition(c, part, [])
        assert [dataset[i].tolist() for i in range(len(dataset))] == expected
        assert len(expected) >= c.wanted[part]


def test_all_branches_are_reached() -> None:
    branches: list[str] = []
    configurations = [configuration(number) for number in range(CONFIGURATIONS)]
    for c in configurations:
        by_definition(c, 0, branches)
    for branch in ("one epoch", "separate", "together", "blend"):
        assert branches.count(branch) >= 30, branch
    assert sum(c.in_64_bits for c in configurations) >= 20
    assert sum(0 in lengths for c in configurations for lengths in c.lengths) >= 30
    assert sum(max(map(max, c.lengths)) == 3000 for c in configurations) >= 20
    assert sum(sum(c.lengths[0]) <= c.seq_length for c in configurations) >= 5
