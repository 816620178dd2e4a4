"""Reference pages of the flags: of a run from the dataclasses, of the tools from their parsers."""

from __future__ import annotations

import argparse
import dataclasses
import html
import re
import typing
from collections.abc import Iterable, Iterator

from programs import PROGRAMS, load, parser_of

from megatron.config import PART_FLAGS, LegacyFlags
from megatron.config.flags import field_help, flag_of, value_type

RUN = """# Flags of a run

Every flag of `pretrain_gpt.py`, by the part of the configuration that it belongs to. Tools that
start, plan or inspect a run accept the same flags. This page is generated from the dataclasses of
`megatron/config`; `--help` prints the same.

A value that is not given comes from the DeepSpeed JSON if it has one, otherwise from the default;
`--explain-config` prints every value with its origin.
"""

TOOLS = """# Flags of the tools

The flags that only one program has. Many programs also accept [flags of a run](flags.md), as it
says under each. This page is generated from the programs' parsers; `--help` prints the same.
"""


def run_page() -> str:
    """The page of the training command's flags, in Markdown."""
    return "\n".join([RUN, *(_section(name, cls) for name, cls in _parts())])


def run_flags() -> Iterator[tuple[str, str]]:
    """Name and help text of each flag on the page of a run's flags."""
    for _, cls in _parts():
        texts = field_help(cls)
        for field in dataclasses.fields(cls):
            if not field.metadata.get("internal"):
                yield flag_of(field), texts[field.name]


def _parts() -> Iterator[tuple[str, type]]:
    yield from PART_FLAGS.items()
    yield "legacy", LegacyFlags


def _section(name: str, cls: type) -> str:
    title = (cls.__doc__ or name).split("\n")[0].rstrip(".")
    heading = f"## {title} {{#{name}}}"
    return "\n".join([heading, "", '<dl class="flags">', *_fields(cls), "</dl>\n"])


def _fields(cls: type) -> Iterator[str]:
    texts, hints = field_help(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        meta = field.metadata
        if meta.get("internal"):
            continue
        name, kind = flag_of(field), value_type(hints[field.name])
        off = meta.get("off")
        others = [*meta.get("aliases", ())]
        if off and meta.get("flag"):
            others += off.split()
        choices = meta.get("choices")
        shown = "" if kind is bool else "|".join(map(str, choices)) if choices else kind.__name__
        if typing.get_origin(hints[field.name]) is tuple or "tuple" in str(hints[field.name]):
            shown += " ..."
        yield _entry(name, others, shown, texts[field.name], _default(field, kind))


def _default(field: dataclasses.Field, kind: type) -> str:
    meta = field.metadata
    if meta.get("note"):
        return ""  # the text says it
    if meta.get("derived"):
        return f"Default: {meta['derived']}"
    if kind is bool:
        shows_off = meta.get("off") and not meta.get("flag")
        return "Default: on" if field.default and not shows_off else ""
    if field.default is None or field.default == () or field.default is dataclasses.MISSING:
        return "Default: not set"
    value = field.default
    return f"Default: {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _entry(name: str, others: Iterable[str], kind: str, text: str, default: str) -> str:
    """One flag, as an item of a description list."""
    also = "".join(f", <code>{other}</code>" for other in others)
    shown = f' <span class="kind">{html.escape(kind).replace("|", "<wbr>|")}</span>' if kind else ""
    note = f' <span class="default">{html.escape(default)}.</span>' if default else ""
    return (
        f'<dt id="{name.lstrip("-")}"><code>{name}</code>{also}{shown}</dt>'
        f"<dd>{_prose(text)}{note}</dd>"
    )


def _prose(text: str) -> str:
    """Help text with its flags set as code."""
    escaped = html.escape(text, quote=False)
    return re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"<code>\1</code>", escaped)


def tools_page() -> str:
    """The page of the tools' flags, in Markdown."""
    run = {group.title for group in parser_of(("pretrain_gpt.py",))._action_groups}
    parts = [TOOLS]
    for program in PROGRAMS:
        if program == ("pretrain_gpt.py",):
            continue
        parser = parser_of(program)
        summary = (load(program[0]).__doc__ or "").strip().split("\n")[0]
        parts += [f"## {' '.join(program)}", "", summary if len(program) == 1 else "", ""]
        groups = [group for group in parser._action_groups if group._group_actions]
        own = [group for group in groups if group.title not in run or group.title == "options"]
        entries = [_argument(a) for group in own for a in group._group_actions if _own(a)]
        if entries:
            parts += ['<dl class="flags">', *entries, "</dl>", ""]
        shared = [str(group.title) for group in groups if group not in own]
        if len(shared) > 8:
            parts += ["It accepts all flags of a run.", ""]
        elif shared:
            parts += [f"It accepts the flags of a run in: {'; '.join(shared)}.", ""]
    return "\n".join(parts)


def _own(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and action.dest not in ("help", "version")


def _argument(action: argparse.Action) -> str:
    names = action.option_strings or [str(action.metavar or action.dest)]
    kind = ""
    if action.option_strings and action.nargs != 0:
        kind = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or "")
        kind = kind or getattr(action.type, "__name__", "")
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return _entry(names[0], names[1:], kind, text, "").replace(' id="', ' data-flag="')
