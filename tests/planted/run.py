"""Plants bugs, one after another, in a copy of this tree, and runs what should catch them.

    python tests/planted/run.py --seconds 1800        # what has no result yet, for half an hour
    python tests/planted/run.py --axis tensor adapters --again
    python tests/planted/run.py --only norm-unsynced --by tests
    python tests/planted/run.py --healthy             # the named tests, without a bug
    python tests/planted/run.py --table

Each bug is a patch of the catalogue (``bugs/``). Of an axis of the layout the symbolic check looks
for it in the runs of ``cases.py``; what that does not see, and all others, the tests that the patch
names must catch. A process is forked for each bug, since importing torch takes longer than most
checks. Its tests start the process that their ranks are forked from themselves, from the copy.
``results.jsonl`` has a line for each bug, which counts as long as neither the patch nor its tests
change; tests that were all skipped, as of a program that is not installed, are no result.

Exit status: 0 if all are caught; 1 if some survive, which are named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES  # noqa: E402
from catalogue import CATALOGUE  # noqa: E402
from planted import Planted  # noqa: E402

RESULTS = Path(__file__).parent / "results.jsonl"
PAGE = ROOT / "docs" / "evidence" / "planted.md"
MARKS = "<!-- planted -->\n", "<!-- end of planted -->\n"
CPU_SECONDS, WALL_SECONDS = 180, 1200
SYMBOLIC = "symbolic check"
NO_TEST = "no test"


def copied_tree(target: Path) -> None:
    """Copy the files that git knows, and Python's caches of them, with their times."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        source, place = ROOT / name, target / name
        if source.is_file() and not source.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
    for top in ("megatron", "tests"):
        for kept in (ROOT / top).rglob("__pycache__"):
            shutil.copytree(kept, target / kept.relative_to(ROOT), dirs_exist_ok=True)


