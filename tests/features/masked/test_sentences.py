"""Numbers of sentences, against a list of them made one by one."""

import numpy as np
import pytest

from megatron.data.samples import Piece
from megatron.features.masked.sentence_numbers import Sentences, join, token_count, trimmed


def listed(documents, units, limit):
    """Every sentence as (sequence, start, stop), and the number of them in each document."""
    found, counts = [], []
    for d in units:
        before = len(found)
        for sequence in range(documents.document_indices[d], documents.document_indices[d + 1]):
            length = int(documents.sequence_lengths[sequence])
            for start in range(0, length, limit):
                found.append((sequence, start, min(start + limit, length)))
        counts.append(len(found) - before)
    return found, counts


@pytest.mark.parametrize("case", range(60))
def test_against_a_list_of_all_sentences(case, counting):
    rng = np.random.default_rng(case)
    longest = int(rng.choice([4, 9, 25]))
    documents = counting(
        [rng.integers(0, longest, rng.integers(0, 6)).tolist() for _ in range(rng.integers(1, 12))]
    )
    total = len(documents.document_indices) - 1
    start = int(rng.integers(0, total))
    units = range(start, int(rng.integers(start + 1, total + 1)))
    limit = int(rng.choice([3, 8, 30]))
    expected, counts = listed(documents, units, limit)
    sentences = Sentences.of(documents, units, limit)
    assert np.diff(sentences.document_starts_D).tolist() == counts
    assert np.diff(sentences.starts_N).tolist() == [stop - start for _, start, stop in expected]
    for number, sentence in enumerate(expected):
        assert sentences.numbers.pieces(documents, number, number + 1) == [
            Piece("counting", *sentence)
        ]
    tokens = join(documents, sentences.numbers.pieces(documents, 0, len(expected)))
    texts = [documents.get(sequence, a, b - a) for sequence, a, b in expected]
    assert tokens.tolist() == [token for text in texts for token in text.tolist()]
    copy = type(sentences.numbers)(
        sentences.numbers.first_sequence, limit, **sentences.numbers.arrays()
    )
    assert copy.pieces(documents, 0, len(expected)) == sentences.numbers.pieces(
        documents, 0, len(expected)
    )


def test_parts_of_one_sentence_are_one_piece(counting):
    sentences = Sentences.of(counting([[2, 10, 3]]), range(1), 4)
    pieces = sentences.numbers.pieces(counting([[2, 10, 3]]), 0, 5)
    assert pieces == [
        Piece("counting", 0, 0, 2),
        Piece("counting", 1, 0, 10),
        Piece("counting", 2, 0, 3),
    ]


@pytest.mark.parametrize("front", range(8))
@pytest.mark.parametrize("back", range(8))
def test_trimmed_against_slicing(front, back, counting):
    documents = counting([[3, 1, 4]])
    pieces = [Piece("counting", 0, 0, 3), Piece("counting", 1, 0, 1), Piece("counting", 2, 1, 4)]
    tokens = join(documents, pieces).tolist()
    cut = trimmed(pieces, front, back)
    assert join(documents, cut).tolist() == tokens[front : max(len(tokens) - back, front)]
    assert all(piece.start < piece.stop for piece in cut)
    assert token_count(cut) == max(7 - front - back, 0)
