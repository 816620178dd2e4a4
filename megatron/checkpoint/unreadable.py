"""Names of what a folder or file contains that no format here reads, so that a run does not start
from random weights where there are others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

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
_FORMS = (
    _Form("a checkpoint of NeMo", ("*.nemo", "model_weights/*", "*context/model.yaml"), _TO_HF),
    _Form(
        "a distributed checkpoint of Megatron-core (torch_dist)",
        ("common.pt", "*/common.pt"),
        "Megatron-Bridge writes it as a folder of Hugging Face",
    ),
    _Form(
        "a file of a checkpoint of DeepSpeed",
        ("*mp_rank_*_model_states.pt", "*_optim_states.pt", "layer_*-model_*-model_states.pt"),
        "give the folder with all of them",
    ),
    _Form(
        "a checkpoint of torch.distributed.checkpoint (DCP)",
        ("*.distcp",),
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch gives its tensors; "
        + _TO_HF,
    ),
    _Form(
        "a checkpoint of nanotron",
        ("checkpoint_metadata.json", "*/checkpoint_metadata.json"),
        _TO_HF,
    ),
    _Form(
        "a checkpoint of Orbax (JAX)",
        ("_CHECKPOINT_METADATA", "*/_CHECKPOINT_METADATA", "*manifest.ocdbt", "*_METADATA"),
        _TO_HF,
    ),
    _Form("an array of Zarr", ("*.zarray", "*.zgroup", "*zarr.json"), _TO_HF),
    _Form(
        "a GGUF file, of llama.cpp",
        ("*.gguf", "*.ggml"),
        "give the model that it was made from: most GGUF files are quantised",
    ),
    _Form(
        "a model of TensorFlow or JAX", ("*.h5", "*.keras", "*.msgpack", "*.index", "*.pb"), _TO_HF
    ),
    _Form("a model for ONNX", ("*.onnx",), "give the model that it was made from"),
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
        "weights of Hugging Face without a config.json",
        ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*"),
        "the config.json of the model belongs next to them",
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
            "*.engine",
            "*.tflite",
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
