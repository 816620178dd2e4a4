"""Zero-shot tasks: texts to score with their continuations, and metrics of the scores."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.normalization import normalized
from megatron.apps.tasks.report import TaskResult, bits_per_byte
from megatron.apps.tasks.zeroshot.texts import Record, detokenizer_of, read_text, records_of
from megatron.config import ConfigError, ModelConfig
from megatron.data.texts import ScoredText
from megatron.engine.train_engine import ModelEngine
from megatron.families import family_of
from megatron.features.evaluation.checkpoints import measure_texts
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import Tokenizer
from megatron.training.metrics import perplexity
from megatron.util.progress import move_to, progress_bar

TASKS = ("wikitext", "lambada", "json")
"""Task names of :func:`prepare`."""

Numbers = npt.NDArray[np.float64]


def prepare(
    task: str,
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    model: ModelConfig,
    overlapping_eval: int,
    strict_lambada: bool,
    *,
    raw: RawTextConfig | None = None,
    most_windows: int | None = None,
    name: str | None = None,
) -> ZeroShotTask:
    """Read and tokenize the files of a task of :data:`TASKS`, for a model.

    ``overlapping_eval`` and ``most_windows`` are the stride and maximum number of :class:`Windows`.
    ``raw`` contains the settings for reading JSON files, and ``name`` is the name of the results.
    Raises OSError or ValueError if a file or one of its lines cannot be used, or if the model's
    family does not continue text."""
    if not family_of(model.family).generates:
        raise ConfigError(
            f"a model of the family {model.family} does not continue text, which {task} measures; "
            "give a checkpoint of a model that does"
        )
    raw, paths = raw or RawTextConfig(), [str(path) for path in files]
    length = model.seq_length
    prepared: ZeroShotTask
    if task != "json" and len(paths) != 1:
        raise ConfigError(f"{task} needs one file, and {' '.join(paths) or 'none'} is given")
    if task == "json":
        prepared = JsonText(paths, raw, tokenizer, length, overlapping_eval, most_windows)
    elif task == "lambada":
        key, longest = raw.eval_text_key or raw.text_key, model.positions.longest
        prepared = Lambada(paths[0], key, tokenizer, longest, strict_lambada)
    else:
        assert task == "wikitext", task
        prepared = WikiText(paths[0], tokenizer, length, overlapping_eval)
    prepared.name = name or prepared.name
    return prepared


class Measured(NamedTuple):
    """Metrics of a task, the number of scored tokens, the line that Megatron-LM prints, and further
    values for the results file."""

    metrics: dict[str, float]
    tokens: int
    line: str
    details: dict[str, Any]


class ZeroShotTask(ABC):
    """Task whose texts are already read and tokenized. It can be evaluated repeatedly. ``name`` is
    the name of its results, and ``notes`` contains messages about the files for the user."""

    name: str
    texts: Sequence[ScoredText]
    notes: list[str]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def evaluate(
        self,
        engine: ModelEngine,
        micro_batch_size: int,
        progress: Callable[[int], object] | None = None,
    ) -> TaskResult:
        """Score the texts with a model. Collective: every rank must call it, and all get the same
        result. ``progress`` is called at intervals with the number of completed texts; the default
        is a progress bar. Raises ConfigError if the model's family does not predict text."""
        start = time.perf_counter()
        with ExitStack() as stack:
            if progress is None:
                bar = progress_bar(self.name, total=len(self.texts), unit=" texts")
                progress = partial(move_to, stack.enter_context(bar))
            scores = measure_texts(engine, self._tokenizer, self.texts, micro_batch_size, progress)
        seconds = time.perf_counter() - start
        return self.result(scores["log_prob"], scores["correct"], seconds)

    def result(self, log_prob: Numbers, correct: Numbers, seconds: float) -> TaskResult:
        """Return the result, given for each text the log-probability of its continuation and the
        number of continuation tokens that are the model's most probable ones."""
        metrics, tokens, line, details = self.measured(log_prob, correct)
        dashes = "-" * (len(line) + 1)
        lines = (dashes, line, dashes)
        return TaskResult(self.name, metrics, len(self.texts), tokens, seconds, lines, details)

    @abstractmethod
    def measured(self, log_prob: Numbers, correct: Numbers) -> Measured:
        """Return the metrics for the arguments of :meth:`result`."""


