"""Parsing of DeepSpeed's hostfile, and selection of its nodes.

If the file does not exist, DeepSpeed's launcher trains on one machine. It ignores text after the
number of slots, and otherwise fails with a traceback. Here, each mistake is an error that names the
file, the line and the remedy.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping

Slots = dict[str, list[int]]
"""Slots of each node, in rank order."""

_ENTRY = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)(\s+max_slots=\d+)?(\s*#.*)?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


class HostfileError(ValueError):
    """Raised if a hostfile, or a selection of its nodes, is invalid."""


def read_hostfile(path: str | os.PathLike[str]) -> Slots:
    """Return the nodes with their slots. Raises :class:`HostfileError` if the file is invalid."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text"
        raise HostfileError(
            f"--hostfile {path}: {reason}; give a file with a line NAME slots=N for each node"
        ) from error
    first: dict[str, int] = {}
    nodes: Slots = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, slots = _entry(line, f"--hostfile {path}, line {number}")
        if name in nodes:
            raise HostfileError(
                f"--hostfile {path}, line {number}: {name} is in line {first[name]} already; give "
                "one line for each node, with all of its slots"
            )
        first[name], nodes[name] = number, list(range(slots))
    if not nodes:
        raise HostfileError(
            f"--hostfile {path}: no node is in it; write a line NAME slots=N for each"
        )
    return nodes


def _entry(line: str, where: str) -> tuple[str, int]:
    """Return the node name and the number of slots in a line."""
    entry = _ENTRY.fullmatch(line)
    if entry is None:
        raise HostfileError(
            f"{where}: {line!r} is not a node; write NAME slots=N, such as "
            f"{_likely_name(line)} slots={_likely_slots(line)}"
        )
    name, slots = entry["name"], int(entry["slots"])
    if "@" in name:
        user, _, host = name.partition("@")
        raise HostfileError(
            f"{where}: {name}: pdsh and --include cannot take a user; write {host}, and "
            f"User {user} for Host {host} in ~/.ssh/config"
        )
    if not _NAME.fullmatch(name):
        raise HostfileError(
            f"{where}: {name!r} is not the name or address of a host; a port belongs into "
            "~/.ssh/config or --ssh_port"
        )
    if slots == 0:
        raise HostfileError(f"{where}: {name} has 0 slots; give 1 or more, or delete the line")
    return name, slots


def _likely_name(line: str) -> str:
    """Return the node name at the start of an invalid line, or "node-1"."""
    name = re.split(r"[\s:=,]", line, maxsplit=1)[0]
    return name if _NAME.fullmatch(name) else "node-1"


def _likely_slots(line: str) -> str:
    numbers = re.findall(r"(?<![\w.-])[1-9]\d{0,2}(?!\w)", line)
    return numbers[-1] if numbers else "8"


def chosen(nodes: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """Return the nodes in ``--include``, or all except those in ``--exclude``. Both use DeepSpeed's
    notation, ``NAME[:SLOT,SLOT...][@NAME...]``. Raises :class:`HostfileError` if it is invalid."""
    if include and exclude:
        raise HostfileError("--include and --exclude contradict each other; give one of them")
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    named = _named(text, flag, nodes)
    left = {
        name: [slot for slot in slots if (slot in named.get(name, ())) == bool(include)]
        for name, slots in nodes.items()
    }
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise HostfileError(f"--exclude {exclude}: no node is left")
    return left


def _named(text: str, flag: str, nodes: Mapping[str, list[int]]) -> Slots:
    named: Slots = {}
    if not text:
        return {name: [] for name in nodes}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in nodes:
            raise HostfileError(
                f"{flag} {text}: {name or 'an empty name'} is not in the hostfile"
                f"{_meant(name, nodes)}; it has {', '.join(nodes)}, and @ stands between two nodes"
            )
        slots = nodes[name]
        if colon:
            if not re.fullmatch(r"\d+(,\d+)*", numbers):
                raise HostfileError(
                    f"{flag} {text}: {numbers!r} is not a list of slots; write {name}:0,1"
                )
            slots = sorted(set(map(int, numbers.split(","))))
            unknown = [slot for slot in slots if slot not in nodes[name]]
            if unknown:
                raise HostfileError(
                    f"{flag} {text}: {name} has the slots 0 to {len(nodes[name]) - 1}, and not "
                    f"{unknown[0]}"
                )
        named[name] = sorted({*named.get(name, []), *slots})
    return named


def _meant(name: str, nodes: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, nodes, n=1)
    return f" (is {close[0]} meant?)" if close else ""


def as_include(nodes: Mapping[str, list[int]]) -> str:
    """Return nodes and slots as a value for ``--include``."""
    return "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in nodes.items())
