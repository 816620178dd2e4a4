"""Vectors of hashed words, compared with a dictionary of words."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding import build_embedder, embedder_type
from megatron.config import Setting

TEXTS = [
    "The cat sat on the mat near the door.",
    "a cat sat on the mat near a window",
    "Quantum chromodynamics is a gauge theory, and so is electroweak theory!",
    "cat the",
    "",
    "<|endoftext|>",
]


def cosine(left: str, right: str) -> float:
    """Of the counts of words and pairs of words, without hashing them."""
    vectors = []
    for text in (left, right):
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        counts = Counter([*words, *zip(words, words[1:], strict=False)])
        vectors.append({key: 1 + math.log(count) for key, count in counts.items()})
    first, second = vectors
    product = sum(value * second.get(key, 0) for key, value in first.items())
    return product / math.prod(math.hypot(*vector.values()) for vector in vectors)


def embedder(width=256):
    config = EmbedderFlags(bert_embedder_type="hashing", retro_hashing_width=width)
    return build_embedder(config)


def test_distances_are_those_of_the_words():
    """Among 2**16 columns no two features of these texts share one."""
    vectors = embedder(1 << 16).embed(TEXTS[:4])
    expected = [[cosine(left, right) for right in TEXTS[:4]] for left in TEXTS[:4]]
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-6)


def test_columns_that_are_shared_add_noise_without_bias():
    """Signs make the products of unrelated words cancel: their mean is zero, their spread that of
    1 / sqrt(width)."""
    texts = [" ".join(f"w{n}x{word}" for word in range(40)) for n in range(200)]
    vectors = embedder(64).embed(texts)
    products = (vectors @ vectors.T)[np.triu_indices(len(texts), 1)]
    assert abs(products.mean()) < 0.005
    assert products.std() == pytest.approx(64**-0.5, rel=0.1)


def test_a_text_does_not_depend_on_the_others():
    together = embedder().embed(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(embedder().embed([text])[0], vector)


def test_texts_without_words_have_zeros():
    found = embedder()
    assert found.lengths(TEXTS).tolist() == [10, 9, 13, 2, 0, 0]
    assert found.embed(TEXTS)[4:].tolist() == np.zeros((2, 256)).tolist()
    assert np.linalg.norm(found.embed(TEXTS[:4]), axis=1) == pytest.approx(1)
    assert found.embed([]).shape == (0, 256)


def test_hashes_stay_what_they_are():
    """Vectors in files are compared with those of later versions."""
    vector = embedder(4).embed(["one two three"])[0]
    np.testing.assert_allclose(vector, [-(0.2**0.5), 0, 2 * 0.2**0.5, 0], atol=1e-6)


def test_without_a_type_a_model_decides():
    load = {"load": Setting("checkpoints", "flag --load")}
    assert embedder_type(EmbedderFlags(), {}) == "hashing"
    assert embedder_type(EmbedderFlags(), load) == "megatron"
    assert embedder_type(EmbedderFlags(bert_load="bert"), {}) == "megatron"
    assert embedder_type(EmbedderFlags(bert_embedder_type="huggingface"), load) == "huggingface"
