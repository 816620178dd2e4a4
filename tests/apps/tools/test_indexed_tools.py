"""merge_datasets.py, inspect_index.py and verify_data.py on small files whose content is known."""

import hashlib
import json
import os
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.corpus import indexed_files
from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer.mark import TokenizerMark
from tools import inspect_index, merge_datasets, verify_data

DOCUMENTS = {
    "a": [[[1, 2, 3]], [[4], [5, 6]]],
    "b": [[[7, 8]], [], [[9]]],
    "c": [[[10, 11, 12, 13]]],
}


def write(prefix: Path, documents: list, dtype: str = "uint16", mode: int | None = None) -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            modes = None if mode is None else [mode] * len(document)
            writer.add_document([np.array(s, dtype) for s in document], modes)
    return prefix


def read(prefix: Path | str) -> list:
    dataset = IndexedDataset(prefix)
    dataset.verify()
    bounds = dataset.document_indices.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    return [[dataset[i].tolist() for i in range(start, stop)] for start, stop in pairs]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name, documents in DOCUMENTS.items():
        write(tmp_path / "in" / name, documents)
    return tmp_path / "in"


def merge(*arguments: object) -> None:
    merge_datasets.main([str(argument) for argument in arguments])


def test_a_folder_is_merged_by_name(folder: Path, tmp_path: Path, capsys) -> None:
    merge("--input", folder, "--output-prefix", tmp_path / "out" / "all")
    assert read(tmp_path / "out" / "all") == DOCUMENTS["a"] + DOCUMENTS["b"] + DOCUMENTS["c"]
    assert (
        "6 documents, 6 sequences, 13 tokens of uint16 from 3 datasets" in capsys.readouterr().out
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["all.bin", "all.idx"]


def marked(digest: str, kind: str = "HFTokenizer", size: int = 32_000) -> bytes:
    return TokenizerMark(kind, size, digest).json()


def test_the_tokenizer_of_all_is_that_of_the_whole(folder: Path, tmp_path: Path, capsys) -> None:
    for name, kind in (("a", "HFTokenizer"), ("b", "Llama2Tokenizer"), ("c", "HFTokenizer")):
        (folder / f"{name}.tokenizer").write_bytes(marked("same", kind))
    merge("--input", folder, "--output-prefix", tmp_path / "all")
    assert (tmp_path / "all.tokenizer").read_bytes() == marked("same")
    (folder / "b.tokenizer").unlink()
    merge("--input", folder, "--output-prefix", tmp_path / "all")
    assert not (tmp_path / "all.tokenizer").exists()
    assert f"{folder / 'b'}.bin: it is not known which tokenizer" in capsys.readouterr().out


def test_data_of_different_tokenizers_are_not_merged(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / "a.tokenizer").write_bytes(marked("one"))
    (folder / "c.tokenizer").write_bytes(marked("two", "GPT2BPETokenizer", 50_257))
    with pytest.raises(SystemExit) as end:
        merge("--input", folder, "--output-prefix", tmp_path / "all")
    assert str(end.value).endswith(
        f"{folder / 'a'}.bin was made with HFTokenizer of 32,000 ids (one), and {folder / 'c'}.bin "
        "with GPT2BPETokenizer of 50,257 ids (two): data of different tokenizers cannot be put "
        "together; preprocess them with the same one"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    for content in (b"{", b"[]", b'{"format": 1}', b'{"format": 1, "digest": 3}'):
        (folder / "a.tokenizer").write_bytes(content)
        with pytest.raises(SystemExit, match="a.tokenizer: it is "):
            merge("--input", folder, "--output-prefix", tmp_path / "all")


def test_prefixes_are_merged_as_given(folder: Path, tmp_path: Path) -> None:
    merge("--input", folder / "c", folder / "a", "--output-prefix", tmp_path / "x")
    assert read(tmp_path / "x") == DOCUMENTS["c"] + DOCUMENTS["a"]


def test_the_bytes_are_those_of_one_writer(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "once", [*DOCUMENTS["a"], *DOCUMENTS["b"], *DOCUMENTS["c"]])
    merge("--input", folder, "--output-prefix", tmp_path / "merged")
    for ending in ("bin", "idx"):
        merged = (tmp_path / f"merged.{ending}").read_bytes()
        assert merged == (tmp_path / f"once.{ending}").read_bytes()


def test_token_types_are_widened_and_named(folder: Path, tmp_path: Path, capsys) -> None:
    write(folder / "wide", [[[70_000]]], "int32")
    merge("--input", folder / "a", folder / "wide", "--output-prefix", tmp_path / "x")
    assert IndexedDataset(tmp_path / "x").dtype == np.int32
    assert read(tmp_path / "x") == [*DOCUMENTS["a"], [[70_000]]]
    assert "a.bin: uint16 tokens are written as int32" in capsys.readouterr().out


def test_modes_are_kept(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / "a", [[[1], [2]]], mode=1),
        write(tmp_path / "b", [[[3]]], mode=0),
    )
    merge("--input", first, second, "--output-prefix", tmp_path / "x", "--multimodal")
    modes = IndexedDataset(tmp_path / "x").modes
    assert modes is not None and modes.tolist() == [1, 1, 0]


def test_many_blocks_in_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.apps.corpus import indexed_writer as dataset_writer

    monkeypatch.setattr(dataset_writer, "_BLOCK", 1000)
    lengths = np.random.default_rng(1).integers(0, 20, 50_000)
    for name in "ab":
        with IndexedDatasetWriter(tmp_path / name, "uint16") as made:
            made.add_documents(
                np.arange(lengths.sum()) % 60_000, lengths, np.ones(len(lengths), np.int64)
            )
    tracemalloc.start()
    merge("--input", tmp_path / "a", tmp_path / "b", "--output-prefix", tmp_path / "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_500_000  # buffers; the .idx alone has 2.8 MB, tokens and copies more
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.sequence_lengths.tolist() == lengths.tolist() * 2
    halves = (tmp_path / "a.bin").read_bytes() + (tmp_path / "b.bin").read_bytes()
    assert (tmp_path / "x.bin").read_bytes() == halves


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "give --input and --output-prefix"),
        ("empty", "has no .bin and .idx files"),
        ("half", "b.idx does not exist"),
        ("floats", "wide.bin contains float32 values"),
        ("modes", "wide has a mode for each sequence"),
        ("itself", "is one of the inputs"),
        ("cut", "c.bin has 4 bytes"),
    ],
)
def test_datasets_that_cannot_be_merged(
    damage: str, message: str, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "x"
    if damage == "empty":
        folder = tmp_path / "nothing"
        folder.mkdir()
    elif damage == "half":
        (folder / "b.idx").unlink()
    elif damage == "floats":
        write(folder / "wide", [[[1.5]]], "float32")
    elif damage == "modes":
        write(folder / "wide", [[[1]]], mode=1)
    elif damage == "itself":
        output = folder / "a"
    elif damage == "cut":
        os.truncate(folder / "c.bin", 4)
    with pytest.raises(SystemExit, match=message) as caught:
        merge(*([] if damage == "nothing" else ["--input", folder, "--output-prefix", output]))
    assert str(caught.value).startswith("merge_datasets.py: error: ")
    assert not list(tmp_path.glob("x*")) and not list(tmp_path.rglob("*partial*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(self: Path, *arguments, **more):
        return opened(Path("/dev/full") if "partial" in self.name else self, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    write_something = (tmp_path / "x.bin").write_bytes(b"older")
    with pytest.raises(SystemExit, match=r"No space left on device.*x\.bin\.partial"):
        merge("--input", folder, "--output-prefix", tmp_path / "x")
    assert write_something and (tmp_path / "x.bin").read_bytes() == b"older"
    assert [p.name for p in tmp_path.glob("x*")] == ["x.bin"]


def test_counts_and_lengths(folder: Path, capsys) -> None:
    inspect_index.main([str(folder / "a"), str(folder / "b"), "--json"])
    a, b = json.loads(capsys.readouterr().out)
    assert (a["documents"], a["sequences"], a["tokens"], a["dtype"]) == (2, 3, 6, "uint16")
    assert a["bin_bytes"] == 12 and a["idx_bytes"] == 34 + 3 * 12 + 3 * 8
    assert a["tokens_per_sequence"]["largest"] == 3 and a["tokens_per_sequence"]["mean"] == 2.0
    assert b["tokens_per_document"] == {
        "count": 3, "total": 3, "smallest": 0, "largest": 2, "empty": 1, "mean": 1.0,
        "quantiles": {"5%": 0, "25%": 0, "50%": 1, "75%": 2, "95%": 2},
    }  # fmt: skip
    inspect_index.main([str(folder)])
    out = capsys.readouterr().out
    assert "b: 3 documents, 2 sequences, 3 tokens of uint16" in out and ", 1 empty" in out


def test_statistics_against_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_files, "_BLOCK", 7)
    rng = np.random.default_rng(2)
    lengths, per_document = rng.integers(0, 50, 500), np.array([3, 0, 1, 1] * 100)
    with IndexedDatasetWriter(tmp_path / "x", "int32") as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.int32), lengths, per_document)
    statistics = indexed_files.contents(IndexedDataset(tmp_path / "x"))
    ends = np.cumsum(per_document)
    documents = [lengths[e - n : e].sum() for e, n in zip(ends, per_document, strict=True)]
    for name, values in (
        ("tokens_per_sequence", lengths), ("tokens_per_document", documents),
        ("sequences_per_document", per_document),
    ):  # fmt: skip
        ours, values = statistics[name], np.array(values)
        assert (ours["count"], ours["total"]) == (len(values), values.sum())
        assert (ours["smallest"], ours["largest"]) == (values.min(), values.max())
        assert ours["empty"] == (values == 0).sum() and ours["mean"] == pytest.approx(values.mean())
        expected = np.percentile(values, indexed_files.QUANTILES, method="inverted_cdf")
        assert list(ours["quantiles"].values()) == expected.tolist()
    monkeypatch.setattr(indexed_files, "_EXACT_BELOW", 100)  # each fifth of the sequences
    sampled = indexed_files.contents(IndexedDataset(tmp_path / "x"))["tokens_per_sequence"]
    expected = np.percentile(lengths[::5], indexed_files.QUANTILES, method="inverted_cdf")
    assert list(sampled["quantiles"].values()) == expected.tolist()
    assert sampled["total"] == lengths.sum()


def test_a_document(folder: Path, capsys) -> None:
    inspect_index.main([str(folder / "a"), "--document", "1"])
    out = capsys.readouterr().out
    assert "document 1, 2 sequences, 3 tokens" in out
    assert "sequence 1, 1 tokens:\n  4\nsequence 2, 2 tokens:\n  5 6\n" in out
    inspect_index.main([str(folder / "a"), "--document", "-2", "--max-tokens", "2"])
    assert "  1 2 ... (1 more)" in capsys.readouterr().out
    inspect_index.main([str(folder / "a"), "--document", "0", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["sequences"] == [{"sequence": 0, "tokens": [1, 2, 3]}]


@pytest.mark.realdata
def test_a_document_as_text(realdata: Path, tmp_path: Path, capsys) -> None:
    from megatron.config import TokenizerConfig
    from megatron.tokenizer import build_tokenizer

    files = {"vocab_file": "gpt2-vocab.json", "merge_file": "gpt2-merges.txt"}
    found = {
        key: next((realdata / "gpt2_bpe").glob(f"*{name.split('-')[1]}"))
        for key, name in files.items()
    }
    text = "Two documents, naïvely tokenized.\nWith a second line — and a dash."
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", **{k: str(v) for k, v in found.items()}
    )
    write(tmp_path / "x", [[[0]], [build_tokenizer(config).tokenize(text)]])
    inspect_index.main(
        [str(tmp_path / "x"), "--document", "1", "--tokenizer-type", "GPT2BPETokenizer"]
        + ["--vocab-file", str(found["vocab_file"]), "--merge-file", str(found["merge_file"])]
    )
    assert capsys.readouterr().out.endswith(f"\n{text}\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--document", "2"], "--document 2: .*a has 2 documents"),
        (["--document", "0", "--max-tokens", "-1"], "--max-tokens -1"),
        (["--document", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4"],
         "sequence 2 contains the token id 6"),
        (["--tokenizer-type", "Nothing"], "--tokenizer-type Nothing is unknown"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_shown(flags: list[str], message: str, folder: Path) -> None:
    with pytest.raises(SystemExit, match=f"inspect_index.py: error: .*{message}"):
        inspect_index.main([str(folder / "a"), *flags])


def test_whole_datasets(folder: Path, capsys) -> None:
    assert verify_data.main([str(folder), "--vocab-size", "14"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [str(folder / name) for name in "abc"]
    assert (
        "2 documents, 3 sequences, 6 tokens of uint16, largest id 6 of 14, no checksums" in lines[0]
    )


def test_checksums(folder: Path, capsys) -> None:
    assert verify_data.main([str(folder), "--write-checksums"]) == 0
    digest = hashlib.sha256((folder / "a.bin").read_bytes()).hexdigest()
    assert (folder / "a.sha256").read_text().splitlines()[0] == f"{digest}  a.bin"
    subprocess.run(["sha256sum", "--check", "--quiet", "a.sha256"], cwd=folder, check=True)
    assert verify_data.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("checksums equal") == 3
    raw = bytearray((folder / "b.bin").read_bytes())
    raw[0] ^= 1  # still a token id
    (folder / "b.bin").write_bytes(bytes(raw))
    assert verify_data.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("whole") == 2
    assert f"damaged: {folder / 'b.bin'} has the SHA-256" in captured.err
    assert str(folder / "b.sha256") in captured.err
    assert verify_data.main([str(folder / "b"), "--write-checksums"]) == 0
    assert verify_data.main([str(folder)]) == 0
    assert not list(folder.glob("*partial*"))


@pytest.mark.parametrize("content", ["", "nonsense\n", "0" * 64 + "  other.bin\n"])
def test_a_damaged_file_of_checksums(content: str, folder: Path, capsys) -> None:
    (folder / "a.sha256").write_text(content)
    assert verify_data.main([str(folder / "a")]) == 1
    assert f"{folder / 'a.sha256'}" in capsys.readouterr().err


def test_damage_is_named_and_the_others_are_checked(folder: Path, capsys) -> None:
    os.truncate(folder / "a.bin", 10)
    write(folder / "b", [[[3, -1]]], "int32")
    (folder / "d.bin").write_bytes(b"")
    assert verify_data.main([str(folder / name) for name in "abcd"] + ["--vocab-size", "12"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = captured.err.splitlines()
    for line, part in zip(
        errors,
        ("a.bin has 10 bytes", "b.bin: sequence 0 contains the token id -1",
         "c.bin: sequence 0 contains the token id 13", "d.idx does not exist"), strict=True,
    ):  # fmt: skip
        assert line.startswith("damaged: ") and part in line


def test_wrong_flags_have_another_status(folder: Path, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        verify_data.main([str(folder), "--tokenizer-type", "Nothing"])
    assert caught.value.code == 2
    assert "--tokenizer-type Nothing is unknown" in capsys.readouterr().err
