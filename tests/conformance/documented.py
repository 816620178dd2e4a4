"""The documented commands, as the files in ``cases/`` hold them, and how each is made small.

A command stands there word for word. A test may replace what a flag of :data:`SIZES` is given, and
the paths that a case names; nothing is added, dropped or replaced besides. docs/reference/
conformance.md is made from the same files::

    MEGATRON_REWRITE_DOCS=1 pytest tests/conformance/test_table.py
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENTS = (
    "readme-2023",
    "scripts-2023",
    "readme-2019",
    "oneflow",
    "huggingface",
    "megatron-deepspeed",
    "llama2",
)
"""Files of the lineage's documents, in the order of the table; ``mistakes`` is none of them."""


@dataclass(frozen=True)
class Today:
    """The command that does the same in the spelling of this project, and its sizes."""

    run: str
    sizes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A documented command.

    Attributes:
        document: file in ``cases/``, without its ending.
        title: name of the document.
        name: of the case, unique in its document.
        documented: the command as documented.
        run: the same for bash, with the variables of its document filled in.
        files: what its folder holds, by name: a file of the public data, of which ``[:N]`` takes
            the first N lines and ``key=content`` renames the key of JSON lines.
        after: the case whose folder it continues in (a copy of it).
        prepare: lines for bash that make what the document takes as given.
        environment: variables that the document says to set.
        sizes: other values for flags of :data:`SIZES`, and values for those of :data:`PATHS`.
        paths: replaces placeholders such as ``<wikitext>``.
        stand_in: a program that is replaced by one that prints its words.
        prints: names of :data:`LINES`, or patterns; each must be found in the output.
        leaves: files that it must make; patterns of pathlib.
        processes: how many the documented command has; it must resolve at its own size.
        today: the same run in today's spelling, of which every number must be the same.
        status: the exit status.
        typed: what a user types into it.
        serves: it is a server, which SIGTERM ends once it prints this pattern.
        alongside: the case of a server that runs meanwhile.
        sample: whether ``make test`` runs it.
    """

    document: str
    title: str
    name: str
    documented: str
    run: str
    files: Mapping[str, str] = field(default_factory=dict)
    after: str | None = None
    prepare: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    stand_in: str | None = None
    prints: Sequence[str] = ()
    leaves: Sequence[str] = ()
    processes: int | None = None
    today: Today | None = None
    status: int = 0
    typed: str = ""
    serves: str | None = None
    alongside: str | None = None
    sample: bool = False

    @property
    def id(self) -> str:
        return f"{self.document}/{self.name}"

    @property
    def is_script(self) -> bool:
        """Whether it starts a shell script, which gets its sizes as flags behind it."""
        return re.search(r"\.(sh|sbatch)\b", self.run) is not None

    def small(self) -> str:
        """The command with small sizes; of a script, as documented."""
        text = self.run
        for placeholder, path in self.paths.items():
            assert placeholder in text, f"{self.id}: paths: {placeholder} is not in the command"
            text = text.replace(placeholder, path)
        if self.is_script:
            return text
        return shrunk(text, self.sizes, self.id)[0]

    def replaced(self) -> list[str]:
        """The flags and placeholders that :meth:`small` replaces."""
        return [*self.paths, *shrunk(self.run, self.sizes, self.id)[1]]


def shrunk(text: str, sizes: Mapping[str, str], where: str) -> tuple[str, list[str]]:
    """A command with the values of its size flags replaced, and these flags.

    Raises:
        AssertionError: a size is given for a flag that is no size, or not in the command.
    """
    used = []
    for flag in sizes:
        assert flag in (*SIZES, *PATHS), f"{where}: sizes: {flag} is no size, count or path"
        assert f"{flag} " in f"{text} ", f"{where}: sizes: {flag} is not in the command"
    for flag, value in (SIZES | dict(sizes)).items():
        more = r" +[^ -]\S*" * value.count(" ")
        text, count = re.compile(rf"(?<=\s){flag}(?:\s+|=)\S+{more}(?=\s|$)").subn(
            f"{flag} {value}", text
        )
        used += [flag] if count else []
    return text, used


def small_flags(printed: str, sizes: Mapping[str, str], where: str) -> str:
    """What is put behind a script to make it small: the sizes of the flags that it has."""
    flags = shlex.join(_behind(SIZED, printed) or [])
    _, used = shrunk(f" {flags} ", sizes, where)
    return " ".join(f"{flag} {(SIZES | dict(sizes))[flag]}" for flag in used)


@cache
def _common() -> dict[str, Any]:
    return yaml.safe_load((HERE / "common.yaml").read_text())


SIZES: dict[str, str] = {flag: str(value) for flag, value in _common()["sizes"].items()}
"""Flags of sizes, counts and intervals, and what a test gives them."""
PATHS: tuple[str, ...] = tuple(_common()["paths"])
"""Flags of paths, which a case may replace."""
LINES: dict[str, list[str]] = _common()["lines"]
"""Patterns of the lines that people's scripts look for, by name."""


