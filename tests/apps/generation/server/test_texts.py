"""Tokens as the text that a client gets."""

import functools
import random

import pytest
from serving import byte_tokenizer
from small_tokenizers import random_ids, small_tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from megatron.apps.generation.decoding.text_stream import bytes_of_token
from megatron.apps.generation.request import TokenScore, Update
from megatron.apps.generation.server.texts import ChoiceText, name_there, placed_prompt, token_name
from megatron.features.tokenizers.huggingface import HFTokenizer


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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenizers by name; "begun" puts a token before every text."""
    folder = tmp_path_factory.mktemp("tokenizers")
    makers = small_tokenizers(folder)

    def begun():
        makers["hf_gpt2"]()
        path = folder / "hf_gpt2" / "tokenizer.json"
        backend = Tokenizer.from_file(str(path))
        token = "<|endoftext|>"
        backend.post_processor = TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, backend.token_to_id(token))]
        )
        backend.save(str(path))
        return HFTokenizer(path.parent)

    return functools.cache(lambda name: begun() if name == "begun" else makers[name]())


@pytest.mark.parametrize("name", ["bytes", "begun", "gpt2", "llama", "hf_llama", "wordpiece"])
@pytest.mark.parametrize("seed", range(3))
def test_a_token_is_in_the_text_where_its_place_is(made, name, seed):
    """Offsets of an echoed prompt and of what follows, however they are split."""
    tokenizer, draw = made(name), random.Random(seed)
    parts = ["The", " quick", " the"] + ["東京", "ß", " ", "x", "\n", "👩"] * (name != "wordpiece")
    shown = "".join(draw.choices(parts, k=draw.randrange(1, 9))) if name != "wordpiece" else "The"
    prompt = tokenizer.tokenize(shown)
    new = [i for i in random_ids(tokenizer, draw, 40) if i not in tokenizer.special_tokens]
    new += [*[i for i in tokenizer.tokenize("x京")][-3:], new[0]]
    placed = placed_prompt(tokenizer, prompt, [None] * len(prompt), shown)
    assert [p.token for p in placed] == prompt
    text = ChoiceText(tokenizer, prompt, (), frozenset(), len(shown))
    size = draw.choice((1, 5, len(new)))
    for start in range(0, len(new), size):
        part = tuple(new[start : start + size])
        piece = text.add(update(part, "length" if start + size >= len(new) else None))
        shown, placed = shown + piece.text, [*placed, *piece.tokens]
    assert [p.token for p in placed] == [*prompt, *new]
    assert [p.offset for p in placed] == sorted(p.offset for p in placed)
    most = {"begun": 1, "llama": 2, "hf_llama": 2}  # the beginning, and the first space
    assert sum(p.name == "" for p in placed) <= most.get(name, 0)
    for each in placed:
        called = name_there(tokenizer, each)
        own, there = bytes_of_token(tokenizer, each.token), shown[each.offset :]
        if not called.startswith("bytes:") and each.token not in tokenizer.byte_pieces:
            assert there.startswith(called), (each, called, there[:9])
        else:  # a part of a character, or of none
            assert there[0] == "\ufffd" or own[0] in there[0].encode(), (each, own, there[:9])


@pytest.mark.parametrize("shown", ["ab c", "a", " a", "  a  b", "a ", "</s>", "é b"])
@pytest.mark.parametrize("kind", ["prefix", "metaspace", "bos"])
def test_offsets_where_a_tokenizer_adds_or_drops_spaces(kind, shown, tmp_path):
    made = pre_tokenizers.Metaspace() if kind == "metaspace" else None
    made = made or pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix", use_regex=False)
    letters = ["\u2581", *"abcé"] if kind == "metaspace" else made.alphabet()
    vocab = {name: n for n, name in enumerate(["<s>", "</s>", *sorted(letters)])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = made
    backend.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if kind == "bos":
        backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = HFTokenizer(tmp_path)
    prompt = tokenizer.tokenize(shown)
    placed = placed_prompt(tokenizer, prompt, [None] * len(prompt), shown)
    assert [p.token for p in placed] == prompt
    for each in placed:
        called = name_there(tokenizer, each)
        if not called.startswith("bytes:"):
            assert shown.startswith(called, each.offset), (each, called)


def test_bytes_that_do_not_continue_a_character_come_after_it():
    text = choice()
    (piece,) = [text.add(update(b"a\xe6x\xe6\x9d\xb1\xc3", "length", scored=True))]
    assert piece.text == "a\ufffdx東\ufffd"
    assert [p.offset for p in piece.tokens] == [0, 1, 2, 3, 3, 3, 4]
