"""Programs with the flags of Megatron's own: Megatron-DeepSpeed's converter of Llamas
(``tools/hf2megads_weight_converter.py``), and Megatron-LM's merging of tensor-parallel partitions
(``tools/merge_mp_partitions.py``).

The converter takes its own flags, and the flags of the training that uses the checkpoint. Sizes in
these flags must equal the model's; layout and schedules have no effect, because any layout loads
the result.
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
"""Endings of the files of weights that a --load-mode reads."""
_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class HFConverterConfig:
    """Conversion between Hugging Face and this project, with Megatron-DeepSpeed's flags."""

    hf_ckpt_dir: str | None = option(None)
    """Folder of the model of Hugging Face; with --to-hf-ckpt the one that training started from."""
    hf_ckpt_num_shards: int | None = option(None)
    """Number of files of its weights; -1 for any. Compared where --load-mode names a form."""
    load_mode: str = option("auto", choices=tuple(LOAD_MODES))
    """Form of its weights: torchbin for pytorch_model*.bin, safetensor for model*.safetensors, auto
    for whichever is there."""
    to_hf_ckpt: bool = option(False)
    """Write the checkpoint of --load as a model of Hugging Face in --save; by default --hf-ckpt-dir
    is written as a checkpoint in --save."""


def convert(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Converts in one of the processes that a launcher starts. Raises ConfigError if a flag is
    missing, or contradicts the model; CheckpointError if a file is missing or damaged, or the
    logits of both forms differ."""
    config, settings = RunToolParser(HFConverterConfig, description).parse(argv)
    if not is_main_process():
        return  # a launcher started one for each GPU
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
    """A model with the longest sequence of that which its training started from: with rotary
    positions a training on shorter ones does not change it."""
    positions, first = model.positions, original.positions
    if positions.position_embedding_type != "rope" or positions.rope_scaling != first.rope_scaling:
        return model
    longest = dataclasses.replace(positions, max_position_embeddings=first.max_position_embeddings)
    return dataclasses.replace(model, positions=longest)


def check_files(path: Path, mode: str, shards: int | None) -> None:
    """Raises CheckpointError if a folder has weights of another form than ``mode``, or in another
    number of files than ``shards``, where that is positive."""
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
    """Raises ConfigError if the settings give a size that the model does not have."""
    fields = {field.name for field in dataclasses.fields(ModelFlags)}
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= settings.keys():
        return
    given = {name: each for name, each in settings.items() if name in fields}
    ours = build(ModelFlags, given).resolve()
    here, there = ours.flags(), model.flags()
    # What is not given may differ: the checkpoint says it.
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
    """Writes a checkpoint in fewer partitions. Raises ConfigError if a flag is missing, or differs
    from the checkpoint; CheckpointError if it is damaged, or what is read back differs."""
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
