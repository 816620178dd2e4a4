"""Samples of the inverse cloze task against a loop over sentences, as Megatron's helper makes the
table of blocks, and against the definition."""

import numpy as np
import pytest

from megatron.data.index_cache import IndexCache
from megatron.features.retrieval.samples import IctRecipe, document_blocks

CLS, SEP, VOCAB = 1, 2, 10**6
rng = np.random.default_rng(5)
DOCUMENTS = [rng.integers(1, 30, rng.integers(1, 25)).tolist() for _ in range(40)]
DOCUMENTS[7] = [4, 600, 3]


class Sentences:
    """Documents of sentences whose tokens count up."""

    prefix = "sentences"

    def __init__(self, documents, first=1000):
        self.sequence_lengths = np.array([n for each in documents for n in each], np.int32)
        self.document_indices = np.cumsum([0, *map(len, documents)])
        self.starts = first + np.cumsum([0, *self.sequence_lengths])
        self.lengths_digest = str(self.sequence_lengths.tolist())

    def __len__(self):
        return len(self.sequence_lengths)

    def get(self, index, offset=0, length=None):
        return np.arange(self.starts[index], self.starts[index + 1], dtype=np.int32)

    def verify(self):
        pass


def loop(lengths, target, fewest):
    """Megatron's build_blocks_mapping, for one document."""
    blocks, start, size, count, left = [], 0, 0, 0, len(lengths)
    for place, length in enumerate(lengths):
        size, count, left = size + length, count + 1, left - 1
        if (size >= target and left >= fewest and count >= fewest) or not left:
            blocks.append((start, place + 1))
            start, size, count = place + 1, 0, 0
    return blocks


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("target", [1, 40, 10**4])
def test_blocks_are_those_of_a_loop(fewest, target):
    for lengths in DOCUMENTS:
        starts = np.cumsum([0, *lengths])
        expected = loop(lengths, target, fewest)
        assert list(document_blocks(starts, target, fewest)) == expected


def dataset(length=64, kept=0.1, count=300, seed=1, fewest=2, titles=True):
    documents = Sentences(DOCUMENTS)
    own = Sentences([[3]] * len(DOCUMENTS), 500_000) if titles else None
    recipe = IctRecipe(length, seed, kept, fewest, CLS, SEP, VOCAB, own)
    units = range(recipe.units(documents))
    return documents, recipe.build(documents, units, count, "train", IndexCache(None))


def test_samples_follow_from_their_blocks():
    documents, samples = dataset()
    for number in range(len(samples)):
        pieces = samples.origin(number)
        sentences = [documents.get(piece.sequence).tolist() for piece in pieces]
        document = np.searchsorted(documents.document_indices, pieces[0].sequence, "right") - 1
        title = [500_000 + 3 * document + n for n in range(3)]
        query, context = (ids.tolist() for ids in samples[number])
        assert query[0] == CLS and query[-1] == SEP and context[-1] == SEP
        (drawn,) = (n for n, s in enumerate(sentences) if s[:62] == query[1:-1])
        without = [token for n, s in enumerate(sentences) if n != drawn for token in s]
        whole = [token for s in sentences for token in s]
        head, room = [CLS, *title, SEP], 64 - 6
        assert context in ([*head, *without[:room], SEP], [*head, *whole[:room], SEP])


@pytest.mark.parametrize(("kept", "inside"), [(0.0, 0), (1.0, 300)])
def test_share_of_queries_that_stay(kept, inside):
    _, samples = dataset(10**4, kept)
    pairs = [samples[number] for number in range(300)]
    assert sum(bool(np.isin(pair.query[1:-1], pair.context).all()) for pair in pairs) == inside


def test_an_epoch_has_every_block_once_and_queries_change():
    _, samples = dataset(count=10**4)
    blocks = len(samples._index["blocks"])
    firsts = [samples.origin(n)[0].sequence for n in range(2 * blocks)]
    assert len(set(firsts[:blocks])) == blocks and set(firsts[:blocks]) == set(firsts[blocks:])
    assert firsts[:blocks] != firsts[blocks:]
    again = {samples.origin(n)[0].sequence: samples[n].query for n in range(blocks)}
    later = {samples.origin(n)[0].sequence: samples[n].query for n in range(blocks, 2 * blocks)}
    assert any(len(later[n]) != len(query) for n, query in again.items())


def test_documents_that_are_left_out(caplog):
    documents, samples = dataset()
    used = {piece.sequence for n in range(300) for piece in samples.origin(n)}
    short = [n for n, lengths in enumerate(DOCUMENTS) if len(lengths) < 2 or max(lengths) > 512]
    starts = documents.document_indices
    assert short and not any(used & set(range(starts[n], starts[n + 1])) for n in short)


def test_other_numbers_of_titles_are_refused():
    documents = Sentences(DOCUMENTS)
    recipe = IctRecipe(64, 1, 0.1, 2, CLS, SEP, VOCAB, Sentences([[3]] * 39))
    with pytest.raises(ValueError, match=r"--titles-data-path .* 39 titles, and .* 40 documents"):
        recipe.build(documents, range(40), 3, "train", IndexCache(None))
    recipe = IctRecipe(64, 1, 0.1, 2, CLS, SEP, VOCAB)
    with pytest.raises(ValueError, match="--use-one-sent-docs"):
        recipe.build(Sentences([[3], [4]]), range(2), 3, "train", IndexCache(None))
