"""Texts end where they should, and nothing before or after is lost."""

import random
import time

import pytest
from small_tokenizers import small_tokenizers

from megatron.apps.generation.decoding.text_stream import (
    StopWatch,
    TextBeforeStop,
    TextStream,
    continuation_text,
)
from megatron.apps.generation.request import StopRules
from megatron.config import TokenizerConfig
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return ByteLevelTokenizer.from_config(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))


def watched(stopping, tokens, tokenizer=None, prompt=()):
    """How many tokens the text has, and why it ended."""
    watch = StopWatch(stopping, tokenizer, prompt)
    for count, token in enumerate(tokens, 1):
        if finish := watch.add(token):
            return count, finish
    return len(tokens), None


def test_tokens_and_length():
    wanted = StopRules(4, tokens=frozenset([7, 9]))
    assert watched(wanted, [1, 2, 9, 3]) == (3, "stop")
    assert watched(wanted, [1, 2, 3, 7]) == (4, "stop")
    assert watched(wanted, [1, 2, 3, 4, 7]) == (4, "length")
    assert watched(wanted, [1, 2]) == (2, None)


def test_a_stop_text_across_tokens(tokenizer):
    def ends(text, *stops, prompt=""):
        wanted = StopRules(99, texts=stops)
        tokens, given = tokenizer.tokenize(text), tokenizer.tokenize(prompt)
        count, finish = watched(wanted, tokens, tokenizer, given)
        return tokenizer.detokenize(tokens[:count]), finish

    assert ends("one\n\ntwo", "\n\n") == ("one\n\n", "stop")
    assert ends("ababac", "abac") == ("ababac", "stop")
    assert ends("日本語です", "語") == ("日本語", "stop")
    assert ends("x\n", "\n\n", prompt="\n") == ("x\n", None)
    assert ends("\n", "\n\n", prompt="\n") == ("\n", None)  # the prompt is no new text
    assert ends("abcd", "bc", "c") == ("abc", "stop")


def test_a_stop_text_inside_of_a_token(tmp_path):
    tokenizer = small_tokenizers(tmp_path)["gpt2"]()
    tokens = tokenizer.tokenize(" the lazy dog")
    assert any(b"og" in tokenizer.token_bytes[i][:-1] or b"he" in tokenizer.token_bytes[i]
               for i in tokens)  # fmt: skip
    count, finish = watched(StopRules(99, texts=("he",)), tokens, tokenizer)
    assert finish == "stop" and "he" in tokenizer.detokenize(tokens[:count])


@pytest.mark.parametrize("kind", ["llama", "hf_llama"])
def test_a_line_end_of_a_byte_piece_stops_at_once(tmp_path, kind):
    tokenizer = small_tokenizers(tmp_path)[kind]()
    newline = tokenizer.token_bytes.index(b"\n")
    prompt, rest = tokenizer.tokenize("The"), tokenizer.tokenize("The dog")[-2:]
    for stop, count in (("\n", 3), ("\n\n", 4)):
        tokens = [*rest, newline, newline, *rest]
        assert watched(StopRules(9, texts=(stop,)), tokens, tokenizer, prompt) == (count, "stop")


def test_any_text_stops_where_its_characters_do(tokenizer):
    """Against a search of the text after each token."""
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices("ab日", k=rng.randrange(1, 20)))
        stops = tuple("".join(rng.choices("ab日", k=rng.randrange(1, 5))) for _ in range(2))
        tokens = tokenizer.tokenize(text)
        expected = (len(tokens), None)
        for count in range(1, len(tokens) + 1):
            seen = continuation_text(tokenizer, [], tokens[:count])
            if any(stop in seen for stop in stops):
                expected = (count, "stop")
                break
        assert watched(StopRules(99, texts=stops), tokens, tokenizer) == expected


@pytest.mark.parametrize("kind", ["llama", "hf_llama", "gpt2"])
def test_any_text_of_byte_pieces_stops_where_its_characters_do(tmp_path, kind):
    """Against a search of the text so far, with the characters that are whole."""
    tokenizer, rng = small_tokenizers(tmp_path)[kind](), random.Random(2)
    ordinary = tokenizer.tokenize("The dog ad")
    pieces = [tokenizer.token_bytes.index(bytes([byte])) for byte in "é日\n".encode()]
    for _ in range(150):
        characters = [pieces[:2], pieces[2:5], pieces[5:], *([token] for token in ordinary)]
        tokens = [token for part in rng.choices(characters, k=8) for token in part]
        stops = tuple("".join(rng.choices("é日\nd", k=rng.randrange(1, 4))) for _ in range(3))
        seen = [continuation_text(tokenizer, [], tokens[:count]) for count in range(1, 99)]
        ends = [n for n, text in enumerate(seen[: len(tokens)], 1) if any(s in text for s in stops)]
        count, finish = watched(StopRules(99, texts=stops), tokens, tokenizer)
        assert (count, finish) == ((ends[0], "stop") if ends else (len(tokens), None)), stops


def test_stop_texts_of_equal_characters_take_linear_time(tokenizer):
    stops = tuple("-" * 100_000 + end for end in "abcdefg")
    begun = time.process_time()
    passing, watch = TextBeforeStop(stops), StopWatch(StopRules(10**6, texts=stops), tokenizer)
    for _ in range(2000):
        assert passing.add("-" * 10) == "" and watch.add(ord("-")) is None
    assert time.process_time() - begun < 5  # it took minutes
    assert passing.add("x") == "-" * 20_000 + "x"


def test_text_before_the_stop_is_the_same_for_any_split():
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices("abc", k=rng.randrange(30)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(3)]
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
        expected = text
        if ends:
            longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
            expected = text[: ends[0] - longest]
        passing, passed, start = TextBeforeStop(stops), "", 0
        while start < len(text):
            end = start + rng.randrange(1, 5)
            passed += passing.add(text[start:end])
            assert expected.startswith(passed)
            start = end
        assert passing.stopped == bool(ends)
        assert passed + passing.close() == expected


def test_only_what_may_begin_a_stop_text_is_held():
    passing = TextBeforeStop(["\n\n", "User:"])
    assert passing.add("Hello\n") == "Hello"
    assert passing.add("Us") == "\n"
    assert passing.add("e it") == "Use it"
    assert passing.close() == "" and not passing.stopped
    assert TextBeforeStop([]).add("all") == "all"


def test_a_stream_up_to_its_stop(tokenizer):
    stream, passing = TextStream(tokenizer), TextBeforeStop(["END"])
    tokens = tokenizer.tokenize("日本E NEND more")
    pieces = [passing.add(stream.add(token)) for token in tokens]
    assert "".join(pieces) + passing.close() == "日本E N" and passing.stopped


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"max_new_tokens": -1}, "max_new_tokens -1"), ({"texts": ("",)}, "a stop text is empty")],
)
def test_what_cannot_stop(wrong, message):
    with pytest.raises(ValueError, match=message):
        StopRules(**{"max_new_tokens": 1} | wrong)
    with pytest.raises(ValueError, match="need a tokenizer"):
        StopWatch(StopRules(1, texts=("a",)))
