"""Training of tokenizers on text."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer, model_path
from megatron.features.tokenizers.wordpiece import SPECIAL_TOKENS, UNKNOWN, WordPieceTokenizer
from megatron.tokenizer.base import TextSource, Tokenizer, write_text
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer
from megatron.util.files import Lock

logger = logging.getLogger(__name__)

KINDS = ("unigram", "bpe", "char")
_LONGEST_SENTENCE = 4000
"""Maximum length, in characters, of a sentence for training. SentencePiece skips sentences above a
limit of its own, in bytes."""
_THREADS = 16
"""Number of threads of SentencePiece's trainer. It is fixed, since the order of floating-point sums
affects the model."""
_MOST_CHARACTERS = 1000
_LEAST_WORDPIECES = 32


TRAINED_FILES = {
    "GPT2BPETokenizer": "vocab.json and merges.txt",
    "BertWordPieceLowerCase": "vocab.txt",
    "BertWordPieceCase": "vocab.txt",
    "SentencePieceTokenizer": "tokenizer.model",
}
"""Names of the vocabulary files that training writes, by --tokenizer-type."""


def train_tokenizer(
    tokenizer_type: str,
    texts: TextSource,
    vocab_size: int,
    min_frequency: int,
    sentence_piece_kind: str,
    byte_fallback: bool,
) -> Tokenizer:
    """Train a tokenizer. `sentence_piece_kind` and `byte_fallback` are passed to
    `train_sentencepiece_model`."""
    if tokenizer_type == "GPT2BPETokenizer":
        return train_byte_level_bpe(texts(), vocab_size, min_frequency)
    if tokenizer_type == "SentencePieceTokenizer":
        model = train_sentencepiece_model(texts(), sentence_piece_kind, vocab_size, byte_fallback)
        return SentencePieceTokenizer.gpt_from_model(model)
    lower_case = tokenizer_type == "BertWordPieceLowerCase"
    return train_wordpiece(texts, vocab_size, min_frequency, lower_case)


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, min_frequency: int
) -> GPT2BPETokenizer:
    """Train a byte-level byte-pair encoding in GPT-2's format.

    Ids are ordered as follows: the 256 bytes in GPT-2's order, the merged tokens in the order in
    which they were learned, and `<|endoftext|>`. Equal texts give equal vocabularies. The
    vocabulary is smaller than `vocab_size` if no further pair occurs `min_frequency` times. Raises
    ValueError if `vocab_size` is too small for the bytes and `<|endoftext|>`.
    """
    if vocab_size < 257:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: the 256 bytes and {END_OF_TEXT} take 257"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [(left, right) for left, right in model["merges"]]
    return GPT2BPETokenizer({**vocab, END_OF_TEXT: len(vocab)}, merges)


def train_wordpiece(
    texts: TextSource, vocab_size: int, min_frequency: int, lower_case: bool
) -> WordPieceTokenizer:
    """Train a vocabulary in the format of BERT's vocab.txt. `texts` is called twice.

    Ids are ordered as follows: [PAD], [UNK], [CLS], [SEP], [MASK], the characters, each of them
    again with `##`, and longer pieces in the order in which they were learned. Only the most
    frequent characters are included, at most 1,000 and at most a quarter of the vocabulary. Equal
    texts give equal vocabularies. Raises ValueError if `vocab_size` is too small.
    """
    if vocab_size < _LEAST_WORDPIECES:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: five special tokens and the characters take "
            f"{_LEAST_WORDPIECES} at least"
        )
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalizer.normalize_str(text))
    # tokenizers could limit the number of characters, but chooses arbitrarily among equally
    # frequent ones.
    by_frequency = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    characters = sorted(by_frequency[: min(_MOST_CHARACTERS, (vocab_size - 5) // 4)])

    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # By default the trainer numbers ##characters in a random order.
        special_tokens=[*SPECIAL_TOKENS.values(), *characters, *(f"##{c}" for c in characters)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    vocab = tokenizer.get_vocab()
    return WordPieceTokenizer(
        {t: vocab[t] for t in sorted(vocab, key=vocab.__getitem__)}, lower_case
    )


def train_missing_model(config: TokenizerConfig, texts: TextSource) -> None:
    """Train the model of --tokenizer-model unless it exists, and write its pieces to a .vocab file
    next to it. Other processes wait for the file. Raises ConfigError if --vocab-size is missing or
    --tokenizer-model-type is unknown, and ValueError if no model can be trained on the texts."""
    path, vocab_size = Path(model_path(config, new=True)), config.vocab_size
    if path.exists():
        return
    if vocab_size is None:
        raise ConfigError(
            f"--vocab-size is missing: --tokenizer-model {path} does not exist, and to train it "
            "from the run's text its size must be known"
        )
    kind = _checked(config.tokenizer_model_type or "bpe")
    path.parent.mkdir(parents=True, exist_ok=True)
    with Lock(f"{path}.lock", wait_seconds=-1):
        if not path.exists():
            logger.warning("%s does not exist: training it (%s, %d)", path, kind, vocab_size)
            model = train_sentencepiece_model(texts(), kind, vocab_size)
            write_text(path.with_suffix(".vocab"), _pieces(model))
            write_text(path, model)


def _pieces(model: bytes) -> str:
    """Return a model's pieces with their scores, one per line, in the format of SentencePiece's
    .vocab file. No program reads this file; it is for users."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    numbers = range(pieces.get_piece_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in numbers)


