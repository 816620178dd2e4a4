"""From flags to datasets."""

from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.build import GPTDatasets, build_gpt_datasets, parse_data_path
from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed import IndexedDatasetWriter


def write(prefix: Path, documents: int, first_token: int = 0) -> str:
    """Documents of 20 tokens: first_token + the document's number."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for number in range(documents):
            writer.add_document([np.full(20, first_token + number)])
    return str(prefix)


def build(
    data: DataConfig, counts: tuple[int, int, int] = (20, 5, 2), vocab_size: int = 1000
) -> GPTDatasets:
    return build_gpt_datasets(
        data, seq_length=8, sample_counts=counts, seed=1234, vocab_size=vocab_size, eod_token=0
    )


def tokens(dataset: object) -> set[int]:
    assert dataset is not None
    return {int(t) for i in range(len(dataset)) for t in dataset[i]}  # type: ignore


def test_one_prefix_is_split(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100)
    train, valid, test = build(DataConfig(data_path=(prefix,), split="90,8,2"))
    assert isinstance(train, GPTDataset)
    assert len(train) >= 20 and len(valid) >= 5 and len(test) >= 2
    assert tokens(train) <= set(range(90))
    assert tokens(valid) <= set(range(90, 98))
    assert tokens(test) <= {98, 99}
    assert (tmp_path / "index-cache").is_dir()


def test_blend_of_two(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", 50), write(tmp_path / "b", 50, first_token=100)
    data = DataConfig(
        data_path=("3", first, "1", second),
        split="80,20,0",
        data_cache_path=str(tmp_path / "cache"),
    )
    train, valid, test = build(data, (40, 8, 8))
    assert isinstance(train, BlendedDataset)
    assert (len(train), len(valid), test) == (40, 8, None)
    from_second = sum(train[i][0] >= 100 for i in range(40))
    assert from_second == 10
    assert tokens(train) <= set(range(40)) | set(range(100, 140))
    assert tokens(valid) <= set(range(40, 50)) | set(range(140, 150))
    assert not (tmp_path / "index-cache").exists()
    again = build(data, (40, 8, 8)).train
    assert all(np.array_equal(train[i], again[i]) for i in range(40))


def test_parts_of_a_blend_are_built_for_their_share(tmp_path: Path) -> None:
    """800 tokens make 99 samples of 8 an epoch: 302 wanted of one part, 101 of the other."""
    first, second = write(tmp_path / "a", 40), write(tmp_path / "b", 40)
    data = DataConfig(data_path=("3", first, "1", second), split="1,0,0")
    train = build(data, (400, 0, 0)).train
    assert isinstance(train, BlendedDataset)
    assert [len(part) for part in train.parts] == [(4 * 800 - 1) // 8, (2 * 800 - 1) // 8]


def test_files_of_their_own(tmp_path: Path) -> None:
    paths = {name: write(tmp_path / name, 5, 100 * n) for n, name in enumerate("abc")}
    train, valid, test = build(
        DataConfig(
            train_data_path=("1", paths["a"], "1", paths["b"]), valid_data_path=(paths["c"],)
        )
    )
    assert isinstance(train, BlendedDataset) and isinstance(valid, GPTDataset)
    assert test is None
    assert tokens(train) == {0, 1, 2, 3, 4, 100, 101, 102, 103, 104}
    assert tokens(valid) == {200, 201, 202, 203, 204}


def test_parts_that_are_not_wanted(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 3)
    train, valid, test = build(DataConfig(data_path=(prefix,)), (20, 0, 0))
    assert train is not None and valid is None and test is None


def test_mock_data() -> None:
    train, valid, test = build(DataConfig(mock_data=True), (20, 5, 0), vocab_size=50)
    assert (len(train), len(valid), test) == (20, 5, None)
    assert train[0].shape == (9,) and max(tokens(train)) < 50
    assert not np.array_equal(train[0], valid[0])


@pytest.mark.parametrize("split", ["969,30,1", "100,1,0"])
def test_too_few_documents_for_validation(
    split: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write(tmp_path / "a", 3)
    datasets = build(DataConfig(data_path=(str(prefix),), split=split), (8, 2, 0))
    assert datasets.train is not None
    assert datasets.valid is None
    assert f"--split {split} gives valid no document of" in caplog.text


@pytest.mark.parametrize("split", ["1,99,0"])
def test_too_few_documents_for_training(split: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 3)
    with pytest.raises(ValueError, match=rf"--split {split} gives train no document of .*a, which"):
        build(DataConfig(data_path=(prefix,), split=split))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give --data-path or --train-data-path"),
        ({"valid_data_path": ("x",)}, "give --data-path or --train-data-path"),
        ({"data_path": ("x",), "valid_data_path": ("y",)}, "exclude each other"),
        ({"data_path": ("x",), "split": "0,1,0"}, "--split 0,1,0 leaves nothing for training"),
        ({"data_path": ("x",), "split": "a"}, "--split 'a'"),
        ({"data_path": ("x", "y")}, "--data-path x y: give one PREFIX, or WEIGHT PREFIX pairs"),
        ({"data_path": ("1", "x", "2")}, "--data-path 1 x 2"),
        ({"train_data_path": ("0", "x", "1", "y")}, "--train-data-path: the weight 0.0"),
    ],
)
def test_flags_that_cannot_be_used(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DataConfig(**fields))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx"):
        build(DataConfig(data_path=(str(tmp_path / "nothing"),)))
    empty = write(tmp_path / "empty", 0)
    with pytest.raises(ValueError, match="--train-data-path: .*empty holds no documents"):
        build(DataConfig(train_data_path=(empty,)))


def test_token_past_the_vocabulary(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100)
    with pytest.raises(ValueError, match=r"a\.bin: sequence 99 holds the token id 99"):
        build(DataConfig(data_path=(prefix,)), vocab_size=99)


def test_weights_are_shares() -> None:
    blend = parse_data_path(["2", "a", "6", "b"], "--data-path")
    assert (blend.prefixes, blend.weights) == (("a", "b"), (0.25, 0.75))
    assert parse_data_path(["a"], "--data-path").weights is None
