"""Conversion programs with Megatron's flags: Megatron-DeepSpeed's converter for Llama models
(``tools/hf2megads_weight_converter.py``), and Megatron-LM's program that merges tensor-parallel
partitions (``tools/merge_mp_partitions.py``).

The converter also accepts the flags of the training run that uses the checkpoint. Sizes in these
flags must equal the model's. Flags for layout and schedules have no effect, because any layout can
load the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import Source
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    ModelConfig,
    ModelFlags,
    PrecisionConfig,
    Settings,
)
from megatron.config.flags import POSITIVE, build, names_of, option
from megatron.config.output import check_output
from megatron.formats.conversion.commands import (
    LoadConfig,
    export_hf,
    export_megatron,
    import_hf,
    opened,
    sizes_of,
)
from megatron.formats.conversion.output import need, published
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.huggingface.weight_files import WeightFiles
from megatron.run.run import RunToolParser
from megatron.util.processes import is_main_process

LOAD_MODES = {"torchbin": ".bin", "safetensor": ".safetensors", "auto": ""}
"""Suffix of the weight files that each --load-mode reads; "" for any."""
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HFConverterConfig:
    """Conversion from or to Hugging Face, with Megatron-DeepSpeed's flags."""

    hf_ckpt_dir: str | None = option(None)
    """Folder of the Hugging Face model. With --to-hf-ckpt, the model from which training
    started."""
    hf_ckpt_num_shards: int | None = option(None)
    """Number of weight files that the Hugging Face model must have; -1 for any number. It is not
    checked if --load-mode is auto."""
    load_mode: str = option("auto", choices=tuple(LOAD_MODES))
    """File format of the weights: torchbin for pytorch_model*.bin, safetensor for
    model*.safetensors, auto for whichever is found."""
    to_hf_ckpt: bool = option(False)
    """Write the checkpoint of --load as a Hugging Face model to --save. Without this flag,
    --hf-ckpt-dir is written as a checkpoint to --save."""


