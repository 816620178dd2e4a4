"""Streamed text is the text, cut where its characters are whole."""

import string

import pytest

from megatron.inference.generate import TextStream, continuation_text
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.train import train_byte_level_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([string.printable] * 3, vocab_size=257, min_frequency=2)


@pytest.mark.parametrize("text", ["hello", "héllo wörld", "日本語", "👩‍👩‍👧‍👦 family", " lead", ""])
def test_stream(tokenizer, text):
    prompt = tokenizer.tokenize("né")
    pieces = []
    stream = TextStream(tokenizer, prompt, pieces.append)
    for token in tokenizer.tokenize(text):
        stream.add(token)
        assert "\ufffd" not in "".join(pieces)
    stream.close()
    assert "".join(pieces) == text


def test_incomplete_character_is_shown_at_the_end(tokenizer):
    pieces = []
    stream = TextStream(tokenizer, tokenizer.tokenize("a"), pieces.append)
    for token in tokenizer.tokenize("b日")[:-1]:
        stream.add(token)
    assert pieces == ["b"]
    stream.close()
    assert "".join(pieces) == "b\ufffd"


def test_space_between_prompt_and_continuation_is_kept():
    assert continuation_text(NullTokenizer(9), [1, 2], [3]) == " 3"
