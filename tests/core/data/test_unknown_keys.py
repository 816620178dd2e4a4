"""A key that nobody knows is refused by every reader of records, with its file and line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.apps.tasks.fine_tuning.examples import read_race
from megatron.apps.tasks.fine_tuning.squad_files import read_questions
from megatron.features.instruction.conversations import read_examples
from megatron.features.preference.records import read_preferences

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "a b",
                    "qas": [
                        {
                            "id": "1",
                            "question": "q",
                            "answers": [{"text": "b", "answer_start": 2}],
                        }
                    ],
                }
            ],
        }
    ],
}


def lines(read: Callable) -> Callable:
    return lambda path: list(read(str(path)))


READERS = {
    "alpaca": (lines(read_examples), "x.jsonl", {"instruction": "a", "output": "b"}, []),
    "pair of texts": (lines(read_examples), "x.jsonl", {"prompt": "a", "completion": "b"}, []),
    "messages": (lines(read_examples), "x.jsonl", {"messages": [USER, ANSWER]}, []),
    "a message": (lines(read_examples), "x.jsonl", {"messages": [USER, ANSWER]}, ["messages", 1]),
    "prompt's message": (
        lines(read_examples), "x.jsonl", {"prompt": [USER], "completion": [ANSWER]}, ["prompt", 0]
    ),
    "preference": (lines(read_preferences), "x.jsonl", PAIR, []),
    "preference's message": (
        lines(read_preferences), "x.jsonl",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, ["chosen", 0],
    ),
    "older alpaca preference": (
        lines(read_preferences), "x.jsonl", {"instruction": "a", "output": ["b", "c"]}, []
    ),
    "judged answer": (
        lines(read_preferences), "x.jsonl", {"prompt": "a", "completion": "b", "label": True}, []
    ),
    "race": (
        lambda path: read_race(path.parent), "x.txt",
        {"article": "a", "questions": ["q"], "options": [["a", "b", "c", "d"]], "answers": ["A"],
         "id": "1"},
        [],
    ),
    "squad": (lambda path: read_questions(path, False), "x.json", SQUAD, []),
    "squad's article": (lambda path: read_questions(path, False), "x.json", SQUAD, ["data", 0]),
    "squad's paragraph": (
        lambda path: read_questions(path, False), "x.json", SQUAD, ["data", 0, "paragraphs", 0]
    ),
    "squad's question": (
        lambda path: read_questions(path, False), "x.json", SQUAD,
        ["data", 0, "paragraphs", 0, "qas", 0],
    ),
    "squad's answer": (
        lambda path: read_questions(path, False), "x.json", SQUAD,
        ["data", 0, "paragraphs", 0, "qas", 0, "answers", 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_planted_key_is_refused(name: str, tmp_path: Path) -> None:
    read, file, record, inside = READERS[name]
    path = tmp_path / file
    path.write_text(json.dumps(record))
    assert read(path)
    for value in ("a passage", 1, True, ["x"], {"x": 1}):
        planted = json.loads(json.dumps(record))
        target = planted
        for step in inside:
            target = target[step]
        target["zebra"] = value
        path.write_text(json.dumps(planted))
        place = re.escape(str(path)) + ("" if file == "x.json" else ", line 1")
        with pytest.raises(ValueError, match=rf'{place}.*the key "zebra" \('):
            read(path)
    for empty in (None, "", [], {}):
        target["zebra"] = empty
        path.write_text(json.dumps(planted))
        assert read(path)
