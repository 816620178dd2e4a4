"""Vocabularies trained on the standard library's sources, and strings that try to break them."""

import base64
import email
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

PIECES = (
    ["<|endoftext|>", "<|endoftext|", "<|startoftext|>", "<|", "</s>", "[MASK]"]
    + ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "’s", "'", "''", "can't", "I'dve"]
    + ["def ", "return", " self.", "import os\n", "http://x.y/?a=1&b=2", "0x1F", "3.14159", "__"]
    + ["Ġ", "Ċ", "Ā", "ł", "ġġ", "naïve", "Straße", "ﬁ", "Ǆ", "İ", "中文字", "日本語", "русский"]
    + ["👩‍👩‍👧‍👦", "🇩🇪", "e\u0301"]
    + ["\u200d", "\ufeff", "\ufffd", "\U0010ffff", "\ue000", "²", "Ⅷ", "٣"]
)
SPACES = list(" \t\n\r\f\v\x1c\x1f\x85\xa0\u1680\u2000\u200b\u2028\u2029\u202f\u205f\u3000")


@pytest.fixture(scope="session")
def fuzzed_strings() -> Callable[[int, int], list[str]]:
    """(count, seed) -> strings of words, white space, specials, characters from all of Unicode."""

    def make(count: int, seed: int) -> list[str]:
        rng = random.Random(seed)

        def character() -> str:
            top = rng.choice([0x80, 0x250, 0x3000, 0x10000, 0x20000, 0x110000])
            code = rng.randrange(top)
            return chr(code) if not 0xD800 <= code <= 0xDFFF else " "

        def piece() -> str:
            kind = rng.randrange(6)
            if kind == 0:
                return "".join(character() for _ in range(rng.randrange(1, 6)))
            if kind == 1:
                return rng.choice(SPACES) * rng.randrange(1, 9)
            if kind == 2:
                return " " * rng.randrange(1, 20)
            if kind == 3:
                return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABC", k=rng.randrange(1, 9)))
            if kind == 4:
                return str(rng.randrange(10 ** rng.randrange(1, 12)))
            return rng.choice(PIECES)

        return ["".join(piece() for _ in range(rng.randrange(12))) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def python_sources() -> list[str]:
    """About a megabyte of Python."""
    folder = Path(email.__file__).parent
    files = sorted(folder.rglob("*.py")) + sorted(folder.parent.glob("[a-d]*.py"))
    return [file.read_text("utf-8") for file in files if file.stat().st_size]


@pytest.fixture(scope="session")
def trained(python_sources):
    """A tokenizer of 2,000 tokens."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(python_sources, vocab_size=1999, show_progress=False)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    return GPT2BPETokenizer({**model["vocab"], "<|endoftext|>": 1999}, merges)


@pytest.fixture(scope="session")
def trained_folder(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    trained.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wordpiece_file(python_sources, tmp_path_factory) -> Path:
    """A cased vocab.txt of 2,000 tokens."""
    from megatron.features.tokenizers.train import train_wordpiece

    folder = tmp_path_factory.mktemp("wordpiece")
    train_wordpiece(lambda: python_sources, 2000, 2, lower_case=False).save_pretrained(folder)
    return folder / "vocab.txt"


@pytest.fixture(scope="session")
def sentencepiece_files(python_sources, tmp_path_factory) -> dict[str, Path]:
    """SentencePiece models of about 1,000 pieces: unigram, bpe, char, and bpe as Llama 2 has it."""
    from megatron.features.tokenizers.train import train_sentencepiece_model

    folder = tmp_path_factory.mktemp("sentencepiece")
    files = {kind: folder / f"{kind}.model" for kind in ("unigram", "bpe", "char", "llama")}
    texts = [*python_sources[:30], "naïve Straße русский 中文字 日本語"]
    for kind, path in files.items():
        lossless = kind == "llama"
        kind = "bpe" if lossless else kind
        path.write_bytes(train_sentencepiece_model(texts, kind, 1000, byte_fallback=lossless))
    return files


@pytest.fixture(scope="session")
def ranks_file(trained, tmp_path_factory) -> Path:
    """The vocabulary of `trained` as a tiktoken file of 1,999 ranks."""
    tokens = [token for i, token in sorted(trained._bytes_of_id.items()) if i < 1999]
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    return path
