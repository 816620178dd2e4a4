"""The result of a fine-tuning as a model of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint
from megatron.config import ConfigError
from megatron.finetune.chat_format import write_chat_format
from megatron.finetune.config import FineTuneConfig
from megatron.finetune.model_card import model_card
from megatron.finetune.settings import CHECKPOINTS
from megatron.finetune.summary import TuningSummary
from megatron.formats.conversion.commands import export_hf, parse_size
from megatron.formats.conversion.output import published_into
from megatron.training.run import Run
from megatron.util.progress import say

CARD = "README.md"


def check_output_folder(config: FineTuneConfig) -> None:
    """Raises ConfigError if the result cannot be written later, or would replace a model that this
    command has not written."""
    assert config.output is not None
    output = Path(config.output)
    parse_size(config.max_shard_size)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; name a folder")
    if config.overwrite or not (output / "config.json").is_file():
        return
    if not (output / CHECKPOINTS).is_dir():
        raise ConfigError(
            f"--output {output} has a model that finetune.py has not written (it has no "
            f"{CHECKPOINTS}); name another folder, or give --overwrite to replace it"
        )


def export_model(
    config: FineTuneConfig, run: Run, summary: TuningSummary, ends: frozenset[int]
) -> None:
    """Writes the newest checkpoint as a model into ``--output``, whose logits transformers computes
    alike. Raises ValueError or OSError if the model fits no architecture, or the folder cannot be
    written."""
    assert config.model is not None and config.output is not None
    output, checkpoints = Path(config.output), Path(run.config.checkpoint.save or "")
    found = locate_checkpoint(str(checkpoints))
    if found is None:
        raise CheckpointError(f"{checkpoints}: no complete checkpoint found")
    size = parse_size(config.max_shard_size)
    with published_into(output, overwrite=True) as folder:
        result = export_hf(found.open(), folder, size, name=f"--output {output}")
        has_template = write_chat_format(folder, config.model, run, ends)
        card = model_card(summary, output.resolve().name, has_template)
        (folder / CARD).write_text(card, "utf-8")
    say(f"{output}: {result}")
