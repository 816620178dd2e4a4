"""The result of a fine-tuning as a model of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint
from megatron.finetune.config import FineTuneConfig
from megatron.formats.conversion.commands import export_hf, parse_size
from megatron.formats.conversion.output import need, published_into
from megatron.util.progress import say


def export_model(config: FineTuneConfig, checkpoints: Path, output: Path) -> None:
    """Writes the newest checkpoint as a model into ``output``, whose logits transformers computes
    alike. Raises ValueError or OSError if the model fits no architecture, or the folder cannot be
    written."""
    need("the export", "transformers")
    found = locate_checkpoint(str(checkpoints))
    if found is None:
        raise CheckpointError(f"{checkpoints}: no complete checkpoint found")
    with published_into(output, overwrite=True) as folder:
        result = export_hf(
            found.open(), folder, parse_size(config.max_shard_size), name=f"--output {output}"
        )
    say(f"{output}: {result}")
