"""Recognition of unsupported checkpoints, with advice for each program that writes them. Without
it, a run would ignore the files and start from random weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

_DEEPEST = 4


_MOST_NAMES = 20_000


_SKIPPED = ("wandb", "tensorboard", "mlruns", "logs", "run", "__pycache__")
"""Names of folders in a run's output that contain no model weights."""


class _Form(NamedTuple):
    """Unsupported format: its name, patterns for paths in its folders, and advice for converting it
    to a supported one."""

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
"""Unsupported formats, in the order in which they are tested: file names that only one format uses
come before file names that several share."""


def unreadable(path: Path) -> str | None:
    """Describe the unsupported format of the files at a path, with advice. Return None if no known
    weights are found, as in a new folder."""
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
    """Yield the paths of files in a folder, then in its subfolders. Training data is skipped, and
    so are hidden folders, which belong to unfinished saves."""
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
