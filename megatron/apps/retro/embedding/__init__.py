"""Vectors of chunks of text, the distances of which make neighbours."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.embedding.config import MODEL_FILES, EmbedderFlags
from megatron.config import ConfigError, Settings

F = TypeVar("F", bound=EmbedderFlags)

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
    kind = embedder_type(config, settings)
    if kind == "hashing" and config.bert_load:
        raise ConfigError(
            f"--bert-load {config.bert_load}: --bert-embedder-type hashing reads no model; leave "
            "the flag out, or give another type"
        )
    name = f"megatron.apps.retro.embedding.{_BUILDERS[kind]}"
    return pkgutil.resolve_name(name)(config, settings)  # type: ignore[no-any-return]


def completed_flags(config: F, settings: Settings) -> F:
    """The flags with what they leave to those of training, and paths that are understood in every
    folder: they make the same embedder without ``settings``."""
    kind = embedder_type(config, settings)
    values: dict[str, Any] = {"bert_embedder_type": kind}
    if kind != "hashing":
        values["bert_load"] = config.bert_load or _given(settings, "load")
    if kind == "megatron":
        for name in ("vocab_file", "tokenizer_type"):
            own = f"retro_bert_{name}"
            values[own] = getattr(config, own) or _given(settings, name)
    for name in MODEL_FILES:
        path = values.get(name)
        if path is not None and os.path.exists(path):
            values[name] = os.path.abspath(path)
    return dataclasses.replace(config, **values)


def _given(settings: Settings, name: str) -> Any:
    return settings[name].value if name in settings else None


def embedder_type(config: EmbedderFlags, settings: Settings) -> str:
    """The given type, or what the other flags mean without one."""
    if config.bert_embedder_type is not None:
        return config.bert_embedder_type
    return "megatron" if config.bert_load or "load" in settings else "hashing"


def readable(text: str) -> str:
    """A text without the ends of documents, which no embedder reads."""
    return text.replace(END_OF_TEXT, "")
