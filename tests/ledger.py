"""The ledger: which long tables were seen to pass, when, and on which code.

    make proof MINUTES=60           # run what is stale, a case of each function first, for an hour
    python tests/ledger.py          # a line for each claim: seen, stale, minutes to run
    python tests/ledger.py layouts  # the test functions of a claim

``ledger.jsonl`` has a line for each test function with cases beyond the fixed sample: the hash of
the code that it depends on (:mod:`dependencies`), the versions, and the cases that passed on them.
A case is stale where the hash differs from today's. Evidence of other code is kept until all cases
have passed again.
"""

from __future__ import annotations

import contextlib
import json
import platform
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "helpers"))

from dependencies import ROOT, code_of  # noqa: E402

LEDGER = ROOT / "tests" / "ledger.jsonl"
CLAIMS = ROOT / "tests" / "claims.json"
CASES, OUTCOMES = "cases.json", "outcomes.jsonl"
RESULTS = ROOT / ".pytest_cache" / "ledger"
"""Folder of the results of a run that no line of the ledger has yet; a killed run leaves them to
the next one."""

PACKAGES = ("torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Evidence:
    """Cases of a test function that passed on the same code.

    Attributes:
        test: the function, as ``tests/folder/test_file.py::test_name``.
        code: the hash of what it depends on.
        cases: number of its cases then.
        passed: the cases that passed; None for all that were not skipped.
        skipped: number of cases that were skipped, for want of a package or data.
        seconds: time of the cases that passed, in seconds of the clock.
        date, commit, versions: of the last of them.
    """

    test: str
    code: str
    cases: int
    passed: tuple[str, ...] | None
    skipped: int
    seconds: float
    date: str
    commit: str
    versions: str

    @property
    def whole(self) -> bool:
        return self.passed is None


@dataclass(frozen=True)
class Result:
    """The outcome of one case: ``passed``, ``skipped`` or ``failed``."""

    case: str
    code: str
    outcome: str
    seconds: float


class Ledger:
    """Evidence by test function: what was seen whole last, and what was seen since, in part."""

    def __init__(self, lines: Iterable[Evidence] = ()) -> None:
        self.whole: dict[str, Evidence] = {}
        self.parts: dict[str, Evidence] = {}
        for line in lines:
            (self.whole if line.whole else self.parts)[line.test] = line

    @classmethod
    def read(cls, path: Path = LEDGER) -> Ledger:
        """Read the file; without one the ledger is empty."""
        if not path.exists():
            return cls()
        lines = map(json.loads, path.read_text("utf-8").splitlines())
        return cls(
            Evidence(**line | {"passed": line["passed"] and tuple(line["passed"])})
            for line in lines
        )

    @property
    def tests(self) -> list[str]:
        """All test functions that have a line."""
        return sorted({*self.whole, *self.parts})

    def write(self, path: Path = LEDGER) -> None:
        """Replace the file at once."""
        lines = sorted([*self.whole.values(), *self.parts.values()], key=lambda e: (e.test, e.code))
        text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
        new = path.with_suffix(".new")
        new.write_text(text, "utf-8")
        new.replace(path)

    def fresh(self, test: str, case: str, code: str) -> bool:
        """True if a case was seen to pass on this code."""
        whole, part = self.whole.get(test), self.parts.get(test)
        if whole is not None and whole.code == code:
            return True
        return part is not None and part.code == code and case in (part.passed or ())

    def add(self, cases: Mapping[str, Sequence[str]], results: Iterable[Result]) -> None:
        """Take in results of a run.

        Args:
            cases: all cases of each test function, as they were collected.
            results: outcomes, in any order.
        """
        files = {test.partition("::")[0] for test in cases}
        for lines in (self.whole, self.parts):
            gone = [t for t in lines if t.partition("::")[0] in files and t not in cases]
            for test in gone:
                del lines[test]
        for test in cases:
            if test not in self.whole:
                unseen = Evidence(test, "", len(cases[test]), (), 0, 0.0, "", "", "")
                self.parts.setdefault(test, unseen)
        by_test: dict[str, dict[str, Result]] = defaultdict(dict)
        for result in results:
            by_test[function_of(result.case)][result.case] = result
        for test in by_test.keys() & cases:
            self._add(test, cases[test], by_test[test])

    def _add(self, test: str, cases: Sequence[str], outcomes: Mapping[str, Result]) -> None:
        code = next(reversed(outcomes.values())).code
        outcomes = {case: each for case, each in outcomes.items() if each.code == code}
        before = self._before(test, code, len(cases))
        kept = set(cases if before.whole else before.passed or ())
        failed = {case for case, each in outcomes.items() if each.outcome == "failed"}
        skipped = {case for case, each in outcomes.items() if each.outcome == "skipped"}
        now = {case for case, each in outcomes.items() if each.outcome == "passed"}
        passed = (kept | now) - failed - skipped
        seconds = before.seconds + sum(outcomes[case].seconds for case in now - kept)
        new = replace(
            before,
            cases=len(cases),
            passed=tuple(case for case in cases if case in passed),
            skipped=min(len(skipped) or before.skipped, len(cases) - len(passed)),
            seconds=round(seconds, 1),
            date=datetime.now(UTC).date().isoformat(),
            commit=commit(),
            versions=_versions(),
        )
        whole = passed and not set(cases) - passed - skipped
        if whole:
            self.whole[test] = replace(new, passed=None)
            self.parts.pop(test, None)
            return
        if failed and test in self.whole and self.whole[test].code == code:
            del self.whole[test]
        self.parts[test] = new

    def _before(self, test: str, code: str, cases: int) -> Evidence:
        for lines in (self.parts, self.whole):
            if test in lines and lines[test].code == code and lines[test].cases == cases:
                return lines[test]
        return Evidence(test, code, cases, (), 0, 0.0, "", "", "")


def function_of(case: str) -> str:
    """Return the name of a case's test function."""
    return case.partition("[")[0]


@cache
def today(test: str) -> str:
    """Return the hash of the code of a test function as it is now."""
    return code_of(ROOT / test.partition("::")[0])


@cache
def commit() -> str:
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8")
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


@cache
def _versions() -> str:
    names = [f"{name} {version(name)}" for name in PACKAGES]
    return ", ".join([*names, f"Python {platform.python_version()}"])


def rounds(cases: Sequence[str], seed: str) -> dict[str, int]:
    """Return the round in which each case of a test function runs: one random case in round 0, so
    that a fault of a whole table shows early, and the others in round 1. More rounds would prepare
    every file more often than its cases are worth."""
    first = random.Random(seed).choice(cases)
    return {case: int(case != first) for case in cases}


class Recorder:
    """A plugin that leaves out what was seen to pass on this code, stops by the clock, and keeps
    results for the ledger. All functions come in turn, see :func:`rounds`. In a round, what was
    never seen whole comes first, then the oldest evidence. Files of the same age are ordered by
    their hashes, so that a short run sees something of all folders.

    Args:
        minutes: time after which no further case begins; None for no end.
    """

    def __init__(self, minutes: float | None) -> None:
        self.folder = RESULTS / "main"
        self.minutes, self.end = minutes, float("inf")
        self.cases: dict[str, list[str]] = {}
        self.known: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """Choose and order the tests; those of a file and a round stay together."""
        cases = defaultdict[str, list[str]](list)
        for item in items:
            cases[function_of(item.nodeid)].append(item.nodeid)
        long = {function_of(item.nodeid) for item in items if item.get_closest_marker("proof")}
        # Of a test that was named alone it is unknown how many cases it has.
        if not any("::" in argument for argument in config.args):
            self.cases = {test: cases[test] for test in cases if test in long}
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CASES).write_text(json.dumps(self.cases), "utf-8")
        ledger, dates = Ledger.read(), defaultdict[tuple[int, str], list[str]](list)
        turn: dict[str, int] = {}
        for test in long:
            turn |= rounds(cases[test], today(test))

        def place(case: str) -> tuple[int, str]:
            return turn[case], case.partition("::")[0]

        def order(item: pytest.Item) -> tuple[int, str, str]:
            at = place(item.nodeid)
            return at[0], min(dates[at]), today(function_of(item.nodeid))

        kept, left_out = [], []
        for item in items:
            test, case = function_of(item.nodeid), item.nodeid
            if test not in long or ledger.fresh(test, case, today(test)):
                left_out.append(item)
                continue
            kept.append(item)
            seen = ledger.whole.get(test)
            dates[place(case)].append(seen.date if seen else "")
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
        # The tests are distributed over parts, and pytest puts those of a fixture's value together.
        yield
        items.sort(key=order)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a case: of its call, or of what failed or skipped it otherwise."""
        case = report.nodeid
        test = function_of(case)
        if test not in self.cases or (report.when != "call" and report.passed):
            return
        if self.known.get(case, "passed") == "passed":
            self.known[case] = report.outcome
            result = Result(case, today(test), report.outcome, round(report.duration, 2))
            with (self.folder / OUTCOMES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    def pytest_collection_finish(self) -> None:
        """Start the clock."""
        if self.minutes is not None:
            self.end = time.monotonic() + 60 * self.minutes

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Stop when the minutes are over."""
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is over; the next run continues"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the ledger. The end of the time is no failure."""
        absorb()
        over = self.minutes is not None and exitstatus == pytest.ExitCode.INTERRUPTED
        if over and not session.testsfailed:
            session.exitstatus = pytest.ExitCode.OK


