"""The numbers that a validation loss is compared with."""

import json
import math

import numpy as np
import pytest

from megatron.data.indexed import IndexedDatasetWriter
from megatron.quickstart.measure import HeldOut, held_out, unigram_cross_entropy


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