class Windows(Sequence[ScoredText]):
    """Windows of ``length`` input tokens over a text [T], ``stride`` tokens apart, at most ``most``
    of them. Every token but the first is scored once: the first window scores all of its tokens,
    each later window only its last ``stride`` tokens. Raises ConfigError if the stride exceeds the
    length."""

    def __init__(
        self, tokens: npt.NDArray[np.int64], length: int, stride: int, most: int | None = None
    ) -> None:
        if not 0 < stride <= length:
            raise ConfigError(
                f"--overlapping-eval {stride} must be from 1 to --seq-length {length}: the tokens "
                "between two windows would not be scored"
            )
        assert len(tokens) > 1
        self._tokens, self._length, self._stride = tokens, length, stride
        count = 1 + max(0, -(-(len(tokens) - 1 - length) // stride))
        self._count = count if most is None else min(count, most)

    def __len__(self) -> int:
        return self._count

    @property
    def targets(self) -> int:
        """Number of scored tokens."""
        return min(len(self._tokens) - 1, self._length + (self._count - 1) * self._stride)

    @overload
    def __getitem__(self, index: int) -> ScoredText: ...
    @overload
    def __getitem__(self, index: slice) -> list[ScoredText]: ...
    def __getitem__(self, index: int | slice) -> ScoredText | list[ScoredText]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        start = index * self._stride
        window = self._tokens[start : start + self._length + 1]
        scored_before = self._length - self._stride if index else 0
        return ScoredText(window[: scored_before + 1], window[scored_before + 1 :])


class WikiText(ZeroShotTask):
    """WIKITEXT103: the perplexity of one text file. The adjusted perplexity is per word of the file
    before detokenization, so that models with different tokenizers are comparable."""

    name = "wikitext"
    texts: Windows

    def __init__(self, path: str, tokenizer: Tokenizer, seq_length: int, stride: int) -> None:
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
        how = f"no detokenizer: the path {path} contains neither ptb, wiki nor lambada"
        if detokenizer is not None:
            how = f"detokenizer: {detokenizer}"
        self.notes = [
            f" > number of original tokens: {len(words)}, number of detokenized tokens: "
            f"{len(tokens)}",
            f" > {len(self.texts)} windows of {seq_length} tokens, {stride} apart; {how}",
        ]

    def measured(self, log_prob: Numbers, correct: Numbers) -> Measured:
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
        counts = {"words": self._words, "text_bytes": self._bytes}
        details = {**counts, "tokens_correct": int(correct.sum())}
        return Measured(metrics, targets, line, details)


class JsonText(ZeroShotTask):
    """RAW: the perplexity of the documents of JSON lines files, concatenated. Each document ends
    with the end-of-document token unless ``raw`` disables it. The files are read only as far as
    ``most`` windows need."""

    name = "json"
    texts: Windows

    def __init__(
        self,
        paths: Sequence[str],
        raw: RawTextConfig,
        tokenizer: Tokenizer,
        seq_length: int,
        stride: int,
        most: int | None = None,
    ) -> None:
        super().__init__(tokenizer)
        try:
            eod = [tokenizer.eod] if raw.append_eod else []
        except ValueError as error:
            raise ConfigError(
                f"--task RAW puts the end-of-document token behind each document: {error}; "
                "--no-append-eod leaves it out"
            ) from None
        needed = math.inf if most is None else seq_length + (most - 1) * stride + 1
        key, documents, count = raw.eval_text_key or raw.text_key, [], 0
        self._bytes = 0
        for record in chain.from_iterable(records_of(path, key, raw.delim) for path in paths):
            if count >= needed:
                break
            documents.append(np.array(record.tokens(tokenizer) + eod, np.int64))
            count += len(documents[-1])
            self._bytes += len(record.text.encode())
        if count < 2:
            raise ConfigError(
                f"--valid-data {' '.join(paths)} has {count} token; a perplexity needs at least "
                "two, as the first is not predicted"
            )
        self.texts = Windows(np.concatenate(documents), seq_length, stride, most)
        self._documents, self._whole = len(documents), self.texts.targets == count - 1
        self.notes = [
            f" > {self._documents} documents of {count} tokens, {len(self.texts)} windows of "
            f"{seq_length} tokens, {stride} apart"
        ]

    def measured(self, log_prob: Numbers, correct: Numbers) -> Measured:
        total, targets = math.fsum(log_prob), self.texts.targets
        loss = -total / targets
        metrics = {"loss": loss, "perplexity": perplexity(loss)}
        details = {"documents": self._documents, "tokens_correct": int(correct.sum())}
        if self._whole:
            metrics["bits_per_byte"] = bits_per_byte(total, self._bytes)
            details["text_bytes"] = self._bytes
        line = (
            " validation loss at the end of training for test data | "
            f"LM loss: {loss:.6E} | LM PPL: {metrics['perplexity']:.6E}"
        )
        return Measured(metrics, targets, line, details)


class Lambada(ZeroShotTask):
    """LAMBADA: predict the last token of each passage or, if ``strict``, every token of its last
    word. A context that exceeds the model's ``longest`` positions is truncated on the left. A
    passage counts as correct if every token to predict is the most probable one, given the correct
    tokens before it."""

    name = "lambada"

    def __init__(
        self, path: str, key: str, tokenizer: Tokenizer, longest: int | None, strict: bool
    ) -> None:
        super().__init__(tokenizer)
        if "lambada" not in path:
            raise ConfigError(
                f"--task LAMBADA: the path of --valid-data {path} must contain 'lambada'; move the "
                "file to a folder of that name if it is LAMBADA, or give another --task"
            )
        texts, self._bytes, cut = [], 0, 0
        for record in records_of(path, key):
            if strict:
                context, label = _last_word(record, tokenizer)
            else:
                tokens = record.tokens(tokenizer)
                context, label = tokens[:-1], tokens[-1:]
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
        self.notes = [f" > found {len(texts)} samples."]
        if cut:
            self.notes.append(
                f" > {cut} of them are longer than the {longest} positions of the model "
                "(--max-position-embeddings): their contexts are cut at the beginning"
            )

    def measured(self, log_prob: Numbers, correct: Numbers) -> Measured:
        sizes = np.array([len(text.continuation) for text in self.texts])
        right, count, total = int((correct == sizes).sum()), len(self.texts), math.fsum(log_prob)
        tokens = int(sizes.sum())
        metrics = {
            "accuracy": right / count,
            "loss": -total / tokens,
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
            "label_tokens": tokens,
            "contexts_cut": self._cut,
            "text_bytes": self._bytes,
        }
        return Measured(metrics, tokens, line, details)


def _last_word(record: Record, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of the context and of the last word; both empty without a context."""
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
    return record._replace(text=context).tokens(tokenizer), label


def _plain(text: str) -> str:
    """Normalize a text, for comparing it with the output of tokenizers that change it."""
    return "".join(normalized("NFKC", text).casefold().split())
