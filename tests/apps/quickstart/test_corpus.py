"""The corpus of source files, and the numbers that a validation loss is compared with."""

import json
import math

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.quickstart.corpus import (
    HeldOut,
    held_out,
    source_files,
    standard_library,
    unigram_cross_entropy,
    write_corpus,
)


@pytest.fixture
def sources(tmp_path):
    """Two good files, and one of each kind that is left out."""
    root = tmp_path / "lib"
    texts = {
        "a.py": "print('ä')\n",
        "pkg/b.py": "b = 1\n",
        "pkg/empty.py": " \n",
        "pkg/notes.txt": "no Python",
        "pkg/test/c.py": "c = 1\n",
        "site-packages/d.py": "d = 1\n",
        "encodings/e.py": "e = 1\n",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "latin1.py").write_bytes("# ä".encode("latin-1"))
    return root


def test_documents(sources, tmp_path):
    corpus = write_corpus(tmp_path / "out" / "corpus.jsonl", sources)
    texts = [json.loads(line)["text"] for line in corpus.path.read_text().splitlines()]
    assert sorted(texts) == ["b = 1\n", "print('ä')\n"]
    assert (corpus.documents, corpus.text_bytes) == (2, 6 + 12)
    assert [path.name for path in corpus.path.parent.iterdir()] == ["corpus.jsonl"]


def test_order_is_mixed_and_the_same_wherever_the_files_lie(sources, tmp_path):
    names = [path.relative_to(standard_library()) for path in source_files(standard_library())]
    assert len(names) > 100 and names != sorted(names)
    moved = tmp_path / "elsewhere"
    sources.rename(moved)
    again = [path.relative_to(moved).as_posix() for path in source_files(moved)]
    assert again == ["pkg/b.py", "pkg/empty.py", "latin1.py", "a.py"]


def test_digest_follows_the_content(sources, tmp_path):
    first = write_corpus(tmp_path / "corpus.jsonl", sources)
    assert write_corpus(tmp_path / "corpus.jsonl", sources) == first
    (sources / "a.py").write_text("other\n")
    assert write_corpus(tmp_path / "corpus.jsonl", sources).digest != first.digest


def test_no_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"contains no \.py files"):
        write_corpus(tmp_path / "corpus.jsonl", tmp_path)


def test_unigram_against_sums_by_hand():
    # Frequencies with one added to each count: 4/8, 3/8, 1/8.
    train, valid = np.array([3, 2, 0]), np.array([2, 1, 1])
    expected = (2 * math.log(8 / 4) + math.log(8 / 3) + math.log(8)) / 4
    assert unigram_cross_entropy(train, valid) == pytest.approx(expected, rel=1e-12)


def test_unigram_of_equal_frequencies_is_the_log_of_their_number():
    counts = np.full(1000, 7)
    assert unigram_cross_entropy(counts, counts) == pytest.approx(math.log(1000), rel=1e-12)


def test_bits_per_byte():
    measured = HeldOut(tokens=30, text_bytes=120, unigram_entropy=0.0)
    assert measured.bits_per_byte(math.log(2) * 8) == pytest.approx(2.0, rel=1e-12)


@pytest.fixture
def preprocessed(tmp_path):
    """Four documents, the last of which is the validation split."""
    prefix, corpus = tmp_path / "data", tmp_path / "corpus.jsonl"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in ([0, 1, 2], [0, 0, 2], [1, 2], [0, 1, 1, 2]):
            writer.add_document([tokens])
    texts = ["ab", "aa", "b", "abbä"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prefix, corpus


def test_held_out(preprocessed):
    result = held_out(*preprocessed, "75,25,0", vocab_size=4)
    assert (result.tokens, result.text_bytes) == (4, 5)
    # Training counts 3, 2, 3, 0.
    expected = (math.log(12 / 4) + 2 * math.log(12 / 3) + math.log(12 / 4)) / 4
    assert result.unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_files_of_two_corpora(preprocessed):
    prefix, corpus = preprocessed
    corpus.write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ValueError, match="has 4 documents and .* 1: they do not belong together"):
        held_out(prefix, corpus, "75,25,0", vocab_size=4)
