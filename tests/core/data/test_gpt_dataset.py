"""Samples of GPT datasets, against the tokens megatron-core gave and against a concatenation."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.blend import BlendedDataset
from megatron.data.gpt_dataset import GPTDataset, GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset

GOLDEN = Path(__file__).parents[2] / "golden" / "gpt_sample_order" / "golden.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())}


def counting_corpus(prefix: Path, lengths: list[int]) -> IndexedDataset:
    """Tokens count up from 0 through the whole file."""
    with IndexedDatasetWriter(prefix, "int32") as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths, [1] * len(lengths))
    return IndexedDataset(prefix)


def build(
    folder: Path, lengths: list[int], s: int, samples: int, *, cache: IndexCache | None = None
) -> GPTDataset:
    indexed = counting_corpus(folder / "corpus", lengths)
    cache = cache or IndexCache(None)
    return GPTRecipe(s, 1234).build(indexed, range(len(lengths)), samples, "train", cache)


@pytest.mark.parametrize("name", CASES)
def test_tokens_against_megatron_core_golden(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    indexed = counting_corpus(tmp_path / "corpus", case["lengths"])
    dataset = GPTRecipe(case["seq_length"], case["seed"]).build(
        indexed,
        range(*case["documents"]),
        case["num_samples"],
        "train",
        IndexCache(tmp_path / "cache"),
    )
    assert len(dataset) == len(case["token_sums"])
    samples = [dataset[i] for i in range(len(dataset))]
    assert {(sample.dtype, sample.shape) for sample in samples} == {
        (np.dtype("int64"), (case["seq_length"] + 1,))
    }
    assert [int(sample[0]) for sample in samples] == case["first_tokens"]
    assert [int(sample.sum()) for sample in samples] == case["token_sums"]


def test_an_epoch_reads_every_token_once_but_the_shared_ones(tmp_path: Path) -> None:
    dataset = build(tmp_path, [3, 1, 8, 0, 5, 4], 4, 5)
    order = np.argsort(dataset._index["shuffle_index"])
    stream = np.concatenate([dataset[int(i)][:-1] for i in order] + [dataset[int(order[-1])][-1:]])
    assert sorted(stream.tolist()) == list(range(21))
    for i, j in zip(order, order[1:], strict=False):
        assert dataset[int(i)][-1] == dataset[int(j)][0]


def test_out_of_range(tmp_path: Path) -> None:
    dataset = build(tmp_path, [50], 4, 5)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of {len(dataset)}"):
            dataset[index]


def test_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus: the 2 documents for train have no tokens"):
        build(tmp_path, [0, 0], 4, 5)


def test_an_index_that_memory_has_no_room_for_is_refused_before_it_is_built(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus: the index of 1,000,0.* GiB while it is built"):
        build(tmp_path, [5, 8], 4, 10**18)


def test_cache_of_other_lengths_is_not_used(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    first = build(tmp_path, [10, 20], 4, 5, cache=cache)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    same = build(moved, [10, 20], 4, 5, cache=cache)  # another place, same lengths: same entry
    assert same._index["sample_index"].filename == first._index["sample_index"].filename
    other = build(moved, [20, 10], 4, 5, cache=cache)
    assert other._index["sample_index"].filename != first._index["sample_index"].filename


def test_a_damaged_index_is_found_before_the_order_is_built(tmp_path: Path) -> None:
    indexed = counting_corpus(tmp_path / "corpus", [5, 5, 5])
    lengths = indexed.sequence_lengths.copy()
    lengths[1] = 4
    indexed.sequence_lengths = indexed.index_file.sequence_lengths = lengths
    with pytest.raises(ValueError, match=r"corpus\.idx: sequence 1"):
        GPTRecipe(4, 1).build(indexed, range(3), 5, "train", IndexCache(None))


@pytest.mark.parametrize("in_memory", [True, False])
def test_pickles(in_memory: bool, tmp_path: Path) -> None:
    cache = IndexCache(None if in_memory else tmp_path / "cache")
    dataset = build(tmp_path, [100] * 50, 4, 1000, cache=cache)
    pickled = pickle.dumps(dataset)
    assert in_memory or len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert all(np.array_equal(copy[i], dataset[i]) for i in range(len(dataset)))


def test_blend(tmp_path: Path) -> None:
    parts = [[np.array([100 * d + i]) for i in range(20)] for d in range(3)]
    dataset = BlendedDataset.build(parts, [0.5, 0.3, 0.2], 20, IndexCache(tmp_path), "train")
    assert len(dataset) == 20
    tokens = [int(dataset[i][0]) for i in range(20)]
    assert [token for token in tokens if token < 100] == list(range(10))
    assert [token for token in tokens if 100 <= token < 200] == list(range(100, 106))
    assert [token for token in tokens if token >= 200] == list(range(200, 204))
    with pytest.raises(IndexError, match="sample 20 of a dataset of 20"):
        dataset[20]


def test_origin_names_the_tokens_of_every_sample(tmp_path: Path) -> None:
    dataset = build(tmp_path, [3, 1, 0, 8, 0, 5, 4], 4, 30)
    documents = dataset.documents
    for index in range(len(dataset)):
        pieces = dataset.origin(index)
        assert all(piece.source == str(tmp_path / "corpus") for piece in pieces)
        assert all(piece.start < piece.stop for piece in pieces)
        parts = [documents.get(p.sequence, p.start, p.stop - p.start) for p in pieces]
        assert np.concatenate(parts).tolist() == dataset[index].tolist()
    with pytest.raises(IndexError, match="sample -1"):
        dataset.origin(-1)


def test_origin_in_a_blend(tmp_path: Path) -> None:
    parts = []
    for name, lengths in (("a", [30, 10]), ("b", [5] * 9)):
        (tmp_path / name).mkdir()
        parts.append(build(tmp_path / name, lengths, 4, 8))
    dataset = BlendedDataset.build(parts, [0.5, 0.5], 12, IndexCache(None), "train")
    for index in range(12):
        pieces = dataset.origin(index)
        assert {piece.source for piece in pieces} == {str(tmp_path / "ab"[index % 2] / "corpus")}
        tokens = [t for piece in pieces for t in range(piece.stop - piece.start)]
        assert len(tokens) == 5


def test_the_cache_entry_of_an_earlier_release_is_found(tmp_path: Path) -> None:
    """Runs that continue after an update must not build their indices again."""
    build(tmp_path, [10, 20], 4, 5, cache=IndexCache(tmp_path / "cache"))
    (entry,) = (path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert entry == "gpt-train-2c5130d5d61eb25ad96fde3beb924965"


@pytest.mark.parametrize("bytes_left", [0, 10, 399])
def test_a_file_that_is_cut_short_while_it_is_read(bytes_left: int, tmp_path: Path) -> None:
    dataset = build(tmp_path, [50, 50], 9, 10)
    os.truncate(tmp_path / "corpus.bin", bytes_left)
    with pytest.raises(
        ValueError, match=f"corpus.bin was cut short .* 400 bytes and has {bytes_left};"
    ):
        for i in range(len(dataset)):
            dataset[i]


@pytest.mark.parametrize("token", [100, 2**31 - 1, -1])
def test_ids_that_leave_the_vocabulary_while_the_file_is_read(token: int, tmp_path: Path) -> None:
    indexed = counting_corpus(tmp_path / "corpus", [50, 50])
    dataset = GPTRecipe(9, 1234, 100).build(indexed, range(2), 10, "train", IndexCache(None))
    for i in range(len(dataset)):
        dataset[i]
    with (tmp_path / "corpus.bin").open("r+b") as file:
        file.seek(4 * 70)
        file.write(np.int32(token).tobytes())
    with pytest.raises(
        ValueError, match=f"corpus: sequence 1 contains the token id {token}, .*sample"
    ):
        for i in range(len(dataset)):
            dataset[i]
