"""Documents read from text files, against the .bin/.idx of the same text."""

import dataclasses
import json
import logging
import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import run_config
from torch.utils.data import DataLoader

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import DataConfig, TokenizerConfig
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import parts_of
from megatron.features.raw_text.documents import (
    RawTextDocuments,
    open_raw_text,
    read_texts,
    text_settings,
)
from megatron.features.raw_text.encoder import TextEncoder, TextSettings
from megatron.features.raw_text.flags import RawTextConfig
from megatron.features.raw_text.text_files import JsonLines, scan, text_files
from megatron.features.tokenizers.train import train_byte_level_bpe

WORDS = "the of and to in is was for on with as by at from that it an be are this".split()
RECIPE = GPTRecipe(seq_length=32, seed=7)


def texts(count: int, seed: int = 0) -> list[str]:
    """Sentences of random words; some texts are empty, some have several lines, quotes, Unicode."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lines = [
            " ".join(rng.choice(WORDS, rng.integers(1, 30))).capitalize() + "."
            for _ in range(rng.integers(0, 5))
        ]
        made.append("\n".join(lines) + rng.choice(["", "", ' "é\u2028, 漢字"', "\t\\"]))
    return made


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_byte_level_bpe([*texts(50), "<|endoftext|>"], 400, 2).save_pretrained(folder)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def write_lines(path: Path, documents: list[str], key: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"n": n, key: text}) for n, text in enumerate(documents)]
    path.write_text("\n\n".join(lines) + "\n  \n")  # with lines that hold nothing
    return path


def preprocessed(path: Path, tokenizer: TokenizerConfig, **flags) -> IndexedDataset:
    prefix = path.parent / f"{path.stem}-indexed"
    preprocess(
        PreprocessConfig(
            **{"input": (str(path),), "workers": 1, **flags}, output_prefix=str(prefix)
        ),
        tokenizer,
    )
    level = "sentence" if flags.get("split_sentences") else "document"
    return IndexedDataset(f"{prefix}_text_{level}")


def check_equal(raw: RawTextDocuments, indexed: IndexedDataset) -> None:
    assert raw.sequence_lengths.tolist() == indexed.sequence_lengths.tolist()
    assert raw.document_indices.tolist() == indexed.document_indices.tolist()
    assert raw.lengths_digest == indexed.lengths_digest
    for i in np.random.default_rng(0).permutation(len(raw)):
        assert np.array_equal(raw.get(int(i)), indexed.get(int(i)))
        assert raw.get(int(i)).dtype == indexed.dtype


def check_equal_samples(raw: RawTextDocuments, indexed: IndexedDataset, folder: Path) -> None:
    count = 3 * int(indexed.sequence_lengths.sum()) // RECIPE.seq_length
    lazy, mapped = (
        RECIPE.build(documents, range(len(documents)), count, "train", IndexCache(folder / name))
        for documents, name in ((raw, "a"), (indexed, "b"))
    )
    assert len(lazy) == len(mapped) >= count
    assert all(np.array_equal(lazy[i], mapped[i]) for i in range(len(lazy)))


@pytest.mark.parametrize("append_eod", [True, False])
def test_against_preprocessed(append_eod: bool, gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts(60))
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2, append_eod)))
    indexed = preprocessed(path, gpt2, append_eod=append_eod)
    check_equal(raw, indexed)
    check_equal_samples(raw, indexed, tmp_path)


def test_folder_and_glob_against_preprocessed(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    for n, name in enumerate(["b/2.json", "b/1.jsonl", "a.jsonl"]):
        write_lines(tmp_path / "in" / name, texts(10, seed=n))
    encoder = TextEncoder(TextSettings(gpt2))
    indexed = preprocessed(tmp_path / "in", gpt2)
    check_equal(RawTextDocuments.open(str(tmp_path / "in"), encoder), indexed)
    (tmp_path / "in" / "b" / "1.jsonl").write_bytes(b'\xef\xbb\xbf\n{"text": "no line end"}')
    pattern = str(tmp_path / "in" / "b" / "*")
    raw = RawTextDocuments.open(pattern, encoder)
    check_equal(raw, preprocessed(tmp_path / "again", gpt2, input=(pattern,)))
    assert raw.text(0) == "no line end"


def test_sentences_against_preprocessed(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts(60))
    indexed = preprocessed(path, gpt2, split_sentences=True, sentence_splitter="rules")
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2, splitter="rules")))
    check_equal(raw, indexed)
    assert len(raw) > len(raw.document_indices) > 10
    ends = TextEncoder(TextSettings(gpt2, append_eod=True, splitter="rules"))
    flags = {"split_sentences": True, "sentence_splitter": "rules", "append_eod": True}
    check_equal(RawTextDocuments.open(str(path), ends), preprocessed(path, gpt2, **flags))


def test_presplit_sentences(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    documents = ["One is.\nTwo was.\n\n \nThree.\n", "Alone.", "", "\n", "Last one\nof it."]
    path = write_lines(tmp_path / "text.jsonl", documents)
    encoder = TextEncoder(TextSettings(gpt2, presplit_sentences=True))
    raw = RawTextDocuments.open(str(path), encoder)
    sentences = [[s for s in d.split("\n") if s.strip()] for d in documents]
    with IndexedDatasetWriter(tmp_path / "by-hand", encoder.dtype) as writer:
        for document in filter(None, sentences):
            writer.add_document([encoder.tokenizer.tokenize(s) for s in document])
    check_equal(raw, IndexedDataset(tmp_path / "by-hand"))
    assert raw.document_indices.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_tables_against_json_lines(ending: str, gpt2: TokenizerConfig, tmp_path: Path) -> None:
    """Line breaks and commas in quoted fields of CSV; quotation marks as they stand in TSV."""
    documents = [t for t in texts(40) if t]
    if ending == ".csv":
        quoted = ['"' + t.replace('"', '""') + '"' for t in documents]
        rows = "".join(f"{n},{t},x\r\n" for n, t in enumerate(quoted))
    else:
        documents = [" ".join(t.split()).replace("\t", "") for t in documents] + ['a "b', "c"]
        rows = "".join(f"{n}\t{t}\tx\n" for n, t in enumerate(documents))
    delim = "," if ending == ".csv" else "\t"
    table = tmp_path / f"table{ending}"
    table.write_text(f"\ufeffid{delim}text{delim}more\n{rows}", newline="")
    encoder = TextEncoder(TextSettings(gpt2))
    raw = RawTextDocuments.open(str(table), encoder)
    lines = RawTextDocuments.open(str(write_lines(tmp_path / "l.jsonl", documents)), encoder)
    assert len(raw) == len(documents)
    order = np.random.default_rng(1).permutation(len(raw)).tolist()
    assert all(np.array_equal(raw.get(i), lines.get(i)) for i in order)
    assert [raw.text(i) for i in order] == [documents[i] for i in order]


@pytest.mark.parametrize("size", [1, 7, 97])
def test_ranges_are_cut_anywhere(size: int, gpt2, tmp_path: Path, monkeypatch) -> None:
    """Ranges begin inside lines, at their first and last bytes and in empty ones."""
    path = write_lines(tmp_path / "text.jsonl", texts(15))
    path.write_text("\n" + path.read_text() + path.read_text().replace("\n\n", "\n"))
    encoder = TextEncoder(TextSettings(gpt2))
    whole = RawTextDocuments.open(str(path), encoder, cache=IndexCache(None))
    monkeypatch.setattr("megatron.features.raw_text.text_files._RANGE_BYTES", size)
    cut = RawTextDocuments.open(str(path), encoder, cache=IndexCache(None))
    assert len(cut._records[0].ranges()) > 30
    for name in ("record_offsets", "sequence_lengths", "document_indices"):
        assert np.array_equal(whole._index[name], cut._index[name])


@pytest.mark.proof
def test_processes_find_the_same(gpt2: TokenizerConfig, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.features.raw_text.text_files._RANGE_BYTES", 2000)
    path = write_lines(tmp_path / "text.jsonl", texts(100))
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    found = scan(raw._records, raw._encoder, workers=2)
    assert all(np.array_equal(found[name], raw._index[name]) for name in found)
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match=rf"{path}, line \d+: no key \"text\""):
        RawTextDocuments.open(str(path), raw._encoder, workers=2)


def test_get_takes_parts(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.jsonl", ["the of and to in is was for on with as by"] * 3)
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    whole = raw.get(1)
    assert np.array_equal(raw.get(1, 2), whole[2:])
    assert np.array_equal(raw.get(1, 2, 3), whole[2:5])
    for arguments in ((3,), (-1,), (0, -1), (0, 0, len(whole) + 1), (0, 1, -1)):
        with pytest.raises(IndexError, match=r"text\.jsonl"):
            raw.get(*arguments)


def test_few_documents_are_kept(gpt2: TokenizerConfig, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.features.raw_text.documents._KEPT_TOKENS", 100)
    path = write_lines(tmp_path / "text.jsonl", [" ".join(WORDS)] * 40)
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    for i in (0, *range(40), 3):
        raw.get(i)
        assert raw._kept_tokens == sum(len(s) for d in raw._kept.values() for s in d)
        assert raw._kept_tokens <= 100 or len(raw._kept) == 1
    assert list(raw._kept)[-1] == 3


def test_index_is_taken_from_the_cache(gpt2: TokenizerConfig, tmp_path: Path, monkeypatch) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts(20))
    encoder = TextEncoder(TextSettings(gpt2))
    first = RawTextDocuments.open(str(path), encoder)
    monkeypatch.setattr(
        "megatron.features.raw_text.documents.scan", lambda *_: pytest.fail("scanned")
    )
    again = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    assert np.array_equal(first.get(3), again.get(3))


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"append_eod": True}},
        {"settings": {"splitter": "rules"}},
        {"settings": {"presplit_sentences": True}},
        {"key": "other"},
        {"content": True},
        {"date": True},
        {"vocabulary": True},
    ],
    ids=str,
)
def test_index_depends_on(change: dict, gpt2: TokenizerConfig, tmp_path: Path) -> None:
    records = [{"text": t, "other": t.upper()} for t in texts(20) if t]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    files = [Path(name) for name in (gpt2.vocab_file, gpt2.merge_file)]
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocab, merges = (str(tmp_path / file.name) for file in files)
    tokenizer = dataclasses.replace(gpt2, vocab_file=vocab, merge_file=merges)
    RawTextDocuments.open(str(path), TextEncoder(TextSettings(tokenizer)))
    settings = TextSettings(tokenizer, **change.get("settings", {}))
    key = change.get("key", "text")
    stat = path.stat()
    if "content" in change:  # of the same size and date
        path.write_bytes(path.read_bytes().replace(b"the", b"eht"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if "date" in change:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    if "vocabulary" in change:  # other files at the same paths
        train_byte_level_bpe([*texts(9), "<|endoftext|>"], 300, 2).save_pretrained(tmp_path)
    RawTextDocuments.open(str(path), TextEncoder(settings), text_key=key)
    entries = [p for p in (tmp_path / "index-cache").iterdir() if p.is_dir()]
    assert len(entries) == 2


def test_a_change_between_runs_is_said(gpt2, tmp_path: Path, caplog) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts(20))
    encoder = TextEncoder(TextSettings(gpt2))
    with caplog.at_level(logging.WARNING):
        RawTextDocuments.open(str(path), encoder)
        RawTextDocuments.open(str(write_lines(tmp_path / "other.jsonl", texts(3))), encoder)
        assert not caplog.records
        write_lines(path, texts(21))
        RawTextDocuments.open(str(path), encoder)
    assert "text.jsonl changed since its documents were last indexed" in caplog.text


def test_a_change_in_use_is_an_error(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    documents = [t for t in texts(20) if t]
    path = write_lines(tmp_path / "text.jsonl", documents)
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    pickled = pickle.dumps(raw)
    content = path.read_text()
    path.write_text(content.replace(documents[7][:4], documents[7][:4] + " more of it", 1))
    for attempt in (partial(raw.get, 7), raw.verify, partial(pickle.loads, pickled)):
        with pytest.raises(ValueError, match=r"text\.jsonl has changed while it was in use"):
            attempt()
    lines = content.split("\n\n")  # as many bytes, other tokens
    lines[8] = re.sub(r"(?<= )[a-z]+(?= )", lambda word: word.group().upper(), lines[8])
    path.write_text("\n\n".join(lines))
    with pytest.raises(ValueError, match="has changed while it was in use"):
        raw.get(8)
    path.write_text("")
    with pytest.raises(ValueError, match="has changed while it was in use"):
        raw.get(9)


def test_loader_processes_read_the_same(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts(40))
    raw = RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))
    assert len(pickle.dumps(raw)) < 2000  # neither tokens nor tokenizer
    cache = IndexCache.next_to(str(path), None)
    dataset = RECIPE.build(raw, range(len(raw)), 20, "train", cache)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for i, sample in zip(range(20), loader, strict=False):
        assert torch.equal(torch.as_tensor(sample), torch.from_numpy(dataset[i]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"content": "x"}', 'no key "text"'),
        ('{"text": 3}', '"text" is not a string'),
        ('{"text": "\\ud800"}', ""),
    ],
)
def test_malformed_lines(line: str, message: str, gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the"}\n' * 2 + "\n" + line + "\n" + '{"text": "of"}\n')
    with pytest.raises(ValueError, match=rf"text\.jsonl, line 4: .*{message}"):
        RawTextDocuments.open(str(path), TextEncoder(TextSettings(gpt2)))


@pytest.mark.parametrize("size", [10, 30, 1000])
def test_line_without_end(size: int, gpt2: TokenizerConfig, tmp_path: Path, monkeypatch) -> None:
    """It is refused after so many bytes; the ranges inside it hold nothing."""
    monkeypatch.setattr("megatron.features.raw_text.text_files.LONGEST_RECORD", 20)
    monkeypatch.setattr("megatron.features.raw_text.text_files._RANGE_BYTES", size)
    path, encoder = tmp_path / "text.jsonl", TextEncoder(TextSettings(gpt2))
    path.write_text(f'{{"text": "{"a" * 8}"}}\n' * 3)  # of 20 bytes and an end
    assert len(RawTextDocuments.open(str(path), encoder)) == 3
    path.write_text(f'{{"text": "{"a" * 8}"}}\n\n{{"text": "{"a" * 200}"}}\n{{"text": "b"}}')
    with pytest.raises(ValueError, match=r"text\.jsonl, line 3: longer than"):
        RawTextDocuments.open(str(path), encoder)
    (records,) = (JsonLines(file, "text") for file in text_files(str(path)))
    found = [start for span in records.ranges()[3:] for start, _ in records.read(*span)]
    assert set(found) <= {235}


@pytest.mark.parametrize("row", ["a,", 'a,"'])
def test_row_without_end(row: str, gpt2: TokenizerConfig, tmp_path: Path, monkeypatch) -> None:
    """A table's longest line and field, which a quotation mark may begin, are those of JSON."""
    monkeypatch.setattr("megatron.features.raw_text.text_files.LONGEST_RECORD", 1000)
    end = "long " * 300 if row == "a," else "line\n" * 300
    (tmp_path / "table.csv").write_text(f"a,text\nb,the\n{row}{end}")
    with pytest.raises(ValueError, match=r"table\.csv, line 3: not a row .*(longer|larger) than"):
        RawTextDocuments.open(str(tmp_path / "table.csv"), TextEncoder(TextSettings(gpt2)))


