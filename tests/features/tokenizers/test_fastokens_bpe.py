"""GPT2BPETokenizer's batches on fastokens against its definition, and without fastokens."""

import dataclasses
import importlib.util
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.raw_text.encoder import tokenizer_identity
from megatron.features.tokenizers import fastokens_bpe
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE, END_OF_TEXT, GPT2BPETokenizer

needs_fastokens = pytest.mark.skipif(
    importlib.util.find_spec("fastokens") is None, reason="fastokens is not installed"
)
SPACES = " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2009\u2028\u2029\u202f\u205f\u3000"
SPACES += "\u180e\u200b\ufeff"  # these are none


def quick(tokenizer: GPT2BPETokenizer) -> GPT2BPETokenizer:
    """The same one, its batches on fastokens."""
    again = GPT2BPETokenizer(tokenizer._vocab, tokenizer._merges, with_fastokens=True)
    again._batches._to_go = 0
    again.tokenize_batch(["It's 1 text."])
    assert again._batches._fast is not None, "the fast way must be the one that is tested"
    return again


def assert_defined(tokenizer: GPT2BPETokenizer, texts: list[str]) -> None:
    for text, ids in zip(texts, tokenizer.tokenize_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizer._definition.encode(text).ids, ascii(text[:100])
    assert tokenizer._batches._fast is not None


@pytest.fixture(scope="module")
def tokenizer(trained) -> GPT2BPETokenizer:
    return quick(trained)


@needs_fastokens
def test_batches_of_strings_and_sources(tokenizer, fuzzed_strings, python_sources):
    assert_defined(tokenizer, fuzzed_strings(5_000, 5) + python_sources[:20])
    assert tokenizer.tokenize_batch([]) == []
    assert list(map(len, tokenizer.tokenize_batch(["", "a", ""]))) == [0, 1, 0]


@pytest.mark.realdata
@needs_fastokens
def test_batches_real_vocabulary(realdata, fuzzed_strings, python_sources):
    files = [realdata / "gpt2_bpe" / f"gpt2-{name}" for name in ("vocab.json", "merges.txt")]
    real = quick(GPT2BPETokenizer.from_files(*files))
    assert_defined(real, fuzzed_strings(5_000, 6) + python_sources[:20])


@needs_fastokens
@pytest.mark.proof
def test_split_at_every_character():
    """Merges of "a", "1" and "!" with any first byte show what is in one piece."""
    heads = [CHARACTER_OF_BYTE[b] for b in b"a1!'s"]
    merges = [(head, c) for head in heads for c in CHARACTER_OF_BYTE]
    tokens = [*CHARACTER_OF_BYTE, *map("".join, merges), END_OF_TEXT]
    tokenizer = quick(GPT2BPETokenizer({token: i for i, token in enumerate(tokens)}, merges))
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 61)]
    texts = [
        "".join(f"a{c}1{c}!{c} {c}\n {c}'s{c}'ll{c}'d" for c in map(chr, codes[i : i + 4096]))
        for i in range(0, len(codes), 4096)
    ]
    assert_defined(tokenizer, texts)


@needs_fastokens
def test_runs_of_white_space(tokenizer):
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    ends = [("", ""), ("a", "b"), ("é", "漢"), ("", "'s"), ("1", "")]
    texts = [
        before + space * length + last + after
        for space in SPACES
        for length in lengths
        for last in ("", " ", "\n", "\u3000")
        for before, after in ends
    ]
    assert_defined(tokenizer, texts)


@needs_fastokens
def test_contractions_after_every_kind_of_character(tokenizer):
    characters = "a Z1²Ⅷ٣_.'\n\t’＇é漢あ한ǅ\u0301\u0345\u200d\ufeff😀𝐀\U00032897\U0010ffff\x00"
    endings = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", "''s", "' s", "'r"]
    texts = [c + e + after for c in characters for e in endings for after in ("", "a", " b", "😀")]
    assert_defined(tokenizer, texts)


