"""Scores next to the rows that they are of, and runs that continue."""

import json
import threading
import time
from pathlib import Path

import pytest
from detoxifying.annotate import annotate, read_rows, run_annotation
from detoxifying.scorers import Scorer

from megatron.config import ConfigError


def row(number, text, **more):
    return {"text": text, "all_text": text, "prompt": "", "id": number, **more}


def by_marks(texts):
    return [text.count("!") / 10 for text in texts]


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rows_of_megatron(written, loud, capsys):
    texts = ["<|endoftext|>Hello!", "", "<|endoftext|>\n", "Go!!!<|endoftext|>", "Über\n!!"]
    path = written("samples.out", [row(n, text, more=n) for n, text in enumerate(texts)])
    run_annotation(None, ["--data-path", path, "--scorer-command", loud, "--total", "5"])
    out = f"{path}-annotated.jsonl"
    assert capsys.readouterr().out == f"{out}\n"
    found = read(out)
    cleaned = ["Hello!", "", "\n", "Go!!!", "Über\n!!"]
    scores = [0.1, None, None, 0.3, 0.2]
    assert found == [
        row(n, texts[n], more=n)
        | {"text": cleaned[n], "score": None if scores[n] is None else {"toxicity": scores[n]}}
        for n in range(5)
    ]


def test_every_score_is_next_to_its_text(written, tmp_path):
    """Calls that end in another order than they began, and blank texts between."""
    texts = ["" if n % 7 == 3 else f"text {n}" + "!" * (n % 10) for n in range(60)]
    rows = read_rows("--data-path", written("a.jsonl", [row(n, t) for n, t in enumerate(texts)]))
    lock = threading.Lock()
    under_way = most = 0

    def slow(batch):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.002 * (len(batch[0]) % 5))
        with lock:
            under_way -= 1
        return by_marks(batch)

    annotate(rows, tmp_path / "out", Scorer("slow", slow, 2, workers=4), ())
    found = read(tmp_path / "out")
    assert [r["id"] for r in found] == list(range(60)) and 1 < most <= 4
    for each in found:
        expected = {"toxicity": each["text"].count("!") / 10} if each["text"] else None
        assert each["score"] == expected


def test_an_interrupted_run_continues(written, tmp_path, capsys):
    rows = read_rows("--data-path", written("a", [row(n, f"{n} " + "!" * n) for n in range(8)]))
    out, asked = tmp_path / "out", []

    def breaks(texts):
        asked.extend(texts)
        if texts[0].startswith("5"):
            raise OSError("the network is gone")
        return by_marks(texts)

    with pytest.raises(OSError, match="network"):
        annotate(rows, out, Scorer("service", breaks, 1), ())
    assert not out.exists()
    (part,) = tmp_path.glob("out.partial-*")
    assert [r["id"] for r in read(part)] == [0, 1, 2, 3, 4]
    with part.open("a") as file:
        file.write('{"text": "cut o')  # the machine went down while it wrote

    asked.clear()
    again = Scorer("service", lambda texts: asked.extend(texts) or by_marks(texts), 1)
    annotate(rows, out, again, ())
    assert asked == [r.content["text"] for r in rows[5:]]
    assert [r["score"]["toxicity"] for r in read(out)] == [n / 10 for n in range(8)]
    assert not list(tmp_path.glob("out.partial-*"))
    assert "continuing after 5 of 8 lines" in capsys.readouterr().out


def stopped(texts):
    raise KeyboardInterrupt


def test_ctrl_c(written, capsys):
    path = written("a", [row(0, "Hi!")])
    with pytest.raises(SystemExit) as end:
        run_annotation(None, ["--data-path", path, "--scorer", f"{__name__}:stopped"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command continues\n"


def test_another_scorer_or_text_begins_again(written, tmp_path):
    def interrupted(texts):
        raise OSError

    rows = read_rows("--data-path", written("a", [row(0, "Hi!")]))
    others = read_rows("--data-path", written("b", [row(0, "Ho!")]))
    for given, name in ((rows, "one"), (rows, "two"), (others, "one"), (rows, "one")):
        with pytest.raises(OSError):
            annotate(given, tmp_path / "out", Scorer(name, interrupted, 1), ())
    assert len(list(tmp_path.glob("out.partial-*"))) == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "--data-path .* is empty"),
        ([row(0, "a"), '{"text": '], "line 2 is not valid JSON"),
        ([row(0, "a"), "[" * 100_000], "line 2 is not valid JSON: nested more than"),
        ([row(0, "a"), "", "[1]"], "line 3 is not a JSON object"),
        ([{"texts": "a", "id": 1}], r'line 1 has no string "text" \(its keys: texts, id\)'),
        ([{"text": 5}], 'line 1 has no string "text"'),
    ],
)
def test_files_that_are_no_samples(written, rows, said):
    with pytest.raises(ConfigError, match=said):
        run_annotation(None, ["--data-path", written("a", rows), "--scorer-command", "cat"])


def test_paths_that_cannot_be_used(written, tmp_path):
    path = written("a", [row(0, "a")])
    for words, said in (
        ([], "--data-path is missing"),
        (["--data-path", f"{tmp_path}/none"], "none does not exist; name a file"),
        (["--data-path", path, "--out-path", path], "is the file of --data-path"),
        (["--data-path", path, "--out-path", str(tmp_path)], "is a folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_annotation(None, [*words, "--scorer-command", "cat"])
