"""Tasks for an encoder with a head: the label of a text or a pair, a number, the best option.

A text is ``[CLS] a [SEP] b [SEP]``, cut at the right end.

Shape suffixes: S tokens of a text, N examples, L labels or options.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.apps.tasks.fine_tuning.examples import LabelledExample, RaceQuestion
from megatron.apps.tasks.fine_tuning.metrics import (
    SCORERS,
    Scores,
    accuracy_scores,
)
from megatron.apps.tasks.fine_tuning.predictions import (
    Prediction,
    chosen,
    estimated,
)
from megatron.apps.tasks.fine_tuning.race import (
    LETTERS,
    answered,
    read_race,
)
from megatron.apps.tasks.fine_tuning.tables import TableTask
from megatron.apps.tasks.fine_tuning.task import (
    FineTuning,
    HeldOutSamples,
    TaskRun,
    TrainingSamples,
    require_labels,
)
from megatron.config import Setting, Settings
from megatron.data.labelled_text import LabelledText, collate_labelled
from megatron.data.samples import MadeSamples
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

MULTIPLE = 8
"""Texts are padded to a multiple of it."""


def _logits(state: LayerState, batch: Any) -> Mapping[str, Tensor]:
    assert state.pooled is not None
    return {"logits": state.pooled}


LOGITS = Measure(("logits",), _logits, ends="logits", per_sample=True)


@dataclass(frozen=True)
class EncoderTask(FineTuning):
    """A task whose samples are labelled texts."""

    def training_samples(self, examples: Sequence[Any], run: TaskRun) -> TrainingSamples:
        require_labels(examples)
        return TrainingSamples(self.dataset(examples, run), collator(run))

    def held_out_samples(self, examples: Sequence[Any], run: TaskRun) -> HeldOutSamples:
        encoded = self.dataset(examples, run)
        samples = [encoded[number] for number in range(len(encoded))]
        labelled = all(example.label is not None for example in examples)
        return HeldOutSamples(
            samples,
            [sample.length for sample in samples],
            partial(collate_labelled, pad=run.tokenizer.pad),
            LOGITS,
            lambda numbers: self.predictions(examples, numbers["logits"]),
            encoded if labelled else None,
        )

    @abstractmethod
    def dataset(self, examples: Sequence[Any], run: TaskRun) -> MadeSamples[LabelledText]:
        """The examples, encoded when they are read."""

    @abstractmethod
    def predictions(
        self, examples: Sequence[Any], logits_NL: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        """Predictions of logits, a row for each example."""


@dataclass(frozen=True)
class Classification(EncoderTask):
    """The tasks of :data:`megatron.apps.tasks.fine_tuning.tables.TABLES`."""

    table: TableTask

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.table.name

    def settings(self) -> Settings:
        origin, labels = f"task {self.name}", self.table.labels
        return {
            "head": Setting("classification", origin),
            "num_labels": Setting(max(1, len(labels)), origin),
            "label_names": Setting(labels, origin),
        }

    def read(self, path: Path) -> list[LabelledExample]:
        return self.table.read(path)

    def dataset(
        self, examples: Sequence[LabelledExample], run: TaskRun
    ) -> MadeSamples[LabelledText]:
        return MadeSamples(examples, encoder(run).example)

    def predictions(
        self, examples: Sequence[LabelledExample], logits_NL: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        identities = [example.identity for example in examples]
        labels: list[Any] = [example.label for example in examples]
        if not self.table.labels:
            return estimated(identities, labels, logits_NL)
        return chosen(identities, labels, self.table.labels, logits_NL)

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        return SCORERS[self.table.metric](predictions)


@dataclass(frozen=True)
class MultipleChoice(EncoderTask):
    """RACE."""

    name = "RACE"
    folders = True

    def settings(self) -> Settings:
        return {"head": Setting("multiple_choice", f"task {self.name}")}

    def read(self, path: Path) -> list[RaceQuestion]:
        return read_race(path)

    def dataset(self, examples: Sequence[RaceQuestion], run: TaskRun) -> MadeSamples[LabelledText]:
        cut = run.task.max_qa_length
        return MadeSamples(examples, partial(encoder(run).question, max_qa_length=cut))

    def predictions(
        self, examples: Sequence[RaceQuestion], logits_NL: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        identities = [example.identity for example in examples]
        return chosen(identities, [example.label for example in examples], LETTERS, logits_NL)

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        return accuracy_scores(predictions)


@dataclass(frozen=True)
class PairEncoder:
    """Encodes texts with the special tokens of a tokenizer, at most ``seq_length`` tokens each."""

    tokenizer: Tokenizer
    seq_length: int

    def tokens(self, texts: Sequence[str]) -> list[npt.NDArray[np.integer]]:
        """Ids of texts, without special tokens."""
        return list(self.tokenizer.tokenize_sentences(texts))

    def pair(
        self, first: npt.NDArray[np.integer], second: npt.NDArray[np.integer] | None
    ) -> tuple[Ids, Ids]:
        """Tokens and types [S]; a sequence that would reach ``seq_length`` is cut to one token less
        before it gets its last separator."""
        cls, sep = self.tokenizer.cls, self.tokenizer.sep
        parts = [np.array([cls]), first, np.array([sep])]
        parts += [] if second is None else [second]
        tokens = np.concatenate(parts).astype(np.int64)
        types = (np.arange(len(tokens)) > len(first) + 1).astype(np.int64)
        cut = len(tokens) >= self.seq_length
        if cut:
            tokens, types = tokens[: self.seq_length - 1], types[: self.seq_length - 1]
        if cut or second is not None:
            tokens, types = np.append(tokens, sep), np.append(types, int(second is not None))
        return tokens, types

    def example(self, example: LabelledExample) -> LabelledText:
        """A text or a pair of texts as a sample."""
        ids = self.tokens(example.texts)
        tokens, types = self.pair(ids[0], ids[1] if len(ids) > 1 else None)
        return LabelledText((tokens,), (types,), _label(example.label), example.identity)

    def question(self, asked: RaceQuestion, max_qa_length: int) -> LabelledText:
        """A question as a sample of one text per option: the question with the option, at most
        ``max_qa_length`` tokens of it, and the article."""
        texts = [asked.article, *(answered(asked.question, option) for option in asked.options)]
        article, *options = self.tokens(texts)
        pairs = [self.pair(ids[:max_qa_length], article) for ids in options]
        tokens, types = zip(*pairs, strict=True)
        return LabelledText(tokens, types, _label(asked.label), asked.identity)


def _label(label: int | float | None) -> int | float:
    """Nothing depends on the label of a test file's rows."""
    return 0 if label is None else label


def encoder(run: TaskRun) -> PairEncoder:
    """The encoder of a run's texts."""
    return PairEncoder(run.tokenizer, run.config.model.seq_length)


def collator(run: TaskRun) -> Callable[[Sequence[LabelledText]], Any]:
    """Pads a batch to its longest text, or to --seq-length where the micro batches of a step must
    have one shape, as in a pipeline."""
    parallel = run.config.parallel
    multiple, length = MULTIPLE, None
    if parallel.sequence_parallel:
        multiple = int(np.lcm(MULTIPLE, parallel.tensor_model_parallel_size))
    if parallel.pipeline_model_parallel_size > 1:
        length = run.config.model.seq_length
    return partial(collate_labelled, pad=run.tokenizer.pad, length=length, multiple=multiple)
