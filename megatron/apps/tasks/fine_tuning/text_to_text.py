"""Tasks for models that predict text: the predicted label is the answer with the highest
probability.

A model is trained on the tokens of the correct answer, and predicts the answer whose tokens have
the highest joint probability. The prompt depends on whether an encoder or a decoder reads it
(`Family.context_reader`). A decoder, whose answer continues the text, gets the prompts of
lm-evaluation-harness. An encoder gets the task name first, as in the published T5 training.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.fine_tuning.examples import LabelledExample, RaceQuestion
from megatron.apps.tasks.fine_tuning.scores import Prediction, chosen
from megatron.apps.tasks.fine_tuning.task import (
    HeldOutSamples,
    LabelTask,
    TrainingSamples,
    require_labels,
)
from megatron.config import ConfigError, Settings
from megatron.data.texts import ScoredText
from megatron.families import Family
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.evaluation.scoring import TEXT_SCORES
from megatron.run.run import Run


@dataclass(frozen=True)
class TaskPrompt:
    """Prompt of a task. ``text`` has {0} and {1} for the texts of a row. ``answers`` maps labels as
    written in the files to the model's answers. ``sentence`` is the index of a text to which a
    missing full stop is added, or None."""

    text: str
    answers: Mapping[str, str]
    sentence: int | None = None

    def of(self, texts: Sequence[str]) -> str:
        """Return the prompt for the texts of one row."""
        ended = [
            f"{text}." if number == self.sentence and not text.endswith(".") else text
            for number, text in enumerate(texts)
        ]
        return self.text.format(*ended)


NUMBERS = tuple(f"{number / 5:.1f}" for number in range(26))
"""Possible answers in tasks that predict a number: 0 to 5 in steps of 0.2."""


def _same(words: Sequence[str]) -> dict[str, str]:
    return {word: word for word in words}


def number_word(value: float) -> str:
    """Return the answer that is nearest to a number."""
    return f"{round(value * 5) / 5:.1f}"


_NUMBERS = _same(NUMBERS)
_NO_YES = {"0": "no", "1": "yes"}
_ENTAILMENT = ("entailment", "not_entailment")

PROMPTS: dict[str, dict[str, TaskPrompt]] = {
    "decoder": {
        "MNLI": TaskPrompt(
            "{0}\nQuestion: {1} True, False or Neither?\nAnswer:",
            {"contradiction": "False", "entailment": "True", "neutral": "Neither"},
            sentence=1,
        ),
        "QQP": TaskPrompt(
            "Question 1: {0}\nQuestion 2: {1}\nQuestion: Do both questions ask the same thing?\n"
            "Answer:",
            _NO_YES,
        ),
        "QNLI": TaskPrompt(
            "{0}\n{1}\nQuestion: Does this response answer the question?\nAnswer:",
            {"entailment": "yes", "not_entailment": "no"},
        ),
        "SST-2": TaskPrompt(
            "{0}\nQuestion: Is this sentence positive or negative?\nAnswer:",
            {"0": "negative", "1": "positive"},
        ),
        "CoLA": TaskPrompt("{0}\nQuestion: Does this sentence make sense?\nAnswer:", _NO_YES),
        "STS-B": TaskPrompt(
            "Sentence 1: {0}\nSentence 2: {1}\nQuestion: How similar are the sentences, from 0.0 "
            "to 5.0?\nAnswer:",
            _NUMBERS,
        ),
        "MRPC": TaskPrompt(
            "Sentence 1: {0}\nSentence 2: {1}\nQuestion: Do both sentences mean the same thing?\n"
            "Answer:",
            _NO_YES,
        ),
        "RTE": TaskPrompt(
            "{0}\nQuestion: {1} True or False?\nAnswer:",
            {"entailment": "True", "not_entailment": "False"},
        ),
    },
    "encoder": {
        "MNLI": TaskPrompt(
            "mnli hypothesis: {1} premise: {0}", _same(("contradiction", "entailment", "neutral"))
        ),
        "QQP": TaskPrompt(
            "qqp question1: {0} question2: {1}", {"0": "not_duplicate", "1": "duplicate"}
        ),
        "QNLI": TaskPrompt("qnli question: {0} sentence: {1}", _same(_ENTAILMENT)),
        "SST-2": TaskPrompt("sst2 sentence: {0}", {"0": "negative", "1": "positive"}),
        "CoLA": TaskPrompt("cola sentence: {0}", {"0": "unacceptable", "1": "acceptable"}),
        "STS-B": TaskPrompt("stsb sentence1: {0} sentence2: {1}", _NUMBERS),
        "MRPC": TaskPrompt(
            "mrpc sentence1: {0} sentence2: {1}", {"0": "not_equivalent", "1": "equivalent"}
        ),
        "RTE": TaskPrompt("rte sentence1: {0} sentence2: {1}", _same(_ENTAILMENT)),
    },
}
"""Prompts by the kind of model that reads them (`Family.context_reader`), then by task."""

QUESTIONS: dict[str, str] = {
    "decoder": "Article: {article}\n\nQuestion: {question}\nAnswer:",
    "encoder": "race question: {question} article: {article}",
}
"""Prompts for a question about an article. The options of the question are the possible answers."""


class Asked(NamedTuple):
    """Prompt with all possible answers, and the index of the correct one, None if unknown."""

    prompt: str
    answers: Sequence[str]
    right: int | None


@dataclass(frozen=True)
class TextTask(LabelTask):
    """Task for model families that predict text. A training sample is a prompt with the correct
    answer; an evaluation sample is one with a possible answer."""

    family: Family

    def settings(self) -> Settings:
        return {}

    def training_samples(self, examples: Sequence[Any], run: Run) -> TrainingSamples:
        require_labels(examples)
        answers = self._right_answers(examples, run)
        lengths = self._padded_lengths(answers, run)
        collate = partial(self.family.scored_batch, run.config, run.tokenizer, pad_to=lengths)
        return TrainingSamples(answers, collate)

    def held_out_samples(self, examples: Sequence[Any], run: Run) -> HeldOutSamples:
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
    def asked(self, example: Any) -> Asked:
        """Return an example as a prompt with its possible answers."""

    def predictions(
        self, examples: Sequence[Any], log_probs_NA: npt.NDArray[np.float64]
    ) -> list[Prediction]:
        """Return the predictions for N examples, given the log-probabilities [N, A] of all A
        answers."""
        if self.data.labels:
            return chosen(examples, self.data.labels, log_probs_NA)
        best = log_probs_NA.argmax(1)
        return [
            Prediction(each.identity, float(NUMBERS[number]), each.label)
            for each, number in zip(examples, best, strict=True)
        ]

    def text(self, run: Run) -> Callable[[str, str], ScoredText]:
        """Return a function that converts a prompt and an answer into a text to score."""
        return partial(self.family.answered, run.config.model, run.tokenizer)

    def _right_answers(self, examples: Sequence[Any], run: Run) -> MadeSamples[ScoredText]:
        return MadeSamples(examples, partial(self._right_answer, self.text(run)))

    def _right_answer(self, text: Callable[[str, str], ScoredText], example: Any) -> ScoredText:
        prompt, answers, right = self.asked(example)
        assert right is not None
        return text(prompt, answers[right])

    def _padded_lengths(self, answers: MadeSamples[ScoredText], run: Run) -> Any:
        """Return the lengths to pad every batch to, or None to pad each batch to its longest text.
        Pipeline parallelism needs micro batches of one shape, and some layouts shard the sequence.
        In these cases the lengths are the longest of the whole dataset, rounded up."""
        parallel = run.config.parallel
        if parallel.pipeline_model_parallel_size == 1 and parallel.length_divisor == 1:
            return None
        texts = [answers[number] for number in range(len(answers))]
        longest = self.family.scored_lengths(run.config, texts).max(0)
        divisor = math.lcm(parallel.tensor_model_parallel_size, parallel.length_divisor)
        lengths = (-(-longest // divisor) * divisor).tolist()
        return tuple(lengths) if isinstance(lengths, list) else lengths


class TextTable(TextTask):
    """Task of :data:`megatron.apps.tasks.fine_tuning.examples.TABLES`, predicted as text."""

    def asked(self, example: LabelledExample) -> Asked:
        assert self.family.context_reader is not None
        prompt = PROMPTS[self.family.context_reader][self.name]
        words, right = self.data.labels or NUMBERS, example.label
        if not self.data.labels and right is not None:
            right = NUMBERS.index(number_word(right))
        answers = [prompt.answers[word] for word in words]
        return Asked(prompt.of(example.texts), answers, None if right is None else int(right))

    def text(self, run: Run) -> Callable[[str, str], ScoredText]:
        """Return the function of `TextTask.text`. Raises ConfigError if two different answers have
        the same tokens."""
        text = super().text(run)
        # The answers do not depend on the row, so empty texts suffice.
        asked = self.asked(LabelledExample(("", ""), None, ""))
        known: dict[tuple[int, ...], str] = {}
        for answer in asked.answers:
            tokens = tuple(text(asked.prompt, answer).continuation.tolist())
            other = known.setdefault(tokens, answer)
            if other != answer:
                raise ConfigError(
                    f"--task {self.name}: the answers {other!r} and {answer!r} are the same tokens "
                    f"({run.tokenizer.source}): the vocabulary lacks them; use one that has the "
                    f"words {', '.join(asked.answers[:3])}{' ...' * (len(asked.answers) > 3)}"
                )
        return text


class TextRace(TextTask):
    """RACE, predicted as text: the predicted option is the most probable answer."""

    def asked(self, example: RaceQuestion) -> Asked:
        assert self.family.context_reader is not None
        text = QUESTIONS[self.family.context_reader]
        prompt = text.format(article=example.article, question=example.question)
        return Asked(prompt, example.options, example.label)
