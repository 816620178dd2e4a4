"""Retrievers on questions: matching, search, ranks and files, against slow loops over the
definitions."""

import itertools
import json
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.retrieval.matching import (
    EvidencePassage,
    EvidenceQuestion,
    has_match,
    has_words,
    hits,
    read_passages,
    read_questions,
)
from megatron.apps.tasks.retrieval.natural_questions import (
    AskedQuestion,
    NaturalQuestions,
    TitledText,
)
from megatron.apps.tasks.retrieval.vectors import load_vectors, nearest, save_vectors
from megatron.config import ConfigError


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("It was Émile Zola's.", ["emile zola"], False),
        ("It was Émile Zola's.", ["ÉMILE  ZOLA"], True),
        (
            unicodedata.normalize("NFD", "It was Émile"),
            [unicodedata.normalize("NFC", "é") + "mile"],
            True,
        ),
        ("12.5 million, in all", ["12 . 5"], True),
        ("art of the party", ["part"], False),
        ("anything", ["", "  "], False),
        ("the end", ["beginning", "END"], True),
    ],
)
def test_words_of_an_answer(text, answers, expected):
    assert has_words(text, answers) is expected


def test_regular_expressions():
    assert has_match("Born on 4 July\n1776", [r"^1[0-9]{3}$"])
    assert not has_match("Born in 17", ["1[0-9]{3}", "(unclosed"])


def test_hits_are_counted_at_the_first_answer():
    draw = np.random.default_rng(0)
    passages = [EvidencePassage(n, f"w{n % 5} x", "") for n in range(20)]
    questions = [EvidenceQuestion("?", [f"w{n % 5}"]) for n in range(7)]
    found = np.array([draw.permutation(20)[:6] for _ in questions])
    found[3, 2:] = -1
    expected = [
        sum(
            any(n >= 0 and passages[n].text.startswith(q.answers[0]) for n in row[: k + 1])
            for q, row in zip(questions, found, strict=True)
        )
        for k in range(6)
    ]
    assert hits(questions, found, passages, "string").tolist() == expected


def test_search_against_a_loop(monkeypatch):
    monkeypatch.setattr("megatron.apps.tasks.retrieval.vectors._ELEMENTS", 20)
    draw = np.random.default_rng(1)
    vectors = draw.integers(-3, 4, (50, 6)).astype(np.float16)  # with equal products
    queries = draw.integers(-3, 4, (5, 6)).astype(np.float32)
    found = nearest(vectors, queries, 9, torch.device("cpu"))
    for row, query in zip(found, queries, strict=True):
        scores = [float(vector.astype(np.float64) @ query) for vector in vectors]
        assert row.tolist() == sorted(range(50), key=lambda n: (-scores[n], n))[:9]
    assert (nearest(vectors[:4], queries, 6, torch.device("cpu"))[:, 4:] == -1).all()


def asked(n, hard=1):
    contexts = [TitledText("t", f"{n} {k}") for k in range(4)]
    return AskedQuestion(f"q{n}", f"what {n}", contexts[0], contexts[1 : 1 + hard], contexts[2:])


def test_ranks_are_among_all_passages_of_the_set():
    draw = np.random.default_rng(2)
    numbers, firsts = draw.normal(size=(12, 8)), [0, 3, 7]
    for first, end in itertools.pairwise((*firsts, 12)):
        numbers[first:end, :4] = numbers[first, :4]  # pairs of a question have its vector
    task = NaturalQuestions(TaskConfig(task="RET-FINETUNE-NQ"))
    found = task._ranks([asked(n) for n in range(3)], firsts, {"vectors": numbers})
    expected = []
    for first in firsts:
        scores = numbers[:, 4:] @ numbers[first, :4]
        expected.append(1 + sum(score > scores[first] for score in scores))
    assert [each.predicted for each in found] == expected
    scores = task.scores(found)
    assert scores.values["average_rank"] == pytest.approx(np.mean(expected))
    assert scores.values["top5_accuracy"] == np.mean([rank <= 5 for rank in expected])


def test_negatives_of_a_sample(monkeypatch):
    class Encoder:
        def question(self, text):
            return text

        def passage(self, title, text):
            return text

    name = "megatron.apps.tasks.retrieval.natural_questions.PassageEncoder.of"
    monkeypatch.setattr(name, lambda run: Encoder())
    run = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(seed=3)))
    task = NaturalQuestions(TaskConfig(train_with_neg=True, train_hard_neg=3, sample_rate=0.5))
    data = task._dataset([asked(0, hard=1), asked(1, hard=0)], run, 3)
    first, second = data[0], data[1]
    assert first.contexts[0] == ("0 0", True) and first.contexts[1] == ("0 1", True)
    assert {text for text, counts in first.contexts if counts} == {"0 0", "0 1", "0 2", "0 3"}
    assert [counts for _, counts in second.contexts] == [True, True, True, False]
    chosen = task._share([asked(n) for n in range(9)], run)
    assert len(chosen) == 4 and chosen == task._share([asked(n) for n in range(9)], run)


def test_questions_of_a_file(tmp_path):
    file = tmp_path / "nq.json"
    ctx = {"title": "T", "text": "x"}
    file.write_text(
        json.dumps(
            [
                {"question": "who?", "positive_ctxs": [ctx], "hard_negative_ctxs": [ctx] * 2},
                {"question": "none", "positive_ctxs": []},
            ]
        )
    )
    task = NaturalQuestions(TaskConfig(task="RET-FINETUNE-NQ"))
    (question,) = task.read(file)
    assert question.text == "who" and len(question.hard) == 2 and not question.others
    file.write_text(json.dumps([{"question": "who?", "positive_ctxs": [{"title": "T"}]}]))
    with pytest.raises(ConfigError, match="question 1: expected an object with question"):
        task.read(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttitle\ttext\n1\ta\tb\n", "the columns are id, text, title"),
        ("id\ttext\ttitle\n1\ta\n", "line 2 has 2 columns"),
        ("id\ttext\ttitle\nx\ta\tb\n", "line 2 has 3 columns, the first 'x'"),
        ("id\ttext\ttitle\n", "has no passages"),
        ("", "the first line is"),
    ],
)
def test_tables_of_passages_that_are_wrong(tmp_path, content, message):
    file = tmp_path / "psgs.tsv"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_passages(str(file))


def test_tables(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('id\ttext\ttitle\n7\t"a ""b"" c"\tT\n')
    assert read_passages(str(file)) == [EvidencePassage(7, 'a "b" c', "T")]
    file.write_text("who\t['a', \"b\"]\n")
    assert read_questions("--qa-data-dev", str(file)) == [EvidenceQuestion("who", ["a", "b"])]
    for wrong in ("who\n", "who\t[]\n", "who\ta\n", "who\t[1]\n", "who\t__import__('os')\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--qa-data-dev .*line 1"):
            read_questions("--qa-data-dev", str(file))


def test_vectors_of_another_model_are_refused(tmp_path):
    file, passages = tmp_path / "v", [EvidencePassage(3, "a", "t"), EvidencePassage(5, "b", "t")]
    vectors, about = np.ones((2, 4), np.float16), {"checkpoint": "1", "passages": "2"}
    save_vectors(file, vectors, passages, about)
    assert np.array_equal(load_vectors(file, passages, about), vectors)
    with pytest.raises(ConfigError, match="vectors of another checkpoint than"):
        load_vectors(file, passages, about | {"checkpoint": "9"})
    with pytest.raises(ConfigError, match="passages with other numbers"):
        load_vectors(file, passages[::-1], about)
    file.write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a file of vectors"):
        load_vectors(file, passages, about)
