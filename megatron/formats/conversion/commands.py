"""The commands ``to-hf``, ``from-hf`` and ``to-megatron``, and functions shared by all
conversions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint, nothing_at
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.output import (
    check_hub,
    need,
    parse_size,
    published,
    push,
    run_of,
    write_checkpoint,
)
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.compare import (
    Comparison,
    largest_difference,
    peft_reads,
    reference_of,
)
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.into import write_into
from megatron.formats.huggingface.packed.writing import linear_weights, quantise_folder
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import counted, model_of
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron
from megatron.formats.tensors import DTYPES
from megatron.model.spec import training_dtype
from megatron.util.errors import spelled
from megatron.util.progress import say


@dataclass(frozen=True)
class LoadConfig:
    """Checkpoint to convert."""

    load: str | None = option(None)
    """Checkpoint, or folder of checkpoints, in any format."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint to convert."""
    pretrained_checkpoint: str | None = option(None, derived="the one that the adapters name")
    """Base model of the adapters, if --load has adapters."""
    average: str | None = option(None, choices=("exponential", "uniform"))
    """Convert this average of the weights instead of the weights themselves. It exists in runs with
    --ema-decay (exponential) or --swa-start-iter (uniform)."""


@dataclass(frozen=True)
class ToHFConfig:
    """Conversion to Hugging Face."""

    output: str | None = option(None)
    """Output folder for the model. It must be new or empty."""
    architecture: str | None = option(
        None, derived="the one that the weights were read from, or else the plainest that fits"
    )
    """model_type to write, for example mistral."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""
    quantize: str | None = option(None, choices=("fp8",))
    """Quantise the weights of linear layers to 8 bits, in the compressed-tensors format for
    inference servers. fp8 is float8 with a scale for each output channel; embeddings, head, norms
    and routers keep their dtype."""
    max_shard_size: str = option("5GB")
    """Maximum size of a safetensors file, for example 500MB, 5GB or 4GiB."""
    origin: str | None = option(None)
    """Hugging Face folder from which the weights were imported, if its model also reads images.
    The output is a copy of this folder with the text model's weights replaced, in the folder's
    dtypes."""
    overwrite: bool = option(False)
    """Replace the model in --output."""
    push_to_hub: str | None = option(None)
    """Hugging Face repository to upload the model to, as owner/name. A new repository is created as
    private. An existing public repository requires --public. The access token is that of `hf auth
    login`, or HF_TOKEN."""
    public: bool = option(False)
    """Create the repository as public, so that anyone can read it."""
    private: bool = option(False)
    """Create the repository as private, which is the default."""


def to_hf(argv: Sequence[str]) -> None:
    """Run ``to-hf``: convert, compare logits, and publish the result only if they agree. Raises
    ConfigError, CheckpointError, or OSError if the hub refuses the upload."""
    checkpoint, config = parsed(
        argv, "to-hf", "Writes a checkpoint as a model of Hugging Face.", LoadConfig, ToHFConfig
    )
    required(checkpoint, "load")
    output = required(config, "output")
    shard_bytes = parse_size(config.max_shard_size)
    need("to-hf", "transformers")
    for flag, given in (("--public", config.public), ("--private", config.private)):
        if given and config.push_to_hub is None:
            raise ConfigError(f"{flag} concerns the repository of --push-to-hub, which is missing")
    if config.public and config.private:
        raise ConfigError("--public and --private contradict each other: give one of them")
    if config.push_to_hub is not None:
        check_hub(config.push_to_hub)
    located_checkpoint = located(checkpoint)
    if config.origin is not None:
        _check_origin(config, Path(config.origin), Path(output))
    with published(Path(output), config.overwrite, located_checkpoint.folder) as folder:
        if config.origin is not None:
            result = export_into(
                located_checkpoint.open(), Path(config.origin), folder, name=f"--output {output}"
            )
        else:
            result = export_hf(
                located_checkpoint.open(), folder, shard_bytes, config.dtype, config.architecture,
                name=f"--output {output}", quantize=config.quantize,
            )  # fmt: skip
    print(f"{output}: {result}")
    if config.push_to_hub is not None:
        print(f"pushed to {push(Path(output), config.push_to_hub, not config.public)}")


def export_hf(
    source: Source,
    folder: Path,
    shard_bytes: int,
    dtype: str | None = None,
    architecture: str | None = None,
    name: str = "the model",
    quantize: str | None = None,
) -> str:
    """Write a checkpoint as a Hugging Face model into an empty folder, and compare its logits with
    the checkpoint's. Return a summary.

    ``name`` is the model's name in messages. With ``quantize``, the weights are then quantised and
    read again. Raises ValueError if no architecture fits the model, or none that can be quantised.
    Raises CheckpointError if the checkpoint is damaged or cannot be used as a model, or if the
    logits differ."""
    source.require_model()
    source.read_ahead()
    _check_reading(source, name)
    dtype = dtype or dtype_of(source)
    form, exact = architecture_of(source.model, architecture), None
    if quantize is not None:
        linear_weights(form, source.model)
    near, why = form.nearest(source.model)
    if why:
        exact = model_of(source, DTYPES[dtype], torch.device("cpu")).float()
        source.model = near
    write_model(source, folder, dtype, shard_bytes, architecture, progress=say)
    # Computed before our model is built, since in float64 each takes twice its float32 memory.
    reference = reference_of(folder, source.model)
    # Round the weights to the dtype in which they were written.
    ours = model_of(source, DTYPES[dtype], torch.device("cpu")).float()
    if exact is not None:
        largest = largest_difference(ours, exact, form, near)
        say(f"approximated: {why}; logits differ from the checkpoint's by up to {largest:.2g}")
    result = reference.compared_with(ours)
    what = f"transformers computes other logits than the checkpoint {source.folder}"
    _require_agreement(result, what, name)
    if quantize is not None:
        quantise_folder(folder, form, source.model, say)
        packed = model_of(HuggingFaceFolder(folder), torch.float32, torch.device("cpu"))
        largest = largest_difference(packed, ours, form, source.model)
        say(f"in 8 bits logits differ from those of {dtype} by up to {largest:.2g}")
    return f"{source.folder} in {dtype}; {result}"


def _check_origin(config: ToHFConfig, origin: Path, output: Path) -> None:
    flags = {"--architecture": config.architecture, "--dtype": config.dtype}
    for flag, given in (flags | {"--quantize": config.quantize}).items():
        if given is not None:
            raise ConfigError(
                f"{flag} {given}: with --origin it is that of the folder; leave it out"
            )
    if HuggingFaceFolder.locate(origin, None) is None:
        raise CheckpointError(f"--origin {origin}: expected the folder of a Hugging Face model")
    first, second = origin.resolve(), output.resolve()
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise CheckpointError(f"--output {output} and --origin {origin} contain each other")


def export_into(source: Source, origin: Path, folder: Path, name: str = "the model") -> str:
    """Write a checkpoint into a copy of the multimodal folder ``origin``, and compare the logits of
    texts without images, as :func:`export_hf` does. Return a summary."""
    source.require_model()
    home = write_into(source, origin, folder, progress=say)
    dtype = home.dtype(next(iter(home.names())))
    reference = reference_of(folder, source.model, strict=False)
    ours = model_of(source, DTYPES[dtype], torch.device("cpu")).float()
    result = reference.compared_with(ours)
    what = f"transformers computes other logits than the checkpoint {source.folder}"
    _require_agreement(result, what, name)
    return f"{source.folder} as the {home.architecture.title} of {origin}, in {dtype}; {result}"


def _check_reading(source: Source, name: str) -> None:
    """Compare a source's logits with those of transformers or peft for the folder from which the
    source, or its base, was read. An error in reading that writing reverses would show nowhere
    else."""
    base = source.base or source
    if not isinstance(base, HuggingFaceFolder) or not base.read_by_transformers:
        return
    read: Source = base
    program = "transformers"
    if base is not source and peft_reads(source.folder):
        read, program = source, "peft"
    adapters = None if read is base else source.folder
    reference = reference_of(base.folder, read.model, strict=False, adapters=adapters)
    result = reference.compared_with(model_of(read, torch.float32, torch.device("cpu")))
    if not math.isfinite(result.magnitude):
        return  # the writer will report which weights are not finite
    what = f"{program} computes other logits with {read.folder} than the model that was read there"
    _require_agreement(result, what, name)


@dataclass(frozen=True)
class FromHFConfig:
    """Conversion from Hugging Face."""

    input: str | None = option(None)
    """Hugging Face folder with config.json, the weights and, if it has one, the tokenizer."""
    output: str | None = option(None)
    """Checkpoint folder to create. It must be new or empty."""
    max_shard_size: str = option("5GB")
    """Maximum size of a safetensors file, for example 500MB, 5GB or 4GiB."""
    overwrite: bool = option(False)
    """Replace the checkpoints in --output."""


def from_hf(argv: Sequence[str]) -> None:
    """Run ``from-hf``, the opposite of :func:`to_hf`. Raises the same errors."""
    (config,) = parsed(
        argv, "from-hf", "Writes a model of Hugging Face as a checkpoint.", FromHFConfig
    )
    path, output = Path(required(config, "input")), Path(required(config, "output"))
    shard_bytes = parse_size(config.max_shard_size)
    need("from-hf", "transformers")
    source, result = import_hf(path, output, "--input", "--output", shard_bytes, config.overwrite)
    print(f"{output}: {source.architecture.title} of {path}, {counted(source)}; {result}")
    if source.model.head == "lm":
        print(f"train on it with --load {output} --use-checkpoint-args")
    else:
        print(f"evaluate it, or train on it, with {spelled('tasks/main.py')} --load {output}")


def import_hf(
    path: Path,
    output: Path,
    input_flag: str,
    output_flag: str,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> tuple[HuggingFaceFolder, Comparison]:
    """Write a Hugging Face model as a checkpoint into the folder ``output``, and compare logits
    before publishing it. ``input_flag`` and ``output_flag`` name the folders in messages. Raises
    CheckpointError if ``path`` has no model, ``output`` must not be replaced, or the logits
    differ."""
    other = locate_checkpoint(path)
    form = HuggingFaceFolder if other is None else other.form
    theirs = getattr(form, "read_by_transformers", True)
    if HuggingFaceFolder.locate(path, None) is None or not theirs:
        why = "config.json not found" if path.is_dir() else "no such folder"
        if form is not HuggingFaceFolder:
            why = f"a {form.title}, which --load of to-hf and of a training reads"
        raise CheckpointError(
            f"{input_flag} {path}: {why}; expected the folder of a Hugging Face model"
        )
    source = HuggingFaceFolder(path)
    for note in source.notes:
        print(note)
    with published(output, overwrite, path, marks=(MEGATRON_TRACKER,)) as folder:
        if source.tokenizer is None:
            print(
                f"no tokenizer: {path} has no tokenizer files, so training needs --tokenizer-type "
                "and its files"
            )
        # Make the checkpoint use the copied tokenizer instead of the original, so that it can be
        # moved.
        source.tokenizer = None
        written = write_checkpoint(
            folder, source, iteration=0, moments=False, max_file_bytes=shard_bytes, progress=say
        )
        reference = reference_of(path, source.model, strict=False)
        ours = model_of(CheckpointReader(written), torch.float32, torch.device("cpu"))
        result = reference.compared_with(ours)
        what = f"the checkpoint computes other logits than transformers with {path}"
        _require_agreement(result, what, f"{output_flag} {output}")
    return source, result


@dataclass(frozen=True)
class ToMegatronConfig:
    """Conversion to the old layout of Megatron-LM."""

    output: str | None = option(None)
    """Checkpoint folder to write to, which becomes Megatron's --load."""
    target_tensor_parallel_size: int = option(1)
    """Tensor-parallel size of the written checkpoint."""
    target_pipeline_parallel_size: int = option(1)
    """Pipeline-parallel size of the written checkpoint."""
    target_expert_parallel_size: int = option(1)
    """Expert-parallel size of the written checkpoint."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""
    release: bool = option(False)
    """Name the checkpoint release instead of iter_<iteration>. Megatron then treats it as initial
    weights, and loads it without --no-load-optim and --no-load-rng."""
    checking: bool = option(True, off="--no-checking")
    """Do not read the result back to compare it with the checkpoint."""


def to_megatron(argv: Sequence[str]) -> None:
    """Run :func:`export_megatron`. Also raises ConfigError if a flag is missing or wrong."""
    checkpoint, config = parsed(
        argv, "to-megatron", "Writes a checkpoint in the layout of Megatron-LM's version 3.",
        LoadConfig, ToMegatronConfig,
    )  # fmt: skip
    output, source = Path(required(config, "output")), opened(checkpoint)
    sizes = config.target_tensor_parallel_size, config.target_pipeline_parallel_size
    experts = config.target_expert_parallel_size
    export_megatron(source, output, sizes, config.dtype, config.release, config.checking, experts)


def opened(checkpoint: LoadConfig) -> Source:
    """Open the checkpoint of ``--load``, and print the notes about facts that it lacks."""
    source = located(checkpoint).open()
    for note in source.notes:
        print(f"{source.folder}: {note}")
    return source


def export_megatron(
    source: Source,
    output: Path,
    sizes: tuple[int, int],
    dtype: str | None = None,
    release: bool = False,
    checking: bool = True,
    experts: int = 1,
) -> None:
    """Write a checkpoint in Megatron's old layout, and print a summary.

    Args:
        sizes: tensor-parallel and pipeline-parallel size.
        release: write it as initial weights, without an iteration.
        checking: read the result back before it is published.
        experts: expert-parallel size.

    Raises ValueError if Megatron does not support the network or the sizes do not divide it, and
    CheckpointError if the checkpoint is damaged or a value that is read back differs."""
    dtype = dtype or dtype_of(source)
    iteration = source.state.get("iteration")
    if iteration is None and isinstance(source, MegatronCheckpoint):
        iteration = source.iteration  # known even if the checkpoint has only weights
    if release:
        iteration = None

    def check(folder: Path) -> None:
        if checking:
            require_equal(MegatronCheckpoint(folder), source, DTYPES[dtype], folder)

    folder = write_megatron(
        source, output, *sizes, iteration, dtype, progress=say, check=check, expert_size=experts
    )
    result = "read back and equal, bit by bit" if checking else "not read back"
    print(
        f"{folder}: {source.folder} in {dtype} for tensor-parallel size {sizes[0]} and pipeline-"
        f"parallel size {sizes[1]}; {counted(source)}, {result}"
    )
    if iteration is not None:
        print("it has weights only: load it with --no-load-optim --no-load-rng or --finetune")


def require_equal(written: Source, source: Source, dtype: torch.dtype, folder: Path) -> None:
    """Raise CheckpointError if the written tensors differ from the source's, rounded to
    ``dtype``."""
    for name in source.names():
        if not torch.equal(written.tensor(name), source.tensor(name).to(dtype).float()):
            raise CheckpointError(f"{folder}: {name} differs from {source.folder}")


def sizes_of(source: Source) -> tuple[int, int]:
    """Return the (tensor-parallel, pipeline-parallel) sizes of a checkpoint's run; 1 if unknown."""
    if isinstance(source, MegatronCheckpoint):
        return source.tensor_size, source.pipeline_size
    if source.run is None:
        return 1, 1
    parallel = source.run.parallel
    return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size


