"""The tables of GLUE: columns, labels, test files, rows that cannot be read."""

from __future__ import annotations

import pytest

from megatron.apps.tasks.fine_tuning.command import set_names
from megatron.apps.tasks.fine_tuning.examples import TABLES, LabelledExample, clean_text
from megatron.config import ConfigError

MNLI = "index promptID pairID genre s1b s2b s1p s2p sentence1 sentence2 label1 gold_label".split()
MNLI_DEV = [*MNLI[:-1], "label2", "label3", "label4", "label5", "gold_label"]


def file(path, *rows):
    path.write_bytes("".join("\t".join(row) + "\n" for row in rows).encode())
    return path


CASES = {
    "MNLI": (MNLI, "7 p q g . . . . A b neutral neutral".split(), (("A", "b"), 2, "7")),
    "MNLI dev": (MNLI_DEV, [*"7 p q g . . . . A b".split(), *["neutral"] * 5, "contradiction"],
                 (("A", "b"), 0, "7")),
    "MNLI test": (MNLI[:10], "7 p q g . . . . A b".split(), (("A", "b"), None, "7")),
    "QQP": ("id qid1 qid2 question1 question2 is_duplicate".split(), "5 1 2 A b 1".split(),
            (("A", "b"), 1, "5")),
    "QQP test": ("id question1 question2".split(), "5 A b".split(), (("A", "b"), None, "5")),
    "QNLI": ("index question sentence label".split(), "5 A b entailment".split(),
             (("A", "b"), 0, "5")),
    "QNLI test": ("index question sentence".split(), "5 A b".split(), (("A", "b"), None, "5")),
    "RTE": ("index sentence1 sentence2 label".split(), "5 A b not_entailment".split(),
            (("A", "b"), 1, "5")),
    "RTE test": ("index sentence1 sentence2".split(), "5 A b".split(), (("A", "b"), None, "5")),
    "SST-2": (["sentence", "label"], ["A b ", "1"], (("A b",), 1, "2")),
    "SST-2 test": (["index", "sentence"], ["0", "A b"], (("A b",), None, "0")),
    "CoLA": (None, ["gj04", "0", "*", "A b"], (("A b",), 0, "1")),
    "CoLA test": (["index", "sentence"], ["0", "A b"], (("A b",), None, "0")),
    "STS-B": ("index genre f y o s1 s2 sentence1 sentence2 score".split(),
              "5 g f y o s1 s2 A b 3.750".split(), (("A", "b"), 3.75, "5")),
    "STS-B test": ("index genre f y o s1 s2 sentence1 sentence2".split(),
                   "5 g f y o s1 s2 A b".split(), (("A", "b"), None, "5")),
    "MRPC": (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], "1 71 72 A b".split(),
             (("A", "b"), 1, "2")),
    "MRPC test": (["index", "#1 ID", "#2 ID", "#1 String", "#2 String"], "0 71 72 A b".split(),
                  (("A", "b"), None, "0")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_columns(case, tmp_path):
    header, row, expected = CASES[case]
    path = file(tmp_path / "x.tsv", *([header] if header else []), row)
    assert TABLES[case.split()[0]].read(path) == [LabelledExample(*expected)]


def test_every_task_is_covered():
    assert {case.split()[0] for case in CASES} == set(TABLES)
    assert {case.split()[0] for case in CASES if case.endswith(" test")} == set(TABLES)


def test_quotes_and_unusual_line_ends_are_text(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_bytes(
        b"\xef\xbb\xbfsentence\tlabel\r\n"
        b'"an open quote\t1\r\nnext \xe2\x80\xa8 line\r still this\t0\r\n'
    )
    texts = [example.texts[0] for example in TABLES["SST-2"].read(path)]
    assert texts == ['"an open quote', "next line still this"]


def test_text_is_cleaned():
    assert clean_text(" a\n b\t\tc . d . . e. ") == " a b c. d.. e. "
    assert clean_text("x . . . . . y") == "x. .. .. y"


QQP = "id qid1 qid2 question1 question2 is_duplicate".split()


def test_rows_of_a_wrong_width_are_left_out(tmp_path, caplog):
    rows = [["1", "2", "3", "a", "b", "0"], ["1", "2", "a b", "0"], ["1", "2", "3", " ", "b", "1"],
            ["1", "2", "3", "a", "", "1"], ["1", "2", "3", "a", "b", "0", ""]]  # fmt: skip
    path = file(tmp_path / "train.tsv", QQP, *rows)
    assert len(TABLES["QQP"].read(path)) == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"{path}: 4 rows are left out: line 3: 4 columns instead of 6; line 4: column 3 (from 0), "
        "a text, is empty; line 5: column 4 (from 0), a text, is empty; 1 more"
    )


@pytest.mark.parametrize(
    "task, rows, words",
    [
        ("QQP", [], "is empty; a file of QQP has 6 columns divided by tabs, texts in 3 and 4"),
        ("QQP", [QQP], " has no row; a file of QQP"),
        ("QQP", [QQP, ["a", "b"]], "line 2: 2 columns instead of 6; a file of QQP"),
        ("QQP", [QQP, "1 2 3 a b 2".split()], "line 2: the label is '2'; QQP's are 0, 1: correct"),
        ("QQP", ["1 2 3 a b 1".split()], "line 1 has the label '1' and would be left out"),
        ("MNLI", [MNLI, "1 2".split()], "line 2: 2 columns instead of 11; a file of MNLI has at"),
        ("MNLI", [MNLI, "7 p q g . . . . A b - -".split()], "line 2: the label is '-'; MNLI's"),
        ("STS-B", [["x"] * 10, [*"5 g f y o s1 s2 A b".split(), "5.2"]], "line 2: the label is "
         "'5.2'; STS-B's are numbers from 0 to 5"),
        ("STS-B", [["x"] * 10, [*"5 g f y o s1 s2 A b".split(), "nan"]], "line 2: the label is"),
        ("CoLA", [["source", "label", "star", "text"]], "line 1: the label is 'label'; CoLA's"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(task, rows, words, tmp_path):
    path = file(tmp_path / "x.tsv", *rows)
    with pytest.raises(ConfigError) as error:
        TABLES[task].read(path)
    assert str(path) in str(error.value) and words in str(error.value)


def test_missing_files_and_other_encodings(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.tsv does not exist; it must be a file"):
        TABLES["QQP"].read(tmp_path / "no.tsv")
    with pytest.raises(ConfigError, match="is a folder"):
        TABLES["QQP"].read(tmp_path)
    path = tmp_path / "latin.tsv"
    path.write_bytes(b"a\tb\n\xe9\t1\n")
    with pytest.raises(ConfigError, match=r"latin\.tsv, line 2 is not UTF-8 text"):
        TABLES["SST-2"].read(path)


def test_names_of_validation_sets():
    glue = ["glue_data/MNLI/dev_matched.tsv", "glue_data/MNLI/dev_mismatched.tsv"]
    assert set_names(glue, "MNLI", folders=False) == ["dev-matched", "dev-mismatched"]
    race = ["data/RACE/dev/middle", "data/RACE/dev/high/"]
    assert set_names(race, "RACE", folders=True) == ["dev-middle", "dev-high"]
    assert set_names(["/x/dev/middle/"], "RACE", folders=True) == ["dev-middle"]
    assert set_names(["a/dev.tsv", "b/dev.tsv"], "QQP", folders=False) == ["dev", "dev-2"]
    assert set_names(["../QQP"], "QQP", folders=False) == ["QQP"]
