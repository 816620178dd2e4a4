"""From blends to datasets."""

from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import DataConfig
from megatron.data.blend import BlendedDataset
from megatron.data.build import DatasetBuilder, Datasets, SourceReader
from megatron.data.gpt_dataset import GPTDataset, GPTRecipe
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import INDEXED, Blend, BlendReader, DataSource


def write(prefix: Path, documents: int, first_token: int = 0) -> str:
    """Documents of 20 tokens: first_token + the document's number."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for number in range(documents):
            writer.add_document([np.full(20, first_token + number)])
    return str(prefix)


def builder(cache_path: Path | None = None) -> DatasetBuilder:
    reader = SourceReader(
        lambda path, source: IndexedDataset(path), GPTRecipe(seq_length=8, seed=1234)
    )
    return DatasetBuilder(
        {INDEXED: lambda: reader}, None if cache_path is None else str(cache_path)
    )


def build(data: DataConfig, counts: tuple[int, int, int] = (20, 5, 2)) -> Datasets:
    found = builder(Path(data.data_cache_path) if data.data_cache_path else None)
    return found.datasets(BlendReader().parts(data), counts)


def tokens(dataset: object) -> set[int]:
    assert dataset is not None
    return {int(t) for i in range(len(dataset)) for t in dataset[i]}  # type: ignore


def test_one_prefix_is_split(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100)
    train, valid, test = build(DataConfig(data_path=(prefix,), split="90,8,2"))
    assert isinstance(train, GPTDataset)
    assert len(train) >= 20 and len(valid["valid"]) >= 5 and len(test["test"]) >= 2
    assert tokens(train) <= set(range(90))
    assert tokens(valid["valid"]) <= set(range(90, 98))
    assert tokens(test["test"]) <= {98, 99}
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
    assert (len(train), len(valid["valid"]), test) == (40, 8, {})
    from_second = sum(train[i][0] >= 100 for i in range(40))
    assert from_second == 10
    assert tokens(train) <= set(range(40)) | set(range(100, 140))
    assert tokens(valid["valid"]) <= set(range(40, 50)) | set(range(140, 150))
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
    assert isinstance(train, BlendedDataset) and isinstance(valid["valid"], GPTDataset)
    assert test == {}
    assert tokens(train) == {0, 1, 2, 3, 4, 100, 101, 102, 103, 104}
    assert tokens(valid["valid"]) == {200, 201, 202, 203, 204}


def test_ranges_of_documents_and_several_validation_sets(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 40), write(tmp_path / "b", 40, first_token=100)
    train, valid, _ = build(
        DataConfig(
            train_weighted_split_paths=(f"t: 0.5 0:0.9 {a}, 0.5 0:0.5 {b}",),
            valid_weighted_split_paths=(f"first: 1 0.9:1 {a}", f"both: 1 0.9:1 {a}, 3 0.5:1 {b}"),
        ),
        (400, 8, 0),
    )
    assert tokens(train) == set(range(36)) | set(range(100, 120))
    assert list(valid) == ["first", "both"]
    assert tokens(valid["first"]) <= {36, 37, 38, 39}
    assert tokens(valid["both"]) <= {36, 37, 38, 39} | set(range(120, 140))
    assert sum(valid["both"][i][0] >= 100 for i in range(8)) == 6


def test_a_range_is_split_within_itself(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100)
    data = DataConfig(data_path=(f"{prefix}@0.5:1",), split="80,20,0")
    train, valid, _ = build(data, (200, 40, 0))
    assert tokens(train) == set(range(50, 90)) and tokens(valid["valid"]) == set(range(90, 100))


def test_files_of_a_source_share_its_weight_by_tokens(tmp_path: Path) -> None:
    """And a blend without weights is one of all tokens."""
    a, b, c = (write(tmp_path / n, count, start) for n, count, start in
               (("a", 30, 0), ("b", 10, 100), ("c", 40, 200)))  # fmt: skip
    sources = (DataSource((a, b), weight=1.0), DataSource((c,), weight=3.0))
    blend = builder().samples(Blend("--train-data", sources), "train", 160)
    unweighted = (DataSource((a, b)), DataSource((c,)))
    proportional = builder().samples(Blend("--train-data", unweighted), "train", 160)
    for found, shares in ((blend, (30, 10, 120)), (proportional, (60, 20, 80))):
        assert found is not None
        first = np.array([found[i][0] for i in range(160)])
        counts = ((first < 100).sum(), ((first >= 100) & (first < 200)).sum(), (first >= 200).sum())
        assert counts == shares
        assert {piece.source for piece in found.origin(0)} <= {a, b, c}


def test_weights_for_some(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 5), write(tmp_path / "b", 5)
    blend = Blend("--train-data", (DataSource((a,), weight=1.0), DataSource((b,))))
    with pytest.raises(ValueError, match="--train-data: some corpora have a weight and that of"):
        builder().samples(blend, "train", 5)


def test_parts_that_are_not_wanted(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 3)
    train, valid, test = build(DataConfig(data_path=(prefix,)), (20, 0, 0))
    assert train is not None and valid == {} and test == {}


@pytest.mark.parametrize("split", ["969,30,1", "100,1,0"])
def test_too_few_documents_for_validation(
    split: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write(tmp_path / "a", 3)
    datasets = build(DataConfig(data_path=(str(prefix),), split=split), (8, 2, 0))
    assert datasets.train is not None
    assert datasets.valid == {}
    assert f"--split {split} gives valid no document of" in caplog.text


def test_one_process_warns_of_what_all_see(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    build(DataConfig(data_path=(str(write(tmp_path / "a", 3)),), split="969,30,1"), (8, 2, 0))
    assert not caplog.messages


def test_a_file_too_small_for_validation_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = write(tmp_path / "a", 100), write(tmp_path / "b", 20, first_token=100)
    data = DataConfig(data_path=("0.5", large, "0.5", small), split="98,2,0")
    train, valid, _ = build(data, (100, 6, 0))
    assert tokens(train) & set(range(100, 120))
    assert tokens(valid["valid"]) == {98, 99} and len(valid["valid"]) == 6
    assert "gives valid no document of" in caplog.text


@pytest.mark.parametrize("split", ["1,99,0"])
def test_too_few_documents_for_training(split: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 3)
    with pytest.raises(ValueError, match=rf"--split {split} gives train no document of .*a, which"):
        build(DataConfig(data_path=(prefix,), split=split))


@pytest.mark.parametrize("fields", [{}, {"valid_data_path": ("x",)}])
def test_no_training_data(fields: dict) -> None:
    with pytest.raises(ValueError, match="give --data-path, --train-data-path or --train-data"):
        build(DataConfig(**fields))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--data-path .*nothing\.idx"):
        build(DataConfig(data_path=(str(tmp_path / "nothing"),)))
    empty = write(tmp_path / "empty", 0)
    with pytest.raises(ValueError, match="--train-data-path: .*empty has no documents"):
        build(DataConfig(train_data_path=(empty,)))
    few = write(tmp_path / "few", 3)
    with pytest.raises(ValueError, match=r"the range 0:0\.1 of .*few, which has 3 documents"):
        build(DataConfig(train_data_path=(f"{few}@0:0.1",)))


def test_a_type_that_the_model_cannot_be_trained_on() -> None:
    blend = Blend("--train-data", (DataSource(("x",), kind="tape"),))
    with pytest.raises(ValueError, match="x: .* cannot be trained on data of the type tape"):
        builder().samples(blend, "train", 5)


def test_exact_epochs_of_a_blend_end_with_the_first_file(tmp_path: Path) -> None:
    """However many samples are wanted: 100 and 200 tokens by equal weights, read twice."""
    paths = [write(tmp_path / name, count) for name, count in (("a", 5), ("b", 10))]
    recipe = GPTRecipe(seq_length=8, seed=1234, exact_epochs=2)
    reader = SourceReader(lambda path, source: IndexedDataset(path), recipe)
    whole = DatasetBuilder({INDEXED: lambda: reader}, exact=True)
    for wanted in (3, 5000):
        sources = tuple(DataSource((path,), weight=1.0) for path in paths)
        train = whole.samples(Blend("--data-path", sources), "train", wanted)
        assert len(train.parts[0]) == (2 * 100 - 1) // 8 and len(train) == 2 * 23
        assert [train[i].shape for i in range(len(train))] == [(9,)] * len(train)
