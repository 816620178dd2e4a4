"""Worst texts for regular expressions, made from what the expressions say.

A pattern is slow where a text lets it begin a match in many places, or divide a run between two
parts in many ways, and then fail. So each part that repeats gets a long run of what it accepts,
behind what comes before it, with an end that nothing accepts.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from re import _constants as codes
from re import _parser as parser
from types import FrameType
from typing import Any, NamedTuple

METHODS = ("search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
_LONG = 100
"""Repetitions from which on a part is worth a run."""
_CHARACTERS = 12
"""Of a pattern that are tried alone."""
_PAIRED = 6
"""Of these, those that are tried in pairs."""
_ENDINGS = ("", "\0", "\n\0")
_OTHERS = " a1.x\n\"'([{-_!~"
Tree = Sequence[Any]


class UsedPattern(NamedTuple):
    """A regular expression of the code.

    Attributes:
        place: its file, and its name or line there.
        methods: what it is used with.
    """

    place: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]


class Attack(NamedTuple):
    """A text of any length: ``beginning``, then ``run`` again and again, then ``end``."""

    beginning: str
    run: str
    end: str

    def text(self, size: int) -> str:
        return self.beginning + self.run * (size // len(self.run)) + self.end


def used_patterns(root: Path, folders: Sequence[str]) -> Iterator[UsedPattern]:
    """The patterns in the files of folders: those that a module has at its top, alone or in tables,
    and those that are written where they are used; not those that are put together there."""
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        content = path.read_text()
        if "re." not in content:
            continue
        place = str(path.relative_to(root))
        yield from _written_in_place(place, ast.parse(content))
        if "re.compile" in content:
            module = importlib.import_module(
                place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
            for name, value in vars(module).items():
                called = re.findall(rf"\b{name}\.({'|'.join(METHODS)})\b", content)
                methods = tuple(dict.fromkeys(called)) or ("match", "search")
                for pattern in _patterns_in(value):
                    yield UsedPattern(f"{place}:{name}", pattern, methods)


def attacks(pattern: re.Pattern[Any]) -> Iterator[Attack]:
    """Texts that may take a pattern long, each once."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    found: dict[Attack, None] = {}
    runs = list(_runs(tree, ""))
    for before, run in runs:
        for repeated in (run, before, before + run, run + before):
            for beginning in ("", before):
                found.update(dict.fromkeys(Attack(beginning, repeated, e) for e in _ENDINGS))
    characters = list(dict.fromkeys(_characters(tree)))[:_CHARACTERS]
    for before in dict.fromkeys(["", *(before for before, _ in runs)]):
        found.update(dict.fromkeys(Attack(before, c, e) for c in characters for e in _ENDINGS[:2]))
    some = characters[:_PAIRED]
    found.update(dict.fromkeys(Attack("", a + b, "\0") for a in some for b in some))
    return (attack for attack in found if attack.run)


def seconds(used: UsedPattern, method: str, text: str, limit: float) -> float:
    """CPU time of a method of a pattern with a text; ``limit`` if it takes longer."""
    subject: Any = text
    replacement: Any = ""
    if isinstance(used.pattern.pattern, bytes):
        subject, replacement = text.encode("latin-1", "replace"), b""
    arguments = (replacement, subject) if method in ("sub", "subn") else (subject,)
    begin = time.process_time()
    try:
        with _time_limit(limit):
            found = getattr(used.pattern, method)(*arguments)
            if method == "finditer":
                for _ in found:
                    pass
    except TimeoutError:
        return limit
    return time.process_time() - begin


@contextmanager
def _time_limit(limit: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer; matching looks for signals at intervals."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _written_in_place(place: str, tree: ast.Module) -> Iterator[UsedPattern]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="re"), attr=method),
                args=[ast.Constant(value=str() | bytes() as text), *_],
            ) if method in METHODS:
                yield UsedPattern(f"{place}:{node.lineno}", re.compile(text), (method,))


def _patterns_in(value: Any) -> Iterator[re.Pattern[Any]]:
    """Those of a value, and of tuples, lists and dictionaries in it."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from _patterns_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _patterns_in(each)


def _runs(tree: Tree, before: str) -> Iterator[tuple[str, str]]:
    """What comes before each part that repeats, and what the part accepts once."""
    for operation, argument in tree:
        if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            if argument[1] > _LONG:
                yield before, _sample(argument[2])
            yield from _runs(argument[2], before)
        for inner in _inner(operation, argument):
            yield from _runs(inner, before)
        before += _sample([(operation, argument)])


def _inner(operation: Any, argument: Any) -> list[Tree]:
    """The parts of a group, of alternatives, of what is looked at ahead or behind."""
    if operation is codes.SUBPATTERN:
        return [argument[3]]
    if operation is codes.BRANCH:
        return argument[1]
    return [argument[1]] if operation in (codes.ASSERT, codes.ASSERT_NOT) else []


def _sample(tree: Tree) -> str:
    """A short text that a pattern accepts."""
    text = ""
    for operation, argument in tree:
        if operation is codes.LITERAL:
            text += chr(argument)
        elif operation is codes.NOT_LITERAL:
            text += "b" if argument == ord("a") else "a"
        elif operation is codes.ANY:
            text += "a"
        elif operation is codes.IN:
            text += _one_of(argument)
        elif operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            text += _sample(argument[2]) * argument[0]
        elif operation in (codes.SUBPATTERN, codes.BRANCH):
            text += _sample(_inner(operation, argument)[0])
    return text


def _one_of(items: Sequence[Any]) -> str:
    wanted = [item for item in items if item[0] is not codes.NEGATE]
    candidates = [*_first_of(wanted), *_OTHERS]
    for character in candidates:
        if any(_has(item, character) for item in wanted) == (len(wanted) == len(items)):
            return character
    return "~"


def _first_of(items: Sequence[Any]) -> Iterator[str]:
    for operation, argument in items:
        if operation is codes.LITERAL:
            yield chr(argument)
        elif operation is codes.RANGE:
            yield chr(argument[0])
        elif operation is codes.CATEGORY:
            yield next(c for c in _OTHERS if _has((operation, argument), c))


def _has(item: Any, character: str) -> bool:
    operation, argument = item
    if operation is codes.LITERAL:
        return argument == ord(character)
    if operation is codes.RANGE:
        return argument[0] <= ord(character) <= argument[1]
    name = str(argument)
    inside = {"SPACE": character.isspace(), "DIGIT": character.isdigit()}.get(
        name.rpartition("_")[2], character.isalnum() or character == "_"
    )
    return inside != ("NOT" in name)


def _characters(tree: Tree) -> Iterator[str]:
    """Characters that a pattern names."""
    for operation, argument in tree:
        if operation is codes.LITERAL:
            yield chr(argument)
        elif operation is codes.IN:
            yield from _first_of([item for item in argument if item[0] is not codes.NEGATE])
        elif operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            yield from _characters(argument[2])
        for inner in _inner(operation, argument):
            yield from _characters(inner)
