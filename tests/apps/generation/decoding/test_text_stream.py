"""Streamed text is the text, cut where its characters are whole, for every tokenizer."""

import random
import time

import pytest
from small_tokenizers import random_ids, small_tokenizers

from megatron.apps.generation.decoding.text_stream import (
    TextStream,
    bytes_of_token,
    continuation_text,
    token_texts,
)
from megatron.tokenizer.plain import NullTokenizer

KINDS = list(small_tokenizers(None))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    makers, made = small_tokenizers(tmp_path_factory.mktemp("tokenizers")), {}

    def get(name):
        if name not in made:
            made[name] = makers[name]()
        return made[name]

    return get


def streamed(tokenizer, prompt, tokens):
    stream = TextStream(tokenizer, prompt)
    return [*(stream.add(token) for token in tokens), stream.close()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_the_text(tokenizers, kind):
    """Of any ids, split at any place into prompt and new tokens."""
    tokenizer, rng = tokenizers(kind), random.Random(kind)
    for _ in range(60):
        ids = random_ids(tokenizer, rng, rng.randrange(1, 16))
        split = rng.randrange(len(ids) + 1)
        prompt, new = ids[:split], ids[split:]
        text = "".join(streamed(tokenizer, prompt, new))
        assert text == continuation_text(tokenizer, prompt, new), (prompt, new)
        assert "".join(token_texts(tokenizer, new, prompt)) == text
        whole = tokenizer.detokenize(ids)
        assert whole.endswith(text)
        if split == 0:
            assert whole == text


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "llama", "hf_llama", "hf_gpt2", "unigram"])
@pytest.mark.parametrize("text", ["hello", "naïve Straße", "日本語", "👩‍👩‍👧‍👦 family", " lead"])
def test_characters_are_written_whole(tokenizers, kind, text):
    tokenizer = tokenizers(kind)
    tokens = tokenizer.tokenize(text)[1 if "llama" in kind else 0 :]
    pieces = streamed(tokenizer, tokenizer.tokenize("né"), tokens)
    if kind != "unigram":  # whose pieces lack some characters
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces).strip() == text.strip()
    assert pieces[-1] == "" or kind in ("llama", "hf_llama")


def test_an_incomplete_character_is_shown_at_the_end(tokenizers):
    tokenizer = tokenizers("bytes")
    assert streamed(tokenizer, [], tokenizer.tokenize("b日")[:-1]) == ["b", "", "", "\ufffd"]


def test_a_character_that_the_prompt_begins(tokenizers):
    tokenizer = tokenizers("bytes")
    ids = tokenizer.tokenize("x日y")
    assert streamed(tokenizer, ids[:3], ids[3:]) == ["日", "y", ""]
    assert streamed(tokenizer, ids[:3], []) == [""]


@pytest.mark.parametrize("kind", ["llama", "hf_llama"])
def test_line_ends_of_byte_pieces_are_known_at_once(tokenizers, kind):
    """They are held, since the text of the run may yet change, but can be asked for."""
    tokenizer = tokenizers(kind)
    newline, part = (tokenizer.token_bytes.index(byte) for byte in (b"\n", b"\xe6"))
    stream = TextStream(tokenizer, tokenizer.tokenize("a"))
    assert stream.add(newline) == "" and stream.held == "\n"
    assert stream.add(part) == "" and stream.held == "\n"
    assert stream.add(newline) == "" and stream.held == ""
    assert len(stream.close()) == 3


def test_the_space_between_prompt_and_continuation_is_kept():
    assert continuation_text(NullTokenizer(9), [1, 2], [3]) == " 3"
    assert token_texts(NullTokenizer(9), [3, 4], [1]) == [" 3", " 4"]


def test_ids_outside_the_vocabulary_have_no_text(tokenizers):
    for kind in ("gpt2", "llama"):
        tokenizer = tokenizers(kind)
        beyond = tokenizer.vocab_size
        a, b = tokenizer.tokenize("a b")[-2:]
        assert token_texts(tokenizer, [b, beyond], [a, beyond])[1] == ""
        assert bytes_of_token(tokenizer, beyond) == b""


@pytest.mark.parametrize("kind", ["gpt2", "llama", "hf_unigram"])
@pytest.mark.parametrize("what", ["text", "spaces", "broken"])
def test_time_is_linear(tokenizers, kind, what):
    """64 times the tokens take far less than 64 squared times the time, whatever they are."""
    tokenizer = tokenizers(kind)
    ids = {
        "text": tokenizer.tokenize("The quick brown fox ")[1:],
        "spaces": [i for i, text in enumerate(tokenizer.token_bytes) if text == b" "][:1],
        "broken": [i for i, text in enumerate(tokenizer.token_bytes) if text == b"\x80"][:1],
    }[what]

    def seconds(count):
        start = time.process_time()
        streamed(tokenizer, [], (ids * count)[:count])
        return time.process_time() - start

    if ids:
        seconds(50)
        assert seconds(6400) < 600 * max(seconds(100), 1e-4)