def preload() -> None:
    """Import what all children need of other projects."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "warning", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    modules = (ROOT / "tests" / "helpers" / "preloaded.py").read_text()
    listed = re.findall(r'^    "([\w.]+)",$', modules, re.M)
    of_others = [name for name in listed if not name.startswith("megatron")]
    for name in ("torch", "deepspeed", "pytest", "hypothesis", *of_others):
        import_module(name)
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401  # imported lazily


def plant(tree: Path, bug: Planted) -> None:
    """Write the bug into the tree, without a cache of the right code."""
    path = tree / "megatron" / bug.file
    path.write_text(bug.applied(ROOT), encoding="utf-8")
    for kept in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        kept.unlink()


def heal(tree: Path, bug: Planted) -> None:
    """Restore the file."""
    shutil.copy2(ROOT / "megatron" / bug.file, tree / "megatron" / bug.file)


def forked(tree: Path, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work`` in a forked process that imports this tree, and its CPU time in
    seconds; the end of the process, as words, if it returns nothing."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        os.setsid()
        _child(into, tree, work)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(WALL_SECONDS)
        data = pipe.read()
        signal.alarm(0)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):  # workers that it left
        os.killpg(child, signal.SIGKILL)
    result = json.loads(data) if data else f"ended by status {status}"
    return result, round(usage.ru_utime + usage.ru_stime, 1)


def _child(into: int, tree: Path, work: Callable[[], Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree), str(tree / "tests" / "planted")]
    os.chdir(tree)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    try:
        result = work()
    except BaseException as error:  # an import may fail too
        result = f"{type(error).__name__}: {error}"
    os.write(into, json.dumps(result).encode())
    os._exit(0)


def by_symbolic_check(axis: str) -> str | None:
    """The first fault in the runs of an axis."""
    import cases

    first = next(cases.faults([axis]), None)
    return None if first is None else f"{first[2]} [{first[0]} ranks, {first[1]}]"


class Failures:
    """A plugin of pytest that notes the tests that fail. Of long tables only the cases that are
    named run."""

    def __init__(self, named: Sequence[str]) -> None:
        self.named, self.of_tests, self.passed = list(named), dict[str, str](), 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item
            for item in items
            if item.nodeid in self.named or not item.get_closest_marker("proof")
        ]

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.passed and report.when == "call"
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.of_tests[report.nodeid] = str(crash.message if crash else report.longrepr)

    def pytest_unconfigure(self) -> None:
        """End the process that ranks were forked from, so that their CPU time counts."""
        stem: Any = sys.modules.get("stem")
        if stem is not None and stem.shared.cache_info().currsize:
            stem.shared().stop()


def by_tests(tests: Sequence[str], first: bool = True) -> dict[str, str]:
    """The tests that fail, by name, with their messages; only the first if ``first``."""
    import pytest

    failures = Failures([f"tests/{test}" for test in tests])
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", *["-x"] * first, *failures.named], plugins=[failures]
    )
    if not failures.of_tests and not status and not failures.passed:
        return {NO_TEST: f"{', '.join(tests)} were skipped"}
    if failures.of_tests or not status:
        return failures.of_tests
    if status in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        return {NO_TEST: f"of {', '.join(tests)} one does not exist"}
    return {tests[0]: f"pytest ended with {status!r}"}


def caught(tree: Path, bug: Planted, ways: Sequence[str]) -> dict[str, Any] | None:
    """Run what should catch a bug: the symbolic check, then its tests; None if one of these does
    not exist."""
    cpu, fault, by = 0.0, None, None
    if bug.axis in CASES and "symbolic" in ways:
        fault, cpu = forked(tree, lambda: by_symbolic_check(bug.axis))
        by = None if fault is None else SYMBOLIC
    if fault is None and bug.tests and "tests" in ways:
        failed, more = forked(tree, lambda: by_tests(bug.tests))
        if isinstance(failed, str):  # the process ended
            failed = {bug.tests[0]: failed}
        if NO_TEST in failed:
            print(f"{bug.name}: {failed[NO_TEST]}", flush=True)
            return None
        by, fault = next(iter(failed.items()), (None, None))
        cpu += more
    return {"by": by, "fault": fault, "cpu": round(cpu, 1)}


def results() -> dict[str, dict[str, Any]]:
    """Results by the name of the bug, of patches that are as they were then."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    read = {each["name"]: each for each in map(json.loads, lines)}
    return {
        bug.name: read[bug.name]
        for bug in CATALOGUE
        if bug.name in read and read[bug.name]["patch"] == bug.patch
    }


def write(kept: dict[str, dict[str, Any]]) -> None:
    """Replace the file of results, in the order of the catalogue."""
    ordered = [kept[bug.name] for bug in CATALOGUE if bug.name in kept]
    new = RESULTS.with_suffix(".new")
    new.write_text("".join(json.dumps(each) + "\n" for each in ordered), "utf-8")
    new.replace(RESULTS)


def table() -> str:
    """Caught and planted bugs of each axis, and the names of those that nothing caught."""
    done, by_axis = results(), defaultdict[str, list[Any]](list)
    for bug in CATALOGUE:
        by_axis[bug.axis].append(done.get(bug.name))
    lines = [
        "| axis | planted | by the symbolic check | by tests | survive | not run | caught |",
        "|---|---|---|---|---|---|---|",
    ]
    known = [axis for axis in by_axis if axis in CASES]
    rows = [(axis, by_axis[axis]) for axis in (*known, *(by_axis.keys() - CASES))]
    rows = sorted(rows[: len(known)]) + sorted(rows[len(known) :])
    of_layout = sum((by_axis[axis] for axis in known), [])
    for axis, each in (*rows, ("communication and ownership", of_layout), ("all", _all(rows))):
        ran = [result["by"] for result in each if result]
        symbolic = sum(by == SYMBOLIC for by in ran)
        total = sum(by is not None for by in ran)
        checked = axis in CASES or axis.startswith("comm")
        shown = f"{symbolic} ({100 * symbolic / max(1, len(ran)):.0f} %)" if checked else "-"
        shown = str(symbolic) if axis == "all" else shown
        lines.append(
            f"| {axis} | {len(each)} | {shown} | {total - symbolic} | {len(ran) - total} | "
            f"{len(each) - len(ran)} | {f'{100 * total / len(ran):.1f} %' if ran else '-'} |"
        )
    alive = [bug for bug in CATALOGUE if done.get(bug.name, {"by": ""})["by"] is None]
    lines += ["", *(f"- `{bug.name}` survives: {bug.what}." for bug in alive)] if alive else []
    return "\n".join(lines) + "\n"


