"""Arrays, text, Parquet and the standard input, against the same documents as JSON lines."""

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path

import pytest
import zstandard
from samples import sampled

from megatron.apps.corpus.preprocessing.inputs import (
    Form,
    InputFile,
    PreprocessConfig,
    find_inputs,
    partition,
)
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.apps.corpus.preprocessing.readers import read_blocks
from megatron.config import ConfigError, TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.features.raw_text.records import BadLine, read_lines
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[4]
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_byte_level_bpe(["the words of a text"], 270, 2).save_pretrained(folder)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


@pytest.fixture
def texts() -> list[str]:
    chance = random.Random(2)
    characters = [
        "a",
        " ",
        "\n",
        "\n\n",
        "ż",
        "日本",
        "😀",
        '"',
        "\\",
        "[",
        "]",
        "{",
        "}",
        ",",
        "\r\n",
    ]
    found = ["".join(chance.choices(characters, k=chance.randrange(1, 400))) for _ in range(200)]
    return [*found, "[]", "{}", " ", "\u2028", "x" * 9000, "last"]


@pytest.fixture(autouse=True)
def block_bytes(request, monkeypatch):
    """Many blocks, but for tests of :data:`EACH_SIZE`."""
    size = getattr(request, "param", 300)
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", size)
    monkeypatch.setattr("megatron.features.raw_text.records._ARRAY_BYTES", size)


EACH_SIZE = pytest.mark.parametrize(
    "block_bytes", [1 << 20, 300], ids=["one block", "many blocks"], indirect=True
)


def run(paths: list[Path] | Path, prefix: Path, tokenizer: TokenizerConfig, **flags):
    inputs = paths if isinstance(paths, list) else [paths]
    names = tuple(map(str, inputs))
    given = {"workers": 1, **flags}
    return preprocess(PreprocessConfig(input=names, output_prefix=str(prefix), **given), tokenizer)


def decoded(prefix: Path, tokenizer: TokenizerConfig) -> list[str]:
    """The documents of an indexed dataset."""
    built = build_tokenizer(tokenizer)
    return [built.detokenize(sequence.tolist()) for sequence in IndexedDataset(prefix)]


# Arrays


