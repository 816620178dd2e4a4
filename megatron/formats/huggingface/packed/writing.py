"""Export of 8-bit weights for inference servers, in the format of compressed-tensors (FP8_DYNAMIC
of llm-compressor, which vLLM reads). Weights of linear layers become float8 with a scale for each
output. The server quantises the activations of each token.

Shapes: O outputs, I inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.files import read_json, write_json
from megatron.config import ModelConfig
from megatron.formats.huggingface import linear_targets
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.packed.float8 import DTYPE
from megatron.formats.tensors import save_tensors
from megatron.util.files import sync_path

_INDEX = "model.safetensors.index.json"
_LARGEST = torch.finfo(DTYPE).max


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight. Return float8 values [O, I] and float32 scales [O, 1]. Each output's
    largest magnitude maps to the largest float8, as in compressed-tensors'
    ``calculate_qparams``."""
    weight_OI = weight_OI.float()
    scales_O1 = weight_OI.abs().amax(1, keepdim=True) / _LARGEST
    scales_O1 = scales_O1.where(scales_O1 > 0, torch.finfo(torch.float32).eps)
    return (weight_OI / scales_O1).clamp(-_LARGEST, _LARGEST).to(DTYPE), scales_O1


def linear_weights(form: Architecture, model: ModelConfig) -> set[str]:
    """Return the names of the linear weights in blocks, including experts. Routers and the gates of
    shared experts are not included, since servers compute them unquantised. Raises ValueError if
    the architecture stacks or transposes such weights."""
    layers = {target.layer for target in linear_targets(model)}
    names = set[str]()
    for parameter in form.parameters(model):
        entry = parameter.entry
        layer, _, kind = entry.ours.rpartition(".")
        if kind != "weight" or layer not in layers or layer.endswith("shared_gate"):
            continue
        stacked = parameter.slices is None and entry.parameter
        if stacked or entry.form.name == "transposed":
            raise ValueError(
                f"--quantize fp8: {form.title} has {parameter.theirs[0]}, which is "
                f"{'of all experts' if stacked else 'transposed'}; expected an architecture with "
                "one matrix for each linear layer"
            )
        names |= set(parameter.theirs)
    return names


def quantise_folder(
    folder: Path, form: Architecture, model: ModelConfig, progress: Callable[[str], None]
) -> None:
    """Quantise the linear weights in a Hugging Face folder in place, one file at a time, and record
    this in its config.json. Raises ValueError for an architecture that :func:`linear_weights` does
    not support, and OSError if a file cannot be written."""
    chosen, kept = linear_weights(form, model), {"lm_head"}
    tables = {
        name for each in form.parameters(model) if each.ours.startswith("embedding.")
        for name in each.theirs
    }  # fmt: skip
    weight_map, total, before = dict[str, str](), 0, 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, values in load_file(path).items():
            before += values.nbytes
            tensors[name] = values
            if name in chosen:
                tensors[name], tensors[f"{name}_scale"] = quantised(values)
            elif name.endswith(".weight") and values.ndim == 2 and name not in tables:
                kept.add(name.removesuffix(".weight"))
        save_tensors(tensors, path, {"format": "pt"})
        sync_path(path)
        weight_map |= dict.fromkeys(tensors, path.name)
        total += sum(values.nbytes for values in tensors.values())
    if (folder / _INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / _INDEX, index)
    content = read_json(folder / "config.json", lenient=True)
    write_json(folder / "config.json", content | {"quantization_config": _config(sorted(kept))})
    progress(f"{len(chosen)} weights in float8: {before / 1e6:,.1f} MB become {total / 1e6:,.1f}")


def _config(kept: list[str]) -> dict[str, Any]:
    """Return the ``quantization_config``. ``kept`` lists the linear modules that are not
    quantised."""
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": args | {"strategy": "channel", "dynamic": False},
        "input_activations": args | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": kept,
        "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip
