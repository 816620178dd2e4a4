"""The ledger of what was seen to pass, and the code that a test depends on."""

import re
from pathlib import Path
from unittest.mock import Mock

import dependencies
import ledger
import pytest
from dependencies import ROOT
from ledger import Claim, Ledger, Result

MARK = re.compile(r"(?<!`)<!-- evidence( in part)?: ([\w, ]+) -->")


def code_after(monkeypatch, changed: str, tests: list[str]) -> set[str]:
    """Those of the tests whose code is another one after a change of one file."""
    assert (ROOT / changed).is_file()
    monkeypatch.setattr(dependencies, "_digest", lambda path: path.name)
    before = {test: dependencies.code_of(ROOT / test) for test in tests}
    other = {ROOT / changed: "other"}
    monkeypatch.setattr(dependencies, "_digest", lambda path: other.get(path, path.name))
    after = {test: dependencies.code_of(ROOT / test) for test in tests}
    return {test for test in tests if before[test] != after[test]}


LAYOUTS = "tests/distributed/parity/test_gradients.py"
Z_LOSS = "tests/distributed/engine/test_z_loss_layouts.py"
COOLDOWN = "tests/features/cooldown/test_cooldown.py"
KILLS = "tests/e2e/test_kills.py"
FUZZ = "tests/fuzz/test_fuzz.py"


@pytest.mark.parametrize(
    "changed, stale",
    [
        ("megatron/parallel/linear.py", {LAYOUTS, Z_LOSS, COOLDOWN, KILLS, FUZZ}),
        ("megatron/features/z_loss/objective.py", {Z_LOSS}),
        ("megatron/features/cooldown/branch.py", {COOLDOWN}),
        ("pretrain_gpt.py", {KILLS}),
        ("tests/helpers/configs.py", {COOLDOWN}),
        (LAYOUTS, {LAYOUTS}),
        ("tests/helpers/parts.py", set()),
        ("megatron/apps/parity/runs.py", {LAYOUTS, Z_LOSS, COOLDOWN}),
        ("tests/fuzz/campaign.py", {FUZZ}),
        ("tests/fuzz/readers/retro.py", {FUZZ}),
        ("megatron/apps/corpus/collection/decontamination.py", {FUZZ}),
    ],
)
def test_a_change_makes_stale_what_depends_on_it(monkeypatch, changed, stale):
    tests = [LAYOUTS, Z_LOSS, COOLDOWN, KILLS, FUZZ]
    assert code_after(monkeypatch, changed, tests) == stale


def digest_of(path: Path, text: str) -> str:
    path.write_text(text)
    return dependencies._digest.__wrapped__(path)


