"""Implementation of ``tools/migrate.py``: recognises a file, translates it, checks the command, and
reports the outcome of every key."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.apps.migration import megatron_scripts
from megatron.apps.migration.check import resolved
from megatron.apps.migration.conversions import FUNCTIONS, flattened, with_json
from megatron.apps.migration.reconcile import reconcile
from megatron.apps.migration.rules import TableRow, table, translate
from megatron.apps.migration.shell import Script, read_script
from megatron.apps.migration.translation import Translation, flag_kinds
from megatron.config import ConfigError

JSON_NAME = "ds_migrated.json"
LIMIT = 4 << 20
"""Maximum size in bytes of a configuration file. Typical ones have a few KiB."""

TRAINERS = {
    "megatron": "Megatron",
    "neox": "GPT-NeoX",
    "nanotron": "nanotron",
    "torchtitan": "torchtitan",
    "transformers": "transformers",
    "llama_factory": "LLaMA-Factory",
    "axolotl": "axolotl",
}
"""The other trainers' titles, by the name of their rule table."""


@dataclass(frozen=True)
class Migrated:
    """A translation, with notes on lines of the file that were not understood."""

    translation: Translation
    notes: tuple[str, ...]


def migrate(
    files: Sequence[str],
    name: str | None = None,
    variables: Mapping[str, str] | None = None,
    processes: int | None = None,
) -> Migrated:
    """Translate a configuration. Several files are only accepted from GPT-NeoX, which merges them.
    Raises ConfigError if a file cannot be read, is from an unknown trainer, or contradicts itself.
    The message names the file.
    """
    migrated = _read(files, name, variables)
    migrated.translation.processes = processes or migrated.translation.processes
    apply(migrated.translation)
    migrated.translation.processes = processes or migrated.translation.processes
    reconcile(migrated.translation)
    return migrated


def apply(t: Translation) -> None:
    """Translate the keys of a file with its trainer's rule table."""
    name = next(name for name, title in TRAINERS.items() if title == t.trainer)
    if name == "megatron":
        megatron_scripts.apply(t)
    else:
        translate(name, t, FUNCTIONS)
    t.finish()


def _read(files: Sequence[str], name: str | None, variables: Mapping[str, str] | None) -> Migrated:
    texts = [_text(file) for file in files]
    path, text = Path(files[0]), texts[0]
    content = _content(path, text)
    if content is None:
        if len(files) > 1:
            raise ConfigError(f"{files[1]}: a script is translated by itself; give one file")
        return _of_script(read_script(text, str(path), dict(variables or {})), path, name)
    for other, more in zip(files[1:], texts[1:], strict=True):
        content |= _content(Path(other), more) or {}
    name = name or _recognised(content, path)
    if len(files) > 1 and name != "neox":
        raise ConfigError(f"{files[1]}: only GPT-NeoX merges several files; give one")
    if name == "megatron":
        arguments = content.get("MODEL_ARGS", content)
        script = Script(
            program=str(content.get("PROGRAM", "pretrain_gpt.py")), words=_words(arguments)
        )
        return _of_script(script, path, name)
    return Migrated(_of_content(name, content, path.parent), ())


def _of_content(name: str, content: dict[str, Any], folder: Path) -> Translation:
    if name == "neox":
        content = {key.replace("-", "_"): value for key, value in content.items()}
    source = with_json(flattened(content), folder)
    return Translation(source, TRAINERS[name])


def _of_script(script: Script, path: Path, name: str | None) -> Migrated:
    words = " ".join(script.words)
    hugging_face = name == "transformers" or (name is None and "--output_dir" in words)
    if not hugging_face:
        return Migrated(megatron_scripts.read(script, str(path), path.parent), tuple(script.notes))
    flags = megatron_scripts.flags_of(script.words)
    positions = flags.pop("", None)
    if positions is not None:
        raise ConfigError(
            f"{path}: {positions} is not a flag: a file of arguments is not read; write its "
            "values as flags"
        )
    # HfArgumentParser treats dashes as underscores. All values are text.
    spelled = {"True": True, "true": True, "False": False, "false": False, "None": None}
    source = {
        name.lstrip("-").replace("-", "_"): spelled.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in flags.items()
    }
    t = Translation(
        with_json(source, path.parent),
        "transformers",
        processes=megatron_scripts.processes_of(script.launcher),
        launcher=script.launcher,
    )
    return Migrated(t, tuple(script.notes))


def _text(file: str) -> str:
    path = Path(file)
    try:
        if path.stat().st_size > LIMIT:
            raise ConfigError(f"{file}: {path.stat().st_size:,} bytes are no configuration")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: it is not text") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _content(path: Path, text: str) -> dict[str, Any] | None:
    """Return a file's keys and values, or None if it is a script."""
    try:
        if path.suffix == ".toml":
            return _toml(text)
        if path.suffix in (".yml", ".yaml", ".json"):
            content = yaml.safe_load(text)
        else:
            return None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: expected keys with values at its top")
    return content


def _toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    return tomllib.loads(text)


