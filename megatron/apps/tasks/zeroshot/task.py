"""What the zero-shot tasks have in common: texts to score, and what follows from the scores."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.report import TaskResult
from megatron.data.scored_text import ScoredText
from megatron.engine.train_engine import ModelEngine
from megatron.tokenizer import Tokenizer
from megatron.training.measuring import measure_texts
from megatron.util.progress import move_to, progress_bar


class ZeroShotTask(ABC):
    """A task whose text is read and tokenized; it can be evaluated again and again.

    Attributes:
        name: of its results.
        texts: what the model is to score.
        notes: lines about the files, for the user.
    """

    name: str
    texts: Sequence[ScoredText]
    notes: Sequence[str] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def evaluate(
        self,
        engine: ModelEngine,
        micro_batch_size: int,
        progress: Callable[[int], object] | None = None,
    ) -> TaskResult:
        """Scores the texts with a model; every rank must call it, and gets the same result.

        Args:
            engine: an evaluator, or the engine of a training.
            micro_batch_size: texts in a forward pass of a data-parallel rank.
            progress: called with the number of texts that are done, from time to time; by default
                that moves a bar.

        Raises:
            ConfigError: the model's family does not predict text.
        """
        start = time.perf_counter()
        with ExitStack() as stack:
            if progress is None:
                bar = progress_bar(self.name, total=len(self.texts), unit=" texts")
                progress = partial(move_to, stack.enter_context(bar))
            found = measure_texts(engine, self._tokenizer, self.texts, micro_batch_size, progress)
        seconds = time.perf_counter() - start
        return self.result(found["log_prob"], found["correct"], seconds)

    @abstractmethod
    def result(
        self,
        log_prob: npt.NDArray[np.float64],
        correct: npt.NDArray[np.float64],
        seconds: float,
    ) -> TaskResult:
        """What follows from the log-probability of every text's continuation, [n], and the tokens
        of it that the model finds most likely, [n]."""


def framed(line: str) -> tuple[str, str, str]:
    """A line between two of dashes, one longer, as Megatron-LM prints results."""
    dashes = "-" * (len(line) + 1)
    return dashes, line, dashes
