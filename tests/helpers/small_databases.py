"""A database of chunks by hand, and a search that finds something else for every chunk."""

import numpy as np

from megatron.features.retro.chunks import ChunkDatabase

CHUNK, EOD, VOCAB = 4, 60, 61


class MadeDocuments:
    """Documents in memory."""

    prefix = "made/corpus_text_document"

    def __init__(self, documents):
        self.documents = documents
        self.sequence_lengths = np.array([len(each) for each in documents])

    def get(self, document, start, count):
        return self.documents[document][start : start + count]


def chunk_database(documents=12):
    """Of documents with 3 to 14 random tokens, and all of their chunks."""
    random = np.random.default_rng(3)
    texts = [random.integers(0, VOCAB - 1, 3 + n % 12) for n in range(documents)]
    table = [
        (0, n, start, min(start + CHUNK, len(text)), 1)
        for n, text in enumerate(texts)
        for start in range(0, len(text), CHUNK)
    ]
    return ChunkDatabase(np.array(table, np.uint32), [MadeDocuments(texts)], CHUNK, EOD)


def nearest(chunks_NM, k):
    """Numbers of k chunks for each, which depend on all of its tokens; sometimes there is no second
    one."""
    mixed_N = (chunks_NM * 7 ** np.arange(chunks_NM.shape[1])).sum(1)
    found_NK = (mixed_N[:, None] * 31 + 5 * np.arange(k)) % len(chunk_database())
    found_NK[mixed_N % 5 == 0, 1:] = -1
    return found_NK
