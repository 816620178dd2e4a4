"""Advice about a flag that a program does not have: a replacement, or the program that has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from functools import cache
from pathlib import Path

from megatron.formats.refused_flags import OWN_FLAGS, refused_flag

OTHER_TRAINERS = Path(__file__).with_name("other_trainers.txt")
"""File that maps option names of transformers, axolotl, LLaMA-Factory, torchtitan, torchtune, NeMo,
nanotron and other trainers to the equivalent flags here."""

TRAINING = "pretrain_gpt.py"


def instead_of(
    flag: str, prog: str, known: Container[str], of_training: Callable[[], Container[str]]
) -> str | None:
    """Return advice about a flag, or a word without dashes, that ``prog`` does not have. Return
    None if no advice is known. ``known`` are the flags of ``prog``, and ``of_training`` returns
    those of pretrain_gpt.py."""
    if not flag.startswith("-"):
        return another_trainers(flag, known)
    instead = refused_flag(flag)
    if instead is not None:
        return f"is not supported here: {instead}"
    other = another_trainers(flag, known)
    if other is not None:
        return f"is another trainer's name: {other}"
    return another_program(flag, prog, of_training)


def another_trainers(name: str, known: Container[str]) -> str | None:
    """Return a description of the flag that corresponds to another trainer's option ``name``, or
    None if the option is unknown. Only ``known`` flags are suggested."""
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


def another_program(flag: str, prog: str, of_training: Callable[[], Container[str]]) -> str | None:
    """Return a phrase that names the program with this flag. Return None if no program has it."""
    for program, flags in OWN_FLAGS.items():
        if flag in flags.split() and not program.endswith(prog):
            name, _, command = prog.partition(" ")
            if command and program.endswith(name):
                return f"is no flag of {command}, but of another command of {program}"
            return f"is a flag of {program}"
    return f"is a flag of {TRAINING}" if flag in of_training() else None
