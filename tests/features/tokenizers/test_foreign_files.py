"""Vocabulary files that are made to mislead: refused in one line that names flag and file."""

import base64
import json
import os

import pytest
from sentencepiece import sentencepiece_model_pb2

from megatron.config import TokenizerConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.registry import with_files

BYTES = [bytes([byte]) for byte in range(256)]
DEEP = "[" * 100_000


def ranks(tokens):
    lines = (f"{base64.b64encode(token).decode()} {n}" for n, token in enumerate(tokens))
    return "\n".join(lines).encode()


def gpt2_of(vocab):
    return lambda path: {"vocab_file": write(path, vocab), "merge_file": write(path, "", "merges")}


def write(path, content, name="file"):
    whole = content if isinstance(content, bytes) else content.encode()
    (path / name).write_bytes(whole)
    return str(path / name)


def model_of(content, **more):
    return lambda path: {"tokenizer_model": write(path, content), **more}


def not_a_file(path):
    os.mkfifo(path / "file")
    return {"tokenizer_model": str(path / "file")}


HOSTILE = {
    "an id that is a size": (
        "GPT2BPETokenizer", gpt2_of('{"a": 0, "b": 4294967290}'), "has the token id 4,294,967,290"
    ),
    "deep vocab.json": ("GPT2BPETokenizer", gpt2_of(DEEP), "nested more than"),
    "an id of many digits": (
        "GPT2BPETokenizer", gpt2_of('{"a": ' + "9" * 10_000 + "}"), "integer of 10,000 digits"
    ),
    "deep ranks": (
        "TikTokenizer", model_of(DEEP, tiktoken_pattern="v1"), "nested more than"
    ),
    "a token of a megabyte": (
        "TikTokenizer", model_of(ranks([*BYTES, b"a" * 1_000_000])), "a token of 1,000,000 bytes"
    ),
    "no model": ("GPTSentencePieceTokenizer", model_of(b""), "is not a SentencePiece model"),
    "no file": ("GPTSentencePieceTokenizer", not_a_file, "is no ordinary file"),
    "no file of ranks": ("TikTokenizer", not_a_file, "is no ordinary file"),
    "a megabyte for a character": (
        "GPTSentencePieceTokenizer", None, "puts 5,000 bytes in the place of a character"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_vocabulary_is_refused(name, tmp_path, sentencepiece_bytes):
    kind, files, message = HOSTILE[name]
    if files is None:
        files = model_of(with_long_replacement(sentencepiece_bytes))
    config = TokenizerConfig(kind, **files(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        build_tokenizer(config)
    text = str(caught.value)
    assert text.startswith("--") and str(tmp_path / "file") in text
    assert "\n" not in text and len(text) < 500


@pytest.fixture(scope="module")
def sentencepiece_bytes():
    """A model that normalizes."""
    from megatron.features.tokenizers.train import train_sentencepiece_model

    texts = ["some words of a text", "more of them, and other letters: xyz"] * 9
    return train_sentencepiece_model(texts, "unigram", 40, False)


def with_long_replacement(content):
    model = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009
    model.ParseFromString(content)
    table = model.normalizer_spec.precompiled_charsmap
    model.normalizer_spec.precompiled_charsmap = table + b"x" * 5000 + b"\0"
    return model.SerializeToString()


def test_too_large_a_file_is_not_read_whole(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without blocks
    for config in (
        TokenizerConfig("BertWordPieceLowerCase", vocab_file=str(path)),
        TokenizerConfig("Llama2Tokenizer", tokenizer_model=str(path)),
    ):
        with pytest.raises(ValueError, match=f"{path} has more than 268,435,456 bytes"):
            build_tokenizer(config)


def test_notes_of_downloads_that_are_none(tmp_path):
    (tmp_path / "a.json").write_text(DEEP)
    os.mkfifo(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("[1]")
    for digest, name in (("d", "vocab.json"), ("e", "merges.txt")):
        url = {"url": f"https://example.org/models/gpt2-{name}"}
        (tmp_path / f"{digest}.json").write_text(json.dumps(url))
        (tmp_path / digest).write_text("content")
    found = with_files(TokenizerConfig("GPT2BPETokenizer", cache_dir=str(tmp_path)))
    assert found.vocab_file == str(tmp_path / "d")
    assert found.merge_file == str(tmp_path / "e")


def test_a_sentinel_of_many_digits_is_none():
    from megatron.features.tokenizers.pieces import sentinel_ids

    names = {"<extra_id_0>": 7, f"<extra_id_{'9' * 5000}>": 8, "<extra_id_\u0661>": 9}
    assert sentinel_ids(names) == (7,)
