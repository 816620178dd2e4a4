"""Vectors of chunks of text, the distances of which make neighbours."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.config import Settings
from megatron.retro.embedding.config import EmbedderFlags

END_OF_TEXT = "<|endoftext|>"
"""What GPT-2's tokenizer writes for the end of a document."""

_BUILDERS = {
    "megatron": "megatron_bert:build_megatron_embedder",
    "huggingface": "transformers_encoder:build_transformers_embedder",
    "hashing": "hashing:build_hashing_embedder",
}
"""For each type a module of this package, imported when it is needed, and its function of
configuration and settings."""


class Embedder(Protocol):
    """Turns texts into vectors. A text's vector does not depend on the others beyond rounding."""

    width: int
    """Of a vector."""
    identity: Mapping[str, Any]
    """What the vectors depend on, as JSON; another identity makes other vectors."""

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Tokens of each text, [n], without special ones and before it is cut; without any
        a vector says nothing."""
        ...

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """A vector for each text, [n, width]; zeros for one without tokens."""
        ...


def build_embedder(config: EmbedderFlags, settings: Settings | None = None) -> Embedder:
    """The embedder of the flags. ``settings`` are the flags of training beside them: ``--load``,
    sizes, tokenizer and precision of the BERT. Raises ConfigError, CheckpointError or OSError,
    naming flag and file, if it cannot be used."""
    settings = settings or {}
    name = f"megatron.retro.embedding.{_BUILDERS[embedder_type(config, settings)]}"
    return pkgutil.resolve_name(name)(config, settings)  # type: ignore[no-any-return]


def embedder_type(config: EmbedderFlags, settings: Settings) -> str:
    """The given type, or what the other flags mean without one."""
    if config.bert_embedder_type is not None:
        return config.bert_embedder_type
    return "megatron" if config.bert_load or "load" in settings else "hashing"


def readable(text: str) -> str:
    """A text without the ends of documents, which no embedder reads."""
    return text.replace(END_OF_TEXT, "")
