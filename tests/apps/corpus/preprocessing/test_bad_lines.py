"""Malformed lines of many kinds: what each is taken for, and that the rest is as without them."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import TokenizerConfig
from megatron.features.tokenizers.train import train_byte_level_bpe

ROOT = Path(__file__).parents[4]
LONG = 5000
"""--max-line-bytes of these tests."""

MALFORMED: dict[str, tuple[bytes, str]] = {
    "bad UTF-8": (b'{"text": "caf\xe9"}', "not UTF-8"),
    "cut UTF-8": (b'{"text": "caf\xc3"}', "not UTF-8"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    "UTF-16 without mark": ('{"text": "a"}'.encode("utf-16-le"), "not JSON"),
    "NUL in a string": (b'{"text": "a\0b"}', "not JSON"),
    "NULs only": (b"\0" * 64, "not JSON"),
    "control characters": (b'{"text": "a\x01\tb"}', "not JSON"),
    "lone surrogate": (b'{"text": "a\\ud83d b"}', "a lone surrogate in a text"),
    "low surrogate": (b'{"text": "\\udc00"}', "a lone surrogate in a text"),
    "deep nesting": (b"[" * 3000 + b"]" * 1900, "nested too deeply"),
    "deep nesting next to the text": (
        b'{"text": "a", "b": ' + b"[" * 1025 + b"]" * 1025 + b"}",
        "nested too deeply",
    ),
    "long line": (b'{"text": "' + b"long " * LONG + b'"}', "longer than --max-line-bytes"),
    "missing key": (b'{"content": "a"}', 'no key "text"'),
    "no key at all": (b"{}", 'no key "text"'),
    "null": (b'{"text": null}', '"text" is not a string'),
    "number": (b'{"text": 5}', '"text" is not a string'),
    "list of strings": (b'{"text": ["a"]}', '"text" is not a string'),
    "true": (b'{"text": true}', '"text" is not a string'),
    "truncated": (b'{"text": "a', "not JSON"),
    "trailing comma": (b'{"text": "a",}', "not JSON"),
    "two objects": (b'{"text": "a"}{"text": "b"}', "not JSON"),
    "two objects, comma": (b'{"text": "a"}, {"text": "b"}', "not JSON"),
    "single quotes": (b"{'text': 'a'}", "not JSON"),
    "comment": (b'{"text": "a"} // note', "not JSON"),
    "array": (b'["text", "a"]', "not a JSON object"),
    "string": (b'"text"', "not a JSON object"),
    "number line": (b"17", "not a JSON object"),
    "null line": (b"null", "not a JSON object"),
    "plain text": (b"some words", "not JSON"),
    "bad escape": (b'{"text": "\\x41"}', "not JSON"),
    "cut escape": (b'{"text": "\\u00"}', "not JSON"),
    "Python's True": (b'{"text": "a", "b": True}', "not JSON"),
    "unquoted key": (b'{text: "a"}', "not JSON"),
    "leading zero": (b'{"text": "a", "n": 007}', "not JSON"),
}
FINE: dict[str, tuple[bytes, str | None]] = {
    "CRLF": (b'{"text": "a"}\r', "a"),
    "byte-order mark in the middle": (b'\xef\xbb\xbf{"text": "a"}', "a"),
    "duplicate key": (b'{"text": "a", "text": "b"}', "b"),
    "duplicate key, one no string": (b'{"text": 1, "text": "b"}', "b"),
    "NaN": (b'{"text": "a", "n": NaN}', "a"),
    "infinity and a duplicate": (b'{"text": "a", "n": -Infinity, "text": "b"}', "b"),
    "long number": (b'{"text": "a", "n": ' + b"9" * 4900 + b"}", "a"),
    "large exponent": (b'{"text": "a", "n": 1e999}', "a"),
    "white space": (b' \t{ "text" :\t"a" } ', "a"),
    "escaped NUL": (b'{"text": "a\\u0000b"}', "a\0b"),
    "surrogate pair": (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
    "lone surrogate elsewhere": (b'{"text": "a", "b": "\\ud83d"}', "a"),
    "line separator": ('{"text": "a\u2028b\x85c"}'.encode(), "a\u2028b\x85c"),
    "brackets in strings": (b'{"n": NaN, "text": "' + b"[" * 2000 + b'"}', "[" * 2000),
    "nesting that is not too deep": (
        b'{"text": "a", "b": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        "a",
    ),
    "empty document": (b'{"text": ""}', None),
    "empty line": (b"", None),
    "blanks": (b" \t\r", None),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_byte_level_bpe(["the words of a text"], 270, 2).save_pretrained(folder)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def run(path: Path, prefix: Path, tokenizer: TokenizerConfig, **flags):
    given = {"workers": 1, "max_line_bytes": LONG, "append_eod": True, **flags}
    return preprocess(
        PreprocessConfig(input=(str(path),), output_prefix=str(prefix), **given), tokenizer
    )


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", MALFORMED)
def test_error_names_file_and_line(tmp_path, tokenizer, kind):
    line, reason = MALFORMED[kind]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' * 10 + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError) as error:
        run(path, tmp_path / "out" / "p", tokenizer)
    assert str(error.value).startswith(f"--input {path}, line 21: {reason} (")
    assert len(str(error.value)) < len(str(path)) + 450, "a message, not the whole line"
    assert "\0" not in str(error.value)


@pytest.mark.parametrize("kind", FINE)
@pytest.mark.parametrize("is_last", [False, True], ids=["middle", "last, without line break"])
def test_what_is_fine(tmp_path, tokenizer, kind, is_last):
    line, text = FINE[kind]
    path, clean = tmp_path / "in.jsonl", tmp_path / "clean.jsonl"
    path.write_bytes(b'{"text": "z"}\n' + line + (b"" if is_last else b'\n{"text": "z"}\n'))
    texts = ["z", *([text] if text else []), *([] if is_last else ["z"])]
    clean.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    summary = run(path, tmp_path / "out" / "p", tokenizer)
    run(clean, tmp_path / "clean" / "p", tokenizer)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "clean")
    assert summary.bad_lines == {}
    assert summary.keys["text"].empty == (kind == "empty document")


def plant(path: Path, clean: Path, count: int, seed: int) -> Counter[str]:
    """Writes `count` malformed lines of all kinds, and all that is fine, among clean lines; and a
    file of the good ones alone."""
    chance = random.Random(seed)
    kinds = list(MALFORMED)
    reasons: Counter[str] = Counter()
    with path.open("wb") as file, clean.open("wb") as good:
        file.write(b"\xef\xbb\xbf")
        for number in range(count):
            for _ in range(chance.choice([0, 0, 1, 2, 5])):
                line = json.dumps({"text": "the words of " * chance.randrange(1, 40)}).encode()
                if chance.random() < 0.1:
                    line = FINE[chance.choice(list(FINE))][0]
                file.write(line + b"\n")
                good.write(line + b"\n")
            line, reason = MALFORMED[kinds[number % len(kinds)]]
            file.write(line + (b"\n" if number < count - 1 else b""))
            reasons[reason] += 1
    return reasons


@pytest.mark.parametrize(
    "count, workers, block",
    [(1000, 1, 3000), (1000, 2, 40_000), pytest.param(10_000, 2, 1 << 20, marks=pytest.mark.proof)],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_skip_against_clean_lines_alone(
    tmp_path, tokenizer, monkeypatch, count, workers, block, packed
):
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", block)
    path, clean = tmp_path / "in.jsonl", tmp_path / "clean.jsonl"
    reasons = plant(path, clean, count, seed=count)
    assert len(MALFORMED) >= 20 and sum(reasons.values()) == count
    if packed:
        import gzip

        path.write_bytes(gzip.compress(path.read_bytes(), 1))
    flags = {"workers": workers, "on_bad_line": "skip"}
    summary = run(path, tmp_path / "out" / "p", tokenizer, **flags)
    run(clean, tmp_path / "clean" / "p", tokenizer)
    assert summary.bad_lines == reasons
    assert outputs(tmp_path / "out") == outputs(tmp_path / "clean")


@pytest.mark.parametrize("size", [LONG - 1, LONG, LONG + 1])
@pytest.mark.parametrize("ending", [b"\n", b""])
@pytest.mark.parametrize("block", [700, 4999, 5000, 1 << 20])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_longest_line(tmp_path, tokenizer, monkeypatch, size, ending, block, packed):
    """The limit does not depend on where blocks begin, on packing, or on the line's end."""
    import gzip

    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", block)
    path = tmp_path / "in.jsonl"
    line = b'{"text": "' + b"a" * (size - 12) + b'"}'
    data = b'{"text": "a"}\n' + line + ending
    path.write_bytes(gzip.compress(data) if packed else data)
    summary = run(path, tmp_path / "out" / "p", tokenizer, on_bad_line="skip")
    assert summary.bad_lines == ({"longer than --max-line-bytes": 1} if size > LONG else {})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak in /proc")
