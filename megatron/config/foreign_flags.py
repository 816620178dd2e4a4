"""Flags of other trainers and programs: those that are accepted and not used, and advice about one
that a program does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import make_dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.flags import option
from megatron.util.files import read_sections

_FLAGS = read_sections(Path(__file__).with_name("refused_flags.txt"))
NETWORKS = _FLAGS["networks"]
"""Names and patterns of other trainers' flags that describe networks, and what to use instead."""
REFUSED = NETWORKS | _FLAGS["others"]
"""The same of all their flags."""
OF_2019 = _FLAGS["first releases"]
"""The same for flags of Megatron-LM's first releases."""
OWN_FLAGS = _FLAGS["programs"]
"""Flags that people give to another program, by the program that has them."""

OTHER_TRAINERS = Path(__file__).with_name("other_trainers.txt")
"""Names in transformers, axolotl, LLaMA-Factory, torchtitan, torchtune, NeMo, nanotron and others,
and the flags that mean the same here."""

TRAINING = "pretrain_gpt.py"

ACCEPTED = Path(__file__).with_name("accepted_flags.txt")
"""Flags that are accepted from scripts of other trainers, and what happens instead."""


def _unused(words: str, note: str) -> tuple[str, Any, Any]:
    """A field for ``make_dataclass``: a flag with its aliases, or with its value: INT, FLOAT, STR
    or choices with at least one ``|``."""
    flag, *others = words.split()
    name = flag[2:].replace("-", "_").lower()
    if others and not others[0].startswith("-"):
        if others[0] == "STR+":
            return name, tuple[str, ...], option((), flag=flag, note=note)
        kind = {"INT": int, "FLOAT": float}.get(others[0], str)
        choices = [word for word in others[0].split("|") if word] if "|" in others[0] else None
        return name, kind | None, option(None, flag=flag, choices=choices, note=note)
    return name, bool, option(False, flag=flag, aliases=others, note=note)


LegacyFlags = make_dataclass(
    "LegacyFlags",
    [_unused(words, note) for words, note in read_sections(ACCEPTED)["accepted"].items()],
    frozen=True,
    namespace={
        "__doc__": "Accepted from other trainers' scripts, and not used.",
        "__module__": __name__,
    },
)

_PATTERNS = {
    pattern: reason for row, reason in (REFUSED | OF_2019).items() for pattern in row.split()
}


def instead_of(
    flag: str, prog: str, known: Container[str], of_training: Callable[[], Container[str]]
) -> str | None:
    """Words about a flag that ``prog``, whose flags are ``known``, does not have; None if nothing
    is known of it. ``of_training`` returns the flags of pretrain_gpt.py."""
    instead = refused_flag(flag)
    if instead is not None:
        return f"is not supported here: {instead}"
    other = another_trainers(flag, known)
    if other is not None:
        return f"is another trainer's name: {other}"
    return another_program(flag, prog, of_training)


def another_trainers(name: str, known: Container[str]) -> str | None:
    """The flag that means what another trainer calls ``name``, as words; None for any other name.
    Only ``known`` flags are named."""
    name = name.lstrip("-+").replace("-", "_").lower()
    last = name.rpartition(".")[2]
    own = f"--{last.replace('_', '-')}"
    for key in dict.fromkeys((name, last)):
        for advice in _other_trainers().get(key, ()):
            first = re.search(r"--[a-z][\w-]*", advice)
            if first is None or first[0] in known:
                return advice
    return own if last != name and own in known else None


@cache
def _other_trainers() -> dict[str, list[str]]:
    advice: dict[str, list[str]] = {}
    for line in OTHER_TRAINERS.read_text().splitlines():
        names, colon, words = line.partition(": ")
        if colon and not line.startswith("#"):
            for name in names.split():
                advice.setdefault(name, []).append(words)
    return advice


def refused_flag(flag: str) -> str | None:
    """Return the advice for a flag of another trainer; None for any other flag."""
    exact = _PATTERNS.get(flag)
    if exact is not None:
        return exact
    return next((reason for p, reason in _PATTERNS.items() if fnmatchcase(flag, p)), None)


def another_program(flag: str, prog: str, of_training: Callable[[], Container[str]]) -> str | None:
    """Says whose flag it is, if it belongs to another program than ``prog``."""
    for program, flags in OWN_FLAGS.items():
        if flag in flags.split() and not program.endswith(prog):
            name, _, command = prog.partition(" ")
            if command and program.endswith(name):
                return f"is no flag of {command}, but of another command of {program}"
            return f"is a flag of {program}"
    return f"is a flag of {TRAINING}" if flag in of_training() else None
