"""What a SentencePiece model file says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

SPACE = "\u2581"
"""SentencePiece's mark for a space."""
UNIGRAM, BPE, CHAR = 1, 2, 4
"""Algorithms of a model (`trainer.model_type`)."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of pieces (`piece.type`)."""


class Model(NamedTuple):
    """Messages of sentencepiece_model.proto, whose classes are made at run time."""

    pieces: Any
    """A sequence of messages with `piece`, `score` and `type`, by id."""
    trainer: Any
    normalizer: Any


def read_model(processor: sentencepiece.SentencePieceProcessor) -> Model:
    """The model that a processor runs."""
    model = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009
    model.ParseFromString(processor.serialized_model_proto())
    return Model(model.pieces, model.trainer_spec, model.normalizer_spec)


def check_kind(processor: sentencepiece.SentencePieceProcessor) -> None:
    """Refuses a model that `transformers` has no form for, before anything is trained with it.

    Raises:
        ValueError: the model is of words, or marks spaces behind words.
    """
    trainer = read_model(processor).trainer
    if trainer.model_type not in (UNIGRAM, BPE, CHAR):
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        raise ValueError(
            f"is a SentencePiece model of type {kind}; it must be unigram, bpe or char"
        )
    if trainer.treat_whitespace_as_suffix:
        raise ValueError("marks spaces behind words; it must be trained to mark them before words")
