"""Embeddings of text chunks, whose distances determine neighbours. This file contains the
interface, and an embedder without a model that hashes words and word pairs (Weinberger et al.
2009)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.config import MODEL_FILES, EmbedderFlags
from megatron.apps.retro.embedding.encoder import readable
from megatron.config import ConfigError, Settings
from megatron.tokenizer import Tokenizer
from megatron.util.digests import hash64

F = TypeVar("F", bound=EmbedderFlags)

_WORDS = re.compile(r"\w+|[^\w\s]")
_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
"""2**64 divided by the golden ratio, a factor that mixes the bits of a hash; and half of 64
bits."""


class Embedder(Protocol):
    """Embedder of texts as vectors of ``width`` elements. The embedding of a text does not depend
    on other texts, apart from rounding. ``identity`` is a JSON object of everything that the
    embeddings depend on."""

    width: int
    identity: Mapping[str, Any]

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each text, [n], before truncation and special tokens."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return an embedding of each text, [n, width]. A text without tokens gets zeros."""


def build_embedder(config: EmbedderFlags, settings: Settings | None = None) -> Embedder:
    """Return the embedder that the flags describe. ``settings`` are training flags; a BERT uses
    ``--load``, sizes, tokenizer and precision from them. Raises ConfigError, CheckpointError or
    OSError, naming the flag and file, if one cannot be used."""
    settings = settings or {}
    kind = embedder_type(config, settings)
    if kind == "megatron":
        from megatron.apps.retro.embedding.megatron_bert import build_megatron_embedder

        return build_megatron_embedder(config, settings)
    if kind == "huggingface":
        from megatron.apps.retro.embedding.transformers_encoder import build_transformers_embedder

        return build_transformers_embedder(config, settings)
    if config.bert_load:
        raise ConfigError(
            f"--bert-load {config.bert_load}: --bert-embedder-type hashing reads no model; leave "
            "the flag out, or give another type"
        )
    return HashingEmbedder(config.retro_hashing_width)


def completed_flags(config: F, settings: Settings) -> F:
    """Return the flags, completed from the training flags and with absolute paths, so that they
    describe the same embedder without ``settings``."""

    def of_training(name: str) -> Any:
        return settings[name].value if name in settings else None

    kind = embedder_type(config, settings)
    values: dict[str, Any] = {"bert_embedder_type": kind}
    if kind != "hashing":
        values["bert_load"] = config.bert_load or of_training("load")
    if kind == "megatron":
        for name in ("vocab_file", "tokenizer_type"):
            field = f"retro_bert_{name}"
            values[field] = getattr(config, field) or of_training(name)
    for name in MODEL_FILES:
        path = values.get(name)
        if path is not None and os.path.exists(path):
            values[name] = os.path.abspath(path)
    return dataclasses.replace(config, **values)


def embedder_type(config: EmbedderFlags, settings: Settings) -> str:
    """Return the embedder type that is set, or the one that the other flags imply."""
    if config.bert_embedder_type is not None:
        return config.bert_embedder_type
    return "megatron" if config.bert_load or "load" in settings else "hashing"


def chunk_texts(tokenizer: Tokenizer, tokens: Iterable[np.ndarray]) -> list[str]:
    """Return the text of each chunk of tokens (int64 [...]), without end-of-document tokens."""
    eod = tokenizer.eod
    return [tokenizer.detokenize(row[row != eod].tolist()) for row in tokens]


class HashingEmbedder:
    """Embedder that counts words and pairs of adjacent words, ignoring case. The hash of a word or
    pair determines its column and sign; a count of n contributes 1 + ln n. Embeddings are
    normalised to length 1, so that the smallest L2 distance means the largest cosine similarity."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.identity: Mapping[str, Any] = {"type": "hashing", "width": width}

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the number of words and punctuation marks of each text, [n]."""
        return np.array([len(_words(text)) for text in texts], np.int64)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        words = [_words(text) for text in texts]
        lengths = [len(each) for each in words]
        hashes = np.fromiter(
            (_hash(word) for each in words for word in each), np.uint64, sum(lengths)
        )
        rows = np.repeat(np.arange(len(texts)), lengths)
        within = rows[1:] == rows[:-1]
        pairs = _mixed(_mixed(hashes[:-1]) + hashes[1:])[within]
        features = np.concatenate([_mixed(hashes), pairs])
        return self._vectors(len(texts), np.concatenate([rows, rows[1:][within]]), features)

    def _vectors(
        self, count: int, rows: npt.NDArray[np.int64], features: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.float32]:
        order = np.lexsort((features, rows))
        rows, features = rows[order], features[order]
        first = np.ones(len(rows), bool)
        first[1:] = (rows[1:] != rows[:-1]) | (features[1:] != features[:-1])
        starts = np.flatnonzero(first)
        counts = np.diff(starts, append=len(rows))
        rows, features = rows[starts], features[starts]
        signs = np.where(features >> np.uint64(63), -1.0, 1.0)
        columns = (features % np.uint64(self.width)).astype(np.int64)
        vectors = np.bincount(
            rows * self.width + columns, signs * (1 + np.log(counts)), count * self.width
        ).reshape(count, self.width)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def _words(text: str) -> list[str]:
    return _WORDS.findall(readable(text).lower())


@lru_cache(maxsize=1 << 20)
def _hash(word: str) -> int:
    return hash64(word.encode("utf-8", "surrogatepass"))


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix hashes, so that all bits of each result depend on all bits of the hash."""
    hashes = hashes * _ODD
    return (hashes ^ (hashes >> _HALF)) * _ODD