def test_files_that_cannot_be_used(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    encoder = TextEncoder(TextSettings(gpt2))
    (tmp_path / "packed.jsonl.gz").touch()
    (tmp_path / "nothing.jsonl").touch()
    (tmp_path / "array.json").write_text('[\n{"text": "the"}]')
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "short.csv").write_text('a,text\n1,"2\n3"\n4\n')
    (tmp_path / "bytes.csv").write_bytes(b"a,text\n1,2\n3,\xff\n")
    (tmp_path / "empty").mkdir()
    for name, error, message in [
        ("absent.jsonl", FileNotFoundError, r"absent\.jsonl does not exist"),
        ("*.txt", FileNotFoundError, r"\*\.txt matches no file"),
        ("empty", FileNotFoundError, "empty is a folder without files"),
        ("packed.jsonl.gz", ValueError, r"packed\.jsonl\.gz cannot be read .* decompress it"),
        ("nothing.jsonl", ValueError, r"nothing\.jsonl contains no document"),
        ("array.json", ValueError, r"array\.json, line 1: .* the file is one JSON array"),
        ("table.csv", ValueError, r"--text-key text: .*table\.csv has no such column.*a, b"),
        ("short.csv", ValueError, r"short\.csv, line 4: no column \"text\""),
        ("bytes.csv", ValueError, r"bytes\.csv, line 3: not a row of a table"),
    ]:
        with pytest.raises(error, match=message):
            RawTextDocuments.open(str(tmp_path / name), encoder)


