"""Reading SQuAD's files, and what is said about those that cannot be read."""

import copy
import json

import pytest
from squad_files import squad_content, write_squad

from megatron.apps.tasks.fine_tuning.squad_files import GoldAnswer, read_questions


@pytest.mark.parametrize("negative", [0.0, 0.5])
def test_read(tmp_path, negative):
    content = squad_content(negative=negative)
    found = read_questions(write_squad(tmp_path / "dev.json", content), bool(negative))
    written = [
        (qa, paragraph["context"])
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]
    assert len(found) == len(written) == 16
    for question, (qa, context) in zip(found, written, strict=True):
        assert (question.identity, question.question) == (qa["id"], qa["question"])
        assert question.context == context
        assert question.answers == tuple(
            GoldAnswer(a["text"], a["answer_start"]) for a in qa["answers"]
        )


def test_an_answer_a_little_off(tmp_path, caplog):
    content = squad_content(paragraphs=1, questions=2)
    answer = content["data"][0]["paragraphs"][0]["qas"][1]["answers"][0]
    answer["answer_start"] += 2
    found = read_questions(write_squad(tmp_path / "train.json", content), False)
    assert found[1].answers[0].start == answer["answer_start"] - 2
    assert "train.json: 1 answers" in caplog.text and "question 0-0-1" in caplog.text


def spoiled(change):
    content = copy.deepcopy(squad_content(paragraphs=1, questions=2))
    paragraph = content["data"][0]["paragraphs"][0]
    return change(content, paragraph, paragraph["qas"][1]) or content


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, p, q: {"data": []}, "contains no questions"),
        (lambda c, p, q: [1], "the file: 'data' is missing"),
        (lambda c, p, q: c.pop("data") and None, "the file: 'data' is missing"),
        (lambda c, p, q: p.pop("context") and None, r"article 1 \(T0\), paragraph 1: 'context' is"),
        (lambda c, p, q: q.update(id=7), "a question of article 1.*'id' is 7"),
        (lambda c, p, q: q.update(id="0-0-0"), "question 0-0-0 occurs twice"),
        (lambda c, p, q: q.pop("question") and None, "question 0-0-1: 'question' is missing"),
        (lambda c, p, q: q.update(answers="x"), "question 0-0-1: 'answers' is 'x'"),
        (lambda c, p, q: q.update(answers=[]), "question 0-0-1 has no answer; give --version-2-w"),
        (lambda c, p, q: q["answers"][0].update(text=" "), "0-0-1 has no text; a question without"),
        (lambda c, p, q: q["answers"][0].pop("answer_start") and None, "0-0-1: 'answer_start' is"),
        (lambda c, p, q: q["answers"][0].update(text="zzz"), "0-0-1: the context has.*'zzz'; cor"),
        (lambda c, p, q: q["answers"][0].update(answer_start=-9), "at answer_start -9"),
        (lambda c, p, q: q.update(is_impossible=True), "0-0-1 has answers and is_impossible is t"),
    ],
)  # fmt: skip
def test_refused(tmp_path, change, message):
    path = write_squad(tmp_path / "bad.json", spoiled(change))
    with pytest.raises(ValueError, match=message) as error:
        read_questions(path, False)
    assert str(path) in str(error.value)


def test_not_json(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"data": [\n  oops]}')
    with pytest.raises(ValueError, match=r"bad.json is not valid JSON: .* at line 2, column 3"):
        read_questions(path, False)
    path.write_bytes(json.dumps({"data": "é"}, ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match="bad.json is not valid JSON: byte 10 is not UTF-8"):
        read_questions(path, False)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="bad.json is not valid JSON: nested more than"):
        read_questions(path, False)
    with pytest.raises(FileNotFoundError, match="none.json does not exist; give a JSON file"):
        read_questions(tmp_path / "none.json", False)
