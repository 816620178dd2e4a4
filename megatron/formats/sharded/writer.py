"""Writers of torch.distributed.checkpoint (DCP) and Megatron-Core's torch_dist checkpoints, with
one chunk in memory at a time. Also the commands ``to-torch-dist`` and ``to-dcp``.
"""

from __future__ import annotations

import io
import itertools
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint.files import CheckpointError, write_json
from megatron.checkpoint.folder import replace_folder
from megatron.checkpoint.manifest import KEPT_COUNTS
from megatron.checkpoint.source import Source
from megatron.config import ConfigError, ModelConfig, RunConfig
from megatron.config.flags import option
from megatron.formats.conversion.commands import (
    LoadConfig,
    dtype_of,
    opened,
    parsed,
    require_equal,
    required,
)
from megatron.formats.conversion.output import unfinished_folder
from megatron.formats.features import whole_shards
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.inspection import counted
from megatron.formats.legacy_megatron.arguments import arguments_of_model
from megatron.formats.legacy_megatron.experts import core_expert_name, is_of_experts
from megatron.formats.legacy_megatron.names import to_core
from megatron.formats.legacy_megatron.rank_files import MOMENTS, iteration_folder
from megatron.formats.legacy_megatron.writer import new_folder, share_of
from megatron.formats.sharded.files import METADATA
from megatron.formats.sharded.megatron_core import BACKEND, COMMON, VERSION, CoreFolder
from megatron.formats.tensors import DTYPES
from megatron.formats.trainers.dcp import DcpFolder
from megatron.util.files import sync, sync_path
from megatron.util.progress import progress_bar

_MOST_BYTES = 5 * 10**9
_LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
           "mlp.linear_fc2", "self_attention.core_attention")  # fmt: skip
"""Modules in a block that save extra state, which is empty without FP8."""


class ShardedWriter:
    """Writer of tensors to files ``__0_N.distcp`` in a new folder, as a single process would
    write them. :meth:`finish` writes ``.metadata``. A file has at most ``most_bytes``, or a
    single chunk."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._numbers = itertools.count()
        self._file: Any = None
        self._facts: dict[str, Any] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add(
        self,
        name: str,
        values: Tensor,
        shape: Sequence[int] | None = None,
        block: int = 0,
        path: tuple[str, ...] = (),
    ) -> None:
        """Write a tensor. If ``shape`` is given, ``values`` is the slice ``block`` along the first
        dimension of a tensor with this shape. ``path`` has the tensor's keys in the nested state
        dictionary."""
        self._paths[name] = path or (name,)
        stacked = shape is not None
        chunk = (values[None] if stacked else values).contiguous()
        whole = torch.Size(shape if shape is not None else chunk.shape)
        starts = torch.Size([block * stacked, *[0] * (len(whole) - 1)][: len(whole)])
        facts = self._facts.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), whole, [])
        )
        assert (facts.size, facts.properties.dtype) == (whole, chunk.dtype), name
        index = MetadataIndex(name, starts, len(facts.chunks))
        facts.chunks.append(ChunkStorageMetadata(starts, chunk.shape))
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()
        self._places[index] = self._write(chunk, chunk.nbytes)

    def add_object(self, name: str, value: Any) -> None:
        """Write a value that is not a tensor."""
        self._facts[name], self._paths[name] = BytesStorageMetadata(), (name,)
        self._places[MetadataIndex(name)] = self._write(value, 0)

    def _write(self, content: Any, size: int) -> _StorageInfo:
        if self._file is not None and self._file.tell() + size > self._most:
            self._close()
        if self._file is None:
            path = self._folder / f"__0_{next(self._numbers)}.distcp"
            self._file = path.open("xb")
        start = self._file.tell()
        torch.save(content, self._file)
        name = Path(self._file.name).name
        return _StorageInfo(name, start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is not None:
            sync(self._file)
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Close the current file, and write ``.metadata``."""
        self._close()
        metadata = Metadata(self._facts, self._paths, self._places, version="1.0.0")
        stream = io.BytesIO()
        pickle.dump(metadata, stream)
        (self._folder / METADATA).write_bytes(stream.getvalue())
        sync_path(self._folder / METADATA)