def _recognised(content: Mapping[str, Any], path: Path) -> str:
    keys = {key.replace("-", "_") for key in content}
    if path.suffix == ".toml" and keys & {"job", "training", "parallelism", "lr_scheduler"}:
        return "torchtitan"
    for name, marks in (
        ("megatron", {"MODEL_ARGS"}),
        ("nanotron", {"parallelism", "tokens"}),
        ("axolotl", {"base_model"}),
        ("llama_factory", {"model_name_or_path"}),
        ("neox", {"num_layers", "hidden_size"}),
    ):
        if marks <= keys:
            return name
    if keys & {"train_micro_batch_size_per_gpu", "zero_optimization"}:
        raise ConfigError(
            f"{path}: a DeepSpeed JSON alone has no model and no data: give the script that "
            "names it; "
            "this trainer reads the JSON as it is (--deepspeed_config)"
        )
    known = ", ".join(TRAINERS)
    raise ConfigError(f"{path}: not recognised as a file of {known}: --from NAME says which it is")


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """Return command-line arguments for the flags in a YAML file of Megatron-LM."""
    words: list[str] = []
    for flag, value in arguments.items():
        if value is False or value is None:
            continue
        values = [] if value is True else value if isinstance(value, list) else str(value).split()
        words += [f"--{flag.lstrip('-')}", *map(str, values)]
    return words


def command_of(t: Translation) -> list[str]:
    """Return the command's arguments, including the launcher."""
    launcher = list(t.launcher)
    if not launcher or launcher[0].startswith("-"):
        launcher = ["deepspeed", *launcher]
    if "accelerate" in launcher[0]:
        launcher = ["deepspeed", *(["--num_gpus", str(t.processes)] if t.processes else [])]
    order = list(flag_kinds())
    ordered = sorted(filter(None, t.words.values()), key=lambda words: order.index(words[0]))
    words = [word for each in ordered for word in each]
    if t.content:
        words += ["--deepspeed_config", JSON_NAME]
    return [*launcher, t.program, *words]


def shown(t: Translation) -> str:
    """Return the command as it would be typed in a shell, with one flag per line."""
    words = command_of(t)
    start = words.index(t.program) + 1
    lines, line = [], " ".join(map(shlex.quote, words[:start]))
    for word in words[start:]:
        if word.startswith("--"):
            lines.append(line)
            line = f"    {word}"
        else:
            line += f" {shlex.quote(word)}"
    return " \\\n".join([*lines, line])


def report(migrated: Migrated) -> Iterator[str]:
    """Yield lines about the keys: first lost ones, then unknown, harmless and translated ones."""
    t = migrated.translation
    for state, title in (
        ("lost", "No counterpart; the run differs in this"),
        ("unknown", "Unknown; nothing was done about it"),
        ("harmless", "Not needed"),
        ("translated", "Translated"),
    ):
        rows = t.of_state(state)  # type: ignore[arg-type]
        if rows or (state == "unknown" and migrated.notes):
            yield f"{title}:"
            width = min(44, max(map(len, rows), default=0))
            yield from (f"  {key:<{width}}  {text}" for key, text in rows.items())
        if state == "unknown":
            yield from (f"  {note}" for note in migrated.notes)


def run(
    files: Sequence[str],
    name: str | None,
    processes: int | None,
    variables: Mapping[str, str],
    output: str | None,
) -> bool:
    """Print the translated command, and write it into the folder ``output`` if given. Return
    whether the command is complete and no key was lost or unknown. Raises ConfigError or OSError if
    the file is invalid or a run would refuse the command."""
    migrated = migrate(files, name, variables, processes)
    t = migrated.translation
    print(f"# {t.trainer}: {', '.join(files)}")
    print(shown(t))
    if t.content:
        print(f"\n# {JSON_NAME}\n{json.dumps(t.content, indent=2)}")
    print("\n" + "\n".join(report(migrated)))
    checked = resolved(t)
    print(
        f"\nThe command resolves on {checked.processes} "
        f"process{'es' if checked.processes > 1 else ''}"
        + (", which the file does not say (--processes)." if t.processes is None else ".")
    )
    for note in checked.notes:
        print(f"  {note}")
    if checked.missing:
        print(f"It is incomplete: add {', '.join(checked.missing)}.")
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.sh").write_text(f"#!/bin/sh\n{shown(t)}\n")
        if t.content:
            (folder / JSON_NAME).write_text(json.dumps(t.content, indent=2) + "\n")
    return not (t.of_state("lost", "unknown") or migrated.notes or checked.missing)


_KINDS = {
    "=": "not needed",
    "!": "no counterpart",
    **dict.fromkeys(("json", "keep"), "DeepSpeed JSON"),
}


def markdown(name: str) -> str:
    """Return a trainer's rules as a Markdown table for the documentation."""
    lines = ["| there | here |", "|---|---|"]
    for row in table(name).rows:
        keys = ", ".join(f"`{key}`" for key in row.keys)
        lines.append(f"| {keys} | {_cell(row)} |".replace("\\", ""))
    return "\n".join(lines) + "\n"


def _cell(row: TableRow) -> str:
    if row.action == "flag":
        flag, *names = row.words.split()
        pairs = [pair.split("=", 1) for pair in names]
        values = ", ".join(
            f"`{old}`: `{new}`" for old, new in pairs if new not in ("", "on", "off")
        )
        text = f"`{flag}`" + (f" ({values})" if values else "")
    elif row.action in _KINDS:
        text = f"{_KINDS[row.action]}: {row.words}" if row.action in "=!" else _KINDS[row.action]
    else:
        text = row.words
    default = f"; without it {row.default}" if row.default else ""
    return (text + default).replace("|", "&#124;")