@cache
def _content(document: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / "cases" / f"{document}.yaml").read_text())


def variables(document: str) -> dict[str, str]:
    """The shell variables in which a document keeps paths and parts of its commands."""
    return _content(document).get("variables", {})


@cache
def cases(document: str) -> tuple[Case, ...]:
    """The cases of a document."""
    content = _content(document)
    title = content["document"]
    known = {each.name for each in fields(Case)}
    found = []
    for entry in content["commands"]:
        assert set(entry) <= known, f"{document}: {set(entry) - known}"
        entry = {"files": content.get("files", {})} | entry
        entry |= {"documented": entry["run"], "run": _filled(entry["run"], variables(document))}
        if "today" in entry:
            today = dict(entry["today"])
            today["run"] = _filled(today["run"], variables(document))
            today["sizes"] = _strings(today.get("sizes", {}))
            entry["today"] = Today(**today)
        entry["leaves"] = [_filled(name, variables(document)) for name in entry.get("leaves", ())]
        entry["prepare"] = _filled(entry.get("prepare", ""), variables(document))
        for name in ("sizes", "environment"):
            entry[name] = _strings(entry.get(name, {}))
        found.append(Case(document, title, **entry))
    names = [case.name for case in found]
    assert len(set(names)) == len(names), f"{document}: a name comes twice"
    return tuple(found)


def all_cases() -> Iterator[Case]:
    """The cases of all documents."""
    for document in DOCUMENTS:
        yield from cases(document)


def case_of(identifier: str) -> Case:
    """The case of an id."""
    document = identifier.partition("/")[0]
    return next(case for case in cases(document) if case.id == identifier)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Puts a document's variables into a command, as a shell would."""
    while True:
        filled = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]).strip(), text)
        if filled == text:
            return " ".join(filled.split(" ")).strip()
        text = filled


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def training_flags(text: str) -> list[str] | None:
    """The words behind the training program of a command, if it starts one."""
    return _behind(TRAINING, text)


def _behind(program: re.Pattern[str], text: str) -> list[str] | None:
    words = shlex.split(text.replace("\\\n", " "))
    places = [i for i, word in enumerate(words) if program.search(word)]
    return words[places[0] + 1 :] if places else None


TRAINING = re.compile(
    r"(^|/)(pretrain_(gpt2?|bert|t5|retro)|finetune_llama)\.py$|^oneflow_gpt\.training$"
)
"""The programs that train, as a word of a command."""
SIZED = re.compile(
    rf"{TRAINING.pattern}|(^|/)tasks/main\.py$|"
    r"(^|/)(run_text_generation_server|generate_samples_gpt|finetune_gpt)\.py$|"
    r"(^|/)hf2megads_weight_converter\.py$|(^|/)retro/preprocess_data\.py$"
)
"""Those whose flags a script gets small sizes for."""
