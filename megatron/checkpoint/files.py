"""Files of checkpoints: JSON and safetensors, on the disk and with a checksum once written.

The ``safetensors`` package reads tensors, but does not write those of training: it sorts them by
name, needs all of them on the CPU at the same time, and leaves the checksum to a second pass over
the file (15 % more time on a CPU).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.util.files import naming, read_regular, sync, sync_path, write_whole
from megatron.util.json_text import parse_json
from megatron.util.phases import moved

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_BLOCK_BYTES = 2**22
"""Bytes that are hashed and written at a time, while they are in the cache."""

Facts = dict[str, Any]
"""A file's entry in the manifest: ``bytes`` and ``sha256``."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file."""


class DamagedError(CheckpointError):
    """A checkpoint that does not contain what was saved; an older one may be whole."""


class NotFiniteError(CheckpointError):
    """Weights or moments that are not finite, and must not be saved; the message names a tensor."""


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file by the ``safetensors`` package, with the permissions of any new
    file: the package's own temporary file can be read by its user alone. Raises OSError if it
    cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:  # a full disk, for example
        raise OSError(f"{path} cannot be written: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically and durably."""
    write_whole(path, text.encode())
    sync_path(path.parent)


def stage_text(path: Path, text: str) -> Path:
    """Writes a temporary file that a rename will put in the place of ``path``; a full disk does not
    prevent the rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_bytes(temporary, text.encode())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_bytes(path: Path, content: bytes) -> Facts:
    """Writes a new file to the disk; a partly written one stays."""
    return _write(path, [memoryview(content)])


@dataclass(frozen=True)
class LazyTensor:
    """A float32 tensor of this shape that ``make`` computes, flat, when it is written, so that not
    all of a checkpoint are in memory at once."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def view(self, shape: tuple[int, ...]) -> LazyTensor:
        """The same with another shape."""
        return LazyTensor(shape, self.make)

    def made(self) -> Tensor:
        """The tensor."""
        return self.make().view(self.shape)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | LazyTensor],
    finite_in: torch.dtype | None = None,
) -> Facts:
    """Writes float32 or uint8 tensors, by name, to a new safetensors file on the disk; a partly
    written one stays. Tensors on a GPU are copied to the host one by one. With ``finite_in`` raises
    NotFiniteError if an element is not finite in that dtype; blocks are checked while they are in
    the cache."""

    def contents() -> Iterator[memoryview]:
        yield memoryview(_header(tensors))
        for tensor in tensors.values():
            if not tensor.nbytes:
                continue
            flat = _values(tensor).to("cpu").contiguous().view(-1)
            for block in flat.split(_BLOCK_BYTES // flat.element_size()):
                if finite_in is not None and not _all_finite(block, finite_in):
                    raise NotFiniteError(f"{path.name}: {not_finite(tensors, finite_in)}")
                moved()
                yield block.numpy().data.cast("B")

    return _write(path, contents())


def finite(name: str, values: Tensor, dtype: torch.dtype, where: Path) -> Tensor:
    """The elements of a tensor of the checkpoint ``where`` in another dtype. Raises NotFiniteError
    if one is not finite in that."""
    reason = not_finite({name: values}, dtype)
    if reason is not None:
        raise NotFiniteError(f"{where}: {reason}")
    return values.to(dtype)


def not_finite(tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> str | None:
    """Return which of these tensors, by name, have elements that are not finite in a dtype, and
    their numbers, in words; None if all are finite."""
    counts: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        flat = _values(tensor).reshape(-1)
        blocks = flat.split(_BLOCK_BYTES // flat.element_size())
        bad = sum(
            int(block.to(dtype).isfinite().logical_not().sum())
            for block in blocks
            if not _all_finite(block, dtype)
        )
        if bad:
            counts[name] = bad, flat.numel()
    if not counts:
        return None
    (name, (bad, numel)), *more = counts.items()
    beyond = "" if dtype == torch.float32 else f" in {str(dtype).removeprefix('torch.')}"
    message = f"{name} has {bad:,} of {numel:,} elements that are not finite{beyond}"
    if more:
        total = sum(bad for bad, _ in counts.values())
        message += f" (in all {total:,} elements of {len(counts)} tensors)"
    return message


def _values(tensor: Tensor | LazyTensor) -> Tensor:
    return (tensor.made() if isinstance(tensor, LazyTensor) else tensor).detach()


def _all_finite(values: Tensor, dtype: torch.dtype) -> bool:
    """True if all elements are finite in a dtype; of their smallest and largest, so in one pass
    without a copy (both are NaN if one element is)."""
    if not values.numel() or not values.is_floating_point():
        return True
    return bool(torch.stack(torch.aminmax(values)).to(dtype).isfinite().all())


def _header(tensors: Mapping[str, Tensor | LazyTensor]) -> bytes:
    """The header's length (8 bytes, little endian), and the header: JSON with each tensor's dtype,
    shape and place, padded with spaces to 8 bytes."""
    content, place = {}, 0
    for name, tensor in tensors.items():
        content[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, contents: Iterable[memoryview]) -> Facts:
    """Writes and hashes bytes, without Python's lock. (A second thread for the hash was slower.)"""
    digest, size = hashlib.sha256(), 0
    with naming(path), open(path, "xb", buffering=0) as file:
        for content in contents:
            for start in range(0, len(content), _BLOCK_BYTES):
                block = content[start : start + _BLOCK_BYTES]
                digest.update(block)
                while block:
                    block = block[file.write(block) :]
            size += len(content)
        sync(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def json_text(content: Any) -> str:
    """JSON as this project writes it."""
    return json.dumps(content, indent=1) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_text(path, json_text(content))


def read_json(path: Path, **accepted: bool) -> Any:
    """Reads JSON; raises CheckpointError if the file is missing or not JSON. ``accepted`` are the
    options of :func:`parse_json`."""
    return json_of(path, read_bytes(path), **accepted)


def read_bytes(path: Path) -> bytes:
    """Reads a file; raises CheckpointError if it is missing or cannot be read."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def json_of(path: Path, content: bytes, **accepted: bool) -> Any:
    """Return the content of the JSON file ``path``; errors and options as of :func:`read_json`."""
    try:
        return parse_json(content, str(path), **accepted)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


_DEEPEST = 4
_MOST_NAMES = 20_000
_SKIPPED = ("wandb", "tensorboard", "mlruns", "logs", "run", "__pycache__")
"""Folders of runs that contain no weights of their models."""


class _Form(NamedTuple):
    """A format: its name, patterns of paths in its folders, and how to get from it to one that is
    read."""

    title: str
    marks: tuple[str, ...]
    remedy: str


_TO_HF = "convert it to a folder of Hugging Face with the tools of the program that wrote it"
_ITS_ORIGIN = "give the model that it was made from"
_FORMS = (
    _Form("a checkpoint of NeMo", ("*.nemo", "model_weights/*", "*context/model.yaml"), _TO_HF),
    _Form(
        "a distributed checkpoint of Megatron-core (torch_dist)",
        ("common.pt", "*/common.pt"),
        "metadata.json and .metadata belong next to common.pt",
    ),
    _Form(
        "a file of a checkpoint of DeepSpeed",
        ("*mp_rank_*_model_states.pt", "*_optim_states.pt", "layer_*-model_*-model_states.pt"),
        "give the folder with all of them",
    ),
    _Form(
        "a checkpoint of torch.distributed.checkpoint (DCP)",
        ("*.distcp",),
        "next to these files it needs .metadata and, there or above it, the config.json of the "
        "Hugging Face model; one of Megatron-core needs common.pt and metadata.json",
    ),
    _Form(
        "a checkpoint of nanotron",
        ("checkpoint_metadata.json", "*/checkpoint_metadata.json"),
        "config.yaml and model/ belong next to checkpoint_metadata.json",
    ),
    _Form(
        "a checkpoint of MaxText (Orbax, JAX)",
        ("*items/manifest.ocdbt", "*items/_METADATA", "*items/_sharding"),
        "MaxText's ckpt_conversion.to_huggingface writes it as a folder of Hugging Face",
    ),
    _Form(
        "a checkpoint of Orbax (JAX)",
        ("_CHECKPOINT_METADATA", "*/_CHECKPOINT_METADATA", "*manifest.ocdbt", "*_METADATA"),
        _TO_HF,
    ),
    _Form(
        "a checkpoint of T5X (JAX)",
        ("*target.*/.zarray", "*state.param_states.*/.zarray"),
        "transformers 4 converts it, by models/t5/convert_t5x_checkpoint_to_pytorch.py",
    ),
    _Form("an array of Zarr", ("*.zarray", "*.zgroup", "*zarr.json"), _TO_HF),
    _Form(
        "a file of llama.cpp, from before GGUF files or without what reads these",
        ("*.gguf", "*.ggml"),
        "give the model that it was made from",
    ),
    _Form(
        "a file of llama.cpp before GGUF",
        ("*ggml-*.bin", "*.ggmlv?.*", "*ggjt*.bin"),
        "give the model that it was made from, or make a GGUF file of it by llama.cpp's "
        "convert_llama_ggml_to_gguf.py",
    ),
    _Form(
        "weights of Flax for transformers",
        ("flax_model*",),
        "transformers 4 converts it: from_pretrained(folder, from_flax=True), save_pretrained",
    ),
    _Form(
        "weights of TensorFlow for transformers",
        ("tf_model*",),
        "transformers 4 converts it: from_pretrained(folder, from_tf=True), save_pretrained",
    ),
    _Form(
        "a model of Keras",
        ("*.keras", "*.weights.h5"),
        "KerasHub's export_to_transformers writes it as a folder of Hugging Face",
    ),
    _Form("a model of TensorFlow or JAX", ("*.h5", "*.msgpack", "*.index", "*.pb"), _TO_HF),
    _Form("a model for ONNX", ("*.onnx", "*.ort"), _ITS_ORIGIN),
    _Form("a model for OpenVINO", ("*openvino_*.xml", "*openvino_*.bin"), _ITS_ORIGIN),
    _Form("a model for TensorRT-LLM", ("*rank[0-9]*.safetensors", "*.engine"), _ITS_ORIGIN),
    _Form("a model for CTranslate2", ("*shared_vocabulary.*", "*source_vocabulary.*"), _ITS_ORIGIN),
    _Form("a model for MLC", ("*mlc-chat-config.json", "*params_shard_*.bin"), _ITS_ORIGIN),
    _Form("a model for ExLlama", ("output*.safetensors",), _ITS_ORIGIN),
    _Form(
        "a model for another runtime",
        ("*.mlpackage/*", "*.mlmodel", "*.pte", "*.tflite", "*.mnn", "*.llamafile", "*.litertlm"),
        _ITS_ORIGIN,
    ),
    _Form(
        "a model of MLX",
        ("weights.npz", "weights.[0-9]*.npz"),
        "python -m mlx_lm convert --dequantize writes it as a folder of Hugging Face",
    ),
    _Form(
        "a pipeline of diffusers",
        ("*model_index.json", "*diffusion_pytorch_model*"),
        "it makes images, and is not a language model",
    ),
    _Form(
        "a model of sentence-transformers",
        ("modules.json",),
        "the model is in one of the folders that modules.json names",
    ),
    _Form("an archive", ("*.tar", "*.tar.*", "*.tgz", "*.zip", "*.7z", "*.zst"), "unpack it first"),
    _Form(
        "an incomplete checkpoint of this project",
        (
            "*global_step*/weights-*.safetensors",
            "weights-*.safetensors",
            "*global_step*/index.json",
        ),
        "its manifest.json is missing: copy the whole folder again, or move it away",
    ),
    _Form(
        "models of Hugging Face, in folders in it",
        ("*/model.safetensors", "*/model.safetensors.index.json", "*/pytorch_model*.bin"),
        "name one of them",
    ),
    _Form(
        "adapters of peft without an adapter_config.json",
        ("adapter_model.*",),
        "that file belongs next to them",
    ),
    _Form(
        "weights of Meta or Mistral AI without a params.json",
        ("*consolidated*.pth", "*consolidated*.safetensors"),
        "that file belongs next to them",
    ),
    _Form(
        "weights of Hugging Face without a config.json",
        ("model*.safetensors", "pytorch_model*.bin"),
        "the config.json of the model belongs next to them",
    ),
    _Form(
        "a checkpoint of PyTorch Lightning",
        ("*epoch=*.ckpt",),
        "save its module by save_pretrained of transformers",
    ),
    _Form(
        "weights in a form that is not known",
        (
            "*.safetensors",
            "*.pt",
            "*.pth",
            "*.ckpt",
            "*.bin",
            "*.npz",
            "*.pkl",
            "*.tensors",
            "*.pdparams",
            "*.ot",
            "*.mar",
        ),  # fmt: skip
        "no configuration says of which network they are; " + _TO_HF,
    ),
)
"""Formats that are not read, in the order in which they are recognised: a format's own files before
those that several have."""


def unreadable(path: Path) -> str | None:
    """The format of the files at a path, which none here reads, and what to do; None if there are
    no weights of any kind, as in a new folder."""
    if path.is_file() and (path.parent / "config.json").is_file():
        return f"one file of a model: give its folder, {path.parent}"
    names = [path.name] if path.is_file() else list(_names(path, _DEEPEST))
    for form in _FORMS:
        for mark in form.marks:
            name = next((name for name in names if fnmatchcase(name, mark)), None)
            if name is not None:
                where = "" if path.is_file() else f" ({name})"
                return f"{form.title}{where}, which is not read here: {form.remedy}"
    return None


def _names(folder: Path, depth: int) -> Iterator[str]:
    """Paths of files in a folder, then in its subfolders. Hidden folders are of saves that were not
    finished; data for training are not weights."""
    waiting, count = [(folder, "", depth)], 0
    while waiting:
        place, prefix, left = waiting.pop(0)
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        for entry in entries:
            count += 1
            if count > _MOST_NAMES:
                return
            if entry.is_dir():
                if left and not entry.name.startswith(".") and entry.name not in _SKIPPED:
                    waiting.append((place / entry.name, f"{prefix}{entry.name}/", left - 1))
            elif not (entry.name.endswith(".bin") and f"{entry.name[:-4]}.idx" in names):
                yield f"{prefix}{entry.name}"
