"""The command line of ``tools/merge_mp_partitions.py``: the tensor-parallel partitions of a
checkpoint as one, by the flags of Megatron-LM's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.source import Source
from megatron.config import ConfigError, Settings
from megatron.config.flags import POSITIVE, option
from megatron.formats.conversion.commands import export_megatron, opened, sizes_of
from megatron.run.folders import check_output
from megatron.run.run import RunToolParser

TYPES = {
    **{"BERT": ("bert", "lm"), "GPT": ("gpt", "lm"), "T5": ("t5", "lm")},
    **{"RACE": ("bert", "multiple_choice"), "MNLI": ("bert", "classification")},
    "QQP": ("bert", "classification"),
}
"""Family and head of the model types."""
CHECKED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class MergePartitionsConfig:
    """Merging: which checkpoint, and where to."""

    model_type: str | None = option(None, choices=tuple(TYPES))
    """Kind of the model, which --load must have."""
    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint, of any format."""
    save: str | None = option(None, derived="the folder merged in --load")
    """Folder of checkpoints to write in."""
    tensor_model_parallel_size: int | None = option(
        None, aliases=("--model-parallel-size",), derived="that of --load", bounds=POSITIVE
    )
    """Number of partitions, which --load must have."""
    target_tensor_parallel_size: int = option(1, bounds=POSITIVE)
    """Tensor-parallel size to write for."""
    target_pipeline_model_parallel_size: int = option(
        1, aliases=("--target-pipeline-parallel-size",), bounds=POSITIVE
    )
    """Pipeline-parallel size to write for."""


def merge(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Writes a checkpoint in fewer partitions. Raises ConfigError if a flag is missing, or is not
    what the checkpoint says; CheckpointError if it is damaged, or what is read back differs."""
    options, settings = RunToolParser(MergePartitionsConfig, description).parse(argv)
    if options.model_type is None:
        raise ConfigError(f"--model-type is missing: {', '.join(TYPES)}")
    if options.load is None:
        raise ConfigError("--load is missing: the checkpoint to merge")
    save = Path(options.save or Path(options.load) / "merged")
    if save.resolve() == Path(options.load).resolve():
        raise ConfigError(f"--save {save} is the folder of --load; give another")
    source = opened(options.load)
    source.require_model()
    check(source, options, settings)
    check_output("--save", save / "any")
    sizes = options.target_tensor_parallel_size, options.target_pipeline_model_parallel_size
    export_megatron(source, save, sizes)


def check(source: Source, options: MergePartitionsConfig, settings: Settings) -> None:
    """Raises ConfigError if a flag contradicts the checkpoint."""
    kind = (source.model.family, source.model.head)
    if kind != TYPES[options.model_type or ""]:
        shown = f"{kind[0]} with the head {kind[1]}" if kind[1] != "lm" else kind[0]
        types = " or ".join(name for name, each in TYPES.items() if each == kind)
        raise ConfigError(
            f"--model-type {options.model_type}: {source.folder} is a {shown}"
            + f"; its type is {types}" * bool(types)
        )
    size, parts = options.tensor_model_parallel_size, sizes_of(source)[0]
    if size not in (None, parts):
        raise ConfigError(
            f"--tensor-model-parallel-size {size}: {source.folder} has {parts} partition"
            f"{'s' * (parts > 1)}"
        )
    model = source.model.flags()
    for name in CHECKED:
        stored = getattr(model, name)
        if name in settings and settings[name].value != stored:
            flag = settings[name].origin.removeprefix("flag ")
            raise ConfigError(f"{flag} {settings[name].value}: {source.folder} has {stored}")
