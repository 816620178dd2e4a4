"""BERT's WordPiece tokenizer, for any vocab.txt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.pieces import sentinel_ids, sentinel_names
from megatron.tokenizer.base import (
    Offsets,
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    offsets_of,
    read_text,
    required,
    write_pretrained,
    write_text,
)
from megatron.tokenizer.gpt2_bpe import Vocabulary

UNKNOWN = "[UNK]"
SPECIAL_TOKENS = {
    "pad": "[PAD]", "unk": UNKNOWN, "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]",
}  # fmt: skip
_BOS, _EOS = "[BOS]", "[EOS]"
_MISSING = (
    "; it must list [PAD], [CLS], [SEP] and [MASK], as BERT's vocab.txt does and "
    "tools/train_tokenizer.py writes them; [BOS] and [EOS] come with --vocab-extra-ids"
)
_BOUNDARIES = str.maketrans("\t\n\r", "   ")
_ASCII_WORDS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
_MOST_PARTS, _LONGEST_PART = 1 << 17, 64


class WordPieceTokenizer(Tokenizer):
    """Tokenizer with the ids of `transformers.BertTokenizer` for the same file, without [CLS] and
    [SEP].

    Special tokens in a text keep their ids, as in BertTokenizer. With `extra_ids`, the vocabulary
    is followed by [BOS], [EOS] and `<extra_id_0>`, `<extra_id_1>`, ..., in this order, as in
    Megatron (which also appends [BOS] and [EOS] without them). A document ends with [EOS] if the
    vocabulary has it, otherwise with [SEP].
    """

    def __init__(
        self,
        vocab: Vocabulary,
        lower_case: bool,
        extra_ids: int = 0,
        source: str = "the vocabulary",
    ) -> None:
        """Build the tokenizer. `vocab` is ordered by id, from 0; `source` is its name in messages.
        Raises ValueError if the vocabulary lacks [UNK]."""
        if UNKNOWN not in vocab:
            raise ValueError(f"{source} lacks the token {UNKNOWN}; it must be BERT's vocab.txt")
        self._file_tokens, self._lower_case = list(vocab), lower_case
        vocab = dict(vocab)
        for token in (_BOS, _EOS, *sentinel_names(extra_ids)) if extra_ids else ():
            vocab.setdefault(token, len(vocab))
        self._vocab, self._token_of_id = vocab, list(vocab)
        super().__init__(source, len(vocab), _special_ids(vocab), _MISSING)
        self._encoding = _encoding(vocab, lower_case)
        self._cached = _CachedWordPiece(self._encoding, vocab, lower_case)

    @classmethod
    def from_file(
        cls, vocab_file: str | Path, lower_case: bool, extra_ids: int = 0
    ) -> WordPieceTokenizer:
        """Read a vocab.txt. Raises FileNotFoundError, or ValueError if the file is malformed."""
        vocab = read_wordpieces(str(vocab_file))
        return cls(vocab, lower_case, extra_ids, source=f"--vocab-file {vocab_file}")

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> WordPieceTokenizer:
        """Return the tokenizer for --vocab-file and --vocab-extra-ids. 2019's
        BertWordPieceTokenizer lower-cases text if the model in --tokenizer-model-type is
        uncased."""
        lower_case = config.tokenizer_type == "BertWordPieceLowerCase"
        if config.tokenizer_type == "BertWordPieceTokenizer":
            name = config.tokenizer_model_type or "bert-large-uncased"
            if not name.startswith("bert-"):
                raise ConfigError(
                    f"--tokenizer-model-type {name} is not a model of BERT; with --tokenizer-type "
                    f"{config.tokenizer_type} it is bert-large-uncased, bert-large-cased or the "
                    "like"
                )
            lower_case = "-cased" not in name and "chinese" not in name
        path = required(config, "vocab_file", "the path of BERT's vocab.txt (none is downloaded)")
        return cls.from_file(path, lower_case, config.vocab_extra_ids)

    def _encode(self, text: str) -> TokenIds:
        # raises a clear ValueError for a lone surrogate, instead of a later TypeError
        text.encode()
        return self._cached.encode(text)

    def tokenize_with_offsets(self, text: str) -> tuple[TokenIds, Offsets]:
        text.encode()
        return offsets_of(self._encoding.encode(text, add_special_tokens=False))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return words and special tokens, joined by spaces. The text's own spacing is lost."""
        self._check_ids(ids)
        return self._encoding.decode(list(ids), skip_special_tokens=False)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write vocab.txt, tokenizer.json and tokenizer_config.json for
        `transformers.BertTokenizer`. That tokenizer adds [CLS] before a text and [SEP] after it, as
        BERT models expect, unless it is called with add_special_tokens=False."""
        directory = Path(directory)
        named = {f"{name}_token": t for name, t in SPECIAL_TOKENS.items() if t in self._vocab}
        appended = self._token_of_id[len(self._file_tokens) :]
        sentinels = sentinel_names(len(self.sentinels))
        write_text(directory / "vocab.txt", "".join(f"{token}\n" for token in self._token_of_id))
        write_pretrained(
            directory,
            self._encoding,
            tokenizer_class="BertTokenizer",
            do_lower_case=self._lower_case,
            tokenize_chinese_chars=True,
            strip_accents=None,
            **named,
            **({"bos_token": _BOS, "eos_token": _EOS} if appended else {}),
            **({"additional_special_tokens": sentinels} if sentinels else {}),
        )

    def _find_special_tokens(self) -> frozenset[int]:
        return super()._find_special_tokens() | {self._vocab[UNKNOWN]}

    def _find_word_starts(self) -> WordStarts:
        return np.array([not token.startswith("##") for token in self._token_of_id])


def read_wordpieces(path: str) -> Vocabulary:
    """Read the vocab.txt of --vocab-file, whose lines are the tokens with ids 0, 1 and so on.
    Raises FileNotFoundError if it is missing, and ValueError if it is not UTF-8 or if a line is
    empty or repeated."""
    vocab: Vocabulary = {}
    lines = read_text(path, "--vocab-file").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        token = line.removesuffix("\r")
        if not token:
            raise ValueError(f"--vocab-file {path}, line {number} is empty; it must be a token")
        if token in vocab:
            raise ValueError(
                f"--vocab-file {path}, line {number}: {token!r} is already in "
                f"line {vocab[token] + 1}; each token has one line"
            )
        vocab[token] = number - 1
    return vocab


def _special_ids(vocab: Vocabulary) -> SpecialIds:
    ids = {name: vocab.get(token) for name, token in SPECIAL_TOKENS.items() if name != "unk"}
    eos = vocab.get(_EOS)
    eod = ids["sep"] if eos is None else eos
    sentinels = sentinel_ids(vocab)
    return SpecialIds(**ids, bos=vocab.get(_BOS), eos=eos, eod=eod, sentinels=sentinels)


def _encoding(vocab: Vocabulary, lower_case: bool) -> tokenizers.Tokenizer:
    """Return a `tokenizers.Tokenizer` that encodes like BERT's in `transformers`."""
    encoding = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    encoding.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    encoding.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoding.decoder = decoders.WordPiece(prefix="##")
    specials = [t for t in (*SPECIAL_TOKENS.values(), _BOS, _EOS) if t in vocab]
    specials += sentinel_names(len(sentinel_ids(vocab)))
    encoding.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    cls, sep = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
    if cls in vocab and sep in vocab:
        encoding.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
        )
    return encoding


