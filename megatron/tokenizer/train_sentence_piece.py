"""Learns a SentencePiece model from text, once, however many processes ask for it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.files import write_bytes
from megatron.tokenizer.protocol import TextSource
from megatron.tokenizer.sentence_piece import model_path
from megatron.util.locks import Lock

logger = logging.getLogger(__name__)

KINDS = ("unigram", "bpe", "char")
_LONGEST_SENTENCE = 4000
"""Characters. SentencePiece leaves out sentences that are longer than its limit, in bytes."""
_THREADS = 16
"""Of the trainer. The model depends on it (sums are taken in another order), so it is fixed."""


def train_sentencepiece(
    texts: Iterable[str], path: str | Path, kind: str, vocab_size: int, byte_fallback: bool = False
) -> None:
    """Writes the model that `train_sentencepiece_model` learns to `path`, all at once.

    Raises:
        ConfigError: `kind` is none of unigram, bpe and char.
        ValueError: no model can be learned of the texts.
    """
    write_bytes(Path(path), train_sentencepiece_model(texts, kind, vocab_size, byte_fallback))


def train_missing_model(config: TokenizerConfig, texts: TextSource) -> None:
    """Trains the model of --tokenizer-model unless it is there; others that ask for it wait.

    Raises:
        ConfigError: a flag is missing, or --tokenizer-model-type is unknown.
        ValueError: no model can be learned of the texts.
    """
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
            train_sentencepiece(texts(), path, kind, vocab_size)


def train_sentencepiece_model(
    texts: Iterable[str], kind: str, vocab_size: int, byte_fallback: bool = False
) -> bytes:
    """The file content of a model.

    Ids: `<unk>` 0, `<s>` 1, `</s>` 2, `<pad>` 3, with `byte_fallback` the 256 bytes, then pieces.
    The same texts give the same model. It may come out smaller than `vocab_size`.

    Args:
        kind: unigram, bpe or char.
        byte_fallback: as Llama 2's: text is not normalized and its spaces are kept, digits are
            pieces of their own, and characters that are no piece become bytes, so that every text
            comes back as it was. Else it is normalized to NFKC, runs of white space are one space,
            and such characters become `<unk>`.

    Raises:
        ConfigError: `kind` is none of these.
        ValueError: no model can be learned of the texts.
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
    """Lines of the texts, cut where they are too long.

    SentencePiece ends on an error of its iterator as on its end, so it is kept for afterwards.
    """

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
    """The line in parts of at most _LONGEST_SENTENCE characters, cut before spaces if possible."""
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
            f"--tokenizer-model-type {kind} is no SentencePiece model that can be trained; it is "
            f"one of {', '.join(KINDS)}"
        )
    return kind
