"""SentencePiece tokenizers: Megatron's two ways to use a model file, and Llama 2's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tiktoken
import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.pieces import byte_of_piece, sentinel_ids, sentinel_names
from megatron.formats.tokenizer_json import check_charsmap, check_pieces
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    read_vocabulary_file,
    refuse_extra_ids,
    required,
    write_pretrained,
    write_text,
)

SPACE = "\u2581"
"""SentencePiece's symbol for a space."""
UNIGRAM, BPE, CHAR = 1, 2, 4
"""Values of `trainer.model_type`, the model's algorithm."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Values of `piece.type`."""


class Model(NamedTuple):
    """Parsed SentencePiece model: messages of sentencepiece_model.proto, whose classes are
    generated at run time."""

    pieces: Any
    """Messages with `piece`, `score` and `type`, indexed by id."""
    trainer: Any
    normalizer: Any


def read_model(processor: sentencepiece.SentencePieceProcessor) -> Model:
    model = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009
    model.ParseFromString(processor.serialized_model_proto())
    return Model(model.pieces, model.trainer_spec, model.normalizer_spec)


def check_kind(processor: sentencepiece.SentencePieceProcessor) -> None:
    """Check that `transformers` can run a model, so that no training is wasted on one that it
    cannot. Raises ValueError if the model's pieces are whole words, if it marks spaces after words,
    or if it replaces characters with text that no normalization produces."""
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
) -> tokenizers.Tokenizer:
    """Convert a SentencePiece model to a `tokenizers.Tokenizer` with the same normalization.
    `specials` maps special tokens to ids. `begin` is the id of a token to put before each text."""
    model = read_model(processor)
    trainer, normalizer = model.trainer, model.normalizer
    tokenizer = tokenizers.Tokenizer(_model(model, specials, processor.unk_id()))
    steps: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(" +"), " "),
            normalizers.Replace(Regex("^ | $"), ""),
        ]
    # pre_tokenizers.Metaspace would not add it to a text that begins with a space
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    # encoding word by word is faster
    if trainer.model_type == UNIGRAM and not _crosses_spaces(model):
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
    """Return all (left, right) pairs of pieces whose concatenation is a piece, sorted by descending
    score of the concatenation. SentencePiece may merge any such pair; `tokenizers` merges only
    listed pairs, the earliest first."""
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


def _add(tokenizer: tokenizers.Tokenizer, token: str, i: int, special: bool) -> None:
    added = AddedToken(token, normalized=False, special=special)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    assert tokenizer.token_to_id(token) == i


_SPLIT = " *[^ ]+| +"


# SentencePiece's byte-pair encoding, computed by tiktoken, which is several times faster. Both
# repeatedly merge the two neighbours whose concatenation is the best token, and the leftmost of
# equally good ones. SentencePiece starts from characters and prefers the highest score. tiktoken
# starts from bytes and prefers the lowest rank. Assign ranks in this order: all bytes, then the
# prefixes of multi-byte characters, then characters, then pieces by descending score. The ids then
# agree for every text under these conditions:
#
# 1. Only the text's spaces change (no normalization, white space kept, a space put in front), so
#    that the text that SentencePiece encodes is known.
# 2. Each character of a piece is a piece, so a character that is not a piece never merges.
# 3. Characters without a piece become bytes (byte fallback).
# 4. No two pieces have the same score, except for runs of spaces (see below).
# 5. No piece has a space after another character. No merge crosses the position before a space,
#    and each word can be encoded separately.
# 6. SentencePiece encodes each piece that begins with a space as that piece, because tiktoken looks
#    up a word that is a token, without merging.
#
# Bytes merge to characters first, whatever their neighbours are: prefixes of characters have the
# lowest ranks, and no token begins with a byte from the middle of a character. A character that is
# not a piece remains as bytes and prefixes, which are then replaced by byte pieces.
#
# In a piece, a space is U+2581, which takes three bytes. Ranks use a one-byte space, which saves
# two
# merges per word. Llama 2 gives all runs of 2 to n spaces the same, lowest score. SentencePiece
# then
# merges from the left and extends the leftmost run until it has n spaces. Ranking longer runs first
# has the same effect.


