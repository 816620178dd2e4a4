"""``to-hf``, ``from-hf`` and ``to-megatron``, and what all conversions share."""

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
from megatron.checkpoint.source import (
    DTYPES,
    FoundCheckpoint,
    Source,
    locate_checkpoint,
    nothing_at,
)
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
from megatron.model.spec import training_dtype
from megatron.util.errors import spelled
from megatron.util.progress import say


@dataclass(frozen=True)
class LoadConfig:
    """The checkpoint that is converted."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint, of any format."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    pretrained_checkpoint: str | None = option(None, derived="the one that the adapters name")
    """Where --load has adapters: the model that they belong to."""
    average: str | None = option(None, choices=("exponential", "uniform"))
    """Average of the weights that is converted instead of them, of a run with --ema-decay
    (exponential) or --swa-start-iter (uniform)."""


@dataclass(frozen=True)
class ToHFConfig:
    """Conversion to Hugging Face."""

    output: str | None = option(None)
    """Folder for the model; it must be new or empty."""
    architecture: str | None = option(
        None, derived="the one that the weights were read from, or else the plainest that fits"
    )
    """model_type to write, for example mistral."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""
    quantize: str | None = option(None, choices=("fp8",))
    """Weights of linear layers in 8 bits, in compressed-tensors' form, for a server: fp8 is float8
    with a scale for each output; embeddings, head, norms and routers keep their dtype."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file, for example 500MB, 5GB or 4GiB."""
    origin: str | None = option(None)
    """Folder of Hugging Face that the weights came from, of a model that sees images too: the
    output is a copy of it in which the text model is replaced, in the dtypes there."""
    overwrite: bool = option(False)
    """Replace the model in --output."""
    push_to_hub: str | None = option(None)
    """Repository to upload the model to, as owner/name; created if it does not exist, as a private
    one. One that exists and is public needs --public. The token is that of `hf auth login`, or
    HF_TOKEN."""
    public: bool = option(False)
    """Create the repository as a public one, which everybody can read."""
    private: bool = option(False)
    """Create the repository as a private one, as is done without this flag."""


def to_hf(argv: Sequence[str]) -> None:
    """Converts, compares logits, and gives the result its name only if they agree. Raises
    ConfigError, CheckpointError, or OSError where the hub refuses."""
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
    """Writes a checkpoint as a model of Hugging Face, which messages call ``name``, into an empty
    folder, and compares its logits with the checkpoint's; returns a summary. With ``quantize`` its
    weights are quantised then, and read again. Raises ValueError if the model fits no architecture,
    or not one with quantised weights. Raises CheckpointError if the checkpoint is damaged, cannot
    be used as a model, or the logits differ."""
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
    # Before there is our model: in float64 each needs twice the memory of float32.
    reference = reference_of(folder, source.model)
    # Our weights are rounded like theirs.
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
    """Writes a checkpoint into a copy of the folder ``origin``, and compares logits of texts alone,
    as :func:`export_hf`; returns a summary."""
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
    """Compares a source with the folder of transformers or peft that it, or its base, was read
    from: a mistake of reading that is repeated in writing shows nowhere else."""
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
        return  # the writer names the weights that are not finite
    what = f"{program} computes other logits with {read.folder} than the model that was read there"
    _require_agreement(result, what, name)


@dataclass(frozen=True)
class FromHFConfig:
    """Conversion from Hugging Face."""

    input: str | None = option(None)
    """Folder with config.json, weights, and the tokenizer's files if there are any."""
    output: str | None = option(None)
    """Folder of checkpoints to create; it must be new or empty."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file, for example 500MB, 5GB or 4GiB."""
    overwrite: bool = option(False)
    """Replace the checkpoints in --output."""


