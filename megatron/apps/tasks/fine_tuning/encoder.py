"""Tasks for an encoder with an output head. The head predicts a class or a number for a text or a
pair of texts, or chooses among options.

A text is encoded as ``[CLS] a [SEP] b [SEP]`` and truncated on the right.

Shape suffixes: S tokens of a text, N examples, L labels or options.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.apps.tasks.fine_tuning.examples import LabelledExample, RaceQuestion, answered
from megatron.apps.tasks.fine_tuning.scores import Prediction, chosen, estimated
from megatron.apps.tasks.fine_tuning.task import (
    HeldOutSamples,
    LabelTask,
    TrainingSamples,
    require_labels,
)
from megatron.config import Setting, Settings
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.masked.heads import LabelledText, collate_labelled
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]

MULTIPLE = 8
"""Samples are padded to a multiple of this number of tokens."""


def _logits(state: LayerState, batch: Any) -> Mapping[str, Tensor]:
    assert state.pooled is not None
    return {"logits": state.pooled}


LOGITS = Measure(("logits",), _logits, ends="logits", per_sample=True)


@dataclass(frozen=True)
class PairEncoder:
    """Encoder of texts as token ids with special tokens, at most ``seq_length`` in total."""

    tokenizer: Tokenizer
    seq_length: int

    def pair(
        self, first: npt.NDArray[np.integer], second: npt.NDArray[np.integer] | None
    ) -> tuple[Ids, Ids]:
        """Return the token ids and token types of a text or a pair of texts, both [S]. A sequence
        of ``seq_length`` tokens or more is truncated to ``seq_length - 1``, then the final
        separator is appended."""
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
        """Return a text or a pair of texts as a sample. Examples without a label get the label
        0."""
        ids = self.tokenizer.tokenize_sentences(example.texts)
        tokens, types = self.pair(ids[0], ids[1] if len(ids) > 1 else None)
        label = 0 if example.label is None else example.label
        return LabelledText((tokens,), (types,), label, example.identity)

    def question(self, asked: RaceQuestion, max_qa_length: int) -> LabelledText:
        """Return a question as a sample with one sequence per option: the question with the option,
        truncated to ``max_qa_length`` tokens, followed by the article. Questions without a label
        get the label 0."""
        texts = [asked.article, *(answered(asked.question, option) for option in asked.options)]
        article, *options = self.tokenizer.tokenize_sentences(texts)
        pairs = [self.pair(ids[:max_qa_length], article) for ids in options]
        tokens, types = zip(*pairs, strict=True)
        label = 0 if asked.label is None else asked.label
        return LabelledText(tokens, types, label, asked.identity)


class EncoderTask(LabelTask):
    """Task whose samples are texts with a label, encoded for an encoder model."""

    def training_samples(self, examples: Sequence[Any], run: Run) -> TrainingSamples:
        require_labels(examples)
        return TrainingSamples(self._dataset(examples, run), collator(run))

    def held_out_samples(self, examples: Sequence[Any], run: Run) -> HeldOutSamples:
        encoded = self._dataset(examples, run)
        samples = [encoded[number] for number in range(len(encoded))]
        labelled = all(example.label is not None for example in examples)
        return HeldOutSamples(
            samples,
            [sample.length for sample in samples],
            partial(collate_labelled, pad=run.tokenizer.pad),
            LOGITS,
            lambda numbers: self._predictions(examples, numbers["logits"]),
            encoded if labelled else None,
        )

    def _dataset(self, examples: Sequence[Any], run: Run) -> MadeSamples[LabelledText]:
        """Return the examples as a dataset that encodes each example when it is read."""
        encoder = PairEncoder(run.tokenizer, run.config.model.seq_length)
        return MadeSamples(examples, self.encoding(encoder))

    def _predictions(
        self, examples: Sequence[Any], logits_NL: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        if not self.data.labels:
            return estimated(examples, logits_NL)
        return chosen(examples, self.data.labels, logits_NL)

    @abstractmethod
    def encoding(self, encoder: PairEncoder) -> Callable[[Any], LabelledText]:
        """Return the function that converts an example into a sample."""


class Classification(EncoderTask):
    """Task that predicts a class or a number. Its data is one of
    :data:`megatron.apps.tasks.fine_tuning.examples.TABLES`."""

    def settings(self) -> Settings:
        origin, labels = f"task {self.name}", self.data.labels
        return {
            "head": Setting("classification", origin),
            "num_labels": Setting(max(1, len(labels)), origin),
            "label_names": Setting(labels, origin),
        }

    def encoding(self, encoder: PairEncoder) -> Callable[[Any], LabelledText]:
        return encoder.example


@dataclass(frozen=True)
class MultipleChoice(EncoderTask):
    """RACE: multiple-choice questions about an article. A question with one option is truncated to
    ``max_qa_length`` tokens."""

    max_qa_length: int

    def settings(self) -> Settings:
        return {"head": Setting("multiple_choice", f"task {self.name}")}

    def encoding(self, encoder: PairEncoder) -> Callable[[Any], LabelledText]:
        return partial(encoder.question, max_qa_length=self.max_qa_length)


def collator(run: Run) -> Callable[[Sequence[LabelledText]], Any]:
    """Return a function that pads a batch to its longest text, or to --seq-length with pipeline
    parallelism, which requires all micro batches to have the same shape."""
    parallel = run.config.parallel
    multiple, length = int(np.lcm(MULTIPLE, parallel.length_divisor)), None
    if parallel.pipeline_model_parallel_size > 1:
        length = run.config.model.seq_length
    return partial(collate_labelled, pad=run.tokenizer.pad, length=length, multiple=multiple)
