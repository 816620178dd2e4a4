"""A SentencePiece model: its parts, and its form in the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tiktoken
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

from megatron.formats.tokenizer_json import check_charsmap, check_pieces
from megatron.tokenizer.base import TokenIds

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


_SPLIT = " *[^ ]+| +"


# A byte-pair encoding of SentencePiece on tiktoken, which is several times faster. Both merge again
# and again the two neighbours whose concatenation is the best token, the leftmost on a tie;
# SentencePiece starts from characters and takes the highest score, tiktoken starts from bytes and
# takes the lowest rank. Let ranks be: all bytes, then the beginnings of characters of several
# bytes, then characters, then pieces in the order of their scores. Both agree on every text when
#
# 1. the text is changed in nothing but its spaces (no normalization, white space kept, a space put
#    in front), so that it is known what SentencePiece encodes,
# 2. each character of a piece is a piece, so a character that is no piece never merges,
# 3. what is no piece becomes bytes (byte fallback),
# 4. no two pieces have the same score, but for runs of spaces (see below),
# 5. no piece has a space after another character: no merge crosses the place before a space, and
#    each word can be encoded by itself,
# 6. SentencePiece encodes each piece that begins with a space as that piece: tiktoken does not
#    merge a word that is a token.
#
# Bytes merge to characters first, whatever their neighbours: beginnings of characters rank before
# all else, and no token begins with a byte from a character's middle. The rest of a character that
# is no piece is bytes and beginnings, which become byte pieces.
#
# A space is U+2581 in a piece, three bytes; here it is one, which saves two merges a word. Llama 2
# gives the runs of 2 to n spaces one score, the lowest. SentencePiece then merges leftmost first,
# so it lengthens the run at the left until that has n; ranking longer runs first does the same.


class RankedPieces:
    """Encodes with tiktoken; its ranks are mapped to the ids of pieces."""

    def __init__(self, pieces: list[str], ids: dict[str, int], byte_ids: list[int]) -> None:
        """`pieces` have several characters, the best one first; `ids` has these and all characters
        that are pieces. In both, a space is " "."""
        characters = [piece for piece in ids if len(piece) == 1]
        tokens = [bytes([byte]) for byte in range(256)]
        beginnings = {c.encode()[:n] for c in characters for n in range(2, len(c.encode()))}
        tokens += sorted(beginnings, key=lambda token: (len(token), token))
        first_whole = len(tokens)
        whole = [c for c in characters if len(c.encode()) > 1] + pieces
        tokens += [piece.encode() for piece in whole]
        of_bytes = [[byte_ids[b] for b in token] for token in tokens[:first_whole]]
        for character in characters:
            if len(character.encode()) == 1:
                of_bytes[ord(character)] = [ids[character]]
        self._first_beginning, self._first_whole = 256, first_whole
        self._of_bytes = [np.array(row, np.int32) for row in of_bytes]
        self._id_of_rank = np.array(
            [row[0] for row in of_bytes] + [ids[piece] for piece in whole], np.int32
        )
        self._encoding = tiktoken.Encoding(
            "sentencepiece",
            pat_str=_SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )

    def encode(self, text: str) -> TokenIds:
        """Ids of a text that is valid Unicode."""
        if not text:
            return np.zeros(0, np.int32)
        text = " " + text.replace(SPACE, " ")
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        beginnings = (ranks >= self._first_beginning) & (ranks < self._first_whole)
        if not beginnings.any():
            return self._id_of_rank[ranks]
        parts, start = [], 0
        for stop in np.flatnonzero(beginnings).tolist():
            parts += [self._id_of_rank[ranks[start:stop]], self._of_bytes[ranks[stop]]]
            start = stop + 1
        return np.concatenate([*parts, self._id_of_rank[ranks[start:]]])


def ranked_pieces(processor: sentencepiece.SentencePieceProcessor) -> RankedPieces | None:
    """The fast encoding of a model, None where it would not be exact."""
    pieces, trainer, normalizer = read_model(processor)
    plain = (
        trainer.model_type == BPE
        and trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and not normalizer.remove_extra_whitespaces
        and normalizer.add_dummy_prefix
        and normalizer.escape_whitespaces
    )
    if not plain or any(p.type in (USER_DEFINED, UNUSED) for p in pieces):
        return None
    ids = {p.piece: i for i, p in enumerate(pieces) if p.type == NORMAL}
    score = {p.piece: p.score for p in pieces if p.type == NORMAL}
    byte_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    if not all(map(processor.is_byte, byte_ids)) or SPACE not in ids:
        return None
    if any(" " in piece or not all(c in ids for c in piece) for piece in ids):
        return None
    merged = sorted((p for p in ids if len(p) > 1), key=lambda p: (-score[p], -len(p)))
    words = [piece for piece in merged if piece.strip(SPACE)]
    runs = [piece for piece in merged if not piece.strip(SPACE)]
    if any(SPACE in piece.lstrip(SPACE) for piece in words):
        return None
    if not _no_ties({p: score[p] for p in words}, {len(p): score[p] for p in runs}):
        return None
    begins = [piece for piece in merged if piece[0] == SPACE]
    if processor.encode([piece[1:] for piece in begins]) != [[ids[piece]] for piece in begins]:
        return None
    return RankedPieces(
        [piece.replace(SPACE, " ") for piece in merged],
        {piece.replace(SPACE, " "): i for piece, i in ids.items()},
        byte_ids,
    )


def _no_ties(words: dict[str, float], runs: dict[int, float]) -> bool:
    """True if all scores differ, those of runs of spaces (by length) from one another, too; or
    these have one, below all others, and none is missing from 2 to the longest."""
    if len({*words.values(), *runs.values()}) == len(words) + len(runs):
        return True
    if len(set(words.values())) < len(words) or len(set(runs.values())) != 1:
        return False
    below = min(words.values(), default=0.0) > max(runs.values())
    return below and set(runs) == set(range(2, max(runs) + 1))
