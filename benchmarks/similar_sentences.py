"""Texts whose neighbouring sentences are alike: to pretrain on pairs that share words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

SENTENCES = 60
"""Sentences of a document at most."""
NEIGHBOURS = 12
"""Neighbours of a sentence, and sentences of a document of rows."""


def reordered(texts: Iterable[str]) -> Iterator[str]:
    """Documents of short sentences, a line each, those of one text: each is followed by the one
    that shares most of its words with it, rare words counting more. Texts with fewer than four are
    left out."""
    documents = [_short_sentences(text) for text in texts]
    counts = Counter(
        word for document in documents for sentence in document for word in _words(sentence)
    )
    total = sum(map(len, documents))
    weight = {word: math.log(total / count) for word, count in counts.items()}
    for document in documents:
        document = document[:SENTENCES]
        if len(document) >= 4:
            yield "\n".join(document[number] for number in _order(document, weight))


def _short_sentences(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.?!])[\"'”]?\s+", " ".join(text.split()))
    return [sentence for sentence in sentences if 4 <= len(sentence.split()) <= 22]


def _words(sentence: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", sentence.lower()))


def _order(sentences: Sequence[str], weight: dict[str, float]) -> list[int]:
    words = [_words(sentence) for sentence in sentences]
    sizes = [sum(weight[word] for word in each) or 1.0 for each in words]

    def shared(first: int, second: int) -> float:
        both = sum(weight[word] for word in words[first] & words[second])
        return both / (sizes[first] + sizes[second] - both)

    order, left = [0], set(range(1, len(sentences)))
    while left:
        last = order[-1]
        order.append(max(left, key=lambda number: shared(last, number)))
        left.remove(order[-1])
    return order


def grouped(sentences: Iterable[str]) -> Iterator[str]:
    """Documents of sentences that have no order of their own, a line each: every one is among the
    nearest of the one before it (cosine of TF-IDF above 0.2). Sentences without such a neighbour
    are left out."""
    rows = [text if text[-1] in ".?!" else f"{text}." for text in dict.fromkeys(sentences) if text]
    rows = [text for text in rows if 3 <= len(text.split()) <= 26]
    nearest = _nearest(rows)
    left = np.ones(len(rows), bool)
    for start in np.random.default_rng(0).permutation(len(rows)).tolist():
        document, found = [], start if left[start] else None
        while found is not None and len(document) < NEIGHBOURS:
            document.append(found)
            left[found] = False
            found = next((number for number in nearest[found] if left[number]), None)
        if len(document) > 1:
            yield "\n".join(rows[number] for number in document)


def _nearest(rows: Sequence[str], block: int = 2000) -> list[list[int]]:
    """The nearest rows of each, nearest first, without itself."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(token_pattern=r"[a-z0-9]+", sublinear_tf=True).fit_transform(rows)
    result: list[list[int]] = []
    for first in range(0, len(rows), block):
        cosines: npt.NDArray[np.float64] = (vectors[first : first + block] @ vectors.T).toarray()
        own = np.arange(len(cosines))
        cosines[own, first + own] = 0
        top = np.argpartition(-cosines, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        values = np.take_along_axis(cosines, top, 1)
        order = np.argsort(-values, 1)
        top, values = (np.take_along_axis(each, order, 1) for each in (top, values))
        result += [ids[near > 0.2].tolist() for ids, near in zip(top, values, strict=True)]
    return result
