"""Fine-tuning of a retriever on questions with passages, in the format of DPR's files
(facebookresearch/DPR: biencoder-nq-train.json).

Each question is trained with its first positive passage. The negatives are the positive passages of
the other questions in the batch and, if requested, hard negative passages. An evaluation ranks the
positive passage of each question among all passages of the set, the "average rank" of Karpukhin et
al. 2020 (arXiv:2004.04906).

Shape suffixes: N pairs of a question and a passage, Q questions, D elements of an embedding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.apps.tasks.config import FINE_TUNING, TaskConfig
from megatron.apps.tasks.fine_tuning.scores import Prediction, Scores
from megatron.apps.tasks.fine_tuning.task import (
    FineTuning,
    HeldOutSamples,
    Numbers,
    TrainingSamples,
)
from megatron.apps.tasks.retrieval.vectors import PassageEncoder
from megatron.config import ConfigError, Setting, Settings
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.retrieval.flags import FAMILY
from megatron.features.retrieval.layers import places, vectors_of
from megatron.features.retrieval.samples import IctSample, Ids, PairCollator
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.run.run import Run
from megatron.util.json_text import parse_json

_LISTS = ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")


class TitledText(NamedTuple):
    title: str
    text: str


class AskedQuestion(NamedTuple):
    """Question with its positive, hard negative and other negative passages."""

    identity: str
    text: str
    positive: TitledText
    hard: Sequence[TitledText]
    others: Sequence[TitledText]
    label: int = 0


class AskedSample(NamedTuple):
    """Tokens of a question and of its passages, the positive one first. The flag of each passage is
    False for padding passages, which give all questions of a batch the same number of passages."""

    query: Ids
    contexts: Sequence[tuple[Ids, bool]]


def _pair_vectors(state: LayerState, batch: Any) -> dict[str, torch.Tensor]:
    return {"vectors": torch.cat(vectors_of(state), 1)}


PAIR_VECTORS = Measure(("vectors",), _pair_vectors, ends="logits", per_sample=True)
"""Embeddings of a query and its context, concatenated to [B, 2 D]."""


@dataclass(frozen=True)
class NaturalQuestions(FineTuning):
    """The task RET-FINETUNE-NQ."""

    config: TaskConfig

    name = FINE_TUNING

    def settings(self) -> Settings:
        origin = f"task {self.name}"
        return {"family": Setting(FAMILY, origin), "head": Setting("lm", origin)}

    def read(self, path: Path) -> list[Any]:
        """Return the questions of a file. Those without a positive passage are left out."""
        content = parse_json(path.read_bytes(), str(path))
        if not isinstance(content, list) or not content:
            raise ConfigError(f"{path}: expected a list of questions, as in DPR's files")
        asked = [_question(item, f"{path}, question {n + 1}") for n, item in enumerate(content)]
        questions = [each for each in asked if each is not None]
        if not questions:
            raise ConfigError(f"{path}: no question has a passage in positive_ctxs")
        return questions

    def training_samples(self, examples: Sequence[Any], run: Run) -> TrainingSamples:
        chosen = self._share(examples, run)
        hard = self.config.train_hard_neg if self.config.train_with_neg else 0
        return TrainingSamples(self._dataset(chosen, run, hard), self._collator(run, hard))

    def held_out_samples(self, examples: Sequence[Any], run: Run) -> HeldOutSamples:
        chosen, encoder = self._share(examples, run), PassageEncoder.of(run)
        hard, others = self.config.val_av_rank_hard_neg, self.config.val_av_rank_other_neg
        pairs, firsts = list[IctSample](), list[int]()
        for each in chosen:
            query = encoder.question(each.text)
            firsts.append(len(pairs))
            for context in (each.positive, *each.hard[:hard], *each.others[:others]):
                pairs.append(IctSample(query, encoder.passage(*context)))
        collator = PairCollator.of(run.config, run.tokenizer.pad, encoder.longest)

        def collate(samples: Sequence[IctSample], pad_to: tuple[int, int]) -> Any:
            contexts = [(sample.context, True) for sample in samples]
            queries, labels = [sample.query for sample in samples], range(len(samples))
            return collator.batch(queries, contexts, labels, pad_to)

        negatives = self.config.train_hard_neg if self.config.train_with_neg else 0
        return HeldOutSamples(
            pairs,
            np.array([(len(pair.query), len(pair.context)) for pair in pairs]),
            collate,
            PAIR_VECTORS,
            lambda numbers: self._ranks(chosen, firsts, numbers),
            self._dataset(chosen, run, negatives),
        )

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        """Return top-k accuracies for several k, the fraction of questions whose positive
        passage is among the first k of all passages in the set. Also return its mean rank,
        counted from 1."""
        ranks = np.array([each.predicted for each in predictions], np.float64)
        values = {f"top{k}_accuracy": float((ranks <= k).mean()) for k in (1, 5, 20, 100)}
        mean = float(ranks.mean())
        values["average_rank"] = mean
        shown = ", ".join(f"{name} = {value:.4f}" for name, value in values.items())
        return Scores(values, f"{shown},")

    def _ranks(
        self, questions: Sequence[AskedQuestion], firsts: Sequence[int], numbers: Numbers
    ) -> list[Prediction]:
        """Return the rank, from 1, of each question's positive passage."""
        query_ND, context_ND = torch.from_numpy(numbers["vectors"]).chunk(2, dim=1)
        labels, ranks = torch.tensor(firsts), list[int]()
        for rows in labels.split(256):
            ranks += (places(query_ND[rows] @ context_ND.t(), rows) + 1).tolist()
        return [
            Prediction(question.identity, float(rank), question.text)
            for question, rank in zip(questions, ranks, strict=True)
        ]

    def _share(self, examples: Sequence[Any], run: Run) -> Sequence[Any]:
        """Return a random fraction ``--sample-rate`` of the questions, depending on the seed."""
        count = max(1, int(len(examples) * self.config.sample_rate))
        if count == len(examples):
            return examples
        drawn = random.Random(run.config.training.seed).sample(range(len(examples)), count)
        return [examples[number] for number in sorted(drawn)]

    def _dataset(self, examples: Sequence[Any], run: Run, hard: int) -> MadeSamples[AskedSample]:
        encoder, seed = PassageEncoder.of(run), run.config.training.seed

        def sample(number: int) -> AskedSample:
            asked: AskedQuestion = examples[number]
            draw = random.Random(f"{seed} {number}")
            chosen = draw.sample(asked.hard, min(hard, len(asked.hard)))
            missing = min(hard - len(chosen), len(asked.others))
            chosen += draw.sample(asked.others, missing)
            rows = [(encoder.passage(*each), True) for each in (asked.positive, *chosen)]
            rows += [(encoder.passage("", ""), False)] * (1 + hard - len(rows))
            return AskedSample(encoder.question(asked.text), rows)

        return MadeSamples(range(len(examples)), sample)

    def _collator(self, run: Run, hard: int) -> Any:
        longest = PassageEncoder.of(run).longest
        collator = PairCollator.of(run.config, run.tokenizer.pad, longest)

        def collate(samples: Sequence[AskedSample]) -> Any:
            contexts = [row for sample in samples for row in sample.contexts]
            labels = range(0, len(contexts), 1 + hard)
            return collator.batch([sample.query for sample in samples], contexts, labels)

        return collate


def _question(item: Any, where: str) -> AskedQuestion | None:
    """Parse a question in a DPR file, dropping a final question mark. Return None if it has no
    positive passage. Raises ConfigError if the item is not a question."""
    try:
        lists = [
            [
                TitledText(str(each.get("title") or ""), each["text"])
                for each in item.get(name) or ()
            ]
            for name in _LISTS
        ]
        asked = item["question"].strip()
        if not all(isinstance(context.text, str) for each in lists for context in each):
            raise TypeError
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(
            f"{where}: expected an object with question and {', '.join(_LISTS)}, lists of objects "
            "with title and text"
        ) from None
    positive, hard, others = lists
    if not positive:
        return None
    return AskedQuestion(where, asked.removesuffix("?"), positive[0], hard, others)
