"""Tokens as the text that a client gets."""

import pytest
from serving import byte_tokenizer

from megatron.inference.request import TokenScore, Update
from megatron.inference.server.texts import ChoiceText, token_name


def update(text, finish=None, scored=False):
    tokens = tuple(text) if isinstance(text, bytes) else text
    scores = tuple(TokenScore(token, -1.0) for token in tokens) if scored else ()
    return Update(0, tokens, scores, finish=finish)


def choice(stops=(), ends=frozenset({258}), offset=0):
    return ChoiceText(byte_tokenizer(), (), stops, ends, offset)


def test_characters_come_whole():
    text = choice()
    got = [text.add(update(bytes([byte]))).text for byte in "aé".encode()]
    assert got == ["a", "", "é"]
    assert text.add(update(b"\xc3", "length")).text == "\ufffd"


def test_a_stop_text_is_held_back_and_left_out():
    text = choice(("END", "\n\n"))
    pieces = [text.add(update(part)).text for part in (b"a", b"E", b"N", b"x", b"\n")]
    assert pieces == ["a", "", "", "ENx", ""]
    assert text.add(update(b"\n", "stop")).text == ""


@pytest.mark.parametrize("size", [1, 2, 9])
def test_text_before_a_stop_text_does_not_depend_on_how_it_comes(size):
    content = b"one two three"
    text, got = choice(("thr",)), ""
    for start in range(0, len(content), size):
        part = content[start : start + size]
        got += text.add(update(part, "stop" if b"thr" in content[: start + size] else None)).text
    assert got == "one two "


def test_what_only_begins_like_a_stop_text_comes_at_the_end():
    text = choice(("abc",))
    assert text.add(update(b"xab")).text == "x"
    assert text.add(update(b"", "length")).text == "ab"


def test_the_token_that_ends_a_text_is_no_part_of_it():
    piece = choice().add(update((97, 258), "stop", scored=True))
    assert piece.text == "a" and [placed.token for placed in piece.tokens] == [97]


def test_tokens_come_with_their_text_and_its_place():
    text = choice(("END",), offset=5)
    first = text.add(update(b"aE", scored=True))
    assert [(p.token, p.offset) for p in first.tokens] == [(97, 5)]
    second = text.add(update(b"ND", "stop", scored=True))
    assert (second.text, second.tokens) == ("", ())


def test_all_tokens_come_without_a_stop_text():
    text = choice(("END",))
    pieces = [text.add(update(b"EN", scored=True)), text.add(update(b"", "length"))]
    assert pieces[0].tokens == () and [p.token for p in pieces[1].tokens] == [69, 78]


def test_parts_of_characters_have_names():
    assert token_name(byte_tokenizer(), 0xC3) == "bytes:\\xc3"
    assert token_name(byte_tokenizer(), 97) == "a"
