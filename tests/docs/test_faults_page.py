"""The page of faults has a row for each fault that is tried, and a test for each of the others."""

import re

import pytest
from doc_pages import ROOT, table_rows
from faults.table import FAULTS

TEXT = (ROOT / "docs/evidence/faults.md").read_text()
ROWS = table_rows(TEXT, 6)
"""Fault, layout, seconds, message, what was lost, and what shows it."""
TRIED = [row for row in ROWS if row[-1].startswith("`python ")]


def test_each_fault_that_is_tried_has_its_row():
    commands = [row[-1] for row in TRIED]
    assert sorted(commands) == sorted(f"`python tests/faults/run.py {name}`" for name in FAULTS)


@pytest.mark.parametrize("row", TRIED, ids=lambda row: row[-1].strip("`").split()[-1])
def test_a_row_is_what_its_fault_expects(row):
    title, layout, seconds, message, _, command = row
    fault = FAULTS[command.strip("`").split()[-1]]
    assert (title, layout) == (fault.title.replace(" (no alarm)", ""), fault.shape.name)
    assert (seconds == "no alarm") == (not fault.statuses and message.startswith("none;"))
    if seconds != "no alarm":
        shown = message.replace("process N", "process 1").replace("SAVE", "/save")
        assert re.search(fault.says, shown)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in TRIED], ids=lambda row: row[0])
def test_other_rows_name_a_test_that_exists(row):
    assert all(row)
    file, _, name = row[-1].strip("`").partition("::")
    assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.M), row[-1]


def test_the_numbers_are_those_of_the_rows():
    (sentence,) = re.findall(r"^Of (\d+) rows (\d+) are faults .* and (\d+) are tests", TEXT, re.M)
    assert tuple(map(int, sentence)) == (len(ROWS), len(TRIED), len(ROWS) - len(TRIED))
    (quiet,) = re.findall(r"^In (\d+) rows nothing must happen", TEXT, re.M)
    assert int(quiet) == sum(row[2] == "no alarm" for row in ROWS)
