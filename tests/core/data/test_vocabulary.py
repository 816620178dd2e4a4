"""Token ids past the vocabulary."""

from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data import pipeline
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.pipeline import check_vocabulary


def write(prefix: Path, sequences: list[list[float]], dtype: str = "uint16") -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequence in sequences:
            writer.add_document([np.array(sequence, dtype)])
    return IndexedDataset(prefix)


def test_names_file_sequence_id_and_vocabulary(tmp_path: Path) -> None:
    indexed = write(tmp_path / "x", [[1, 2], [3, 50_257, 4], [5]])
    check_vocabulary(indexed, 50_258, IndexCache(None))
    with pytest.raises(
        ValueError,
        match=r"x\.bin: sequence 1 contains the token id 50257.*50257 ids .*--vocab-file",
    ):
        check_vocabulary(indexed, 50_257, IndexCache(None))


def test_negative_ids(tmp_path: Path) -> None:
    indexed = write(tmp_path / "x", [[1], [2, -1]], "int32")
    with pytest.raises(ValueError, match="sequence 1 contains the token id -1"):
        check_vocabulary(indexed, 100, IndexCache(None))


def test_float_files(tmp_path: Path) -> None:
    indexed = write(tmp_path / "x", [[1.0]], "float32")
    with pytest.raises(ValueError, match=r"x\.bin contains float32 values, not token ids"):
        check_vocabulary(indexed, 100, IndexCache(None))


def test_reads_the_file_once_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = IndexCache(tmp_path / "cache")
    check_vocabulary(write(tmp_path / "x", [[1, 2]]), 10, cache)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_extremes", lambda _: pytest.fail("read again"))
        check_vocabulary(IndexedDataset(tmp_path / "x"), 10, cache)
        with pytest.raises(ValueError, match="token id 2"):
            check_vocabulary(IndexedDataset(tmp_path / "x"), 2, cache)
    with pytest.raises(ValueError, match="token id 12"):
        check_vocabulary(write(tmp_path / "x", [[1, 12]]), 10, cache)


def test_does_not_read_dtypes_within_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_extremes", lambda _: pytest.fail("read"))
    check_vocabulary(write(tmp_path / "x", [[65_535]]), 65_536, IndexCache(None))


def test_finds_the_extremes_in_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = IndexedDataset.token_blocks
    monkeypatch.setattr(IndexedDataset, "token_blocks", lambda self: blocks(self, 3))
    indexed = write(tmp_path / "x", [[5, 6, 7, 8, 90, 1, 2, 3, 4]])
    found = pipeline._extremes(indexed)["tokens_and_positions"]
    assert found[1].tolist() == [90, 4]
