"""The page of upstream flags: what each flag of Megatron-DeepSpeed and Megatron-LM does here.

The lists in upstream_flags/ have a flag a line: its names, then its kind, which is ``switch``, a
type of value or the choices, with ``+``, ``*`` or ``x3`` where it takes several values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import html
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config import FLAG_CLASSES, FlagParser, LegacyFlags
from megatron.config.flags import field_help, flag_names, flag_of
from megatron.formats.refused_flags import refused_flag

LISTS = Path(__file__).parent / "upstream_flags"

UPSTREAMS = {
    "megatron-deepspeed": "Megatron-DeepSpeed, main",
    "megatron-lm-2023": "Megatron-LM, mid 2023",
    "megatron-lm": "Megatron-LM, now",
}
"""The title of each list."""

STATES = ("implemented", "accepted", "refused")

INTRODUCTION = """# Flags of Megatron-LM and Megatron-DeepSpeed

Every flag of the training programs of three upstreams, and what it does here:

- **implemented**: it has its upstream meaning; a value that is not supported is an error.
- **accepted**: it changes nothing here; a run prints the line that says why.
- **refused**: a run does not start, and says what to use instead.

This page is generated from lists of the flags' names and from the parser of `pretrain_gpt.py`.
"""


@dataclass(frozen=True)
class UpstreamFlag:
    """A flag of an upstream: its names and the kind of its value."""

    names: tuple[str, ...]
    kind: str

    @property
    def values(self) -> tuple[str, ...]:
        """Words that may follow the flag, the first choice where it has choices."""
        if self.kind == "switch":
            return ()
        kind, _, count = self.kind.partition(" ")
        example = {"int": "1", "float": "0.5", "str": "text", "bool": "True"}
        word = example.get(kind, kind.split("|")[0])
        return (word,) * (int(count[1:]) if count.startswith("x") else 1)

    @property
    def choices(self) -> tuple[str, ...]:
        """Its choices, if it has some."""
        kind = self.kind.partition(" ")[0]
        return tuple(kind.split("|")) if "|" in kind else ()


def upstream_flags(name: str) -> tuple[str, list[UpstreamFlag]]:
    """Return the source of a list, and its flags."""
    source, *lines = (LISTS / f"{name}.txt").read_text().splitlines()
    return source.removeprefix("# "), [_flag(line.split()) for line in lines]


def _flag(words: list[str]) -> UpstreamFlag:
    names = [word for word in words if word.startswith("--")]
    return UpstreamFlag(tuple(names), " ".join(words[len(names) :]))


@functools.cache
def _known() -> dict[str, tuple[str, str]]:
    """State and text of every name that the parser knows."""
    known = {}
    for cls in FLAG_CLASSES:
        texts = field_help(cls)
        for field in dataclasses.fields(cls):
            if field.metadata.get("internal"):
                continue
            names, off = flag_names(field)
            if cls is LegacyFlags:
                only = field.metadata["choices"]
                state, text = "accepted", field.metadata["note"]
                text += f" (value: {' or '.join(only)})" if only else ""
            else:
                state, text = "implemented", texts[field.name]
            for name in names:
                same = state == "accepted" or name == flag_of(field)
                known[name] = (state, text if same else f"the same as {flag_of(field)}")
            for name in (off or "").split():
                known[name] = (state, f"turns {names[0]} off" if names else text)
    return known


def states_of(flag: UpstreamFlag) -> set[tuple[str, str]]:
    """The states of a flag's names, with what happens; one, unless the tables are wrong."""
    known, found = _known(), set()
    for name in flag.names:
        instead = refused_flag(name)
        if name in known:
            found.add(known[name])
        elif instead is not None:
            found.add(("refused", instead))
    return found


@functools.cache
def _actions() -> dict[str, argparse.Action]:
    return FlagParser(*FLAG_CLASSES)._option_string_actions


def errors_of(flag: UpstreamFlag) -> tuple[str, ...]:
    """The choices of a known flag that are errors here."""
    action = _actions().get(flag.names[0])
    if action is None or action.choices is None:
        return ()
    read = action.type if callable(action.type) else str
    return tuple(word for word in flag.choices if read(word) not in action.choices)


def page() -> str:
    """The page, in Markdown."""
    return "\n".join(
        [INTRODUCTION, *_counts(), *(line for name in UPSTREAMS for line in _part(name))]
    )


def _counts() -> Iterator[str]:
    yield "| upstream | flags | " + " | ".join(STATES) + " |"
    yield "|---|---|---|---|---|"
    for name, title in UPSTREAMS.items():
        flags = upstream_flags(name)[1]
        count = Counter(sorted(states_of(flag))[0][0] for flag in flags)
        yield f"| {title} | {len(flags)} | " + " | ".join(str(count[s]) for s in STATES) + " |"
    yield ""


def _part(name: str) -> Iterator[str]:
    source, flags = upstream_flags(name)
    yield f"## {UPSTREAMS[name]} {{#{name}}}"
    yield ""
    yield f"From {source}."
    yield ""
    yield "| flag | state | what happens here |"
    yield "|---|---|---|"
    for flag in flags:
        state, text = sorted(states_of(flag))[0]
        if flag.choices and (errors := errors_of(flag)):
            text = f"{text.rstrip('.')}; an error: {', '.join(errors)}"
        names = ", ".join(f"`{name}`" for name in flag.names)
        yield f"| {names} | {state} | {html.escape(text, quote=False).replace('|', '&#124;')} |"
    yield ""
