"""tools/preprocess_data_nmt.py: files as Megatron-LM reads them, a line for each document."""

import struct

import numpy as np
import pytest
from small_tokenizers import TEXTS
from tool_modules import load_program

from megatron.apps.corpus.preprocessing.parallel_text import (
    ParallelTextConfig,
    preprocess_sentences,
)
from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("bpe")
    train_byte_level_bpe(TEXTS, vocab_size=300, min_frequency=2).save_pretrained(folder)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def documents(prefix):
    """The sequences of the documents by Megatron's format of .idx files."""
    content = prefix.with_suffix(".idx").read_bytes()
    assert content[:9] == b"MMIDIDX\x00\x00"
    version, code, count, bounds = struct.unpack_from("<QBQQ", content, 9)
    assert version == 1
    lengths = np.frombuffer(content, "<i4", count, 34)
    pointers = np.frombuffer(content, "<i8", count, 34 + 4 * count)
    document_ends = np.frombuffer(content, "<i8", bounds, 34 + 12 * count)
    assert document_ends.tolist() == list(range(count + 1)), "a sequence for each document"
    raw = prefix.with_suffix(".bin").read_bytes()
    return [
        np.frombuffer(raw, DTYPES[code], length, start).tolist()
        for start, length in zip(pointers, lengths, strict=True)
    ]


def test_each_line_is_a_document(tmp_path, tokenizer, capsys):
    lines = ["A fox.", "  two  words ", "naïve 中文"] * 500
    (tmp_path / "en.txt").write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    config = ParallelTextConfig(
        input=str(tmp_path / "en.txt"), output_prefix=str(tmp_path / "en"), dataset_impl="cached"
    )
    said = preprocess_sentences(config, tokenizer)
    own = GPT2BPETokenizer.from_files(tokenizer.vocab_file, tokenizer.merge_file)
    wanted = [own.tokenize(line.strip()) for line in lines[:3]]
    assert documents(tmp_path / "en") == wanted * 500
    assert "1,500 sentences" in said
    assert "--dataset-impl cached: the mmap format is written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a\n\nb\n", r"line 2 has no token"),
        (b"a\nb\n\xff\n", r"line 3 is not UTF-8 text"),
        (b"", "is empty"),
    ],
)
def test_lines_that_break_the_pairs_are_named(content, said, tmp_path, tokenizer):
    (tmp_path / "en.txt").write_bytes(content)
    config = ParallelTextConfig(
        input=str(tmp_path / "en.txt"), output_prefix=str(tmp_path / "out" / "en")
    )
    with pytest.raises(ValueError, match=said):
        preprocess_sentences(config, tokenizer)
    assert not any((tmp_path / "out").iterdir()), "nothing is left"


def test_a_folder_that_cannot_be_written_in_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "en.txt").write_text("A fox.")
    words = f"--input {tmp_path}/en.txt --output-prefix /proc/none/en".split()
    program = load_program("tools/preprocess_data_nmt.py")
    monkeypatch.setattr("sys.argv", ["preprocess_data_nmt.py", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert "--output-prefix /proc/none/en.bin: cannot write to" in capsys.readouterr().err


def test_flags_are_checked():
    for values, said in (
        ({"output_prefix": "a"}, "--input is missing"),
        ({"input": "a"}, "--output-prefix is missing"),
        ({"input": "a", "output_prefix": "b", "workers": 0}, "--workers 0 must be positive"),
    ):
        with pytest.raises(ConfigError, match=said):
            ParallelTextConfig(**values)