@needs_fastokens
def test_end_of_text_in_a_text(tokenizer):
    marks = [END_OF_TEXT, END_OF_TEXT * 2, END_OF_TEXT[:-1], "<|" + END_OF_TEXT, END_OF_TEXT + "|>"]
    around = ["", "a", " ", "\n\n", "  ", "'", "<", "<|", "😀"]
    texts = [before + mark + after for mark in marks for before in around for after in around]
    assert_defined(tokenizer, texts)
    assert tokenizer.eod in tokenizer.tokenize_batch([f"a{END_OF_TEXT}"])[0]


@needs_fastokens
@pytest.mark.parametrize("kind", ["shuffled", "gaps", "without-end"])
@pytest.mark.parametrize(
    "size", [300, 1500, *(pytest.param(n, marks=pytest.mark.proof) for n in (260, 600, 3000, 6000))]
)
def test_small_vocabularies(kind, size, python_sources, fuzzed_strings):
    rng = random.Random(size)
    sources = rng.sample(python_sources, 12)
    of = train_byte_level_bpe(sources, vocab_size=size, min_frequency=2)
    tokens = [t for t in of._vocab if kind != "without-end" or t != END_OF_TEXT]
    ids = rng.sample(range(len(tokens) * (3 if kind == "gaps" else 1)), len(tokens))
    tokenizer = quick(GPT2BPETokenizer(dict(zip(tokens, ids, strict=True)), of._merges))
    assert_defined(tokenizer, fuzzed_strings(1_000, size) + sources[:3])


@needs_fastokens
def test_more_white_space_than_tiktoken_takes(tokenizer):
    assert_defined(tokenizer, [" " * 1_200_000 + "a"])


@needs_fastokens
def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.tokenize_batch(["a", "b\ud800"])
    assert_defined(tokenizer, ["continues"])


