#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Megatron-LM's reshaping command: a checkpoint at other tensor- and pipeline-parallel sizes.

    python tools/checkpoint/util.py --model-type GPT --load-dir old --save-dir new \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2

It reads any format and writes Megatron's old layout, or with --saver safetensors this project's
own, which every layout loads and which needs no sizes. A Llama, as Meta or Hugging Face has it:

    python tools/checkpoint/util.py --model-type GPT --loader llama2 --checkpoint-type meta \
        --model-size 7B --load-dir llama-2 --save-dir new --tokenizer-model tokenizer.model \
        --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --bf16
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.source import Source, reader
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.commands import (
    LoadConfig,
    export_megatron,
    opened,
    required,
    sizes_of,
)
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.legacy_megatron.names import FAMILIES
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.meta import PARAMS, tokenizer_of_file
from megatron.tokenizer import build_tokenizer
from megatron.util.errors import one_line
from megatron.util.progress import say

SAVERS = ("megatron", "safetensors")
LLAMA_LOADERS = ("llama2", "llama2_hf", "llama_mistral")
"""Megatron's loaders that read Llama and its relatives."""
CHECKPOINT_TYPES = {"meta": "meta", "hf": "huggingface"}
"""Names of formats in --checkpoint-type, and here."""


@dataclass(frozen=True)
class ReshapeConfig:
    """Reshaping, with the flags of Megatron-LM's command."""

    model_type: str | None = option(None, choices=tuple(known.family.upper() for known in FAMILIES))
    """Kind of the model, which --load-dir must have."""
    load_dir: str | None = option(None)
    """Folder of checkpoints, one checkpoint, or a zip archive, of any format."""
    save_dir: str | None = option(None)
    """Folder of checkpoints to write in."""
    target_tensor_parallel_size: int | None = option(None, derived="that of --load-dir, or 1")
    """Tensor-parallel size to write for."""
    target_pipeline_parallel_size: int | None = option(None, derived="that of --load-dir, or 1")
    """Pipeline-parallel size to write for."""
    saver: str = option("megatron")
    """megatron for its old layout, safetensors for this project's own format."""
    loader: str | None = option(None, note="the format of --load-dir is recognised")
    """Format of --load-dir."""
    checkpoint_type: str | None = option(None, choices=tuple(CHECKPOINT_TYPES))
    """Who wrote the Llama in --load-dir: Meta, or Hugging Face."""
    model_size: str | None = option(None, aliases=("--model_size",))
    """Name of a Llama, such as 7B or llama2-7B: the folder of it in --load-dir, if that holds
    several."""
    tokenizer_model: str | None = option(None, derived="that of --load-dir, if it has one")
    """The Llama's tokenizer: tokenizer.model of SentencePiece or of Llama 3, or the folder of a
    Hugging Face tokenizer."""
    bf16: bool = option(False)
    """Write the weights in bfloat16; without --bf16 and --fp16 as they are stored."""
    fp16: bool = option(False)
    """Write the weights in float16."""
    true_vocab_size: int | None = option(None)
    """Size of the vocabulary without padding, where a checkpoint of Megatron lacks it."""
    checking: bool = option(True, off="--no-checking")
    """Do not read the result back to compare it."""
    max_queue_size: int | None = option(None, note="there is one process and no queue")
    """Length of the queue between loader and saver."""
    megatron_path: str | None = option(None, note="none of Megatron's code is run")
    """Folder of Megatron-LM."""
    loader_transformer_impl: str | None = option(
        None, choices=("local", "transformer_engine"), note="there is one implementation"
    )
    """Implementation that reads --load-dir."""
    make_vocab_size_divisible_by: int | None = option(None, note="the ranks decide the padding")
    """Multiple that the token embedding is padded to."""
    vocab_file: str | None = option(None, note="the weights say how many tokens there are")
    """Vocabulary of --load-dir."""


