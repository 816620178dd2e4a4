"""Configurations of other trainers in ``cases/``, and changes of their keys."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.apps.migration.command import Migrated, apply, migrate, shown
from megatron.apps.migration.reconcile import reconcile
from megatron.apps.migration.translation import Translation
from megatron.config import ConfigError

FOLDER = Path(__file__).with_name("cases")
JSON = {"ds_z3.json", "ds_z2_warmup.json"}
"""DeepSpeed JSON files that cases name."""
POSITIONS = {"1": "out", "2": "tokenizer.model", "3": "corpus_text_document"}
FILES = {
    path.name: [path.name, *(["neox_local.yml"] if path.name == "neox_125m.yml" else [])]
    for path in sorted(FOLDER.iterdir())
    if path.name not in {*JSON, "neox_local.yml"}
}
"""Files of each case, by the name of the first."""
UNKNOWN = {
    "hyper_unknown_key",
    "mystery_key",
    "unknown_option",
    "ds_z2_warmup.json:unknown_section.a",
}
"""Keys of the cases that no trainer has."""


@contextlib.contextmanager
def in_cases() -> Iterator[None]:
    """The folder of the cases as the current one, in which they name their files."""
    before = Path.cwd()
    os.chdir(FOLDER)
    try:
        yield
    finally:
        os.chdir(before)


def translated(name: str, processes: int | None = None) -> Migrated:
    with in_cases():
        return migrate(FILES[name], None, POSITIONS, processes)


def said(migrated: Migrated) -> str:
    """The command, the JSON and the lines about keys without a counterpart."""
    t = migrated.translation
    lost = [f"{key}: {text}" for key, text in t.of_state("lost", "unknown").items()]
    return "\n".join([shown(t), str(t.content), str(t.processes), *lost, *migrated.notes])


def other(value: Any) -> list[Any]:
    """Values to put in place of one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, value + 8]
    if isinstance(value, float):
        return [value / 2, value * 2, value + 0.25]
    if isinstance(value, list):
        return [[*value, *value[-1:]], [], [f"{value[0]}-other"]] if value else [["other"]]
    if value is None:
        return [1, "other"]
    numbers = {"true": ["false"], "True": ["False"], "false": ["true"], "False": ["True"]}
    with contextlib.suppress(ValueError):
        return [str(float(value) * 2), str(float(value) / 2), str(float(value) + 0.25)]
    return numbers.get(value, [f"{value}x", ""])


def changed_case(base: Migrated, source: dict[str, Any]) -> Migrated:
    """A case with other values of its keys."""
    first = base.translation
    again = Translation(source, first.trainer, first.program)
    if first.trainer in ("Megatron", "transformers"):  # they have launchers of their own
        again.launcher, again.processes = first.launcher, first.processes
    apply(again)
    reconcile(again)
    return Migrated(again, base.notes)


def silent_losses(name: str) -> list[str]:
    """Keys of a case that are said to be translated, and whose values can change without a change
    of what is printed."""
    base = translated(name)
    text, lost = said(base), []
    for key, outcome in base.translation.outcomes.items():
        if outcome.state != "translated" or key not in base.translation.source:
            continue
        source = dict(base.translation.source)
        for value in other(source[key]):
            try:
                changed = changed_case(base, {**source, key: value})
            except (ConfigError, ValueError, TypeError, AttributeError, KeyError):
                break  # the value matters: it is refused
            if said(changed) != text or changed.translation.outcomes[key].state != "translated":
                break
        else:
            lost.append(key)
    return lost


def lines(name: str) -> str:
    """All that is expected of a case: its command, its JSON, and its keys without counterpart."""
    migrated = translated(name)
    t = migrated.translation
    parts = [shown(t), *([str(t.content)] if t.content else [])]
    parts += [f"{state}: {key}" for state in ("lost", "unknown") for key in t.of_state(state)]
    return "\n".join([f"== {name}", *parts, *migrated.notes, ""])