class _CachedWordPiece:
    """Encoder with the ids of `encoding.encode(text, add_special_tokens=False)`, at twice the
    speed.

    BERT's encoding processes substrings between spaces, tabs and line ends independently: its
    normalization changes single characters, it never merges across white space, and no special
    token contains white space. So a text is split there, each distinct substring is encoded only
    once, and the ids are concatenated. Other white space does not split the text, because BERT
    drops some of it without ending a word.
    """

    def __init__(
        self, encoding: tokenizers.Tokenizer, vocab: Mapping[str, int], lower_case: bool
    ) -> None:
        assert isinstance(encoding.model, models.WordPiece)
        self._encoding, self._model = encoding, encoding.model
        self._vocab, self._lower_case = vocab, lower_case
        specials = encoding.get_added_tokens_decoder().values()
        self._heads = "".join({token.content[0] for token in specials})
        self._ids_of_part: dict[str, list[int]] = {}

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text, which must be valid Unicode."""
        parts = text.translate(_BOUNDARIES).split(" ")
        known = self._ids_of_part
        if len(known) > _MOST_PARTS:
            known.clear()
        long: dict[str, list[int]] = {}
        for part in parts:
            if part not in known:
                (known if len(part) <= _LONGEST_PART else long)[part] = self._encode_part(part)
        rows: Iterable[list[int]] = map(known.__getitem__, parts)
        if long:
            rows = (long[part] if part in long else known[part] for part in parts)
        return np.fromiter(chain.from_iterable(rows), np.int32)

    def _encode_part(self, part: str) -> list[int]:
        # Printable ASCII without a special token consists of words, which are runs of letters and
        # digits, and other single characters.
        if not (part.isascii() and part.isprintable()) or any(c in part for c in self._heads):
            return self._encoding.encode(part, add_special_tokens=False).ids
        ids: list[int] = []
        for word in _ASCII_WORDS.findall(part.lower() if self._lower_case else part):
            i = self._vocab.get(word)
            if i is None:
                ids += [token.id for token in self._model.tokenize(word)]
            else:
                ids.append(i)
        return ids