def test_comments_and_form_are_no_change(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    plain = digest_of(first, "def f(x):\n    return x + 1\n")
    assert plain == digest_of(
        second, '"""Text."""\ndef f( x ):\n    """More."""\n    return (x+1)  # y\n'
    )
    assert plain != digest_of(second, "def f(x):\n    return x + 2\n")
    assert plain != digest_of(second, "def f(x):\n    return x - 1\n")


FILE = "tests/core/test_x.py"
TEST = f"{FILE}::test_y"
CASES = {TEST: [f"{TEST}[{n}]" for n in range(3)]}


def outcome(number: int, code: str = "one", outcome: str = "passed") -> Result:
    return Result(CASES[TEST][number], code, outcome, 2.0)


def test_parts_of_several_runs_become_whole(tmp_path):
    path = tmp_path / "ledger.jsonl"
    book = Ledger()
    book.add(CASES, [outcome(0)])
    book.write(path)
    book = Ledger.read(path)
    assert book.fresh(TEST, CASES[TEST][0], "one")
    assert not book.fresh(TEST, CASES[TEST][1], "one")
    assert not book.fresh(TEST, CASES[TEST][0], "two")
    book.add(CASES, [outcome(1), outcome(2, outcome="skipped")])
    book.write(path)
    line = Ledger.read(path).whole[TEST]
    assert (line.cases, line.skipped, line.seconds, line.code) == (3, 1, 4.0, "one")
    assert book.fresh(TEST, CASES[TEST][2], "one")


def test_a_case_that_passes_later_counts_as_skipped_no_longer():
    book = Ledger()
    book.add(CASES, [outcome(n, outcome="skipped") for n in range(3)])
    assert book.parts[TEST].skipped == 3
    book.add(CASES, [outcome(0), outcome(1)])
    assert book.parts[TEST].skipped == 1
    book.add(CASES, [outcome(2)])
    assert (book.whole[TEST].skipped, book.whole[TEST].passed) == (0, None)


def test_a_failure_is_no_evidence():
    book = Ledger()
    book.add(CASES, [outcome(n) for n in range(3)])
    assert TEST in book.whole
    book.add(CASES, [outcome(1, outcome="failed")])
    assert TEST not in book.whole
    assert not book.fresh(TEST, CASES[TEST][1], "one")
    assert book.fresh(TEST, CASES[TEST][0], "one")
    book.add(CASES, [outcome(1)])
    assert TEST in book.whole


def test_old_evidence_stays_until_all_is_seen_again():
    book = Ledger()
    book.add(CASES, [outcome(n) for n in range(3)])
    book.add(CASES, [outcome(0, "two"), outcome(1, "two")])
    assert book.whole[TEST].code == "one"
    assert book.fresh(TEST, CASES[TEST][1], "two")
    book.add(CASES, [outcome(2, "two")])
    assert book.whole[TEST].code == "two"


def test_tests_that_are_gone_leave_the_ledger():
    book = Ledger()
    book.add(CASES, [outcome(0)])
    book.add({f"{FILE}::test_z": [f"{FILE}::test_z"]}, [])
    assert book.tests == [f"{FILE}::test_z"]
    assert not book.whole


def test_lines_name_tests_that_exist():
    for test in Ledger.read().tests:
        path, name = test.split("::")[0], test.split("::")[-1]
        assert f"def {name}(" in (ROOT / path).read_text(), test


def test_every_function_has_a_case_in_the_first_round():
    cases = [f"{TEST}[{n}]" for n in range(70)]
    turn = ledger.rounds(cases, "one")
    assert turn.keys() == set(cases) and sorted(turn.values()) == [0, *[1] * 69]
    assert turn == ledger.rounds(cases, "one") != ledger.rounds(cases, "two")


def test_a_run_takes_functions_in_turn(monkeypatch):
    sizes = {"a.py::test_x": 9, "b.py::test_y": 3, "b.py::test_z": 2}
    codes = {"a.py::test_x": "two", "b.py::test_y": "one", "b.py::test_z": "one"}
    cases = {test: [f"{test}[{n}]" for n in range(sizes[test])] for test in sizes}
    turn = {
        case: n for test in cases for case, n in ledger.rounds(cases[test], codes[test]).items()
    }
    seen = next(case for case in cases["b.py::test_y"] if turn[case] == 0)
    book = Ledger()
    book.add(cases, [Result(seen, "one", "passed", 1.0)])
    monkeypatch.setattr(ledger, "today", codes.__getitem__)
    monkeypatch.setattr(ledger.Ledger, "read", lambda: book)
    items = [Mock(nodeid=case) for test in cases for case in cases[test]]
    ordering = ledger.Recorder(None).pytest_collection_modifyitems(Mock(args=["a.py::"]), items)
    next(ordering)
    items.reverse()
    assert next(ordering, None) is None
    order = [item.nodeid for item in items]
    assert sorted([*order, seen]) == sorted(turn)
    assert [turn[case] for case in order] == sorted(turn[case] for case in order)
    files = [case.partition("::")[0] for case in order if turn[case] == 1]
    assert files == ["b.py"] * 3 + ["a.py"] * 8


def test_claims_have_tests_and_pages():
    tests = Ledger.read().tests
    for claim in ledger.claims():
        assert any(map(claim.shown_by, tests)), claim.name
        assert (ROOT / "docs" / claim.page).is_file(), claim.name


def unproven(text: str, claims: dict[str, Claim], book: Ledger) -> list[str]:
    """Marks of a text whose claim is unknown, or lacks the evidence that they state."""
    wrong = []
    marked = MARK.findall(text)
    for in_part, name in (
        (in_part, name) for in_part, names in marked for name in names.split(", ")
    ):
        state = ledger.state_of(claims[name], book) if name in claims else None
        enough = state is not None and bool(state.seen if in_part else state.whole)
        wrong += [name] * (not enough)
    return wrong


def test_documents_claim_what_was_seen():
    claims = {claim.name: claim for claim in ledger.claims()}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marked = [page for page in pages if MARK.search(page.read_text())]
    assert ROOT / "README.md" in marked
    book = Ledger.read()
    assert {str(p): wrong for p in marked if (wrong := unproven(p.read_text(), claims, book))} == {}


def test_a_claim_without_evidence_is_refused():
    claims = {"y": Claim("y", "Title", "index.md", (FILE,))}
    book = Ledger()
    mark, partly = "<!-- evidence: y -->", "<!-- evidence in part: y -->"
    assert unproven(mark + partly + "<!-- evidence: z -->", claims, book) == ["y", "y", "z"]
    other = f"{FILE}::test_z"
    book.add(CASES | {other: [other]}, [outcome(n) for n in range(3)])
    assert unproven(mark + partly, claims, book) == ["y"]
    book.add(CASES | {other: [other]}, [Result(other, "one", "passed", 1.0)])
    assert unproven(mark + partly, claims, book) == []