class RankedPieces:
    """Encoder that uses tiktoken and maps its ranks to ids of SentencePiece pieces."""

    def __init__(self, pieces: list[str], ids: dict[str, int], byte_ids: list[int]) -> None:
        """Build the encoder. `pieces` are the pieces of two or more characters, the best one first.
        `ids` maps these and all single-character pieces to ids. In both arguments, a space is " "
        instead of U+2581."""
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
        """Return the ids of a text, which must be valid Unicode."""
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
    """Return the fast encoder for a model, or None if its ids might differ from SentencePiece's."""
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
    """Return whether no two pieces have equal scores. `words` has the scores of pieces that are not
    only spaces; `runs` has those of runs of spaces, by length. Equal scores of all runs are allowed
    if they are below all others and if the runs have all lengths from 2 to the longest."""
    if len({*words.values(), *runs.values()}) == len(words) + len(runs):
        return True
    if len(set(words.values())) < len(words) or len(set(runs.values())) != 1:
        return False
    below = min(words.values(), default=0.0) > max(runs.values())
    return below and set(runs) == set(range(2, max(runs) + 1))


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer with the ids of `sentencepiece.SentencePieceProcessor.encode`. Tokens in `specials`
    keep their ids in a text, and the text between them is encoded separately. Without `specials`,
    control symbols in a text are ordinary text, and detokenizing omits their ids."""

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        ids: SpecialIds,
        specials: dict[str, int] | None = None,
        add_bos: bool = False,
        source: str = "the SentencePiece model",
    ) -> None:
        """Wrap a SentencePiece model, called `source` in messages. `specials` maps the special
        tokens that texts may contain to ids. `add_bos` adds the beginning-of-text token to each
        text."""
        self._processor, self._specials = processor, specials or {}
        self._name_of_special = {i: token for token, i in self._specials.items()}
        vocab_size = 1 + max([len(processor) - 1, *self._specials.values()])
        super().__init__(source, vocab_size, ids, hint=" (it is fixed when the model is trained)")
        self._find_specials = re.compile(
            f"({'|'.join(map(re.escape, self._specials))})" if self._specials else "(?!)"
        )
        self._begin = np.array([self.bos] if add_bos else [], np.int32)
        self._ranked: RankedPieces | None = ranked_pieces(processor)

    @classmethod
    def from_file(cls, path: str | Path, extra_ids: int = 0) -> SentencePieceTokenizer:
        """Return Megatron's SentencePieceTokenizer, which appends special tokens to the model.

        The order is: `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, then `<PAD>`, `<BOS>` and `<EOS>` if the
        model has no such id, then `<extra_id_0>`, `<extra_id_1>` and so on. Tokens that the model
        has are not appended. Raises FileNotFoundError if the file is missing, and ValueError if it
        is not a SentencePiece model.
        """
        processor = load_processor(path)
        vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
        own = {
            "PAD": processor.pad_id(), "BOS": processor.bos_id(), "EOS": processor.eos_id()
        }  # fmt: skip
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        names += [f"<{n}>" if i < 0 else processor.id_to_piece(i) for n, i in own.items()]
        specials = {}
        for name in names + sentinel_names(extra_ids):
            specials[name] = vocab.setdefault(name, len(vocab))
        keys = ("cls", "sep", "eod", "mask", "pad", "bos", "eos")
        given = {key: specials[name] for key, name in zip(keys, names, strict=True)}
        ids = SpecialIds(**given, sentinels=sentinel_ids(vocab))
        return cls(processor, ids, specials, source=f"--tokenizer-model {path}")

    @classmethod
    def gpt_from_file(cls, path: str | Path, add_bos: bool = False) -> SentencePieceTokenizer:
        """Return the tokenizer for a model without added tokens. The model's end-of-text token ends
        a document. Raises FileNotFoundError if the file is missing, and ValueError if it is not a
        SentencePiece model or lacks the token for `add_bos`."""
        processor, source = load_processor(path), f"--tokenizer-model {path}"
        return cls(processor, _own_ids(processor), add_bos=add_bos, source=source)

    @classmethod
    def gpt_from_model(cls, model: bytes) -> SentencePieceTokenizer:
        """Return the tokenizer of :meth:`gpt_from_file` for the content of a valid model file."""
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        return cls(processor, _own_ids(processor))

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> SentencePieceTokenizer:
        """Return the tokenizer of --tokenizer-model. Llama2Tokenizer adds `<s>` to each text."""
        if config.tokenizer_type == "SentencePieceTokenizer":
            return cls.from_file(model_path(config), config.vocab_extra_ids)
        refuse_extra_ids(config)
        add_bos = config.tokenizer_type == "Llama2Tokenizer"
        return cls.gpt_from_file(model_path(config), add_bos)

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        for text in texts:
            # raises a clear ValueError for a lone surrogate, instead of a later RuntimeError
            text.encode()
        if not self._specials and not len(self._begin):
            return self._pieces(texts)
        split = [self._find_specials.split(text) for text in texts]
        plain = self._pieces([part for parts in split for part in parts[::2]])
        rows, start = [], 0
        for parts in split:
            row = [self._begin]
            for n, part in enumerate(parts):
                if n % 2:
                    row.append(np.array([self._specials[part]], np.int32))
                else:
                    row.append(plain[start])
                    start += 1
            rows.append(row[1] if len(row) == 2 and not len(row[0]) else np.concatenate(row))
        return rows

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Tokens in `specials` are surrounded by spaces. Without
        `specials`, control symbols are omitted, as in `sentencepiece`."""
        self._check_ids(ids)
        parts: list[str] = []
        pending: list[int] = []
        for i in ids:
            if i in self._name_of_special:
                parts += [self._processor.decode(pending), self._name_of_special[i]]
                pending = []
            else:
                pending.append(int(i))
        parts.append(self._processor.decode(pending))
        return " ".join(part for part in parts if part) if len(parts) > 1 else parts[0]

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model as tokenizer.model, and as tokenizer.json for `transformers`. Both give
        the same ids, except for rare characters that the `tokenizers` library normalizes
        differently (docs/guides/tokenizers.md)."""
        directory = Path(directory)
        begin = self.bos if len(self._begin) else None
        encoding = as_tokenizers(self._processor, self._specials, begin)
        name = {i: encoding.id_to_token(i) or "" for i in range(self._vocab_size)}
        named = self.special_ids.tokens(name) | {"unk_token": name[self._processor.unk_id()]}
        write_text(directory / "tokenizer.model", self._processor.serialized_model_proto())
        write_pretrained(
            directory,
            encoding,
            tokenizer_class="PreTrainedTokenizerFast",
            clean_up_tokenization_spaces=False,
            split_special_tokens=not self._specials,
            **named,
        )

    def _find_word_starts(self) -> WordStarts:
        processor = self._processor
        marks = np.zeros(self._vocab_size, np.bool_)
        marks[len(processor) :] = True
        for i in range(len(processor)):
            marks[i] = processor.is_control(i) or processor.id_to_piece(i).startswith(SPACE)
        for i in self._specials.values():
            marks[i] = True
        return marks

    def _find_token_bytes(self) -> list[bytes]:
        tokens = super()._find_token_bytes()
        for i in self.byte_pieces:
            tokens[i] = byte_of_piece(self._processor.id_to_piece(i))
        return tokens

    def _find_special_tokens(self) -> frozenset[int]:
        model = self._processor
        own = (i for i in range(len(model)) if model.is_control(i) or model.is_unknown(i))
        return super()._find_special_tokens().union(own, self._specials.values())

    def _find_byte_pieces(self) -> frozenset[int]:
        return frozenset(filter(self._processor.is_byte, range(len(self._processor))))

    def _encode(self, text: str) -> TokenIds:
        return self.tokenize_batch([text])[0]

    def _pieces(self, texts: Sequence[str]) -> list[TokenIds]:
        if self._ranked is not None:
            return [self._ranked.encode(text) for text in texts]
        encoded = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, np.int32) for ids in encoded]


def _own_ids(processor: sentencepiece.SentencePieceProcessor) -> SpecialIds:
    vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
    ids = {
        "pad": processor.pad_id(), "bos": processor.bos_id(),
        "eos": processor.eos_id(), "eod": processor.eos_id(),
    }  # fmt: skip
    known = {name: i for name, i in ids.items() if i >= 0}
    return SpecialIds(**known, sentinels=sentinel_ids(vocab))


def load_processor(path: str | Path) -> sentencepiece.SentencePieceProcessor:
    """Read the model of --tokenizer-model. Raises FileNotFoundError if it is missing, and
    ValueError if it is not a SentencePiece model that `transformers` can run."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is no ordinary file"
        problem = problem if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"--tokenizer-model {path} {problem}; it must be a SentencePiece model "
            "(python tools/train_tokenizer.py --tokenizer-type SentencePieceTokenizer trains one)"
        )
    content = read_vocabulary_file(path, "--tokenizer-model")
    try:
        # From empty content the library silently creates a model without pieces.
        processor = sentencepiece.SentencePieceProcessor(model_proto=content or b"?")
        processor.encode("a")
        for i in range(len(processor)):
            processor.id_to_piece(i)
        read_model(processor)
    except (RuntimeError, UnicodeDecodeError, DecodeError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model") from error
    try:
        check_kind(processor)
    except ValueError as error:
        raise ValueError(f"--tokenizer-model {path} {error}") from None
    return processor


def model_path(config: TokenizerConfig, new: bool = False) -> str:
    """Return the path of --tokenizer-model, with `.model` appended if only that file exists, as in
    2019. If neither file exists, return the path as given or, with `new`, the path to write."""
    path = required(config, "tokenizer_model", "a SentencePiece model")
    with_ending = f"{path.removesuffix('.model')}.model"
    if Path(path).exists():
        return path
    return with_ending if new or Path(with_ending).is_file() else path