def test_no_end_of_document(tmp_path: Path) -> None:
    train_byte_level_bpe(texts(9), 300, 2).save_pretrained(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    vocab.pop("<|endoftext|>", None)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    path = write_lines(tmp_path / "text.jsonl", ["the", "of"])
    with pytest.raises(ValueError, match="--append-eod: .*no-append-eod"):
        RawTextDocuments.open(str(path), TextEncoder(TextSettings(tokenizer, append_eod=True)))


def kind_of(path: Path | str, **flags: Any) -> str:
    """What reads a data path."""
    config = run_config(data=DataConfig(data_path=(str(path),)), sections=(RawTextConfig(**flags),))
    train = parts_of(config).train
    assert train is not None
    return train.sources[0].kind


def test_flags(gpt2: TokenizerConfig, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the of", "body": "The is. It was."}\n')
    (tmp_path / "pair.json.idx").touch()
    assert kind_of(path) == "text"
    assert kind_of("data/books_text_document") == "indexed"
    assert kind_of(tmp_path) == "indexed" and kind_of(tmp_path, lazy_loader=True) == "text"
    assert kind_of(tmp_path / "pair.json", lazy_loader=True) == "indexed"
    config = RawTextConfig(eval_text_key="body", presplit_sentences=False)
    assert text_settings(config, gpt2) == TextSettings(gpt2, append_eod=True)
    sentences = text_settings(config, gpt2, sentences=True)
    assert not sentences.append_eod and sentences.splitter in ("punkt", "rules")
    encoder, cache = TextEncoder(sentences), IndexCache(None)
    assert open_raw_text(str(path), config, encoder, cache).text(0) == "the of"
    (tmp_path / "a.csv").write_text("n\ttext\n1\tthe\n")
    tabs = RawTextConfig(delim=r"\t")
    assert open_raw_text(str(tmp_path / "a.csv"), tabs, encoder, cache).text(0) == "the"
    with pytest.raises(ValueError, match="--delim ';;' must be one character"):
        open_raw_text(str(tmp_path / "a.csv"), RawTextConfig(delim=";;"), encoder, cache)
    other = open_raw_text(str(path), RawTextConfig(text_key="body"), encoder, cache)
    assert other.text(0) == "The is. It was."
    assert len(other) == 2
    assert list(read_texts(str(path), RawTextConfig(text_key="body"))) == ["The is. It was."]


@pytest.mark.realdata
def test_openwebtext_against_preprocessed(realdata: Path, tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(realdata / "gpt2_bpe" / "gpt2-vocab.json"),
        merge_file=str(realdata / "gpt2_bpe" / "gpt2-merges.txt"),
    )
    (source,) = (realdata / "openwebtext").glob("*.json*")
    path = tmp_path / "owt.jsonl"
    path.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:200]))
    cache = IndexCache(tmp_path / "cache")
    encoder = TextEncoder(TextSettings(tokenizer, append_eod=True))
    raw = RawTextDocuments.open(str(path), encoder, cache=cache)
    indexed = preprocessed(path, tokenizer, append_eod=True)
    check_equal(raw, indexed)
    recipe = GPTRecipe(seq_length=1024, seed=1234)
    lazy, mapped = (
        recipe.build(d, range(10, 190), 400, "train", IndexCache(None)) for d in (raw, indexed)
    )
    assert all(np.array_equal(lazy[i], mapped[i]) for i in range(0, 400, 3))
