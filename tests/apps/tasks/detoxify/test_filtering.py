"""The least toxic half, and what is said of it."""

import json

import numpy as np
import pytest
from detoxifying.measures import run_filter

from megatron.config import ConfigError

SCORES = [0.9, 0.1, None, 0.7, 0.3, 0.2, 0.6, 0.1, 0.5]


def row(number, score):
    return {"text": f"text {number}", "id": number, "score": score and {"toxicity": score}}


def filtered(written, tmp_path, *flags):
    path = written("a.jsonl", [row(n, score) for n, score in enumerate(SCORES)])
    out = tmp_path / "b.jsonl"
    run_filter(None, ["--data-path", path, "--out-path", str(out), *flags])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_half_of_the_scored_rows(written, tmp_path, capsys):
    found = filtered(written, tmp_path, "--workers", "10")
    assert sorted(each["id"] for each in found) == [1, 4, 5, 7]
    assert all(each == row(each["id"], SCORES[each["id"]]) for each in found)
    scores = np.array([score for score in SCORES if score is not None])
    kept, toxic = np.array([0.1, 0.1, 0.2, 0.3]), scores[scores > 0.5]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:11] == [
        "total line number: 9",
        "total valid samples: 8",
        f"Avg toxicity (all): {scores.mean()} +- {scores.std()}",
        f"Avg toxicity (toxic): {toxic.mean()} +- {toxic.std()}",
        f"Toxic Percentage {3 / 8}",
        f"Avg toxicity (nontoxic): {np.mean([0.1, 0.3, 0.2, 0.1, 0.5])} +- "
        f"{np.std([0.1, 0.3, 0.2, 0.1, 0.5])}",
        f"Nontoxic Percentage {5 / 8}",
        "After filtering: 4 of samples are left",
        f"Avg toxicity (filtered): {kept.mean()} +- {kept.std()}",
        "Toxicity Range (filtered): 0.1 ~ 0.3",
        "Total samples after filtering: 4",
    ]
    assert lines[11].startswith("Examples: [{'text': 'text 1', 'id': 1, 'score': ")


def test_order_depends_on_the_seed(written, tmp_path):
    orders = [
        [each["id"] for each in filtered(written, tmp_path, "--seed", str(seed))]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_nothing_toxic(written, tmp_path, capsys):
    path = written("a.jsonl", [row(n, 0.25) for n in range(4)])
    run_filter(None, ["--data-path", path, "--out-path", str(tmp_path / "b")])
    out = capsys.readouterr().out
    assert "Avg toxicity (toxic): nan +- nan" in out and "Toxic Percentage 0.0" in out


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "is empty"),
        ([row(0, 0.5), {"text": "a"}], "line 2: .*found .*: filter what annotations/perspective"),
        ([row(0, 1.5)], r'line 1: "score" must be null or \{"toxicity": 0 to 1'),
        (['{"text": "a", "score": {"toxicity": NaN}}'], "line 1: .* NaN"),
        ([{"score": {"threat": 0.5}}], "line 1: .*threat"),
        ([{"score": 0.5}], "line 1: .* 0.5"),
        ([row(0, 0.5), row(1, None)], "2 lines, of which 1 have a score"),
    ],
)
def test_files_without_scores(written, tmp_path, rows, said):
    words = ["--data-path", written("a.jsonl", rows), "--out-path", str(tmp_path / "b")]
    with pytest.raises(ConfigError, match=said):
        run_filter(None, words)
    assert not (tmp_path / "b").exists()


def test_missing_output(written):
    with pytest.raises(ConfigError, match="--out-path is missing"):
        run_filter(None, ["--data-path", written("a", [row(0, 0.5)])])
