"""WIKITEXT103: the perplexity of a text, per token and per word."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.report import TaskResult, bits_per_byte
from megatron.apps.tasks.zeroshot.detokenizers import detokenizer_of
from megatron.apps.tasks.zeroshot.task import ZeroShotTask, framed
from megatron.apps.tasks.zeroshot.windows import Windows
from megatron.config import ConfigError
from megatron.tokenizer import Tokenizer
from megatron.training.metrics import perplexity


class WikiText(ZeroShotTask):
    """The text of one file, in overlapping windows.

    The adjusted perplexity is per word of the file, divided at each space, as its words were before
    the detokenizer: so models with different tokenizers compare.
    """

    name = "wikitext"
    texts: Windows

    def __init__(self, path: str, tokenizer: Tokenizer, seq_length: int, stride: int) -> None:
        """Reads and tokenizes a file. Raises OSError; ConfigError if the stride is above the
        length; ValueError if the file is not UTF-8, has less than two words or tokens, or cannot be
        tokenized."""
        super().__init__(tokenizer)
        text = read_text(path)
        words = text.strip().split(" ")
        detokenizer, detokenized = detokenizer_of(path)
        try:
            tokens = np.array(tokenizer.tokenize(detokenized(text)), np.int64)
        except ValueError as error:
            raise ValueError(f"--valid-data {path}: {error}") from None
        if len(words) < 2 or len(tokens) < 2:
            raise ConfigError(
                f"--valid-data {path} has {len(words)} words and {len(tokens)} tokens; a "
                "perplexity needs at least two of both, as the first is not predicted"
            )
        self.texts = Windows(tokens, seq_length, stride)
        self._words, self._bytes = len(words), len(text.strip().encode())
        self.notes = (
            f" > number of original tokens: {len(words)}, number of detokenized tokens: "
            f"{len(tokens)}",
            f" > {len(self.texts)} windows of {seq_length} tokens, {stride} apart; "
            + (
                f"detokenizer: {detokenizer}"
                if detokenizer
                else f"no detokenizer: the path {path} contains neither ptb, wiki nor lambada"
            ),
        )

    def result(
        self,
        log_prob: npt.NDArray[np.float64],
        correct: npt.NDArray[np.float64],
        seconds: float,
    ) -> TaskResult:
        total, targets = math.fsum(log_prob), self.texts.targets
        loss, ratio = -total / targets, targets / (self._words - 1)
        metrics = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "adjusted_perplexity": perplexity(loss * ratio),
            "token_ratio": ratio,
            "bits_per_byte": bits_per_byte(total, self._bytes),
        }
        line = (
            f" validation results on WIKITEXT103 | avg loss: {loss:.4E} | "
            f"ppl: {metrics['perplexity']:.4E} | "
            f"adjusted ppl: {metrics['adjusted_perplexity']:.4E} | token ratio: {ratio} |"
        )
        details = {
            "words": self._words,
            "text_bytes": self._bytes,
            "tokens_correct": int(correct.sum()),
        }
        return TaskResult(
            self.name, metrics, len(self.texts), targets, seconds, framed(line), details
        )


def read_text(path: str) -> str:
    """A UTF-8 file, line breaks as they are. Raises OSError; ValueError, which names the byte, if
    it is not UTF-8, or it is empty."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise ConfigError(
            f"--valid-data {path}, line {line}: not UTF-8 ({error}); convert the file"
        ) from None
    if not text.strip():
        raise ConfigError(f"--valid-data {path} is empty: name a file with text")
    return text