def write_torch_dist(
    source: Source,
    save: Path,
    dtype: str,
    moments: bool = True,
    distributed: bool = True,
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write a GPT's weights and Adam's moments in Megatron-Core's format, to a folder for
    Megatron's ``--load``. Return the checkpoint's folder. With ``distributed``, the state is that
    of the distributed optimizer. ``check`` is called with the folder before it is published, and
    can cancel the export by raising an error. Raises ValueError if Megatron does not support the
    model, CheckpointError if the source is damaged or the checkpoint already exists, and OSError if
    a file cannot be written. After an error nothing is left behind."""
    source.require_model()
    model = source.model
    arguments = arguments_of_model(model)
    iteration = source.state.get("iteration") if source.state else None
    moments = moments and bool(source.state) and has_moments(source)
    folder = save / iteration_folder(iteration)
    arguments |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_valid_samples": 0,
    }
    with new_folder(source, model, folder, arguments, iteration, dtype) as partial:
        writer = ShardedWriter(partial)
        # Float32 weights that are trained directly need no copy.
        master = None
        if moments and (distributed or dtype != "float32"):
            master = "param" if distributed else "fp32_param"
        for name in progress_bar("writing", source.names(), unit=" parameters"):
            _write_parameter(writer, source, name, DTYPES[dtype], moments, master)
        for module in _LINEAR:
            for n in range(model.num_layers):
                key = f"decoder.layers.{module}._extra_state/shard_{n}_{model.num_layers}"
                writer.add_object(key, [None])
        writer.finish()
        content = {"args": Namespace(**arguments), "checkpoint_version": VERSION}
        content |= {"iteration": iteration or 0, "num_floating_point_operations_so_far": 0}
        if moments:
            content["optimizer"] = _optimizer(source, distributed, dtype)
        with open(partial / COMMON, "xb") as file:
            torch.save(content, file)
            sync(file)
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_json(
            partial / BACKEND, backends | {"common_backend": "torch", "common_backend_version": 1}
        )
        check(partial)
    return folder


def has_moments(source: Source) -> bool:
    """Return whether Adam trains every weight and its state is complete. Muon and SOAP leave only
    some weights to Adam, and AdEMAMix has additional state."""
    kept = {"weight", *source.state.get(KEPT_COUNTS, {})}
    return all({*source.kinds(name)} - kept == {*MOMENTS} for name in source.names())


def _write_parameter(
    writer: ShardedWriter,
    source: Source,
    name: str,
    dtype: torch.dtype,
    moments: bool,
    master: str | None,
) -> None:
    model = source.model
    key, block = _key(name, model)
    for kind in source.kinds(name):
        if kind != "weight" and not (moments and kind in MOMENTS):
            continue
        values = source.tensor(name, kind)
        exact = share_of(values, name, model, 0, 1, torch.float32)
        shape = None if block is None else (model.num_layers, *exact.shape)
        if kind == "weight":
            writer.add(key, exact.to(dtype, copy=True), shape, block or 0)
            if master is not None and len(source.kinds(name)) > 1:
                writer.add(f"optimizer.state.{master}.{key}", exact, shape, block or 0)
        else:
            writer.add(f"optimizer.state.{kind}.{key}", exact, shape, block or 0)


def _key(name: str, model: ModelConfig) -> tuple[str, int | None]:
    """Return Megatron-Core's name for a parameter, and its block's index. Raises ValueError if
    Megatron-Core has no such parameter."""
    blocks = {n for n in whole_shards(model) if is_of_experts(n)}
    stack = name.split(".mlp")[0]
    next_to_experts = any(each.startswith(f"{stack}.mlp.") for each in blocks)
    if blocks and len({n.split(".mlp")[0] for n in blocks}) != model.num_layers:
        raise ValueError("torch_dist is written for networks with experts in every block, or none")
    if is_of_experts(name):
        _, number, inner = name.split(".", 2)
        theirs = core_expert_name(inner.replace("experts.", "experts.0.", 1))
        assert theirs is not None, name
        return f"decoder.layers.{theirs.replace('local_experts.0', 'experts')}", int(number)
    key = to_core(name, 0, bool(blocks) and (next_to_experts or ".mlp_norm." in name))
    if key is None:
        raise ValueError(f"Megatron-Core has no {name}")
    if not key.startswith("decoder.layers."):
        return key, None
    _, _, number, inner = key.split(".", 3)
    return f"decoder.layers.{inner}", int(number)


def _optimizer(source: Source, distributed: bool, dtype: str) -> dict[str, Any]:
    """Return the optimizer state other than tensors: parameter groups with and without weight
    decay, and the number of steps."""
    run: RunConfig | None = source.run
    step = float(source.state["optimizer_step"])
    betas, eps, decay = (0.9, 0.999), 1e-8, 0.01
    if run is not None:
        betas = (run.optimizer.adam_beta1, run.optimizer.adam_beta2)
        eps, decay = run.optimizer.adam_eps, run.optimizer.weight_decay
    groups = [
        {
            "wd_mult": multiplier, "lr_mult": 1.0, "is_expert_parallel": False,
            "is_decoupled_lr": False, "default_config": True, "betas": betas, "eps": eps,
            "weight_decay": decay, "step": step,
        }
        for multiplier in (1.0, 0.0)
    ]  # fmt: skip
    if distributed:
        return {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }
    inner = {"state": {"common_step": torch.tensor(step)}, "param_groups": groups}
    return inner if dtype == "float32" else {"optimizer": inner}


@dataclass(frozen=True)
class ToTorchDistConfig:
    """Conversion to Megatron-Core's torch_dist format."""

    output: str | None = option(None)
    """Checkpoint folder to write to, which becomes Megatron-LM's --load."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the model's weights. The optimizer's copy of the weights is float32."""
    optim: bool = option(True, off="--no-optim")
    """Leave out Adam's moments and float32 weights, which are otherwise written if the checkpoint
    has them."""
    distributed_optimizer: bool = option(True, off="--no-distributed-optimizer")
    """Write the optimizer state for a run without Megatron-LM's --use-distributed-optimizer."""


def to_torch_dist(argv: Sequence[str]) -> None:
    """Convert a checkpoint to Megatron-Core's format, and read the result back. Raises ConfigError
    if a flag is missing or wrong, the errors of :func:`write_torch_dist`, and CheckpointError if a
    value that is read back differs."""
    checkpoint, config = parsed(
        argv, "to-torch-dist", "Writes a checkpoint as Megatron-Core's torch_dist.",
        LoadConfig, ToTorchDistConfig,
    )  # fmt: skip
    output, source = required(config, "output"), opened(checkpoint)
    source.require_model()
    dtype = config.dtype or dtype_of(source)

    def check(folder: Path) -> None:
        written = CoreFolder(folder)
        # Float32 weights that are written with the optimizer state must be equal unrounded.
        exact = bool(written.state) and (config.distributed_optimizer or dtype != "float32")
        require_equal(written, source, torch.float32 if exact else DTYPES[dtype], folder)
        for name in written.names():
            for kind in set(written.kinds(name)) & {*MOMENTS}:
                if not torch.equal(written.tensor(name, kind), source.tensor(name, kind)):
                    raise CheckpointError(f"{folder}: {kind} of {name} differs")

    folder = write_torch_dist(
        source, Path(output), dtype, config.optim, config.distributed_optimizer, check
    )
    moments = "weights and Adam's moments" if CoreFolder(folder).state else "weights"
    print(
        f"{folder}: {moments} of {source.folder} in {dtype}; {counted(source)}, read back and "
        "equal, bit by bit"
    )


@dataclass(frozen=True)
class ToDcpConfig:
    """Conversion to torch.distributed.checkpoint (DCP)."""

    output: str | None = option(None)
    """Folder to create."""
    architecture: str | None = option(
        None, derived="the one that the weights were read from, or else the plainest that fits"
    )
    """Hugging Face model_type that determines the tensor names, for example mistral."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights. Moments are float32."""
    optim: bool = option(True, off="--no-optim")
    """Leave out Adam's moments, which are otherwise written if the checkpoint has them."""


def to_dcp(argv: Sequence[str]) -> None:
    """Convert a checkpoint to DCP with Hugging Face's names, under ``model`` and ``optim`` as in
    torch's get_state_dict, and read the weights back. Raises the same errors as
    :func:`to_torch_dist`."""
    checkpoint, config = parsed(
        argv, "to-dcp", "Writes a checkpoint of torch.distributed.checkpoint (DCP).",
        LoadConfig, ToDcpConfig,
    )  # fmt: skip
    output = Path(required(config, "output"))
    if output.exists():
        raise ConfigError(f"--output {output} exists already; name a new folder")
    source = opened(checkpoint)
    source.require_model()
    dtype = config.dtype or dtype_of(source)
    moments = write_dcp(source, output, dtype, config.optim, config.architecture)
    print(
        f"{output}: weights{' and moments' if moments else ''} of {source.folder} in {dtype}; "
        f"{counted(source)}, read back and equal, bit by bit"
    )


def write_dcp(
    source: Source, output: Path, dtype: str, moments: bool = True, architecture: str | None = None
) -> bool:
    """Write a new folder that includes a config.json. Return whether moments were written. Raises
    ValueError if no architecture fits the model, CheckpointError if the source is damaged or a
    value that is read back differs, and OSError if a file cannot be written. Errors leave nothing
    behind."""
    form = architecture_of(source.model, architecture)
    moments = moments and has_moments(source)
    step = torch.tensor(float(source.state.get("optimizer_step", 0)))
    with unfinished_folder(output) as partial:
        writer = ShardedWriter(partial)
        for parameter in progress_bar("writing", list(form.parameters(source.model))):
            for kind in source.kinds(parameter.ours):
                if kind != "weight" and not (moments and kind in MOMENTS):
                    continue
                values = source.tensor(parameter.ours, kind)
                for name, part in _theirs(parameter, values, kind):
                    if kind == "weight":
                        part = part.to(DTYPES[dtype], copy=True)
                        writer.add(f"model.{name}", part, path=("model", name))
                    else:
                        state = ("optim", "state", name)
                        writer.add(".".join((*state, kind)), part, path=(*state, kind))
                        if kind == MOMENTS[0]:
                            count = (*state, "step")
                            writer.add(".".join(count), step.clone(), path=count)
        for name, constant in form.constants(source.model).items():
            writer.add(f"model.{name}", constant, path=("model", name))
        writer.finish()
        write_json(partial / "config.json", form.config(source.model) | {"torch_dtype": dtype})
        tokenizer = partial / "tokenizer"
        source.copy_tokenizer(tokenizer)
        if tokenizer.is_dir():  # copy its files next to config.json, as in Hugging Face folders
            for file in list(tokenizer.iterdir()):
                file.rename(partial / file.name)
            tokenizer.rmdir()
        require_equal(DcpFolder(partial), source, DTYPES[dtype], partial)
        sync_path(partial)
        replace_folder(partial, output, {})
    return moments


def _theirs(parameter: Parameter, values: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) for a parameter or a moment. Some norm weights are stored
    with an offset, which does not apply to moments."""
    parts = parameter.to_hf(values)
    if kind == "weight":
        yield from parts.items()
        return
    zeros = parameter.to_hf(torch.zeros_like(values))
    ones = parameter.to_hf(torch.ones_like(values))
    for name, part in parts.items():
        if not bool((ones[name] - zeros[name] == 1).all()):
            raise ValueError(f"{name} is another multiple of {parameter.ours}: give --no-optim")
        yield name, part - zeros[name]
