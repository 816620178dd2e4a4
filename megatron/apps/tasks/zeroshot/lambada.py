"""LAMBADA: the last word of a passage."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.report import TaskResult, bits_per_byte
from megatron.apps.tasks.zeroshot.records import Record, records_of
from megatron.apps.tasks.zeroshot.task import ZeroShotTask, framed
from megatron.config import ConfigError
from megatron.data.scored_text import ScoredText
from megatron.tokenizer import Tokenizer
from megatron.training.metrics import perplexity
from megatron.util.normalization import normalized


class Lambada(ZeroShotTask):
    """Passages whose last word, or last token, is to be predicted.

    Strict: the last of the words between white space is the label, with the space before it; what
    is before its last occurrence is the context, without white space at both ends. A passage counts
    as correct if every token of the label is the most likely one, given the right ones before it.

    A context that is too long for the model is cut at its beginning.
    """

    name = "lambada"

    def __init__(
        self, path: str, key: str, tokenizer: Tokenizer, longest: int | None, strict: bool
    ) -> None:
        """Reads and tokenizes a file of JSON lines with the passages under ``key``, for a model of
        ``longest`` positions (None: of any length). Raises OSError; ConfigError if the path does
        not contain "lambada"; ValueError, which names the line, if a passage has no context, or a
        label that the tokenizer or the model cannot spell."""
        super().__init__(tokenizer)
        if "lambada" not in path:
            raise ConfigError(
                f"--task LAMBADA: the path of --valid-data {path} must contain 'lambada'; move the "
                "file to a folder of that name if it is LAMBADA, or give another --task"
            )
        texts, self._bytes, cut = [], 0, 0
        for record in records_of(path, key):
            context, label = (_word if strict else _token)(record, tokenizer)
            if not context:
                raise ConfigError(
                    f"{record.place}: nothing comes before the last {'word' if strict else 'token'}"
                    f" of {record.text[:40]!r}, and LAMBADA needs a context; leave the line out"
                )
            fitting = len(context) if longest is None else longest + 1 - len(label)
            if fitting < 1:
                raise ConfigError(
                    f"{record.place}: the label has {len(label)} tokens, and the model has "
                    f"{longest} positions (--max-position-embeddings); leave the line out"
                )
            cut += len(context) > fitting
            texts.append(ScoredText(np.array(context[-fitting:]), np.array(label)))
            self._bytes += len(tokenizer.detokenize(label).encode())
        self.texts, self._strict, self._cut = texts, strict, cut
        self.notes = (f" > found {len(texts)} samples.",) + (
            f" > {cut} of them are longer than the {longest} positions of the model "
            "(--max-position-embeddings): their contexts are cut at the beginning",
        ) * (cut > 0)

    def result(
        self,
        log_prob: npt.NDArray[np.float64],
        correct: npt.NDArray[np.float64],
        seconds: float,
    ) -> TaskResult:
        sizes = np.array([len(text.continuation) for text in self.texts])
        right, count, total = int((correct == sizes).sum()), len(self.texts), math.fsum(log_prob)
        metrics = {
            "accuracy": right / count,
            "loss": -total / int(sizes.sum()),
            "perplexity": perplexity(-total / count),
            "bits_per_byte": bits_per_byte(total, self._bytes),
        }
        line = (
            f" validation results on LAMBADA | number correct: {right:.4E} | "
            f"total examples: {count:.4E} | avg accuracy: {metrics['accuracy']:.4E}"
        )
        details = {
            "correct": right,
            "strict": self._strict,
            "label_tokens": int(sizes.sum()),
            "contexts_cut": self._cut,
            "text_bytes": self._bytes,
        }
        return TaskResult(
            self.name, metrics, count, int(sizes.sum()), seconds, framed(line), details
        )


def _word(record: Record, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of the context and the last word."""
    word = next(reversed(record.text.split()), "")
    context = record.text[: record.text.rfind(word)].strip()
    if not context:
        return [], []
    label = record.tokens(tokenizer, f" {word}")
    spelled = tokenizer.detokenize(label)
    if not label or _plain(spelled) != _plain(word):
        raise ConfigError(
            f"{record.place}: the last word is {word!r}, and its tokens {label} spell {spelled!r}: "
            f"{tokenizer.source} lacks a token for it; give the vocabulary that the model was "
            "trained with"
        )
    return Record(context, record.records, record.offset).tokens(tokenizer), label


def _token(record: Record, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before the last one, and that."""
    tokens = record.tokens(tokenizer)
    return tokens[:-1], tokens[-1:]


def _plain(text: str) -> str:
    """What tokenizers that change a text do not change."""
    return "".join(normalized("NFKC", text).casefold().split())