def train_sentencepiece_model(
    texts: Iterable[str], kind: str, vocab_size: int, byte_fallback: bool = False
) -> bytes:
    """Train a model of the kind unigram, bpe or char, and return the content of its file.

    Ids are ordered as follows: `<unk>` 0, `<s>` 1, `</s>` 2, `<pad>` 3, with `byte_fallback` the
    256 bytes, and then pieces. Equal texts give equal models. A model may be smaller than
    `vocab_size`.

    With `byte_fallback`, as in Llama 2, text is not normalized, spaces are kept, each digit is a
    piece, and characters without a piece become bytes. Otherwise text is normalized to NFKC, runs
    of white space become one space, and characters without a piece become `<unk>`. Raises
    ConfigError for another kind, and ValueError if no model can be trained on the texts.
    """
    lossless: dict[str, Any] = {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
    }
    model = io.BytesIO()
    sentences = _Sentences(texts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=_checked(kind),
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            pad_id=3,
            max_sentence_length=4 * _LONGEST_SENTENCE,
            num_threads=_THREADS,
            minloglevel=2,
            **(lossless if byte_fallback else {}),
        )
    except (RuntimeError, OSError) as error:
        sentences.check()
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise ValueError(
            f"SentencePiece cannot train a {kind} model of --vocab-size {vocab_size} on these "
            f"texts: {reason}"
        ) from None
    sentences.check()
    return model.getvalue()


class _Sentences:
    """Iterator over the lines of texts, which divides long lines. SentencePiece does not report
    errors of its iterator, so an error is stored and raised by :meth:`check`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self._error: Exception | None = None
        self._any = False

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                for line in text.split("\n"):
                    for sentence in _cut(line):
                        self._any = True
                        yield sentence
        except Exception as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._any:
            raise ValueError("there is no text to train a SentencePiece model on")


def _cut(line: str) -> Iterator[str]:
    while len(line) > _LONGEST_SENTENCE:
        end = line.rfind(" ", 1, _LONGEST_SENTENCE)
        end = end if end > 0 else _LONGEST_SENTENCE
        yield line[:end]
        line = line[end:]
    if line.strip():
        yield line


def _checked(kind: str) -> str:
    if kind not in KINDS:
        raise ConfigError(
            f"--tokenizer-model-type {kind} is not a SentencePiece model that can be "
            f"trained; it is one of {', '.join(KINDS)}"
        )
    return kind
