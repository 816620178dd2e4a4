"""Texts as tokens: special tokens, types, where a text is cut, the order of options."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.apps.tasks.fine_tuning.encoder import PairEncoder
from megatron.apps.tasks.fine_tuning.examples import LabelledExample, RaceQuestion

CLS, SEP = 1, 2


class Words:
    """A tokenizer: w7 is 7."""

    cls, sep, pad = CLS, SEP, 0

    def tokenize_sentences(self, texts):
        return [np.array([int(word[1:]) for word in text.split()], np.int32) for text in texts]


def text(*ids):
    return " ".join(f"w{number}" for number in ids)


def encoded(texts, length):
    sample = PairEncoder(Words(), length).example(LabelledExample(texts, 1, "7"))
    assert (sample.label, sample.identity) == (1, "7")
    return sample.tokens[0].tolist(), sample.types[0].tolist()


@pytest.mark.parametrize(
    "texts, length, tokens, types",
    [
        # CLS a SEP b SEP; one text has one SEP.
        (([10, 11], [20]), 9, [CLS, 10, 11, SEP, 20, SEP], [0, 0, 0, 0, 1, 1]),
        (([10, 11],), 9, [CLS, 10, 11, SEP], [0, 0, 0, 0]),
        # Five tokens before the last SEP fit into six, and not into five.
        (([10, 11], [20]), 6, [CLS, 10, 11, SEP, 20, SEP], [0, 0, 0, 0, 1, 1]),
        (([10, 11], [20]), 5, [CLS, 10, 11, SEP, SEP], [0, 0, 0, 0, 1]),
        (([10, 11], [20]), 4, [CLS, 10, 11, SEP], [0, 0, 0, 1]),
        # A single text that reaches the length is cut too, and gets its SEP again.
        (([10, 11],), 5, [CLS, 10, 11, SEP], [0, 0, 0, 0]),
        (([10, 11],), 4, [CLS, 10, 11, SEP], [0, 0, 0, 0]),
        (([10, 11, 12],), 4, [CLS, 10, 11, SEP], [0, 0, 0, 0]),
    ],
)
def test_pairs(texts, length, tokens, types):
    assert encoded(tuple(text(*ids) for ids in texts), length) == (tokens, types)


def test_a_question_has_a_text_for_each_option_in_their_order():
    options = (text(30), text(31, 32, 33), text(34), text(35))
    question = RaceQuestion(text(50, 51), f"{text(40)} _ {text(41)}", options, 2, "1.txt:1:1")
    sample = PairEncoder(Words(), 12).question(question, max_qa_length=4)
    assert [tokens.tolist() for tokens in sample.tokens] == [
        [CLS, 40, 30, 41, SEP, 50, 51, SEP],
        [CLS, 40, 31, 32, 33, SEP, 50, 51, SEP],  # the question is cut to four tokens
        [CLS, 40, 34, 41, SEP, 50, 51, SEP],
        [CLS, 40, 35, 41, SEP, 50, 51, SEP],
    ]
    assert sample.types[1].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert (sample.label, sample.identity) == (2, "1.txt:1:1")


def test_a_test_file_has_samples_too():
    sample = PairEncoder(Words(), 9).example(LabelledExample((text(10),), None, "0"))
    assert sample.label == 0
