"""TikTokenizer against tiktoken itself, and saved folders against transformers."""

import base64
import json

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError
from megatron.features.tokenizers.tik_token import TikTokenizer

# As Meta and Megatron publish them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
V2 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def lines_of(path):
    return [line.split() for line in path.read_text().splitlines()]


def llama3_reference(path) -> tiktoken.Encoding:
    """Meta's numbering, written out."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines_of(path)}
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
    names |= {9: "eot_id", 8: "reserved_special_token_4"}
    for n in range(256):
        names.setdefault(n, f"reserved_special_token_{n - 2 if n < 8 else n - 5}")
    specials = {f"<|{name}|>": len(ranks) + n for n, name in names.items()}
    return tiktoken.Encoding(
        "reference", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens=specials
    )


def assert_same(ours, encode, texts):
    for text, ids in zip(texts, ours.tokenize_batch(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == encode(text) == ours.tokenize(text)
        assert ours.detokenize(ids) == text


@pytest.fixture(scope="module")
def llama3(ranks_file):
    """Ours and tiktoken's, of a small file of ranks."""
    reference = llama3_reference(ranks_file)
    return TikTokenizer.llama3_from_file(ranks_file), (
        lambda text: reference.encode(text, allowed_special="all")
    )


@pytest.fixture(scope="module")
def json_file(ranks_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "vocab.json"
    entries = [
        {"rank": int(rank), "token_bytes": token, "token_str": ""}
        for token, rank in lines_of(ranks_file)
    ]
    path.write_text(json.dumps(entries))
    return path


def test_against_tiktoken(llama3, fuzzed_strings, python_sources):
    ours, encode = llama3
    text = "<|begin_of_text|><|start_header_id|>a<|end_header_id|><|eot_id|><|end_of_text|>"
    assert_same(ours, encode, [*fuzzed_strings(5000, 1), *python_sources[:10], text])
    assert ours.vocab_size == 1999 + 256
    assert (ours.bos, ours.eos, ours.eod) == (1999, 2000, 2000)
    assert ours.tokenize("<|reserved_special_token_250|>") == [2254]
    with pytest.raises(ValueError, match="tokenizer.model has no token for the padding"):
        _ = ours.pad


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_against_tiktoken_hypothesis(llama3, text):
    ours, encode = llama3
    assert ours.tokenize(text) == encode(text)


@pytest.mark.proof
@pytest.mark.realdata
def test_against_tiktoken_real_ranks(realdata, tmp_path, fuzzed_strings, python_sources):
    from transformers import AutoTokenizer

    path = realdata / "tokenizers_sp" / "llama3_tokenizer.tiktoken"
    ours, reference = TikTokenizer.llama3_from_file(path), llama3_reference(path)
    real = (realdata / "wikitext2" / "wiki.valid.raw").read_text("utf-8").split("\n")
    texts = [*fuzzed_strings(10_000, 2), *python_sources[:20], *real]
    assert_same(ours, lambda text: reference.encode(text, allowed_special="all"), texts)
    assert (ours.vocab_size, ours.bos, ours.eod) == (128_256, 128_000, 128_001)
    assert ours.tokenize("Hello world<|eot_id|>") == [9906, 1917, 128_009]
    ours.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved(texts, verbose=False)["input_ids"] == [
        ids.tolist() for ids in ours.tokenize_batch(texts)
    ]


@pytest.mark.parametrize("version, split", [("v1", V1), ("v2", V2)])
def test_json_vocabulary_against_tiktoken(
    json_file, ranks_file, version, split, fuzzed_strings, python_sources
):
    ranks = {base64.b64decode(token): 1000 + int(rank) for token, rank in lines_of(ranks_file)}
    reference = tiktoken.Encoding("r", pat_str=split, mergeable_ranks=ranks, special_tokens={})
    ours = TikTokenizer.json_from_file(json_file, version)
    texts = [*fuzzed_strings(5000, 3), *python_sources[:10], "a<s></s><SPECIAL_5>"]
    assert_same(ours, reference.encode_ordinary, texts)
    assert (ours.bos, ours.eos, ours.eod, ours.vocab_size) == (1, 2, 2, 2999)
    assert ours.detokenize([1, 3, 999]) == "<s><SPECIAL_3><SPECIAL_999>"


def test_json_vocabulary_cut_to_a_size(json_file):
    names = ("<unk>", "<s>", "</s>", "<pad>", "<extra_id_0>")
    ours = TikTokenizer.json_from_file(json_file, "v2", names, 10, vocab_size=300)
    assert (ours.vocab_size, ours.pad, ours.sentinels) == (300, 3, [4])
    assert max(ours.tokenize("def main(): return self.name")) < 300
    for size in (265, 2010):
        with pytest.raises(ConfigError, match=f"--vocab-size {size} .* it must be 266 to 2009"):
            TikTokenizer.json_from_file(json_file, "v2", names, 10, vocab_size=size)
    with pytest.raises(ConfigError, match="--tiktoken-special-tokens <unk> <s>: these must be"):
        TikTokenizer.json_from_file(json_file, "v2", ("<unk>", "<s>"), 10)


@pytest.mark.parametrize("kind", ["llama3", "v1", "v2"])
def test_against_auto_tokenizer_of_saved_folder(
    ranks_file, json_file, tmp_path, fuzzed_strings, python_sources, kind
):
    from transformers import AutoTokenizer

    ours = (
        TikTokenizer.llama3_from_file(ranks_file)
        if kind == "llama3"
        else TikTokenizer.json_from_file(json_file, kind)
    )
    ours.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert len(saved) == ours.vocab_size
    assert (saved.bos_token_id, saved.eos_token_id) == (ours.bos, ours.eos)
    texts = [*fuzzed_strings(1000, 4), *python_sources[:5], "a<s></s><SPECIAL_5><|eot_id|>b"]
    wanted = [ids.tolist() for ids in ours.tokenize_batch(texts)]
    assert saved(texts, verbose=False)["input_ids"] == wanted


def test_a_token_that_no_merge_makes(tmp_path):
    """tiktoken takes a word that is a token as it is; so does the saved folder."""
    from transformers import AutoTokenizer

    tokens = [*(bytes([byte]) for byte in range(256)), b"qzx"]
    lines = [f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate(tokens)]
    (tmp_path / "ranks").write_text("".join(lines))
    ours = TikTokenizer.llama3_from_file(tmp_path / "ranks")
    assert ours.tokenize("qzx!qzxa") == [256, 33, *b"qzxa"]
    ours.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("qzx!qzxa")["input_ids"] == ours.tokenize("qzx!qzxa")


def test_long_runs_continue_where_tiktoken_gives_up(llama3):
    ours, encode = llama3
    text = " " * 1_200_000 + "a"
    with pytest.raises(ValueError, match="[Rr]egex"):
        encode(text)
    assert ours.detokenize(ours.tokenize(text)) == text


def test_word_starts(llama3):
    ours, _ = llama3
    ids = ours.tokenize("import os\n<|eot_id|>")
    texts = [ours.detokenize([i]) for i in ids]
    assert [bool(ours.word_starts[i]) for i in ids] == [
        text[0] in " \n" or text == "<|eot_id|>" for text in texts
    ]


@pytest.mark.parametrize(
    "content, message",
    [
        (
            "AA== 0\nAQ== 2\n",
            "line 2: 'AQ== 2' is not a new token in base64, a space and the rank 1",
        ),
        ("AA== 0\nAA== 1\n", "line 2: 'AA== 1' is not a new token"),
        ("AA 0\n", "line 1: 'AA 0' is not a new token"),
        ("AA== 0\n", "lacks 255 of the 256 bytes, first 0x01"),
        ('[{"rank": 1, "token_bytes": "AA=="}]', "entry 0: .* is not an object with rank 0"),
        ('[{"rank": 0, "token_bytes": "AA"}]', "entry 0: .*a new token in base64"),
        ("[3]", "entry 0: 3 is not an object"),
        ('{"a": 1}', "is not a list of tokens"),
        ("[", "is not valid JSON"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "ranks"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--tokenizer-model .*ranks.*{message}"):
        if content[0] in "[{":
            TikTokenizer.json_from_file(path, "v1")
        else:
            TikTokenizer.llama3_from_file(path)


def test_other_errors(llama3):
    ours, _ = llama3
    with pytest.raises(ValueError, match="surrogates not allowed"):
        ours.tokenize("\ud800")
    with pytest.raises(ValueError, match="token id 2255 is outside the vocabulary of 2255"):
        ours.detokenize([2255])