@EACH_SIZE
@pytest.mark.parametrize(
    "indent, packing, ascii_only",
    sampled(
        product([None, 1], PACKERS, [True, False]),
        lambda case: case in ((None, "", True), (1, "", False), (1, ".gz", True)),
    ),
)
def test_array(tmp_path, tokenizer, texts, indent, packing, ascii_only):
    path = tmp_path / f"in.json{packing}"
    records = [{"n": [1.5, -3, None, {"a": i}], "text": text} for i, text in enumerate(texts)]
    data = json.dumps(records, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(PACKERS[packing](f" \r\n{data}\n ".encode("utf-8-sig")))
    run(path, tmp_path / "p", tokenizer)
    assert decoded(tmp_path / "p_text_document", tokenizer) == texts


@pytest.mark.parametrize(
    "data, message",
    [
        ('[{"text": "a"}, {"text": "b"', "item 2 of the array: not JSON"),
        ('[{"text": "a"}, {"text": 1e}]', "item 2 of the array: not JSON"),
        ('[{"text": "a"} {"text": "b"}]', "item 2 of the array: expected , or ], found '{'"),
        ('[{"text": "a"},]', "item 2 of the array: not JSON"),
        ('[{"text": "a"}', "found the end of the file"),
        ('["a"]\n["b"]', "something follows the array; is this a file of JSON lines"),
        (b'[{"text": "\xff"}]', "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"text": "a"}, {"text": 5}]', 'in.json, item 2: "text" is not a string'),
        ("[]", "contains no document"),
        ("[" + '"' + "a" * 5000 + "]", "more than 4000 bytes long, or never ending"),
    ],
)
@EACH_SIZE
def test_array_that_is_wrong(tmp_path, tokenizer, data, message):
    path = tmp_path / "in.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError) as error:
        run(path, tmp_path / "out" / "p", tokenizer, max_line_bytes=4000)
    assert message in str(error.value) and str(path) in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("size", range(1, 9))
def test_array_items_are_not_cut(tmp_path, tokenizer, monkeypatch, size):
    """A number may continue where what was read of it ends."""
    monkeypatch.setattr("megatron.features.raw_text.records._ARRAY_BYTES", size)
    path = tmp_path / "in.json"
    path.write_text('[12345, {"text": "a"}, 678]')
    summary = run(path, tmp_path / "p", tokenizer, on_bad_line="skip")
    assert summary.bad_lines == {"not a JSON object": 2}


def test_json_lines_named_json(tmp_path, tokenizer):
    (tmp_path / "in.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    run(tmp_path / "in.json", tmp_path / "p", tokenizer)
    assert decoded(tmp_path / "p_text_document", tokenizer) == ["a", "b"]


@pytest.mark.realdata
def test_array_of_alpaca(realdata, tmp_path, tokenizer):
    path = realdata / "sft" / "alpaca_en_demo.json"
    run(path, tmp_path / "p", tokenizer, json_keys=("instruction", "output"))
    records = json.loads(path.read_text())
    for key in ("instruction", "output"):
        wanted = [record[key] for record in records if record[key]]
        assert decoded(tmp_path / f"p_{key}_document", tokenizer) == wanted


# Text


@EACH_SIZE
@pytest.mark.parametrize("packing", PACKERS)
def test_text_file_is_a_document(tmp_path, tokenizer, texts, packing):
    folder = tmp_path / "in"
    folder.mkdir()
    for number, text in enumerate(texts):
        data = PACKERS[packing](text.encode("utf-8-sig" if number % 2 else "utf-8"))
        (folder / f"{number:03}.txt{packing}").write_bytes(data)
    run(folder, tmp_path / "p", tokenizer)
    assert decoded(tmp_path / "p_text_document", tokenizer) == texts


@EACH_SIZE
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_documents_between_empty_lines(tmp_path, tokenizer, newline):
    documents = ["one line", "two\nlines", "  indented", "ż" * 500, "last"]
    gaps = ["\n\n", "\n \t\n", "\n\n\n\n", "\n\n"]
    text = "\n\n" + "".join(d + g for d, g in zip(documents, [*gaps, "\n"], strict=True))
    path = tmp_path / "in.txt"
    path.write_bytes(text.replace("\n", newline).encode())
    run(path, tmp_path / "p", tokenizer, txt_documents="blank-line")
    found = decoded(tmp_path / "p_text_document", tokenizer)
    assert [text.replace("\r\n", "\n") for text in found] == documents


@pytest.mark.realdata
def test_documents_of_berts_sample(realdata, tmp_path, tokenizer):
    path = realdata / "corpora" / "bert_sample_text.txt"
    flags = {"txt_documents": "blank-line", "split_sentences": True, "sentence_splitter": "rules"}
    summary = run(path, tmp_path / "p", tokenizer, **flags).keys["text"]
    wanted = [part.strip("\n") for part in path.read_text().split("\n\n") if part.strip()]
    assert summary.documents == len(wanted) > 1 and summary.sequences > summary.documents


@pytest.mark.parametrize(
    "content, flags, message",
    [
        (b"a\nb\n\xff", {}, "in.txt, line 3: not UTF-8"),
        (b"a\n\nb\n\xff\n\nc", {"txt_documents": "blank-line"}, "in.txt, line 4: not UTF-8"),
        (b"a" * 500, {"max_line_bytes": 400}, "in.txt, line 1: longer than --max-line-bytes"),
        (
            b"a\n\n" + b"b\n" * 500 + b"\nc",
            {"txt_documents": "blank-line", "max_line_bytes": 400},
            "in.txt, line 3: longer than --max-line-bytes",
        ),
    ],
)
def test_text_that_is_wrong(tmp_path, tokenizer, content, flags, message):
    path = tmp_path / "in.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(path, tmp_path / "out" / "p", tokenizer, **flags)
    if flags.get("txt_documents"):
        summary = run(path, tmp_path / "p", tokenizer, on_bad_line="skip", **flags)
        assert decoded(tmp_path / "p_text_document", tokenizer)[-1] == "c"
        assert sum(summary.bad_lines.values()) == 1


def test_text_has_one_key(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(
        ConfigError, match="is plain text, with one text per document: --json-keys a b"
    ):
        run(tmp_path / "in.txt", tmp_path / "p", tokenizer, json_keys=("a", "b"))


# Lines and paragraphs


class Pieces(io.RawIOBase):
    """Gives what it contains in pieces of random sizes."""

    def __init__(self, data: bytes, chance: random.Random) -> None:
        self._data, self._chance = data, chance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        size = self._chance.randint(1, len(buffer))
        found, self._data = self._data[:size], self._data[size:]
        buffer[: len(found)] = found
        return len(found)


def paragraphs_of(path: Path, longest: int) -> list[tuple[int, bytes | BadLine]]:
    status = path.stat()
    file = InputFile(path, Form.PARAGRAPHS, status.st_size, status.st_mtime_ns, is_packed=False)
    return [record for block in read_blocks([file], (), longest) for record in block.records]


@EACH_SIZE
@pytest.mark.parametrize("seed", sampled(range(60), lambda seed: seed < 30))
def test_lines_and_paragraphs_against_splitting_at_once(tmp_path, seed):
    """Whole records whatever the pieces that are read; of a long one, the limit and no more."""
    chance = random.Random(seed)
    parts = [b"a", b"bc" * 30, b"\n", b"\n\n", b" ", b"\n \t\r\n", b"\r\n"]
    data = b"".join(chance.choices(parts, k=chance.randrange(200)))
    longest = chance.choice([20, 200, 10_000])
    stream = io.BufferedReader(Pieces(data, chance), chance.choice([1, 7, 64]))
    found = list(read_lines(stream, longest))
    wanted = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    assert [line if len(line) <= longest else None for _, line in found] == [
        line if len(line) <= longest else None for line in wanted
    ]
    assert all(len(line) <= longest + 2 for _, line in found)
    assert [at for at, _ in found] == [
        sum(len(w) + 1 for w in wanted[:n]) for n in range(len(found))
    ]

    path = tmp_path / "in.txt"
    path.write_bytes(data)
    records = paragraphs_of(path, longest)
    blank = re.compile(rb"(?:\A|\n)(?:\s*\n)+|(?:\A|\n)\s*\Z")
    texts = [text.rstrip(b"\r\n") for text in blank.split(data) if text.strip()]
    assert len(records) == len(texts)
    for (number, content), text in zip(records, texts, strict=True):
        assert wanted[number - 1].rstrip() == text.split(b"\n")[0].rstrip()
        if len(text) <= longest:
            assert content == text
        else:
            assert isinstance(content, BadLine) and content.number == number


@pytest.mark.parametrize("data", [b"ab\n\nc\n", b"\n\n", b"abc", b"a\n" * 4, b"", b"abcdef\ng"])
@pytest.mark.parametrize("longest", [1, 100])
def test_each_line_belongs_to_one_range(tmp_path, data, longest):
    """Wherever a file is cut in three."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with path.open("rb") as file:
        whole = list(read_lines(file, longest))
        assert len(whole) == len(data.splitlines())
        for first in range(len(data) + 1):
            for second in range(first, len(data) + 1):
                cuts = [(0, first), (first, second), (second, len(data))]
                found = []
                for start, stop in cuts:
                    file.seek(0)
                    found += read_lines(file, longest, start, stop) if start < stop else []
                assert found == whole


# Parquet


@pytest.fixture
def parquet():
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    def write(path: Path, columns: dict, **options) -> None:
        parquet.write_table(pyarrow.table(columns), path, **options)

    return write


@EACH_SIZE
@pytest.mark.parametrize(
    "kind, rows_in_group",
    sampled(
        product(["string", "large_string", "dictionary"], [1, 60, 100_000]),
        lambda case: case in (("string", 60), ("large_string", 100_000), ("dictionary", 1)),
    ),
)
def test_parquet(tmp_path, tokenizer, texts, parquet, rows_in_group, kind):
    import pyarrow

    types = {
        "string": pyarrow.string(),
        "large_string": pyarrow.large_string(),
        "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    }
    column = pyarrow.array(texts, types[kind])
    numbers = list(range(len(texts)))
    columns = {"id": numbers, "text": column, "other": [str(n) for n in numbers]}
    parquet(tmp_path / "in.parquet", columns, row_group_size=rows_in_group)
    run(tmp_path / "in.parquet", tmp_path / "p", tokenizer, json_keys=("other", "text"))
    assert decoded(tmp_path / "p_text_document", tokenizer) == texts
    assert decoded(tmp_path / "p_other_document", tokenizer) == columns["other"]


def test_parquet_that_is_wrong(tmp_path, tokenizer, parquet):
    path = tmp_path / "in.parquet"
    parquet(path, {"text": ["a", None, "b"], "n": [1, 2, 3]})
    with pytest.raises(ValueError, match='in.parquet, row 2: "text" is not a string .found null'):
        run(path, tmp_path / "out" / "p", tokenizer)
    summary = run(path, tmp_path / "p", tokenizer, on_bad_line="skip")
    assert summary.bad_lines == {'"text" is not a string': 1}
    assert decoded(tmp_path / "p_text_document", tokenizer) == ["a", "b"]
    with pytest.raises(ValueError, match="has no column 'body' .*its columns: text, n"):
        run(path, tmp_path / "p", tokenizer, json_keys=("body",))
    with pytest.raises(ValueError, match="column 'n' .*contains int64, not strings"):
        run(path, tmp_path / "p", tokenizer, json_keys=("n",))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="in.parquet is damaged or not a Parquet file"):
        run(path, tmp_path / "p", tokenizer)


def shared_text(rows: int, text: str):
    """A column whose rows share one text, which is in the file once."""
    import pyarrow

    places = pyarrow.array([0] * rows, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(places, pyarrow.array([text]))


def test_parquet_without_values_is_read_in_blocks(tmp_path, parquet):
    import pyarrow

    path = tmp_path / "in.parquet"
    parquet(path, {"text": pyarrow.array([None] * 100_000, pyarrow.string())})
    (source,) = find_inputs(PreprocessConfig(input=(str(path),)))
    sizes = [len(block.records) for block in read_blocks([source], ("text",), 1 << 26)]
    assert sum(sizes) == 100_000 and max(sizes) <= 1 << 15


@pytest.mark.parametrize("store_schema", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_parquet_whose_rows_share_a_long_text(tmp_path, parquet, store_schema):
    path = tmp_path / "in.parquet"
    options = {"compression": "zstd", "store_schema": store_schema}
    parquet(path, {"text": shared_text(20_000, "hello " * 400_000)}, **options)
    (source,) = find_inputs(PreprocessConfig(input=(str(path),)))
    tracemalloc.start()
    before = pyarrow_bytes()
    with pytest.raises(ValueError, match="in.parquet, row group 1: .* bytes that are compressed"):
        for block in read_blocks([source], ("text",), 1 << 26):
            assert len(block.records) == 1 and pyarrow_bytes() - before < 200e6
    assert tracemalloc.get_traced_memory()[1] < 300e6
    tracemalloc.stop()
    parquet(path, {"text": shared_text(20, "hello " * 400_000)}, **options)
    (source,) = find_inputs(PreprocessConfig(input=(str(path),)))
    assert len(list(read_blocks([source], ("text",), 1 << 26))) == 20


def pyarrow_bytes() -> int:
    import pyarrow

    return pyarrow.total_allocated_bytes()


def test_parquet_pages_that_are_compressed_too_well(tmp_path, parquet):
    path, texts = tmp_path / "in.parquet", ["hello " * 3_000_000] * 5
    parquet(path, {"text": texts}, compression="zstd", use_dictionary=False)
    (source,) = find_inputs(PreprocessConfig(input=(str(path),)))
    with pytest.raises(ValueError, match="in.parquet, row group 1: column 'text' has .* unpack it"):
        next(iter(read_blocks([source], ("text",), 1 << 26)))


# Which file is what


def test_forms_by_name_and_flag(tmp_path):
    for name, content in (
        ("a.jsonl", b"[1]"),
        ("b.json", b"\xef\xbb\xbf [{}]"),
        ("c.json", b"{}"),
        ("d.txt", b"[1]"),
        ("e.parquet", b"PAR1"),
        ("f", b"{}"),
        ("g.json.gz", gzip.compress(b"[{}]")),
        ("h.jsonl.zst", zstandard.compress(b"{}")),
    ):
        (tmp_path / name).write_bytes(content)

    def forms(**flags) -> str:
        names = [str(tmp_path / n) for n in sorted(os.listdir(tmp_path))]
        found = find_inputs(PreprocessConfig(input=tuple(names), **flags))
        return "".join(source.form.name[:3].lower() + " " for source in found)

    assert forms() == "lin arr lin tex par lin arr lin "
    assert forms(txt_documents="blank-line").split()[3] == "par"
    assert set(forms(input_format="jsonl").split()) == {"lin"}
    assert set(forms(input_format="txt").split()) == {"tex"}
    source = find_inputs(PreprocessConfig(input=("-",)))[0]
    assert source.form is Form.LINES and source.path is None


def test_folder_with_a_readme(tmp_path):
    for name in ("a.jsonl", "b.parquet", "README.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(folder: Path, **flags) -> list[str]:
        inputs = find_inputs(PreprocessConfig(input=(str(folder),), **flags))
        return [Path(source.name).name for source in inputs]

    assert names(tmp_path) == ["a.jsonl", "b.parquet"]
    assert names(tmp_path / "sub") == ["c.txt"]
    assert names(tmp_path, input_format="txt") == ["README.txt", "c.txt"]


@pytest.mark.parametrize("count", range(1, 9))
def test_partition_holds_each_byte_once(tmp_path, count):
    sizes = [0, 100, 7, 0, 33, 1, 0]
    for number, size in enumerate(sizes):
        name = tmp_path / f"{number}.{'txt' if number % 3 == 2 else 'jsonl'}"
        name.write_bytes(b"x" * size)
    names = [str(tmp_path / n) for n in sorted(os.listdir(tmp_path))]
    inputs = find_inputs(PreprocessConfig(input=tuple(names)))
    parts = [list(partition(inputs, rank, count)) for rank in range(count)]
    for source in inputs:
        of_file = [s for part in parts for s in part if s.path == source.path]
        if source.is_divisible:
            assert sum(s.bytes_to_read for s in of_file) == source.size
            ends = [s.stop for s in of_file]
            assert [s.start for s in of_file] == [0, *ends[:-1]][: len(of_file)]
        else:
            assert len(of_file) == 1


# The standard input


def piped(data: bytes, prefix: Path, tokenizer: TokenizerConfig, *flags: str):
    words = ["--input", "-", "--output-prefix", prefix, "--workers", "1"]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", tokenizer.vocab_file]
    words += ["--merge-file", tokenizer.merge_file, *flags]
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=data,
        capture_output=True,
    )


@pytest.mark.parametrize("packing", sampled(["", ".zst"], bool))
def test_standard_input(tmp_path, tokenizer, texts, packing):
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    done = piped(PACKERS[packing](data), tmp_path / "p", tokenizer)
    assert done.returncode == 0, done.stderr.decode()
    assert decoded(tmp_path / "p_text_document", tokenizer) == texts
    bad = piped(PACKERS[packing](data + b"{"), tmp_path / "p", tokenizer)
    assert f"--input the standard input, line {len(texts) + 1}: not JSON" in bad.stderr.decode()


def test_standard_input_as_text(tmp_path, tokenizer):
    flags = ("--input-format", "txt", "--txt-documents", "blank-line")
    done = piped(b"one\n\ntwo\nlines\n", tmp_path / "p", tokenizer, *flags)
    assert done.returncode == 0, done.stderr.decode()
    assert decoded(tmp_path / "p_text_document", tokenizer) == ["one", "two\nlines"]
