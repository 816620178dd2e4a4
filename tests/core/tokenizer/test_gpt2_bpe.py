"""GPT2BPETokenizer against transformers' GPT-2 over the same files."""

import subprocess
import sys

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE, GPT2BPETokenizer, write_vocabulary


@pytest.fixture(scope="module")
def transformers_gpt2():
    """folder with vocab.json and merges.txt -> transformers' tokenizer."""
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer.from_pretrained


def bytes_and(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate([*CHARACTER_OF_BYTE, *tokens, "<|endoftext|>"])}


def assert_same(ours: GPT2BPETokenizer, reference, texts: list[str]) -> None:
    wanted = reference(texts, verbose=False)["input_ids"]
    for text, ids, batch_ids, want in zip(
        texts, map(ours.tokenize, texts), ours.tokenize_batch(texts), wanted, strict=True
    ):
        assert ids == want, repr(text)
        assert batch_ids.dtype == np.int32 and batch_ids.tolist() == want, repr(text)
        assert ours.detokenize(want) == reference.decode(want) == text


def test_against_transformers_gpt2(
    trained, trained_folder, transformers_gpt2, fuzzed_strings, python_sources
):
    assert trained._ranked is not None, "the fast way must be the one that is tested"
    assert_same(
        trained, transformers_gpt2(trained_folder), fuzzed_strings(10_000, 1) + python_sources[:20]
    )


@pytest.mark.realdata
def test_against_transformers_gpt2_real_vocabulary(
    realdata, tmp_path, transformers_gpt2, fuzzed_strings, python_sources
):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(realdata / "gpt2_bpe" / f"gpt2-{name}")
    ours = GPT2BPETokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert ours._ranked is not None
    assert (ours.vocab_size, ours.eod) == (50_257, 50_256)
    assert ours.tokenize("Hello world") == [15496, 995]
    assert_same(ours, transformers_gpt2(tmp_path), fuzzed_strings(10_000, 2) + python_sources[:20])


@pytest.mark.proof
def test_against_tokenizers_split_of_every_character():
    """The split of the fast way knows the same letters, digits and spaces as the definition's.

    With merges of "a", "1" and "!" with every first byte of a character, ids tell whether the
    character was in one piece with what is before it.
    """
    heads = [CHARACTER_OF_BYTE[b] for b in b"a1!"]
    merges = [(head, c) for head in heads for c in CHARACTER_OF_BYTE]
    tokenizer = GPT2BPETokenizer(bytes_and(*map("".join, merges)), merges)
    assert tokenizer._ranked is not None
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 61)]
    for start in range(0, len(codes), 4096):
        text = "".join(f"a{c}1{c}!{c} {c}\n" for c in map(chr, codes[start : start + 4096]))
        assert tokenizer.tokenize(text) == tokenizer._definition.encode(text).ids, hex(codes[start])


@pytest.mark.parametrize(
    "tokens, merges",
    [
        pytest.param(["bc", "ab", "abc"], ["b c", "a b", "ab c"], id="merge-never-reached"),
        pytest.param(["ab", "abc", "bc"], ["a b", "ab c", "b c", "a bc"], id="made-twice"),
        pytest.param(["abc", "ab"], ["ab c", "a b"], id="part-made-later"),
    ],
)
def test_against_transformers_where_tiktoken_is_not_exact(
    tokens, merges, transformers_gpt2, tmp_path
):
    vocab = bytes_and(*tokens)
    pairs = [tuple(merge.split()) for merge in merges]
    tokenizer = GPT2BPETokenizer(vocab, pairs)
    assert tokenizer._ranked is None
    write_vocabulary(tmp_path, vocab, pairs)
    texts = ["abc", "ababcbcc abcabc", "bcab<|endoftext|>abc", "aabbcc abbc", "ñ abc"]
    assert_same(tokenizer, transformers_gpt2(tmp_path), texts)


def test_against_transformers_with_ids_in_any_order(
    trained, transformers_gpt2, fuzzed_strings, tmp_path
):
    """Merge priority is the order of the lines, whatever the ids."""
    vocab = {token: len(trained._vocab) - 1 - i for token, i in trained._vocab.items()}
    tokenizer = GPT2BPETokenizer(vocab, trained._merges)
    assert tokenizer._ranked is not None and tokenizer.eod == 0
    write_vocabulary(tmp_path, vocab, trained._merges)
    assert_same(tokenizer, transformers_gpt2(tmp_path), fuzzed_strings(500, 3))


def test_a_vocabulary_without_some_bytes_drops_them_as_transformers_does(
    transformers_gpt2, tmp_path
):
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    tokenizer = GPT2BPETokenizer(vocab, [("a", "b")])
    write_vocabulary(tmp_path, vocab, [("a", "b")])
    assert tokenizer.tokenize("abcab b") == transformers_gpt2(tmp_path)("abcab b")["input_ids"]


