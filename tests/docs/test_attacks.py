"""The page of attacks has a verdict for each row, and a test for each that is said to be held."""

import re
from collections import Counter

from doc_pages import ROOT, table_rows

TEXT = (ROOT / "docs/evidence/attacks.md").read_text()


ROWS = table_rows(TEXT, 4)
"""Attack, what happens, verdict and test."""


def test_every_row_has_a_verdict_and_a_test():
    for attack, now, verdict, test in ROWS:
        assert attack and now
        assert verdict in ("held", "weak", "open"), attack
        named = re.findall(r"`tests/[\w/]+\.py::test_\w+`", test)
        assert named or (verdict == "open" and test == "none") or "SECURITY.md" in test, attack


def test_the_numbers_are_those_of_the_rows():
    found = Counter(verdict for _, _, verdict, _ in ROWS)
    (sentence,) = re.findall(
        r"^Of (\d+) rows (\d+) are held, (\d+) weak and (\d+) open", TEXT, re.M
    )
    counted = (found.total(), found["held"], found["weak"], found["open"])
    assert tuple(map(int, sentence)) == counted and found["held"] > 20
