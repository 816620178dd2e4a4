"""Translation of Megatron-LM and Megatron-DeepSpeed scripts, most of whose flags exist here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.apps.migration.conversions import flattened, json_object
from megatron.apps.migration.rules import translate
from megatron.apps.migration.shell import Script
from megatron.apps.migration.translation import KeyOutcome, Translation, Unfit, flag_kinds
from megatron.config import ConfigError
from megatron.config.flags import flag_names
from megatron.config.run import LegacyFlags
from megatron.formats.refused_flags import refused_flag

PROGRAMS = {
    **{
        f"pretrain_{name}.py": f"pretrain_{name}.py"
        for name in ("gpt", "bert", "t5", "ict", "retro")
    },
    "pretrain_gpt2.py": "pretrain_gpt.py",
    "pretrain_gpt_core.py": "pretrain_gpt.py",
    "pretrain_mamba.py": "pretrain_gpt.py",
    "pretrain_hybrid.py": "pretrain_gpt.py",
    "finetune_llama.py": "finetune_llama.py",
}
"""Megatron's training programs, and the corresponding programs here."""

JSON_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepscale_config")
_NUMBER = re.compile(r"-\d[\d.e-]*$")


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Parse flags with their values. A switch has the value True, and a flag with several values
    a list. If a flag is repeated, the last one counts. Words before the first flag have the key
    ""."""
    flags: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("-") and not _NUMBER.match(word):
            if name or values:
                flags[name] = True if not values else values[0] if len(values) == 1 else values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    return flags


def processes_of(launcher: Sequence[str]) -> int | None:
    """Return the number of processes that a launcher's arguments set, or None."""
    flags = {
        name.lstrip("-").replace("-", "_"): value for name, value in flags_of(launcher[1:]).items()
    }
    each = flags.get("nproc_per_node") or flags.get("num_gpus") or flags.get("num_processes")
    nodes = flags.get("nnodes") or flags.get("num_nodes") or flags.get("num_machines") or "1"
    each, nodes = (value[0] if isinstance(value, list) else value for value in (each, nodes))
    if not str(each).isdigit() or not str(nodes).isdigit():
        return None
    return int(str(each)) * (1 if "num_processes" in flags else int(str(nodes)))


def json_of(path: str, script: Script, folder: Path) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON that a script writes or that exists on this machine, or None if
    neither is the case. Raises ConfigError if it is not a JSON object."""
    text = script.files.get(path)
    if text is None:
        file = next((place for place in (Path(path), folder / path) if place.is_file()), None)
        if file is None:
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        return json_object(text.encode(), path)
    except ValueError as error:
        raise ConfigError(
            f"{error}; if the script fills it with sed, run that line first"
        ) from None


def read(script: Script, name: str, folder: Path) -> Translation:
    """Return a translation that contains the flags of a script's command, none of them translated
    yet. Raises ConfigError if the script starts an unknown program."""
    program = Path(script.program).name
    if program not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        raise ConfigError(
            f"{name}: {script.program} is not a training program that is known here: {known}"
        )
    flags = flags_of(script.words)
    path = next((flags[each] for each in JSON_FLAGS if each in flags), None)
    content = json_of(str(path), script, folder) if path else None
    source = {key.lstrip("-") or "(words)": value for key, value in flags.items()}
    return Translation(
        source | (flattened(content, f"{path}:") if content else {}),
        "Megatron",
        PROGRAMS[program],
        processes_of(script.launcher),
        list(script.launcher),
    )


def apply(t: Translation) -> None:
    """Translate the flags, and the DeepSpeed JSON to which they refer."""
    named = next((key for key in t.source if f"--{key}" in JSON_FLAGS), "")
    prefix = f"{t.source.get(named)}:"
    if any(name.startswith(prefix) for name in t.source):
        t.tell(named, "the JSON below")
    translate("megatron", t, {})
    notes = _notes()
    for key in t.source:
        if not key.startswith(prefix) and key not in t.outcomes:
            _own(t, key, t.source[key], notes)
    translate("deepspeed", t, {}, prefix, flags_win=True)


def _notes() -> dict[str, str]:
    """Return the reason why each accepted but unused flag has no effect, by flag."""
    notes: dict[str, str] = {}
    for field in dataclasses.fields(LegacyFlags):
        names, off = flag_names(field)
        notes |= dict.fromkeys((*names, *(off or "").split()), field.metadata["note"])
    return notes


def _own(t: Translation, key: str, value: Any, notes: dict[str, str]) -> None:
    flags = (f"--{key}", f"-{key}")
    note = next((notes[flag] for flag in flags if flag in notes), None)
    refused = refused_flag(f"--{key}")
    if note is not None:
        t.harmless(key, note)
    elif f"--{key}" in flag_kinds():
        try:
            _put_own(t, key, value)
        except Unfit as error:
            t.lose(key, str(error))
    elif refused is not None:
        t.outcomes[key] = KeyOutcome("lost", refused)


def _put_own(t: Translation, key: str, value: Any) -> None:
    """Add a flag that both programs have, with the script's spelling."""
    kind, flag = flag_kinds()[f"--{key}"], f"--{key}"
    if kind.type is bool or value is True:
        words: tuple[str, ...] = (flag,)
        if value is not True:
            raise Unfit(f"{flag} takes no value, and has {value}")
        if kind.type is not bool and not kind.bare:
            raise Unfit(
                "it has no value: a variable or position of the script is empty (--set NAME=VALUE)"
            )
    else:
        values = value if isinstance(value, list) else [value]
        for each in values:
            if kind.type in (int, float) and not re.match(r"[-+]?[\d.]", str(each)):
                raise Unfit(f"{each} is not a number, as {flag} needs")
            names = [str(choice) for choice in kind.choices]
            if names and str(each) not in names:
                raise Unfit(f"{flag} has no {each}: {', '.join(names)}")
        words = (flag, *map(str, values))
    before = t.words.get(kind.name)
    if before is not None and before[1:] != words[1:]:
        raise ConfigError(
            f"{before[0]} and {flag} set the same thing: {' '.join(before)}, "
            f"{' '.join(words)}; leave one out"
        )
    t.words[kind.name], t.origins[kind.name] = words, key
    t.tell(key, " ".join(words))
