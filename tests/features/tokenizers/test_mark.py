"""Marks of tokenizers: equal for equal ids, whoever reads the files, wherever they are."""

import json
import shutil

import pytest

from megatron.apps.corpus.indexed_files import common_mark
from megatron.config import TokenizerConfig
from megatron.data.indexed import read_mark
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.mark import TokenizerMark, mark_of, parsed_mark


def config_of(kind: str, folder, wordpiece_file) -> TokenizerConfig:
    if kind.startswith("Bert"):
        return TokenizerConfig(kind, vocab_file=str(wordpiece_file))
    if kind == "GPT2BPETokenizer":
        files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
        return TokenizerConfig(kind, **{name: str(folder / file) for name, file in files.items()})
    return TokenizerConfig(kind)


KINDS = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "ByteLevelTokenizer")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokenizer_has_the_same_mark(trained_folder, wordpiece_file, tmp_path, kind):
    """As files, moved, or as a checkpoint keeps it."""
    found = {}
    for place in (trained_folder, shutil.copytree(trained_folder, tmp_path / "moved")):
        tokenizer = build_tokenizer(config_of(kind, place, wordpiece_file))
        found[place] = mark_of(tokenizer, kind)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = TokenizerConfig("HFTokenizer", tokenizer_model=str(tmp_path / "saved"))
    found["saved"] = mark_of(build_tokenizer(saved), "HFTokenizer")
    assert len({mark.digest for mark in found.values()}) == 1
    (mark, *_) = found.values()
    assert (mark.tokenizer_type, mark.vocab_size) == (kind, tokenizer.vocab_size)
    assert parsed_mark(mark.json()) == mark


def test_different_tokenizers_have_different_marks(trained_folder, wordpiece_file, tmp_path):
    marks = [
        mark_of(build_tokenizer(config_of(kind, trained_folder, wordpiece_file)), kind)
        for kind in KINDS
    ]
    shutil.copytree(trained_folder, tmp_path / "other")
    lines = (tmp_path / "other" / "merges.txt").read_text().splitlines(keepends=True)
    # The vocabulary stays; the last merges are not made.
    (tmp_path / "other" / "merges.txt").write_text("".join(lines[: len(lines) // 2]))
    other = config_of(KINDS[0], tmp_path / "other", wordpiece_file)
    marks.append(mark_of(build_tokenizer(other), KINDS[0]))
    assert len({mark.digest for mark in marks}) == len(marks) == 5
    for kind in ("IdTokenizer", "NullTokenizer"):  # they stand for others
        assert mark_of(build_tokenizer(TokenizerConfig(kind, vocab_size=60)), kind) is None


def test_marks_that_are_put_together():
    one, same, other = (TokenizerMark(n, 9, d) for n, d in (("A", "x"), ("B", "x"), ("C", "y")))
    assert common_mark({"a": one, "b": same}) == one
    assert common_mark({"a": one, "b": None}) is None
    assert common_mark({}) is None
    with pytest.raises(ValueError, match=r"b was made with A of 9 ids \(x\), and c with C of 9"):
        common_mark({"a": None, "b": one, "c": other})
    assert parsed_mark(b'{"format": 2, "anything": 1}') is None  # of a later version


@pytest.mark.parametrize(
    "name",
    [["A"], "\x1b[2J", "A\nB", "A" * 5000, None],
    ids=["list", "escape", "lines", "long", "null"],
)
def test_a_mark_that_cannot_be_shown_is_refused(name, tmp_path):
    """Messages contain it."""
    content = {"format": 1, "tokenizer_type": name, "vocab_size": 3, "digest": "x"}
    (tmp_path / "data.tokenizer").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="data.tokenizer: it is not "):
        read_mark(tmp_path / "data.tokenizer")
