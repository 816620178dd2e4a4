"""RACE's folders: order, blanks, answers, lines that cannot be read."""

from __future__ import annotations

import json

import pytest

from megatron.apps.tasks.fine_tuning.examples import answered, read_race
from megatron.config import ConfigError

PASSAGE = {
    "article": "A cat .\n It sat .  Down.",
    "questions": ["The cat _ down.", "What sat?"],
    "options": [["sat", "ran", "fell", "lay"], ["a cat", "a dog", "a hat", "none"]],
    "answers": ["A", "D"],
}


def test_questions_in_the_order_of_the_files(tmp_path):
    (tmp_path / "9.txt").write_text(json.dumps(PASSAGE) + "\n\n")
    second = PASSAGE | {"answers": ["C", "B"]}
    (tmp_path / "10.txt").write_text(json.dumps(second) + "\n" + json.dumps(PASSAGE))
    (tmp_path / "notes.md").write_text("not read")
    questions = read_race(tmp_path)
    assert [question.label for question in questions] == [2, 1, 0, 3, 0, 3]
    assert [question.identity for question in questions] == [
        "10.txt:1:1", "10.txt:1:2", "10.txt:2:1", "10.txt:2:2", "9.txt:1:1", "9.txt:1:2"
    ]  # fmt: skip
    assert questions[0].article == "A cat. It sat. Down."
    assert questions[1].options == ("a cat", "a dog", "a hat", "none")


def test_an_option_in_the_blank_or_after_the_question():
    assert answered("The cat  _ down _ .", "sat") == "The cat sat down sat ."
    assert answered("What sat?", "a  cat") == "What sat? a cat"


def test_a_test_set_without_answers(tmp_path):
    passage = {key: value for key, value in PASSAGE.items() if key != "answers"}
    (tmp_path / "1.txt").write_text(json.dumps(passage))
    assert [question.label for question in read_race(tmp_path)] == [None, None]


@pytest.mark.parametrize(
    "change, words",
    [
        ("{", "line 1 is not valid JSON"),
        ("[" * 100_000, "line 1 is not valid JSON: nested more than"),
        ("[]", "line 1 is not a JSON object"),
        ({"article": None}, "'article' must be a string"),
        ({"options": None}, "'options' must be a list"),
        ({"options": ["a", "b"]}, "'options' must be a list of lists"),
        ({"answers": ["A"]}, "line 1 has 2 questions, 2 options, 1 answers"),
        ({"answers": ["A", "E"]}, "question 2 has the answer 'E'; it must be one of A, B, C, D"),
        ({"answers": ["A", "a"]}, "question 2 has the answer 'a'"),
        ({"options": [["a"] * 4, ["a"] * 3]}, "question 2 has 3 options instead of 4"),
        ({"options": [["a"] * 4, ["a", "b", "c", 1]]}, "question 2: the question and its options"),
    ],
)
def test_lines_that_cannot_be_read(change, words, tmp_path):
    line = change if isinstance(change, str) else json.dumps(PASSAGE | change)
    (tmp_path / "1.txt").write_text(line)
    with pytest.raises(ConfigError) as error:
        read_race(tmp_path)
    assert str(tmp_path / "1.txt") in str(error.value) and words in str(error.value)


def test_a_missing_key(tmp_path):
    (tmp_path / "1.txt").write_text(json.dumps({"article": "a", "question": []}))
    with pytest.raises(ConfigError, match="no key 'questions'; its keys: article, question"):
        read_race(tmp_path)


def test_folders_without_text(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist; it must be a folder"):
        read_race(tmp_path / "nowhere")
    (tmp_path / "dev" / "middle").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"dev has no \.txt file; name a folder in it: middle"):
        read_race(tmp_path / "dev")
    (tmp_path / "dev" / "middle" / "1.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"its 1 \.txt files have no question"):
        read_race(tmp_path / "dev" / "middle")