def main(argv: Sequence[str] | None = None) -> None:
    try:
        reshape(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        sys.exit(f"util.py: error: {one_line(error)}")


def reshape(argv: Sequence[str]) -> None:
    """Reads, and writes at other sizes.

    Raises:
        ConfigError: a flag is missing or wrong.
        ValueError: Megatron has no such network, or the sizes do not divide it.
        CheckpointError: the checkpoint is damaged, or what is read back differs.
    """
    (config,) = parse_configs((ReshapeConfig,), argv, prog="util.py", description=__doc__)
    model_type = required(config, "model_type")
    load, save = required(config, "load_dir"), Path(required(config, "save_dir"))
    if config.saver not in SAVERS:
        raise ConfigError(
            f"--saver {config.saver}: expected one of {', '.join(SAVERS)}, and "
            "tools/convert_checkpoint.py has more"
        )
    if config.bf16 and config.fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other")
    llama = config.loader in LLAMA_LOADERS
    for flag, value in (
        ("--loader", None if llama else config.loader),
        ("--max-queue-size", config.max_queue_size),
        ("--megatron-path", config.megatron_path),
        ("--loader-transformer-impl", config.loader_transformer_impl),
        ("--make-vocab-size-divisible-by", config.make_vocab_size_divisible_by),
        ("--vocab-file", config.vocab_file),
    ):
        if value is not None:
            print(f"{flag} {value} is accepted and not used")
    source = opened(LoadConfig(llama_folder(load, config.model_size) if llama else load))
    source.require_model()
    if llama:
        check_llama(source, config.checkpoint_type)
    if config.tokenizer_model is not None:
        set_tokenizer(source, Path(config.tokenizer_model))
    if source.model.family != model_type.lower():
        raise ConfigError(
            f"--model-type {model_type}: {source.folder} is a {source.model.family.upper()}"
        )
    if config.true_vocab_size is not None:
        set_vocabulary(source, config.true_vocab_size)
    tensor, pipeline = sizes_of(source)
    if config.saver == "safetensors":
        for flag, value in (
            ("--target-tensor-parallel-size", config.target_tensor_parallel_size),
            ("--target-pipeline-parallel-size", config.target_pipeline_parallel_size),
        ):
            if value is not None:
                print(f"{flag} {value} is accepted and not used: any layout loads what is written")
        print(f"{write_checkpoint(save, source, progress=say)}: any layout loads it with --load")
        return
    tensor = config.target_tensor_parallel_size or tensor
    pipeline = config.target_pipeline_parallel_size or pipeline
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else None
    export_megatron(source, save, (tensor, pipeline), dtype, checking=config.checking)


def llama_folder(load: str, size: str | None) -> str:
    """The folder of a Llama: ``load``, or in it that of a size, where ``load`` has one for each."""
    place = Path(load)
    if size is None or not place.is_dir() or (place / PARAMS).is_file():
        return load
    names = (size, size.removeprefix("llama2-"), f"llama-2-{size.lower()}")
    return str(next((place / name for name in names if (place / name).is_dir()), place))


def check_llama(source: Source, kind: str | None) -> None:
    """Raises ConfigError if a Llama's checkpoint is not of the kind that --checkpoint-type says."""
    if kind is not None and not isinstance(source, reader(CHECKPOINT_TYPES[kind])):
        raise ConfigError(
            f"--checkpoint-type {kind}: {source.folder} is a {source.title}; it has to be a "
            f"{reader(CHECKPOINT_TYPES[kind]).title}"
        )


def set_tokenizer(source: Source, path: Path) -> None:
    """Sets the tokenizer that is written with the weights. Raises ConfigError if it does not exist,
    is none, or has more tokens than the model."""
    if not path.exists():
        raise ConfigError(f"--tokenizer-model {path} does not exist")
    named = tokenizer_of_file(path)
    size, rows = build_tokenizer(named).vocab_size, source.model.vocabulary.size
    if size > rows:
        raise ConfigError(
            f"--tokenizer-model {path} has {size:,} tokens, but the token embedding of "
            f"{source.folder} has {rows:,} rows; give the tokenizer that it was trained with"
        )
    source.tokenizer = named


def set_vocabulary(source: Source, size: int) -> None:
    """Sets how many rows of the token embedding are tokens.

    Raises:
        ConfigError: the checkpoint says another size itself, or has fewer rows.
    """
    known = source.model.vocabulary.size
    if isinstance(source, MegatronCheckpoint) and source.vocabulary_is_guessed:
        if not 0 < size <= (known or 0):
            raise ConfigError(f"--true-vocab-size {size}: the token embedding has {known} rows")
        source.set_vocabulary(size)
    elif size != known:
        raise ConfigError(f"--true-vocab-size {size}: {source.folder} says that it is {known}")


if __name__ == "__main__":
    main()
