"""A vocabulary trained on the standard library's sources, and strings that try to break it."""

import email
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.tokenizer.train import train_byte_level_bpe

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
    return train_byte_level_bpe(python_sources, vocab_size=2000, min_frequency=2)


@pytest.fixture(scope="session")
def trained_folder(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    trained.save_pretrained(folder)
    return folder