def convert(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the converter in one of the processes that a launcher starts; only one of them converts.
    Raises ConfigError if a flag is missing or contradicts the model, and CheckpointError if a file
    is missing or damaged, or if the logits of the two formats differ."""
    config, settings = RunToolParser(HFConverterConfig, description).parse(argv)
    if not is_main_process():
        return  # launchers start a process for each GPU; one is enough
    checkpoint = build(CheckpointConfig, settings)
    if checkpoint.save is None:
        raise ConfigError("--save is missing, the folder to write")
    output = Path(checkpoint.save)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--save {output} exists already; remove it, or name a new folder")
    need("the conversion", "transformers")
    if config.to_hf_ckpt:
        _to_hf(config.hf_ckpt_dir, checkpoint, settings, output)
    else:
        _from_hf(config, settings, output)


def _from_hf(config: HFConverterConfig, settings: Settings, output: Path) -> None:
    if not config.hf_ckpt_dir:
        raise ConfigError("--hf-ckpt-dir is missing, the folder of the model of Hugging Face")
    path = Path(config.hf_ckpt_dir)
    if HuggingFaceFolder.locate(path, None) is not None:
        check_files(path, config.load_mode, config.hf_ckpt_num_shards)
        _check_model(settings, HuggingFaceFolder(path).model, f"{path / 'config.json'}")
    source, result = import_hf(path, output, "--hf-ckpt-dir", "--save", _SHARD_BYTES)
    print(f"{output}: {source.architecture.title} of {path}; {result}")
    print(f"any layout loads it: finetune_llama.py --load {output} --finetune")


def _to_hf(
    original: str | None, checkpoint: CheckpointConfig, settings: Settings, output: Path
) -> None:
    if not checkpoint.load:
        raise ConfigError("--load is missing, the checkpoint to write as a model of Hugging Face")
    source = opened(LoadConfig(checkpoint.load))
    source.require_model()
    _check_model(settings, source.model, f"{source.folder}")
    if original and (Path(original) / "config.json").is_file():
        source.model = _with_positions(source.model, HuggingFaceFolder(Path(original)).model)
    precision = build(PrecisionConfig, settings)
    dtype = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else None
    with published(output, False, source.folder) as folder:
        result = export_hf(source, folder, _SHARD_BYTES, dtype, name=f"--save {output}")
    print(f"{output}: {result}")


def _with_positions(model: ModelConfig, original: ModelConfig) -> ModelConfig:
    """Return ``model`` with the maximum sequence length of ``original``, the model from which
    training started. With rotary positions, training on shorter sequences keeps that length."""
    positions, first = model.positions, original.positions
    if positions.position_embedding_type != "rope" or positions.rope_scaling != first.rope_scaling:
        return model
    longest = dataclasses.replace(positions, max_position_embeddings=first.max_position_embeddings)
    return dataclasses.replace(model, positions=longest)


def check_files(path: Path, mode: str, shards: int | None) -> None:
    """Raise CheckpointError if a folder's weights have a format other than ``mode``. The same
    applies if ``shards`` is positive and differs from the number of weight files."""
    files = sorted(set(WeightFiles(path).files.values()))
    ending = LOAD_MODES[mode]
    others = [file.name for file in files if not file.name.endswith(ending)]
    if others:
        raise CheckpointError(f"--load-mode {mode}: {path} has {', '.join(others[:3])}; use auto")
    if mode != "auto" and shards is not None and 0 < shards != len(files):
        raise CheckpointError(
            f"--hf-ckpt-num-shards {shards}: {path} has {len(files)}; -1 takes any number"
        )


def _check_model(settings: Settings, model: ModelConfig, where: str) -> None:
    """Raise ConfigError if the settings contain a size that differs from the model's."""
    fields = {field.name for field in dataclasses.fields(ModelFlags)}
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= settings.keys():
        return
    given = {name: each for name, each in settings.items() if name in fields}
    ours = build(ModelFlags, given).resolve()
    here, there = ours.flags(), model.flags()
    # Sizes that were not given come from the checkpoint, so only given ones are compared.
    for name in names_of("weights", ModelFlags):
        if name in given and getattr(here, name) != getattr(there, name):
            raise ConfigError(
                f"{given[name].origin.removeprefix('flag ')} {getattr(here, name)}: {where} has "
                f"{getattr(there, name)}; leave the flag out, or give that"
            )


TYPES = {
    **{"BERT": ("bert", "lm"), "GPT": ("gpt", "lm"), "T5": ("t5", "lm")},
    **{"RACE": ("bert", "multiple_choice"), "MNLI": ("bert", "classification")},
    "QQP": ("bert", "classification"),
}
"""Model family and head that each --model-type means."""
CHECKED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


@dataclass(frozen=True)
class MergePartitionsConfig:
    """Merge of tensor-parallel partitions: input and output."""

    model_type: str | None = option(None, choices=tuple(TYPES))
    """Type of the model in --load."""
    load: str | None = option(None)
    """Checkpoint, or folder of checkpoints, in any format."""
    save: str | None = option(None, derived="the folder merged in --load")
    """Checkpoint folder to write to."""
    tensor_model_parallel_size: int | None = option(
        None, aliases=("--model-parallel-size",), derived="that of --load", bounds=POSITIVE
    )
    """Number of tensor-parallel partitions in --load. It is an error if the checkpoint has another
    number."""
    target_tensor_parallel_size: int = option(1, bounds=POSITIVE)
    """Tensor-parallel size of the written checkpoint."""
    target_pipeline_model_parallel_size: int = option(
        1, aliases=("--target-pipeline-parallel-size",), bounds=POSITIVE
    )
    """Pipeline-parallel size of the written checkpoint."""


def merge(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Write a checkpoint with another number of partitions. Raises ConfigError if a flag is missing
    or contradicts the checkpoint, and CheckpointError if the checkpoint is damaged or a value that
    is read back differs."""
    options, settings = RunToolParser(MergePartitionsConfig, description).parse(argv)
    if options.model_type is None:
        raise ConfigError(f"--model-type is missing: {', '.join(TYPES)}")
    if options.load is None:
        raise ConfigError("--load is missing: the checkpoint to merge")
    save = Path(options.save or Path(options.load) / "merged")
    if save.resolve() == Path(options.load).resolve():
        raise ConfigError(f"--save {save} is the folder of --load; give another")
    source = opened(LoadConfig(options.load))
    source.require_model()
    _check_options(source, options, settings)
    check_output("--save", save / "any")
    sizes = options.target_tensor_parallel_size, options.target_pipeline_model_parallel_size
    export_megatron(source, save, sizes)


def _check_options(source: Source, options: MergePartitionsConfig, settings: Settings) -> None:
    """Raise ConfigError if a flag contradicts the checkpoint."""
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
