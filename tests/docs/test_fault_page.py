"""Each row of the page of faults says what was found, and names a fault or a test that exists."""

import re

from doc_pages import ROOT, table_rows
from faults.table import FAULTS

TEXT = (ROOT / "docs/reference/faults.md").read_text()
ROWS = table_rows(TEXT, 6)
"""Fault, layout, found after, message, what was lost, and what shows it."""
RUN = "python tests/faults/run.py "


def test_every_row_names_what_shows_it():
    assert len(ROWS) >= 60
    for fault, *said, shown in ROWS:
        assert fault and all(said), fault
        name = shown.strip("`").removeprefix(RUN)
        if shown.startswith(f"`{RUN}"):
            assert name in FAULTS, shown
            assert (said[1] == "no alarm") == (not FAULTS[name].statuses and "no alarm" in
                                               FAULTS[name].title), fault  # fmt: skip
            continue
        (file, test) = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown).groups()
        assert f"def {test}(" in (ROOT / file).read_text(), shown


def test_a_fault_is_in_one_row():
    named = [shown for *_, shown in ROWS if shown.startswith(f"`{RUN}")]
    assert len(named) == len(set(named))


def test_the_numbers_are_those_of_the_rows():
    (sentence,) = re.findall(r"^Of (\d+) rows (\d+) are .* and (\d+) are tests", TEXT, re.M)
    run = sum(shown.startswith(f"`{RUN}") for *_, shown in ROWS)
    assert tuple(map(int, sentence)) == (len(ROWS), run, len(ROWS) - run)
    (quiet,) = re.findall(r"^In (\d+) rows nothing must happen", TEXT, re.M)
    assert int(quiet) == sum(row[2] == "no alarm" for row in ROWS)
