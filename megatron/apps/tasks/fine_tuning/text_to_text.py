"""Tasks for models that predict text: the label is the answer that they find most probable.

A model is trained on the tokens of the right answer, and predicts the answer whose tokens have the
highest probability together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.fine_tuning.examples import LabelledExample, RaceQuestion
from megatron.apps.tasks.fine_tuning.metrics import (
    SCORERS,
    Scores,
    accuracy_scores,
)
from megatron.apps.tasks.fine_tuning.predictions import Prediction, chosen
from megatron.apps.tasks.fine_tuning.prompts import (
    NUMBERS,
    PROMPTS,
    QUESTIONS,
    number_word,
)
from megatron.apps.tasks.fine_tuning.race import LETTERS, read_race
from megatron.apps.tasks.fine_tuning.tables import TableTask
from megatron.apps.tasks.fine_tuning.task import (
    FineTuning,
    HeldOutSamples,
    TaskRun,
    TrainingSamples,
    require_labels,
)
from megatron.config import ConfigError, Settings
from megatron.data.samples import MadeSamples
from megatron.data.scored_text import ScoredText
from megatron.families import Family
from megatron.model.spec import TEXT_SCORES

Row = TypeVar("Row", LabelledExample, RaceQuestion)


class Asked(NamedTuple):
    """What a model is asked, all possible answers, and the number of the right one."""

    prompt: str
    answers: Sequence[str]
    right: int | None


@dataclass(frozen=True)
class TextTask(FineTuning, Generic[Row]):
    """A task whose samples are prompts with an answer, for models of a family."""

    family: Family

    def settings(self) -> Settings:
        return {}

    def training_samples(self, examples: Sequence[Row], run: TaskRun) -> TrainingSamples:
        require_labels(examples)
        answers = self._right_answers(examples, run)
        lengths = self._padded_lengths(answers, run)
        collate = partial(self.family.scored_batch, run.config, run.tokenizer, pad_to=lengths)
        return TrainingSamples(answers, collate)

    def held_out_samples(self, examples: Sequence[Row], run: TaskRun) -> HeldOutSamples:
        text = self.text(run)
        asked = [self.asked(each) for each in examples]
        texts = [text(prompt, answer) for prompt, answers, _ in asked for answer in answers]
        labelled = all(each.label is not None for each in examples)
        return HeldOutSamples(
            texts,
            self.family.scored_lengths(run.config, texts),
            partial(self.family.scored_batch, run.config, run.tokenizer),
            TEXT_SCORES,
            lambda numbers: self.predictions(
                examples, numbers["log_prob"].reshape(len(examples), -1)
            ),
            self._right_answers(examples, run) if labelled else None,
        )

    @abstractmethod
    def asked(self, example: Row) -> Asked:
        """An example as text."""

    @abstractmethod
    def predictions(
        self, examples: Sequence[Row], log_probs_NA: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        """Predictions of the log-probabilities of all answers, a row for each example."""

    def text(self, run: TaskRun) -> Callable[[str, str], ScoredText]:
        """Makes a prompt and an answer a text to score."""
        return partial(self.family.answered, run.config.model, run.tokenizer)

    def _right_answers(self, examples: Sequence[Row], run: TaskRun) -> MadeSamples[ScoredText]:
        return MadeSamples(examples, partial(self._right_answer, self.text(run)))

    def _right_answer(self, text: Callable[[str, str], ScoredText], example: Row) -> ScoredText:
        prompt, answers, right = self.asked(example)
        assert right is not None
        return text(prompt, answers[right])

    def _padded_lengths(self, answers: MadeSamples[ScoredText], run: TaskRun) -> Any:
        """Lengths to pad every batch to: those of the longest where the micro batches of a step
        must have one shape, as in a pipeline, or be divided; else None."""
        parallel = run.config.parallel
        if parallel.pipeline_model_parallel_size == 1 and not parallel.sequence_parallel:
            return None
        texts = [answers[number] for number in range(len(answers))]
        longest = self.family.scored_lengths(run.config, texts).max(0)
        ranks = parallel.tensor_model_parallel_size
        lengths = (-(-longest // ranks) * ranks).tolist()
        return tuple(lengths) if isinstance(lengths, list) else lengths


@dataclass(frozen=True)
class TextTable(TextTask[LabelledExample]):
    """The tasks of :data:`megatron.apps.tasks.fine_tuning.tables.TABLES` as text."""

    table: TableTask

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.table.name

    def read(self, path: Path) -> list[LabelledExample]:
        return self.table.read(path)

    def asked(self, example: LabelledExample) -> Asked:
        assert self.family.context_reader is not None
        prompt = PROMPTS[self.family.context_reader][self.name]
        words, right = self.table.labels or NUMBERS, example.label
        if not self.table.labels and right is not None:
            right = NUMBERS.index(number_word(right))
        answers = [prompt.answers[word] for word in words]
        return Asked(prompt.of(example.texts), answers, None if right is None else int(right))

    def text(self, run: TaskRun) -> Callable[[str, str], ScoredText]:
        """See `TextTask.text`; raises ConfigError if the tokens of two answers are the same."""
        text, words = super().text(run), self.table.labels or NUMBERS
        asked = self.asked(LabelledExample(("",) * self.table.texts, None, ""))
        known: dict[tuple[int, ...], str] = {}
        for answer in asked.answers:
            tokens = tuple(text(asked.prompt, answer).continuation.tolist())
            other = known.setdefault(tokens, answer)
            if other != answer:
                raise ConfigError(
                    f"--task {self.name}: the answers {other!r} and {answer!r} are the same tokens "
                    f"({run.tokenizer.source}): the vocabulary lacks them; use one that has the "
                    f"words {', '.join(asked.answers[:3])}{' ...' * (len(words) > 3)}"
                )
        return text

    def predictions(
        self, examples: Sequence[LabelledExample], log_probs_NA: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        identities = [example.identity for example in examples]
        labels: list[Any] = [example.label for example in examples]
        if self.table.labels:
            return chosen(identities, labels, self.table.labels, log_probs_NA)
        best = log_probs_NA.argmax(1)
        return [
            Prediction(identity, float(NUMBERS[number]), label)
            for identity, number, label in zip(identities, best, labels, strict=True)
        ]

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        return SCORERS[self.table.metric](predictions)


@dataclass(frozen=True)
class TextRace(TextTask[RaceQuestion]):
    """RACE: the option that is the most probable answer."""

    name = "RACE"
    folders = True

    def read(self, path: Path) -> list[RaceQuestion]:
        return read_race(path)

    def asked(self, example: RaceQuestion) -> Asked:
        assert self.family.context_reader is not None
        text = QUESTIONS[self.family.context_reader]
        prompt = text.format(article=example.article, question=example.question)
        return Asked(prompt, example.options, example.label)

    def predictions(
        self, examples: Sequence[RaceQuestion], log_probs_NA: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        identities = [example.identity for example in examples]
        return chosen(identities, [example.label for example in examples], LETTERS, log_probs_NA)

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        return accuracy_scores(predictions)
