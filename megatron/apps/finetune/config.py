"""The flags of ``finetune.py`` beside those of training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, option

_HELD_OUT = Bounds(lambda value: 0 <= value <= 0.5, "must be in [0, 0.5]")


@dataclass(frozen=True)
class TuningConfig:
    """Fine-tuning: the model, its data, and what becomes of it."""

    model: str | None = option(None)
    """Folder of the model, as downloaded from Hugging Face, or a checkpoint of any format."""
    data: tuple[str, ...] = option(())
    """Files, folders or globs of examples (JSON, JSON lines, Parquet, CSV, TSV): instructions and
    answers, or, with --preference, better and worse answers. Of the folder of a data set its
    training split. PATH PATH ... uses all examples of each, WEIGHT PATH WEIGHT PATH ... blends
    them."""
    output: str | None = option(None)
    """Folder for the result: a model of Hugging Face, the checkpoints, and a report."""
    eval_data: tuple[str, ...] = option(())
    """Files, folders or globs of held-out examples, instead of a share of --data. Of the folder of
    a data set its validation or, without one, its test split."""
    held_out: float | None = option(
        None, derived="0.05; 0 with --eval-data", bounds=_HELD_OUT, aliases=("--val-size",)
    )
    """Share of --data that is held out and evaluated on; 0 for none."""
    epochs: int | None = option(
        None, derived="3; with --preference 1", bounds=POSITIVE, aliases=("--num-train-epochs",)
    )
    """How often to train on all examples; --train-iters and the like set another length."""
    sample_prompts: str | None = option(None, derived="the first held-out prompts")
    """File with prompts that the model in training answers at every evaluation: a line each, or a
    file of examples."""
    samples: int = option(3, bounds=NOT_NEGATIVE)
    """Number of prompts that the model in training answers at every evaluation; 0 for none."""
    sample_tokens: int = option(128, bounds=POSITIVE)
    """Most tokens of such an answer."""
    export: bool = option(True, off="--no-export")
    """Leave it at checkpoints: write no Hugging Face folder."""
    merge_adapters: bool = option(True, flag="--merge-adapters", off="--no-merge-adapters")
    """With --lora, write the model with its adapters added to the weights, beside the adapters in
    the folder adapter."""
    overwrite: bool = option(False)
    """Replace a model in --output that this command has not written."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file of the result, for example 500MB, 5GB or 4GiB."""