@needs_fastokens
def test_pickled(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert_defined(again, ["a text", f"and {END_OF_TEXT}"])


def _encode_or_exit(tokenizer: GPT2BPETokenizer, text: str, count: int) -> None:
    os._exit(sum(map(len, tokenizer.tokenize_batch([text, "b"]))) != count)


@needs_fastokens
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_in_a_child_after_use(tokenizer, python_sources, how):
    """A forked child has none of its parent's threads: it must not wait for one."""
    text = "\n".join(python_sources)[:1_000_000]
    count = sum(map(len, tokenizer.tokenize_batch([text, "b"])))
    args = (tokenizer, text, count)
    child = multiprocessing.get_context(how).Process(target=_encode_or_exit, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork next to other libraries' threads
        child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        pytest.fail("the child hangs")
    assert child.exitcode == 0


@needs_fastokens
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_no_threads(trained_folder):
    """Not even for a long text and many texts; a user who wants threads gets them."""
    code = (
        "import os; from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer as T;"
        f"t = T.from_files({str(trained_folder / 'vocab.json')!r}, "
        f"{str(trained_folder / 'merges.txt')!r}, with_fastokens=True);"
        "threads = lambda: len(os.listdir('/proc/self/task')); before = threads();"
        "texts = ['a text ' * 9] * 1000 + ['a long text ' * 200_000];"
        "t.tokenize_batch(texts); t.tokenize_batch(texts);"
        "assert t._batches._fast is not None; print(threads() - before)"
    )

    def more_threads(**variables: str) -> int:
        env = {k: v for k, v in os.environ.items() if k != "FASTOKENS_BPE_THREADS"} | variables
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert more_threads() == 0
    if len(os.sched_getaffinity(0)) > 1:
        assert more_threads(FASTOKENS_BPE_THREADS="2") == 1


@needs_fastokens
def test_starts_when_it_is_worth_it(trained, monkeypatch):
    monkeypatch.setattr(fastokens_bpe, "WORTH_BUILDING", 10)
    tokenizer = GPT2BPETokenizer(trained._vocab, trained._merges, with_fastokens=True)
    tokenizer.tokenize_batch(["a" * 9])
    tokenizer.tokenize("a" * 9)
    assert tokenizer._batches._fast is None
    tokenizer.tokenize_batch(["b"])
    assert tokenizer._batches._fast is not None


def assert_stays_with_tiktoken(tokenizer: GPT2BPETokenizer, warning: str | None) -> None:
    texts = ["It's text,", "", f"more {END_OF_TEXT} of it"]
    for expected in (warning, None):  # one warning
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            batch = tokenizer.tokenize_batch(texts)
        assert [ids.tolist() for ids in batch] == list(map(tokenizer.tokenize, texts))
        assert [str(w.message) for w in seen if "fastokens" in str(w.message)] == (
            [f"fastokens {expected}: tiktoken encodes instead, more slowly"] if expected else []
        )
    assert tokenizer._batches._fast is None


def test_it_is_not_used_unless_asked_for(trained_folder, monkeypatch):
    """Neither imported, nor looked for."""
    monkeypatch.setattr(fastokens_bpe, "WORTH_BUILDING", 0)
    monkeypatch.setitem(sys.modules, "fastokens", None)
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    paths = {field: str(trained_folder / name) for field, name in files.items()}
    config = TokenizerConfig("GPT2BPETokenizer", **paths)
    tokenizer = build_tokenizer(config)
    tokenizer.tokenize_batch(["a text"] * 9)
    assert tokenizer._batches is None
    asked = dataclasses.replace(config, bpe_library="fastokens")
    assert tokenizer_identity(asked) == tokenizer_identity(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install -e '.*fast.*' in the checkout, or leave"):
        build_tokenizer(asked)
    with pytest.raises(ConfigError, match="is for --tokenizer-type GPT2BPETokenizer, not Byte"):
        build_tokenizer(TokenizerConfig("ByteLevelTokenizer", bpe_library="fastokens"))


def test_other_ids_end_the_run(trained, monkeypatch):
    """One text of some batches is compared as long as it is used."""
    monkeypatch.setattr(fastokens_bpe, "_COMPARED_EVERY", 3)
    tokenizer = with_fastokens(trained, monkeypatch)
    tokenizer._batches._fast = Broken()
    for _ in range(2):
        assert len(tokenizer.tokenize_batch(["a text"])) == 1
    with pytest.raises(ValueError, match="other ids than tiktoken.*begins with 'a text'"):
        tokenizer.tokenize_batch(["a text"])


def with_fastokens(trained, monkeypatch) -> GPT2BPETokenizer:
    """One that would use it, whether it is installed or not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return GPT2BPETokenizer(trained._vocab, trained._merges, with_fastokens=True)


class Broken:
    """In place of FastEncoding."""

    def __init__(self, *args):
        pass

    def encode_batch(self, texts):
        return [np.zeros(0, np.int32) for _ in texts]


@pytest.mark.parametrize("when, warning", [("ids", "gives other ids"), ("build", None)])
def test_fastokens_that_does_not_fit(trained, monkeypatch, when, warning):
    def refuses(*args):
        raise AttributeError("no such method")

    monkeypatch.setattr(fastokens_bpe, "WORTH_BUILDING", 0)
    monkeypatch.setattr(fastokens_bpe, "FastEncoding", Broken if when == "ids" else refuses)
    tokenizer = with_fastokens(trained, monkeypatch)
    warning = warning or "cannot be used (AttributeError: no such method)"
    assert_stays_with_tiktoken(tokenizer, warning)


def test_fastokens_that_fails_later(trained, monkeypatch):
    def fails(self, texts):
        raise RuntimeError("some table is full")

    monkeypatch.setattr(Broken, "encode_batch", fails)
    tokenizer = with_fastokens(trained, monkeypatch)
    tokenizer._batches._fast = Broken()
    assert_stays_with_tiktoken(tokenizer, "failed (RuntimeError: some table is full)")