def absorb() -> None:
    """Move the results of a run into the ledger."""
    ledger = Ledger.read()
    for folder in sorted(RESULTS.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            cases = json.loads((folder / CASES).read_text("utf-8"))
            lines = (folder / OUTCOMES).read_text("utf-8").splitlines()
            ledger.add(cases, [Result(**json.loads(line)) for line in lines])
            (folder / OUTCOMES).unlink()
    ledger.write()


@dataclass(frozen=True)
class Claim:
    """A statement of the documentation, and the tests that show it.

    Attributes:
        name: of the marks ``<!-- evidence: name -->`` in README and docs.
        title: the claim.
        page: the page of docs/ that makes it.
        tests: beginnings of the names of test functions, or a word in their names.
    """

    name: str
    title: str
    page: str
    tests: tuple[str, ...]

    def shown_by(self, test: str) -> bool:
        """True if a test function is evidence of the claim."""
        return any(
            test.startswith(each) if "/" in each else each in test.partition("::")[2]
            for each in self.tests
        )


@cache
def claims() -> tuple[Claim, ...]:
    """Return the claims of ``claims.json``."""
    entries = json.loads(CLAIMS.read_text("utf-8"))
    return tuple(Claim(**entry | {"tests": tuple(entry["tests"])}) for entry in entries)


@dataclass(frozen=True)
class State:
    """The share of a claim that has been seen.

    Attributes:
        functions: test functions of the claim.
        seen: those that were seen whole, on whatever code.
        cases, skipped, seconds: of those that were seen whole.
        since: the oldest date of them, and ``commit`` its commit.
    """

    functions: tuple[str, ...]
    seen: tuple[str, ...]
    cases: int
    skipped: int
    seconds: float
    since: str
    commit: str

    @property
    def whole(self) -> bool:
        """True if every function was seen whole."""
        return bool(self.functions) and len(self.seen) == len(self.functions)


def state_of(claim: Claim, ledger: Ledger) -> State:
    """Return the evidence for a claim."""
    own = tuple(test for test in ledger.tests if claim.shown_by(test))
    whole = [ledger.whole[test] for test in own if test in ledger.whole]
    oldest = min(whole, key=lambda line: line.date, default=None)
    return State(
        own,
        tuple(line.test for line in whole),
        sum(line.cases for line in whole),
        sum(line.skipped for line in whole),
        sum(line.seconds for line in whole),
        oldest.date if oldest else "",
        oldest.commit if oldest else "",
    )


def stale(state: State, ledger: Ledger) -> list[str]:
    """Return the test functions that were not seen whole on today's code."""
    return [
        test
        for test in state.functions
        if test not in state.seen or ledger.whole[test].code != today(test)
    ]


def page() -> str:
    """Return the page of the documentation: a line for each claim, as of today's code."""
    ledger = Ledger.read()
    lines = [
        "| claim | tests | seen whole | cases | skipped | oldest | stale today | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in claims():
        state = state_of(claim, ledger)
        oldest = f"{state.since}, `{state.commit}`" if state.seen else "-"
        counts = len(state.functions), len(state.seen), state.cases, state.skipped
        shown = " | ".join(f"{count:,}" for count in counts)
        lines.append(
            f"| [{claim.title}](../{claim.page}) | {shown} | {oldest} "
            f"| {len(stale(state, ledger))} | {state.seconds / 60:.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the state of all claims, or the tests of one."""
    ledger = Ledger.read()
    if not argv:
        print(page())
        return 0
    by_name = {claim.name: claim for claim in claims()}
    if argv[0] not in by_name:
        print(f"{argv[0]}: no claim; there are {', '.join(by_name)}", file=sys.stderr)
        return 2
    state = state_of(by_name[argv[0]], ledger)
    old = stale(state, ledger)
    for test in state.functions:
        whole, part = ledger.whole.get(test), ledger.parts.get(test)
        line = f"seen whole {whole.date} at {whole.commit}" if whole else "never seen whole"
        line += ", stale" if whole and test in old else ""
        line += f", {len(part.passed or ())} of {part.cases} since" if part and part.passed else ""
        print(f"{test}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
