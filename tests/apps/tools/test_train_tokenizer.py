"""tools/train_tokenizer.py: text in, files out that both readers take."""

import errno
import gzip
import json
import os
import random
from pathlib import Path

import pytest
import zstandard
from samples import sampled
from tool_modules import load_program

from megatron.config import TokenizerConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

TOOL = Path(__file__).parents[3] / "tools" / "train_tokenizer.py"


@pytest.fixture(scope="module")
def main():
    return load_program("tools/train_tokenizer.py").main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The same kind of text as JSON lines and as plain text, packed and not."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = [
        path.read_text() for path in sorted(TOOL.parents[1].joinpath("megatron").rglob("*.py"))
    ]
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in sources[:20])
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.txt.zst").write_bytes(zstandard.compress("".join(sources[20:200]).encode()))
    return folder


def run(main, output: Path, *arguments: object) -> GPT2BPETokenizer:
    main([*map(str, arguments), "--output", str(output)])
    return GPT2BPETokenizer.from_files(output / "vocab.json", output / "merges.txt")


def test_against_transformers_gpt2(main, corpus, tmp_path, capsys):
    from transformers import AutoTokenizer, GPT2TokenizerFast

    ours = run(main, tmp_path, "--input", corpus, "--vocab-size", 1000)
    assert ours.vocab_size == 1000 and ours.eod == 999
    assert "1,000 tokens, from 3 files" in capsys.readouterr().out
    (tmp_path / "two").mkdir()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "two" / name).symlink_to(tmp_path / name)
    rng = random.Random(0)
    texts = [TOOL.read_text(), "".join(chr(rng.randrange(0xD800)) for _ in range(5000))]
    for reader in (
        AutoTokenizer.from_pretrained(tmp_path),
        GPT2TokenizerFast.from_pretrained(tmp_path / "two"),
    ):
        assert reader(texts, verbose=False)["input_ids"] == [ours.tokenize(text) for text in texts]


def test_globs_keys_and_determinism(main, corpus, tmp_path):
    first = run(main, tmp_path / "1", "--input", corpus / "*.jsonl*", "--vocab-size", 500)
    lines = (corpus / "a.jsonl").read_text().replace('"text"', '"body"')
    (tmp_path / "a.jsonl").write_text(lines + lines)
    again = run(
        main,
        tmp_path / "2",
        "--input",
        tmp_path / "a.jsonl",
        "--json-keys",
        "body",
        "--vocab-size",
        500,
    )
    assert (tmp_path / "1" / "merges.txt").read_bytes() == (
        tmp_path / "2" / "merges.txt"
    ).read_bytes()
    assert first.vocab_size == again.vocab_size == 500


def test_says_when_the_size_is_not_reached(main, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab ab")
    assert run(main, tmp_path, "--input", tmp_path / "a.txt", "--vocab-size", 1000).vocab_size < 300
    assert (
        "--vocab-size 1,000 is not reached: no more pairs occur 2 times" in capsys.readouterr().err
    )


KINDS = ["BertWordPieceLowerCase", "BertWordPieceCase"]


@pytest.mark.parametrize("kind", sampled(KINDS, KINDS[:1].__contains__))
def test_wordpiece_against_transformers(main, corpus, tmp_path, capsys, kind):
    from transformers import AutoTokenizer

    main(
        ["--input", str(corpus), "--vocab-size", "1000", "--output", str(tmp_path)]
        + ["--tokenizer-type", kind]
    )
    assert "vocab.txt, 1,000 tokens, from 3 files" in capsys.readouterr().out
    ours = build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, vocab_file=str(tmp_path / "vocab.txt"))
    )
    saved = AutoTokenizer.from_pretrained(tmp_path)
    text = TOOL.read_text()
    assert saved.encode(text, add_special_tokens=False) == ours.tokenize(text)


@pytest.mark.parametrize(
    "flags",
    sampled([["unigram"], ["bpe"], ["bpe", "--byte-fallback"]], lambda flags: flags == ["bpe"]),
)
def test_sentencepiece_against_transformers(main, corpus, tmp_path, capsys, flags):
    from transformers import AutoTokenizer

    main(
        ["--input", str(corpus), "--vocab-size", "800", "--output", str(tmp_path)]
        + ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model-type", *flags]
    )
    assert "tokenizer.model, 800 tokens, from 3 files" in capsys.readouterr().out
    ours = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer",
            tokenizer_model=str(tmp_path / "tokenizer.model"),
        )
    )
    text = TOOL.read_text()
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == ours.tokenize(text)
    assert (ours.detokenize(ours.tokenize(text)) == text) == ("--byte-fallback" in flags)


@pytest.mark.parametrize(
    "content, flags, message",
    [
        ('{"text": "1"}\n{"text": 3}\n', ["--vocab-size", "300"], 'line 2: "text" is not a string'),
        ('{"text": "1"}\n', ["--vocab-size", "100"], "--vocab-size 100 is too small"),
        ('{"text": "1"}\n', [], "--vocab-size is missing"),
        (
            '{"text": 1}\n',
            ["--vocab-size", "300", "--tokenizer-type", "SentencePieceTokenizer"],
            'a.jsonl, line 1: "text" is not a string',
        ),
        (
            '{"text": "ab"}\n',
            ["--vocab-size", "3", "--tokenizer-type", "SentencePieceTokenizer"],
            "cannot train a bpe model of --vocab-size 3",
        ),
        (
            '{"text": "ab"}\n',
            ["--vocab-size", "9", "--tokenizer-type", "BertWordPieceCase"],
            "--vocab-size 9 is too small",
        ),
    ],
)
def test_errors(main, tmp_path, content, flags, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), *flags])
    assert str(stop.value).startswith("train_tokenizer.py: error: ") and message in str(stop.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["/proc/tokenizer", "a.txt"])
def test_an_output_that_cannot_be_written_is_named_first(main, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("ab ab ab")
    flags = ["--input", "a.txt", "--output", output, "--vocab-size", "300"]
    with pytest.raises(SystemExit, match=f"--output {output}.*: cannot write to .*; choose a"):
        main(flags)


def test_text_that_is_not_utf8(main, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(SystemExit, match="a.txt is not UTF-8 text, after line 0"):
        main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path), "--vocab-size", "300"])


def test_a_full_disk_is_named(main, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n')
    monkeypatch.setattr(os, "fsync", full)
    flags = ["--vocab-size", "300", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="No space left on device: .*out/merges.txt'"):
        main(["--input", str(tmp_path / "a.jsonl"), *flags])
