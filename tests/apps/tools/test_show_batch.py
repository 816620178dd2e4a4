"""tools/show_batch.py on preferences: in colour, plain, and as JSON."""

import json
import re
from pathlib import Path

import pytest

from tools.show_batch import GREEN, GREY, PLAIN, main

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1 --tokenizer-type NullTokenizer --vocab-size 99 --split 1,0,0"
).split()
PAIR = {"prompt": "1 2 3", "chosen": " 4 5", "rejected": " 6"}


@pytest.fixture
def shown(tmp_path: Path, capsys):
    def run(record: dict, *flags: str) -> str:
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(record) + "\n")
        main([*FLAGS, "--data-path", str(path), *flags])
        return capsys.readouterr().out

    return run


def test_both_answers(shown) -> None:
    text = shown(PAIR, "--preference", "dpo")
    assert "document 0, tokens 0 to 5 (better)" in text
    assert "document 0, tokens 0 to 4 (worse)" in text
    better = "    better, loss on 3 of 5 tokens\n    | [[1 2 3]]4 5 <eod>\n"
    assert f"{better}    worse, loss on 2 of 4 tokens\n    | [[1 2 3]]6 <eod>\n" in text
    judged = shown({"prompt": "1", "completion": " 2", "label": False}, "--preference", "kto")
    assert "    bad, loss on 2 of 2 tokens\n    | [[1]]2 <eod>\n    another prompt's" in judged


def test_in_colour(shown, monkeypatch) -> None:
    text = shown(PAIR, "--preference", "dpo", "--color", "always")
    assert f"    | {GREY}1 2 3{PLAIN}{GREEN}4 5 <eod>{PLAIN}\n" in text and "[[" not in text
    # Nothing but colours is different.
    plain = shown(PAIR, "--preference", "dpo", "--color", "never")
    assert re.sub(r"\x1b\[\d+m", "", text) == re.sub(r"\[\[|\]\]", "", plain)
    short = shown(PAIR, "--preference", "dpo", "--color", "always", "--max-characters", "6")
    assert f"| {GREY}1 2 3{PLAIN}{GREEN}4{PLAIN}... (8 characters more)" in short
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert GREEN in shown(PAIR, "--preference", "dpo")
    monkeypatch.setenv("NO_COLOR", "1")
    assert GREEN not in shown(PAIR, "--preference", "dpo")


def test_instructions(shown) -> None:
    record = {"prompt": "1 2 3", "completion": " 4 5"}
    text = shown(record, "--sft")
    assert "sample 0, loss on 3 of 5 tokens" in text and "    | [[1 2 3]]4 5 <eod>\n" in text
    assert f"{GREEN}4 5 <eod>{PLAIN}" in shown(record, "--sft", "--color", "always")


def test_rows_as_json(shown) -> None:
    (line,) = shown(PAIR, "--preference", "dpo", "--json").splitlines()
    first, second = json.loads(line)["rows"]
    assert first["name"] == "better" and first["tokens"] == [1, 2, 3, 4, 5]
    assert second["loss_mask"] == [0, 0, 1, 1] and second["text"] == "[[1 2 3]]6 <eod>"
    (line,) = shown({"prompt": "1", "completion": " 2"}, "--sft", "--json").splitlines()
    assert json.loads(line)["tokens"] == [1, 2] and "rows" not in json.loads(line)