def _all(rows: Sequence[tuple[str, list[Any]]]) -> list[Any]:
    return [result for _, of_axis in rows for result in of_axis]


def page() -> str:
    """The page of the documentation with the table of today's results."""
    text = PAGE.read_text("utf-8")
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]


def chosen(options: argparse.Namespace) -> list[Planted]:
    """The bugs to run; axes take turns, so that a run by the clock has some of each."""
    done = {} if options.again or options.only else results()
    done = {name for name, result in done.items() if result["by"]}  # tests may be better now
    bugs = [
        bug
        for bug in CATALOGUE
        if (not options.axis or bug.axis in options.axis)
        and (not options.only or bug.name in options.only)
        and bug.name not in done
    ]
    turns = Counter[str]()
    places = {}
    for bug in bugs:
        places[bug.name] = turns[bug.axis]
        turns[bug.axis] += 1
    return sorted(bugs, key=lambda bug: places[bug.name])


def healthy(tree: Path, bugs: Sequence[Planted]) -> int:
    """Run the tests that bugs name without a bug, a file at a time; print those that fail."""
    files = defaultdict[str, dict[str, None]](dict)
    for test in (test for bug in bugs for test in bug.tests):
        files[test.partition("::")[0]][test] = None
    failed: dict[str, str] = {}
    for file, tests in files.items():
        result, cpu = forked(tree, lambda tests=tests: by_tests([*tests], first=False))  # type: ignore[misc]
        failed |= {file: result} if isinstance(result, str) else result
        print(f"{file:60} {len(tests):3} tests {cpu:6.1f} s", flush=True)
    for test, message in failed.items():
        print(f"FAILS {test}: {message[:300]}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axis", nargs="*", default=[], help="only bugs of these axes")
    parser.add_argument("--only", nargs="*", default=[], help="only bugs with these names")
    parser.add_argument("--by", nargs="*", choices=("symbolic", "tests"),
                        default=["symbolic", "tests"])  # fmt: skip
    parser.add_argument("--again", action="store_true", help="also bugs that have a result")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--healthy", action="store_true", help="run the tests without bugs")
    parser.add_argument("--table", action="store_true", help="write the page and print the table")
    options = parser.parse_args()
    if not options.table:
        run(options)
    if not options.healthy:
        PAGE.write_text(page(), "utf-8")
        print(table())
    return 1 if any(each["by"] is None for each in results().values()) else 0


def run(options: argparse.Namespace) -> None:
    """Run the chosen bugs, and keep a result after each."""
    began = time.monotonic()
    preload()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copied_tree(tree)
        if options.healthy:
            sys.exit(healthy(tree, chosen(argparse.Namespace(**vars(options) | {"again": True}))))
        for bug in chosen(options):
            if time.monotonic() - began > options.seconds:
                break
            plant(tree, bug)
            try:
                result = caught(tree, bug, options.by)
            finally:
                heal(tree, bug)
            if result is None:
                continue
            fault = result.pop("fault")
            verdict = "SURVIVES" if result["by"] is None else f"{result['by']}: {fault}"
            shown = " ".join(verdict.split())
            print(f"{bug.axis:9} {bug.name:32} {result['cpu']:6.1f} s  {shown[:230]}", flush=True)
            today = datetime.now(UTC).date().isoformat()
            line = {"name": bug.name, "patch": bug.patch, **result, "date": today}
            write(results() | {bug.name: line})


if __name__ == "__main__":
    sys.exit(main())
