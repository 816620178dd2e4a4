"""RAW: the perplexity of documents in a loose JSON file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.report import TaskResult, bits_per_byte
from megatron.apps.tasks.zeroshot.records import records_of
from megatron.apps.tasks.zeroshot.task import ZeroShotTask, framed
from megatron.apps.tasks.zeroshot.windows import Windows
from megatron.config import ConfigError
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import Tokenizer
from megatron.training.metrics import perplexity


class JsonText(ZeroShotTask):
    """The documents of files in their order, each with the end-of-document token behind it unless
    ``raw`` says otherwise, as one stream of tokens in windows.

    Args:
        most: windows that are used at most; no more of the files is read than they need.
    """

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
        """Reads and tokenizes the files. Raises OSError; ConfigError if the stride is above the
        length; ValueError, which names the line, if one is not a JSON object with a text, or it
        cannot be tokenized; or if there are no two tokens."""
        super().__init__(tokenizer)
        eod = _end_of_document(tokenizer) if raw.append_eod else []
        needed = math.inf if most is None else seq_length + (most - 1) * stride + 1
        key, found, count = raw.eval_text_key or raw.text_key, [], 0
        self._bytes = self._documents = 0
        for record in chain.from_iterable(records_of(path, key, raw.delim) for path in paths):
            if count >= needed:
                break
            found.append(np.array(record.tokens(tokenizer) + eod, np.int64))
            count += len(found[-1])
            self._bytes += len(record.text.encode())
            self._documents += 1
        if count < 2:
            raise ConfigError(
                f"--valid-data {' '.join(paths)} has {count} token; a perplexity needs at least "
                "two, as the first is not predicted"
            )
        self.texts = Windows(np.concatenate(found), seq_length, stride, most)
        self._whole = self.texts.targets == count - 1
        self.notes = (
            f" > {self._documents} documents of {count} tokens, {len(self.texts)} windows of "
            f"{seq_length} tokens, {stride} apart",
        )

    def result(
        self,
        log_prob: npt.NDArray[np.float64],
        correct: npt.NDArray[np.float64],
        seconds: float,
    ) -> TaskResult:
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
        return TaskResult(
            self.name, metrics, len(self.texts), targets, seconds, framed(line), details
        )


def _end_of_document(tokenizer: Tokenizer) -> list[int]:
    try:
        return [tokenizer.eod]
    except ValueError as error:
        raise ConfigError(
            f"--task RAW puts the end-of-document token behind each document: {error}; "
            "--no-append-eod leaves it out"
        ) from None
