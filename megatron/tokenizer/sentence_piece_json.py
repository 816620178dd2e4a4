"""A SentencePiece model as the `tokenizers` library runs it, for tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping

import sentencepiece
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

from megatron.tokenizer.sentence_piece_model import (
    BPE,
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    USER_DEFINED,
    Model,
    read_model,
)


def as_tokenizers(
    processor: sentencepiece.SentencePieceProcessor,
    specials: Mapping[str, int],
    begin: int | None,
) -> Tokenizer:
    """The model with its normalization, the special tokens, and `begin` before each text."""
    model = read_model(processor)
    trainer, normalizer = model.trainer, model.normalizer
    tokenizer = Tokenizer(_model(model, specials))
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


def _model(model: Model, specials: Mapping[str, int]) -> models.Model:
    trainer = model.trainer
    scores = [(piece.piece, piece.score) for piece in model.pieces]
    appended = sorted((i, token) for token, i in specials.items() if i >= len(scores))
    if trainer.model_type == UNIGRAM:
        scores += [(token, 0.0) for _, token in appended]
        return models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    vocab = {piece: i for i, (piece, _) in enumerate(scores)}
    vocab |= {token: i for i, token in appended}
    return models.BPE(
        vocab,
        _merges(model) if trainer.model_type == BPE else [],
        unk_token=model.pieces[trainer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
    )


def _crosses_spaces(model: Model) -> bool:
    return any(SPACE in piece.piece[1:] for piece in model.pieces)


def _merges(model: Model) -> list[tuple[str, str]]:
    """All pairs whose concatenation is a piece, the piece of the highest score first.

    SentencePiece merges any such pair; `tokenizers` merges those listed, the earliest first.
    """
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