def required(config: Any, field: str) -> str:
    """Return the value of a required flag. Raises ConfigError if it was not given."""
    value = getattr(config, field)
    if value is None:
        raise ConfigError(f"--{field.replace('_', '-')} is missing")
    return value


def parsed(argv: Sequence[str], command: str, description: str, *classes: type) -> list[Any]:
    """Parse a command's flags. Return one object per class."""
    prog = f"convert_checkpoint.py {command}"
    return list(parse_configs(classes, argv, prog=prog, description=description))


def located(checkpoint: LoadConfig) -> FoundCheckpoint:
    """Find the checkpoint of ``--load``. Raises ConfigError if the flag is missing, and
    CheckpointError if there is no checkpoint."""
    load, iteration = required(checkpoint, "load"), checkpoint.iteration
    place = locate_checkpoint(load, None if iteration is None else str(iteration))
    if place is None:
        raise CheckpointError(f"--load {load}: {nothing_at(load)}")
    average = checkpoint.average
    weights = "weight" if average is None else f"{average}_average"
    return place._replace(base=checkpoint.pretrained_checkpoint, weights=weights)


def dtype_of(source: Source) -> str:
    """Return the dtype in which a checkpoint's run computed or, if unknown, in which it is
    stored."""
    return str(training_dtype(run_of(source))).removeprefix("torch.")


def _require_agreement(result: Comparison, what: str, output: str) -> None:
    if not math.isfinite(result.magnitude):
        raise CheckpointError(
            f"transformers computes logits that are not finite, so {output} is not written; "
            "tools/inspect_checkpoint.py shows the norms of all weights"
        )
    if not result.agree:
        raise CheckpointError(
            f"{what}: the largest difference is {result.largest:.3g} (allowed {result.allowed:.2g} "
            f"of logits up to {result.magnitude:.3g}, in float64); {output} is not written"
        )
