"""Provenance of an output folder. Its checkpoints record the inputs of the run. A command that
continues it is compared with this record, and the model card shows it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.apps.finetune.settings import CHECKPOINTS, TuningConfig
from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import CONFIG
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import PART_FLAGS, ConfigError, RunConfig
from megatron.config.features import kind_classes
from megatron.config.flags import flag_of
from megatron.data.build import DataFile
from megatron.data.loader import TrainingData
from megatron.features.inputs.compared import (
    BASE,
    changed_inputs,
    compared_inputs,
    model_input,
    recorded_inputs,
)
from megatron.features.inputs.data_files import changed_files
from megatron.features.inputs.flags import ChangedDataFlags
from megatron.training.resume import ResumeSource, find_origin
from megatron.util.secrets import without_secrets

TUNING = "tuning"
"""Key of the :class:`TuningRecord` in ``state.json``."""
_NOT_COMPARED = frozenset(
    ("chat_template", "reference_checkpoint", "retro_project_dir", "log_token_accuracy")
)
"""Flags that are not compared: logging, and files whose contents are compared instead."""
_MUST_AGREE = frozenset(("seed", "split", "seq_length"))
"""Fields that must not change, nor may flags of adapters, distillation or kinds of data."""
_SAID = ("training", "optimizer", "precision", "hidden_dropout", "attention_dropout")
"""Parts and fields of the configuration that may change. The model card shows their changes."""
_NAMES = {"split": "the split of --held-out or --eval-data"}


def base_name(path: str) -> str:
    """Return the name of a model's folder, or of its repository in Hugging Face's cache."""
    parts = Path(path).resolve().parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    return parts[-1] if cached is None else cached.removeprefix("models--").replace("--", "/")


@dataclass(frozen=True)
class TuningRecord:
    """Record of a fine-tuning run, stored in its checkpoints: names of the base model and the
    example files, epochs (None if another length was given), samples per epoch, held-out samples,
    and values that a later start changed, with the step of each change."""

    model: str
    data: tuple[str, ...]
    eval_data: tuple[str, ...]
    epochs: int | None
    samples: int
    held_out: int
    programs: str
    changes: tuple[tuple[int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return dataclasses.asdict(self)

    def after(self, source: Source, changes: Sequence[str]) -> TuningRecord:
        """Return the record of a run that continues a checkpoint's run with other values. The names
        of the base model and the data remain those in the checkpoint."""
        before = TuningRecord.of(source)
        if before is None:
            return self
        if self.programs != before.programs:
            changes = [*changes, f"programs: {self.programs}"]
        after = int(source.state.get("iteration", 0))
        return dataclasses.replace(
            before,
            epochs=self.epochs,
            held_out=self.held_out,
            changes=(*before.changes, *((after, line) for line in changes)),
        )

    @classmethod
    def of(cls, source: Source) -> TuningRecord | None:
        """Return the record in a checkpoint, or None if an earlier version wrote the checkpoint.
        Raises CheckpointError if the record is malformed."""
        content = source.state.get(TUNING)
        if content is None:
            return None
        try:
            lists = {name: tuple(content[name]) for name in ("data", "eval_data")}
            changes = tuple((int(after), str(text)) for after, text in content["changes"])
            return cls(**{**content, **lists, "changes": changes})
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{source.folder}: {TUNING} is malformed") from None


class Earlier(NamedTuple):
    """Checkpoint that a command continues, and the configuration of its run."""

    origin: ResumeSource
    source: Source
    config: RunConfig


def earlier_run(config: RunConfig) -> Earlier | None:
    """Return the checkpoint in the output folder that the command continues, or None."""
    origin = find_origin(config.checkpoint)
    if origin is None or not origin.continues:
        return None
    source = origin.found.open(verify=False)
    return Earlier(origin, source, run_of(source) or config)


def run_of(source: Source) -> RunConfig | None:
    """Return the configuration of the run that wrote a checkpoint of a model or of adapters."""
    return source.run if source.additions is None else source.additions.run


def check_base(config: TuningConfig) -> None:
    """Check, before any slow work, that the output folder was made from ``--model``. Raises
    ConfigError if it was made from another model."""
    assert config.model is not None and config.output is not None
    checkpoint = locate_checkpoint(Path(config.output) / CHECKPOINTS)
    base = locate_checkpoint(config.model)
    if checkpoint is None or base is None:
        return
    now = {BASE: model_input(config.model, base)}
    before = recorded_inputs(checkpoint.folder) or _base_by_path(checkpoint)
    if changed_inputs(before, now):
        raise ConfigError(
            f"--output {config.output} was made from --model {before[BASE]['path']}, and --model "
            f"{config.model} has other content: name another --output, or the model that it was "
            "made from"
        )


def _base_by_path(found: FoundCheckpoint) -> dict[str, dict[str, str]]:
    """Return the base model of a checkpoint from an earlier version that recorded only its path."""
    file = found.folder / CONFIG
    content = read_json(file) if file.is_file() else {}
    path = content.get("checkpoint", {}).get("pretrained_checkpoint")
    base = None if path is None else locate_checkpoint(path)
    if base is not None:
        return {BASE: model_input(path, base)}
    return {} if path is None else {BASE: {"path": path, "folder": path, "content": ""}}


def changes_since(
    earlier: Earlier, config: RunConfig, data: TrainingData, output: str | None
) -> list[str]:
    """Return the differences between a command and the one whose checkpoint it continues, one per
    line. Raises CheckpointError if a value differs that must not change, unless
    ``--allow-changed-data`` is given."""
    saved = [DataFile(**file) for file in earlier.source.state.get("data", ())]
    differ = [f"data: {line}" for line in changed_files(saved, data.files(), same_flags=True)]
    changes = []
    for part, name, line in _changed_values(earlier.config, config):
        if part in ("adapters", "distillation", *kind_classes()) or name in _MUST_AGREE:
            differ.append(line)
        elif part in _SAID or name in _SAID:
            changes.append(line)
    if differ and not ChangedDataFlags.of(config.checkpoint).allow_changed_data:
        more = f", and {len(differ) - 4} more differences" if len(differ) > 4 else ""
        raise CheckpointError(
            f"--output {output} was made otherwise: {'; '.join(differ[:4])}{more}; give what it "
            "was made from, or name another --output"
        )
    return [*compared_inputs(config, earlier.origin)[1], *differ, *changes]


def _changed_values(before: RunConfig, now: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield part, field and a description for each flag that has changed. Flags for the length of a
    run and its evaluations are left out."""
    old, new = before.to_dict(), without_secrets(now.to_dict())
    for part, values in new.items():
        flags = {field.name: field for field in dataclasses.fields(PART_FLAGS[part])}
        for name in (each for each in flags if each in values and each not in _NOT_COMPARED):
            was, value, meta = old[part].get(name), values[name], flags[name].metadata
            if json.dumps(was) != json.dumps(value) and meta.get("role") != "course":
                shown = _NAMES.get(name, flag_of(flags[name]))
                yield part, name, f"{shown} was {_words(was)} and is {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "not given"
    return "not given" if value is None else str(value)