@pytest.mark.parametrize("packing", ["plain", "zstd"])
def test_memory_is_bounded(tmp_path, packing):
    """An endless line of 400 MB (1.5 GB unpacked from zstd) next to a limit of 8 MB."""
    path = tmp_path / "in.jsonl"
    if packing == "plain":
        with path.open("wb") as file:
            file.write(b'{"text": "1"}\n{"text": "')
            file.seek(400 << 20, os.SEEK_CUR)  # zeros that take no disk
            file.write(b'"}\n{"text": "2"}\n')
    else:
        import zstandard

        with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as file:
            file.write(b'{"text": "1"}\n{"text": "')
            for _ in range(1500):
                file.write(b" " * 1_000_000)
            file.write(b'"}\n{"text": "2"}\n')
    code = (
        "import re, sys\n"
        "from tools.preprocess_data import main\n"
        "main(sys.argv[1:])\n"
        # Not ru_maxrss, which knows the memory of the process that started this one.
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    words = ["--input", path, "--output-prefix", tmp_path / "p", "--workers", "1"]
    words += ["--on-bad-line", "skip", "--max-line-bytes", str(8 << 20)]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "2 documents, 2 tokens" in done.stdout and "1 x longer than" in done.stderr
    assert int(done.stdout.split()[-1]) < 220_000, "KiB"
