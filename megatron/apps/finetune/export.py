"""The result of a fine-tuning as a model of Hugging Face."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.apps.finetune.chat_format import write_chat_format
from megatron.apps.finetune.config import TuningConfig
from megatron.apps.finetune.model_card import model_card
from megatron.apps.finetune.provenance import TuningRecord, run_of
from megatron.apps.finetune.settings import CHECKPOINTS
from megatron.apps.finetune.summary import TuningSummary
from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.folder import BEST, replace_folder, unfinished_folder
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import ConfigError
from megatron.features.adapters.checkpoint import AdaptedSource
from megatron.formats.conversion.commands import export_hf, parse_size
from megatron.formats.conversion.output import published_into
from megatron.formats.huggingface.peft import write_peft
from megatron.run.folders import check_output
from megatron.run.run import Run
from megatron.util.progress import say

CARD, REPORT = "README.md", "report.html"
EXPORTED = "exported.json"
"""Among the checkpoints: which of them the model in --output is, and how it was written."""
ADAPTER = "adapter"
"""Folder of the adapters in --output."""


def check_output_folder(config: TuningConfig) -> None:
    """Raises ConfigError if the result cannot be written later, or would replace a model that this
    command has not written."""
    assert config.output is not None
    output = Path(config.output)
    parse_size(config.max_shard_size)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; name a folder")
    check_output("--output", output / REPORT)
    if config.overwrite or not (output / "config.json").is_file():
        return
    if locate_checkpoint(output / CHECKPOINTS) is None:
        raise ConfigError(
            f"--output {output} has a model that no checkpoint in {output / CHECKPOINTS} has made; "
            "name another folder, or give --overwrite to replace it"
        )


def export_model(
    config: TuningConfig, run: Run, summary: TuningSummary, ends: frozenset[int]
) -> None:
    """Writes the newest checkpoint as a model into ``--output``, whose logits transformers computes
    alike. Its card says what the checkpoint does, or else ``summary``. Raises ValueError or OSError
    if the model fits no architecture, or the folder cannot be written."""
    assert config.model is not None and config.output is not None
    output, found = Path(config.output), exported_checkpoint(run)
    size = parse_size(config.max_shard_size)
    source = found.open()
    try:
        if isinstance(source, AdaptedSource):
            export_adapters(source, output / ADAPTER, config.model, run)
            if not config.merge_adapters:
                _note_export(config, found.folder, [])
                return
        with published_into(output, overwrite=True) as folder:
            result = export_hf(source, folder, size, name=f"--output {output}")
            has_template = write_chat_format(folder, run, ends)
            card = model_card(done_in(source, summary), output.resolve().name, has_template)
            (folder / CARD).write_text(card, "utf-8")
            names = sorted(path.name for path in folder.iterdir())
        _note_export(config, found.folder, names)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{error}. The training is complete in {found.folder}: mend that and give the same "
            "command again, which then only writes the model"
        ) from error
    say(f"{output}: {result}")


def exported_checkpoint(run: Run) -> FoundCheckpoint:
    """The checkpoint that is exported. Raises CheckpointError without one."""
    checkpoints = Path(run.config.checkpoint.save or "")
    found = locate_checkpoint(str(checkpoints), best_of(run))
    if found is None:
        raise CheckpointError(f"{checkpoints}: no complete checkpoint found")
    return found


def done_in(source: Source, summary: TuningSummary) -> TuningSummary:
    """Work done until a checkpoint, by its own record, else as in ``summary``."""
    steps = int(source.state.get("iteration", summary.steps))
    return dataclasses.replace(
        summary,
        config=run_of(source) or summary.config,
        record=TuningRecord.of(source) or summary.record,
        steps=steps,
        rows=[row for row in summary.rows if row["iteration"] <= steps],
    )


def is_exported(config: TuningConfig, run: Run) -> bool:
    """True if the model in ``--output`` is that of the checkpoint that would be exported, written
    as the flags say, and all of its files exist."""
    found = exported_checkpoint(run)
    path = found.folder.parent / EXPORTED
    if not path.is_file():
        return False
    output, content = Path(config.output or ""), read_json(path)
    files = [output / name for name in content.get("files", ())]
    if isinstance(found.open(verify=False), AdaptedSource):
        files.append(output / ADAPTER / "adapter_model.safetensors")
    same = content | {"files": None} == _export_note(config, found.folder, None)
    return same and all(file.is_file() for file in files)


def _note_export(config: TuningConfig, folder: Path, files: list[str]) -> None:
    write_json(folder.parent / EXPORTED, _export_note(config, folder, files))


def _export_note(config: TuningConfig, folder: Path, files: list[str] | None) -> dict[str, Any]:
    how = {"max_shard_size": config.max_shard_size, "merged": config.merge_adapters}
    return {"checkpoint": folder.name, **how, "files": files}


def best_of(run: Run) -> str | None:
    """The checkpoint of the best evaluation, with ``--keep-best``; None for the newest."""
    checkpoint = run.config.checkpoint
    path = Path(checkpoint.save or "") / BEST
    if not checkpoint.keep_best or not path.is_file():
        return None
    found: str | None = read_json(path)["checkpoint"]
    return found


def export_adapters(source: AdaptedSource, folder: Path, base: str, run: Run) -> None:
    """Writes the adapters of a checkpoint as peft does, for the model ``base``. Raises ValueError
    or OSError if they cannot be written."""
    with unfinished_folder(folder.resolve()) as temporary:
        tensors = write_peft(source, temporary, str(Path(base).resolve()))
        run.tokenizer.save_pretrained(temporary)
        replace_folder(temporary, folder.resolve(), {})
    say(f"{folder}: {tensors} tensors of adapters")