def test_against_auto_tokenizer_of_saved_folder(trained, trained_folder, fuzzed_strings):
    from transformers import AutoTokenizer

    reloaded = AutoTokenizer.from_pretrained(trained_folder)
    assert type(reloaded).__name__.startswith("GPT2Tokenizer")
    assert reloaded.eos_token_id == trained.eod and len(reloaded) == trained.vocab_size
    assert_same(trained, reloaded, fuzzed_strings(500, 4))
    again = GPT2BPETokenizer.from_files(
        trained_folder / "vocab.json", trained_folder / "merges.txt"
    )
    assert (again._vocab, again._merges) == (trained._vocab, trained._merges)


def test_a_vocabulary_without_endoftext_has_no_eod(trained, tmp_path):
    from transformers import AutoTokenizer

    vocab = {token: i for token, i in trained._vocab.items() if token != "<|endoftext|>"}
    tokenizer = GPT2BPETokenizer(vocab, trained._merges)
    with pytest.raises(ValueError, match=r"no token for the end of document .*<\|endoftext\|>"):
        _ = tokenizer.eod
    tokenizer.save_pretrained(tmp_path)
    text = "a <|endoftext|> b"
    ids = tokenizer.tokenize(text)
    assert max(ids) < tokenizer.vocab_size == len(vocab)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded(text)["input_ids"] == ids and reloaded.eos_token_id is None
    assert tokenizer.detokenize(ids) == text


def test_long_runs_continue_where_the_fast_way_gives_up(trained):
    text = " " * 1_200_000 + "a"
    with pytest.raises(ValueError, match="[Rr]egex"):
        trained._ranked.encode(text)
    assert trained.detokenize(trained.tokenize(text)) == text


def test_lone_surrogates_are_refused(trained):
    slow = GPT2BPETokenizer({"a": 0}, [])
    for tokenizer in (trained, slow):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            tokenizer.tokenize("a\ud800")


def test_detokenize_cut_character_and_unknown_id(trained):
    ids = trained.tokenize("é…")
    assert "\ufffd" in trained.detokenize(ids[:1] + ids[2:])
    with pytest.raises(ValueError, match="token id 2000 is not in"):
        trained.detokenize([5, 2000])


def test_byte_alphabet_is_that_of_tokenizers():
    assert sorted(CHARACTER_OF_BYTE) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_transformers_and_torch_are_not_imported(trained_folder):
    code = (
        "import sys; from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer as T;"
        f"T.from_files({str(trained_folder / 'vocab.json')!r}, "
        f"{str(trained_folder / 'merges.txt')!r}).tokenize('a');"
        "sys.exit(not {'transformers', 'torch'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not valid JSON"),
        ("[]", "contains an empty list; it must be a vocab.json"),
        ('{"a": "0"}', "token 'a' has the id '0'"),
        ('{"a": -1}', "token 'a' has the id -1"),
        ('{"a": 0, "b": 0}', "tokens 'a' and 'b' share the id 0"),
        (b"\xff\xfe", "is not UTF-8"),
        (r'{"a\ud800": 0}', r"token 'a\ud800' has half of a character"),
    ],
)
def test_bad_vocabulary(tmp_path, content, message):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_bytes(content if isinstance(content, bytes) else content.encode())
    merges.write_text("")
    with pytest.raises(ValueError, match="--vocab-file .*vocab.json.*") as error:
        GPT2BPETokenizer.from_files(vocab, merges)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ("#version: 0.2\na b\nb c\n", "line 3: 'b c' makes or uses the token 'c'"),
        ("b a\n", "line 1: 'b a' makes or uses the token 'ba'"),
        ("a b a\n", "line 1: 'a b a' is not two tokens"),
        ('{"a": 0, "b": 1}', "is not two tokens with a space between"),
    ],
)
def test_bad_merges(tmp_path, content, message):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text('{"a": 0, "b": 1, "ab": 2}')
    merges.write_text(content)
    with pytest.raises(ValueError, match="--merge-file .*merges.txt") as error:
        GPT2BPETokenizer.from_files(vocab, merges)
    assert message in str(error.value)


def test_merges_with_windows_line_ends_and_a_hash(tmp_path):
    (tmp_path / "vocab.json").write_text('{"#": 0, "##": 1}')
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\n# #\r\n")
    tokenizer = GPT2BPETokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert tokenizer.tokenize("##") == [1]


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="--vocab-file .*none.json does not exist"):
        GPT2BPETokenizer.from_files(tmp_path / "none.json", tmp_path / "merges.txt")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(FileNotFoundError, match="--merge-file .* is a folder"):
        GPT2BPETokenizer.from_files(tmp_path / "vocab.json", tmp_path)
