"""A SentencePiece model: its parts, and its form in the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from megatron.tokenizer.tokenizer_json import check_charsmap, check_pieces

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
    model = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009
    model.ParseFromString(processor.serialized_model_proto())
    return Model(model.pieces, model.trainer_spec, model.normalizer_spec)


def check_kind(processor: sentencepiece.SentencePieceProcessor) -> None:
    """Refuses a model that `transformers` cannot run, before anything is trained with it. Raises
    ValueError if the model is of words, marks spaces after words, or replaces characters by texts
    that no normalization has."""
    pieces, trainer, normalizer = read_model(processor)
    check_charsmap(normalizer.precompiled_charsmap, "the model")
    if trainer.model_type not in (UNIGRAM, BPE, CHAR):
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        raise ValueError(
            f"is a SentencePiece model of type {kind}; it must be unigram, bpe or char"
        )
    if trainer.model_type == UNIGRAM:
        check_pieces((piece.piece for piece in pieces), "the model")
    if trainer.treat_whitespace_as_suffix:
        raise ValueError("marks spaces after words; it must be trained to mark them before words")


def as_tokenizers(
    processor: sentencepiece.SentencePieceProcessor,
    specials: Mapping[str, int],
    begin: int | None,
) -> Tokenizer:
    """The model with its normalization, the special tokens, and `begin` before each text."""
    model = read_model(processor)
    trainer, normalizer = model.trainer, model.normalizer
    tokenizer = Tokenizer(_model(model, specials, processor.unk_id()))
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(" +"), " "),
            normalizers.Replace(Regex("^ | $"), ""),
        ]
    if normalizer.add_dummy_prefix:  # not of Metaspace, which adds none before a space
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if trainer.model_type == UNIGRAM and not _crosses_spaces(model):  # words by themselves: faster
        tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.decoder = _decoder(normalizer.add_dummy_prefix)
    for i, piece in enumerate(model.pieces):
        if piece.type in (CONTROL, USER_DEFINED) and piece.piece not in specials:
            special = piece.type == CONTROL
            _add(tokenizer, piece.piece, i, special)
    for token, i in sorted(specials.items(), key=lambda item: item[1]):
        _add(tokenizer, token, i, special=True)
    if begin is not None:
        token = model.pieces[begin].piece
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, begin)]
        )
    return tokenizer


def _model(model: Model, specials: Mapping[str, int], unk: int) -> models.Model:
    trainer = model.trainer
    scores = [(piece.piece, piece.score) for piece in model.pieces]
    appended = sorted((i, token) for token, i in specials.items() if i >= len(scores))
    if trainer.model_type == UNIGRAM:
        scores += [(token, 0.0) for _, token in appended]
        return models.Unigram(scores, unk_id=unk, byte_fallback=trainer.byte_fallback)
    vocab = {piece: i for i, (piece, _) in enumerate(scores)}
    vocab |= {token: i for i, token in appended}
    return models.BPE(
        vocab,
        _merges(model) if trainer.model_type == BPE else [],
        unk_token=model.pieces[unk].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _crosses_spaces(model: Model) -> bool:
    return any(SPACE in piece.piece[1:] for piece in model.pieces)


def _merges(model: Model) -> list[tuple[str, str]]:
    """All pairs whose concatenation is a piece, the piece of the highest score first. SentencePiece
    merges any such pair; `tokenizers` merges those listed, the earliest first."""
    score = {p.piece: p.score for p in model.pieces if p.type == NORMAL}
    merges = []
    for piece in sorted(score, key=lambda p: (-score[p], -len(p))):
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        merges += [(left, right) for left, right in cuts if left in score and right in score]
    return merges


def _decoder(dummy_prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        steps.append(decoders.Strip(" ", left=1))
    return decoders.Sequence(steps)


def _add(tokenizer: Tokenizer, token: str, i: int, special: bool) -> None:
    added = AddedToken(token, normalized=False, special=special)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    assert tokenizer.token_to_id(token) == i
