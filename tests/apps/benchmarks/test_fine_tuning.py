"""What benchmarks/fine_tuning.py reads from a run, and its table."""

import json

import masked_language
from fine_tuning import ACCURACY, Run, by_epoch, table

PRINTED = """ > |epoch: 0| metrics for dev: correct / total = 5 / 8 = 62.5000 %, elapsed
 >> |epoch: 0| overall: correct / total = 5 / 8 = 62.5000 %
[2026-11-23 06:11:31] iteration       20/      20 | lm loss: 6.197530E-01 |
[2026-11-23 06:11:32] >> |epoch: 1| overall: correct / total = 6 / 8 = 75.0000 %
"""
RUNS = [
    Run("QQP", start, 1234 + seed, (60.0, last))
    for start, found in (("pretrained", (71.0, 70.0, 73.5)), ("random", (69.0, 68.0, 66.0)))
    for seed, last in enumerate(found)
]


def test_accuracies_of_all_sets_together():
    assert ACCURACY.findall(PRINTED) == [("0", "5", "8"), ("1", "6", "8")]


def test_table():
    assert table(RUNS).splitlines()[2:] == [
        "| QQP | pretrained | 71.0 | 70.0 | 73.5 |",
        "| QQP | random | 68.0 | 66.0 | 69.0 |",
    ]
    assert list(by_epoch(RUNS, "QQP", "random")) == [(60.0,) * 3, (69.0, 68.0, 66.0)]


def test_articles_of_a_folder(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(json.dumps({"article": f"Text {name}."}) + "\n")
    assert list(masked_language.read(tmp_path)) == ["Text a.", "Text b."]