def from_hf(argv: Sequence[str]) -> None:
    """As :func:`to_hf`, in the other direction."""
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
    """Write a Hugging Face model as a checkpoint into the folder ``output``, comparing logits
    before it is published. Messages name the folders by their flags. Raises CheckpointError if
    ``path`` has no model, ``output`` must not be replaced, or logits differ."""
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
        # The checkpoint uses its own copy of the tokenizer, even after a move.
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
    """Conversion to Megatron-LM's old layout."""

    output: str | None = option(None)
    """Folder of checkpoints to write in; --load of Megatron."""
    target_tensor_parallel_size: int = option(1)
    """Tensor-parallel size to write for."""
    target_pipeline_parallel_size: int = option(1)
    """Pipeline-parallel size to write for."""
    target_expert_parallel_size: int = option(1)
    """Expert-parallel size to write for."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""
    release: bool = option(False)
    """Write release instead of iter_<iteration>: weights to start from, which Megatron loads
    without --no-load-optim and --no-load-rng."""
    checking: bool = option(True, off="--no-checking")
    """Do not read the result back to compare it with the checkpoint."""


def to_megatron(argv: Sequence[str]) -> None:
    """Converts by :func:`export_megatron`. Raises ConfigError too if a flag is missing or wrong."""
    checkpoint, config = parsed(
        argv, "to-megatron", "Writes a checkpoint in the layout of Megatron-LM's version 3.",
        LoadConfig, ToMegatronConfig,
    )  # fmt: skip
    output, source = Path(required(config, "output")), opened(checkpoint)
    sizes = config.target_tensor_parallel_size, config.target_pipeline_parallel_size
    experts = config.target_expert_parallel_size
    export_megatron(source, output, sizes, config.dtype, config.release, config.checking, experts)


def opened(checkpoint: LoadConfig) -> Source:
    """Open :func:`located`, and print the assumptions made for missing facts."""
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
    """Writes a checkpoint in Megatron's old layout, and prints a summary. ``sizes`` are
    tensor-parallel and pipeline-parallel, ``experts`` expert-parallel; ``release`` leaves the
    iteration out; ``checking`` reads the result back before it gets its name. Raises ValueError if
    Megatron has no such network, or the sizes do not divide it; CheckpointError if the checkpoint
    is damaged, or what is read back differs."""
    dtype = dtype or dtype_of(source)
    iteration = source.state.get("iteration")
    if iteration is None and isinstance(source, MegatronCheckpoint):
        iteration = source.iteration  # weights only, from a run that had one
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
    """Raises CheckpointError if what was written to a folder is not a source, rounded."""
    for name in source.names():
        if not torch.equal(written.tensor(name), source.tensor(name).to(dtype).float()):
            raise CheckpointError(f"{folder}: {name} differs from {source.folder}")


def sizes_of(source: Source) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size of the run that wrote a checkpoint; 1 where unknown."""
    if isinstance(source, MegatronCheckpoint):
        return source.tensor_size, source.pipeline_size
    if source.run is None:
        return 1, 1
    parallel = source.run.parallel
    return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size


def required(config: Any, field: str) -> str:
    """The value of a required flag. Raises ConfigError if it was not given."""
    value = getattr(config, field)
    if value is None:
        raise ConfigError(f"--{field.replace('_', '-')} is missing")
    return value


def parsed(argv: Sequence[str], command: str, description: str, *classes: type) -> list[Any]:
    """Return the flags of a command, one object per class."""
    prog = f"convert_checkpoint.py {command}"
    return list(parse_configs(classes, argv, prog=prog, description=description))


def located(checkpoint: LoadConfig) -> FoundCheckpoint:
    """The checkpoint of ``--load``. Raises ConfigError without the flag, CheckpointError
    without a checkpoint."""
    load, iteration = required(checkpoint, "load"), checkpoint.iteration
    place = locate_checkpoint(load, None if iteration is None else str(iteration))
    if place is None:
        raise CheckpointError(f"--load {load}: {nothing_at(load)}")
    average = checkpoint.average
    weights = "weight" if average is None else f"{average}_average"
    return place._replace(base=checkpoint.pretrained_checkpoint, weights=weights)


def dtype_of(source: Source) -> str:
    """The dtype that a checkpoint's run computed in, or else that it is stored in."""
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
