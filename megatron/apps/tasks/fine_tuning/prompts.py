"""The tasks as text: what a model is asked, and the word for each label.

They depend on what reads them (`Family.context_reader`):

- a decoder, whose answer continues the text: the prompts of lm-evaluation-harness.
- an encoder: the name of the task comes first, as the published T5 was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """How a row of a task is put.

    Attributes:
        text: with {0} and {1} for the texts of a row.
        answers: by the label's word in the files.
        sentence: the number of a text that gets a full stop if it has none.
    """

    text: str
    answers: Mapping[str, str]
    sentence: int | None = None

    def of(self, texts: Sequence[str]) -> str:
        """What is asked about the texts of a row."""
        ended = [
            f"{text}." if number == self.sentence and not text.endswith(".") else text
            for number, text in enumerate(texts)
        ]
        return self.text.format(*ended)


NUMBERS = tuple(f"{number / 5:.1f}" for number in range(26))
"""The answers where a number from 0 to 5 is predicted: in steps of 0.2."""

_NUMBERS = {word: word for word in NUMBERS}
_NO_YES = {"0": "no", "1": "yes"}
_ENTAILMENT = ("entailment", "not_entailment")


def _same(words: Sequence[str]) -> dict[str, str]:
    return {word: word for word in words}


PROMPTS: dict[str, dict[str, Prompt]] = {
    "decoder": {
        "MNLI": Prompt(
            "{0}\nQuestion: {1} True, False or Neither?\nAnswer:",
            {"contradiction": "False", "entailment": "True", "neutral": "Neither"},
            sentence=1,
        ),
        "QQP": Prompt(
            "Question 1: {0}\nQuestion 2: {1}\nQuestion: Do both questions ask the same thing?\n"
            "Answer:",
            _NO_YES,
        ),
        "QNLI": Prompt(
            "{0}\n{1}\nQuestion: Does this response answer the question?\nAnswer:",
            {"entailment": "yes", "not_entailment": "no"},
        ),
        "SST-2": Prompt(
            "{0}\nQuestion: Is this sentence positive or negative?\nAnswer:",
            {"0": "negative", "1": "positive"},
        ),
        "CoLA": Prompt("{0}\nQuestion: Does this sentence make sense?\nAnswer:", _NO_YES),
        "STS-B": Prompt(
            "Sentence 1: {0}\nSentence 2: {1}\nQuestion: How similar are the sentences, from 0.0 "
            "to 5.0?\nAnswer:",
            _NUMBERS,
        ),
        "MRPC": Prompt(
            "Sentence 1: {0}\nSentence 2: {1}\nQuestion: Do both sentences mean the same thing?\n"
            "Answer:",
            _NO_YES,
        ),
        "RTE": Prompt(
            "{0}\nQuestion: {1} True or False?\nAnswer:",
            {"entailment": "True", "not_entailment": "False"},
        ),
    },
    "encoder": {
        "MNLI": Prompt(
            "mnli hypothesis: {1} premise: {0}", _same(("contradiction", "entailment", "neutral"))
        ),
        "QQP": Prompt(
            "qqp question1: {0} question2: {1}", {"0": "not_duplicate", "1": "duplicate"}
        ),
        "QNLI": Prompt("qnli question: {0} sentence: {1}", _same(_ENTAILMENT)),
        "SST-2": Prompt("sst2 sentence: {0}", {"0": "negative", "1": "positive"}),
        "CoLA": Prompt("cola sentence: {0}", {"0": "unacceptable", "1": "acceptable"}),
        "STS-B": Prompt("stsb sentence1: {0} sentence2: {1}", _NUMBERS),
        "MRPC": Prompt(
            "mrpc sentence1: {0} sentence2: {1}", {"0": "not_equivalent", "1": "equivalent"}
        ),
        "RTE": Prompt("rte sentence1: {0} sentence2: {1}", _same(_ENTAILMENT)),
    },
}
"""By what reads them, and the task."""

QUESTIONS: dict[str, str] = {
    "decoder": "Article: {article}\n\nQuestion: {question}\nAnswer:",
    "encoder": "race question: {question} article: {article}",
}
"""How a question about an article is put; its options are the answers."""


def number_word(value: float) -> str:
    """The answer nearest to a number."""
    return f"{round(value * 5) / 5:.1f}"
