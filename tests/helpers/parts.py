"""A long test run in parts of about equal time, each of which is a run of its own.

    make proof PART=2/4

Every test is in exactly one part, the same one wherever it runs. ``tests/seconds.txt`` says what a
test takes: a line has seconds and the beginning of the tests' names, the longest beginning counts.
Those of functions also say which tests are slow. Junit files of any selection bring it up to date::

    pytest --workers 3 -m "not proof" --junitxml=seconds.xml
    python tests/helpers/parts.py seconds.xml
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "seconds.txt"

SHARE = 8
"""A file is cut where it takes more than this fraction of a part: by its tests' order, for they
share fixtures with their neighbours."""
LONG = 1.0
"""Seconds from which on a test function has a line of its own in ``seconds.txt``."""
SLOW = 1.5
"""Seconds from which on ``make test`` leaves the cases of a function out."""


@dataclass(frozen=True)
class Piece:
    """Tests that one process runs one after the other.

    Attributes:
        name: the file, and which piece of it.
        tests: names (node ids) in the order in which they were collected.
        seconds: what they take together.
    """

    name: str
    tests: tuple[str, ...]
    seconds: float


def recorded() -> dict[str, float]:
    """Seconds of a test by the beginning of its name."""
    lines = (line.split(maxsplit=1) for line in RECORDED.read_text().splitlines())
    return {beginning: float(seconds) for seconds, beginning in lines}


def slow(seconds: Mapping[str, float]) -> set[str]:
    """Names of the test functions whose cases take ``SLOW`` seconds or longer."""
    return {name for name, took in seconds.items() if "::" in name and took >= SLOW}


def parse_part(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and how many there are, of ``2/4``.

    Raises:
        ValueError: there is no such part.
    """
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--part {text}: expected I/N with I from 1 to N, as in 2/4")
    return int(number), int(parts)


def split(tests: Sequence[str], parts: int, seconds: Mapping[str, float]) -> list[list[Piece]]:
    """Distributes tests over parts.

    Args:
        tests: names in the order in which they were collected; those of a file follow each other.
        parts: how many.
        seconds: of a test by the beginning of its name.

    Returns:
        The pieces of every part, longest ones first.
    """
    beginnings = sorted(seconds, key=len, reverse=True)
    near = {
        file: [b for b in beginnings if file.startswith(b) or b.startswith(file)]
        for file in {test.partition("::")[0] for test in tests}
    }
    took = {
        test: next((seconds[b] for b in near[test.partition("::")[0]] if test.startswith(b)), LONG)
        for test in tests
    }
    longest = sum(took.values()) / parts / SHARE
    pieces = []
    for file, names in groupby(tests, key=lambda test: test.partition("::")[0]):
        pieces += _cut(file, list(names), took, longest)
    found: list[list[Piece]] = [[] for _ in range(parts)]
    for piece in sorted(pieces, key=lambda piece: (-piece.seconds, piece.name)):
        min(found, key=lambda part: sum(p.seconds for p in part)).append(piece)
    return found


def _cut(file: str, tests: list[str], took: Mapping[str, float], longest: float) -> list[Piece]:
    """As few pieces as possible of about equal time, none much longer than ``longest``."""
    whole = sum(took[test] for test in tests)
    count = max(1, -int(-whole // longest)) if longest else 1
    pieces, passed = defaultdict(list), 0.0
    for test in tests:
        middle = passed + took[test] / 2
        pieces[min(count - 1, int(middle / whole * count)) if whole else 0].append(test)
        passed += took[test]
    return [
        Piece(f"{file}-{number + 1}", tuple(names), sum(took[name] for name in names))
        for number, names in sorted(pieces.items())
    ]


def measured(files: Iterable[Path]) -> tuple[dict[str, float], set[str]]:
    """Mean seconds of a test from junit files: of each long function, and of each file's others;
    and the names of those others."""
    functions = defaultdict(list)
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            path, rest = case.get("classname", "").split("."), []
            while path and not (ROOT / Path(*path)).with_suffix(".py").is_file():
                rest.insert(0, path.pop())
            if path:
                test = case.get("name", "").partition("[")[0]
                function = "::".join([*rest, test])
                name = Path(*path).with_suffix(".py").as_posix()
                functions[name, function].append(float(case.get("time", 0)))
    found, others, short = {}, defaultdict(list), set()
    for (path_, function), times in functions.items():
        if sum(times) / len(times) >= LONG:
            found[f"{path_}::{function}"] = sum(times) / len(times)
        else:
            others[path_] += times
            short.add(f"{path_}::{function}")
    return found | {path_: sum(times) / len(times) for path_, times in others.items()}, short


def main() -> None:
    """Brings ``seconds.txt`` up to date with junit files."""
    new, short = measured(map(Path, sys.argv[1:]))
    kept = {name: took for name, took in recorded().items() if name not in short}
    lines = sorted((kept | new).items())
    RECORDED.write_text("".join(f"{seconds:.3g} {name}\n" for name, seconds in lines))


if __name__ == "__main__":
    main()
