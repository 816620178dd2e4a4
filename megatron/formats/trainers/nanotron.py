"""Llama models of nanotron: ``config.yaml`` and one safetensors file per parameter and
tensor-parallel rank.

::

    config.yaml                                 model.model_config describes the network
    checkpoint_metadata.json
    model/model/decoder/0/pp_block/attn/qkv_proj/
        model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors      a rank's shard, under "data"
    model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors     not sharded

The metadata of a shard locates it in the whole parameter: ``local_global_slices_pairs`` and
``unsharded_shape``. The files follow ``nanotron/serialize/weights.py`` of nanotron 0.4, and the
network follows ``models/llama.py``: qkv has all queries, then all keys, then all values, and RoPE
rotates channels 2i and 2i + 1 unless ``rope_interleaved`` is false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.formats.trainers.renamed import (
    LLAMA_KEYS,
    FileTensor,
    Settings,
    TrainerFolder,
    halves_from_pairs,
    yaml_of,
)

CONFIG, METADATA = "config.yaml", "checkpoint_metadata.json"
TRACKER = "latest.txt"
_FILE = re.compile(
    r"model_(weight|bias)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+))?\.safetensors"
)
_BLOCK = re.compile(r"decoder/(\d+)/pp_block/(.+)")
_OUTSIDE = {
    "token_position_embeddings/pp_block/token_embedding": "model.embed_tokens",
    "final_layer_norm/pp_block": "model.norm",
    "lm_head/pp_block": "lm_head",
}
_INSIDE = {
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "attn/qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn/o_proj": ("self_attn.o_proj",),
    "mlp/gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp/down_proj": ("mlp.down_proj",),
}
_HARMLESS = {
    "bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ..., "initializer_range": ...,
    "is_llama_config": True, "pretraining_tp": 1, "use_cache": ...,
}  # fmt: skip


class NanotronFolder(TrainerFolder):
    """Checkpoint of nanotron, with any number of tensor-parallel and pipeline ranks."""

    title = "checkpoint of nanotron"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        path = path.parent if path.name in (CONFIG, METADATA) else path
        if _fits(path):
            if wanted not in (None, path.name):
                raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
            return path
        names = [each.name for each in path.iterdir() if _fits(each)] if path.is_dir() else []
        if not names:
            return None
        tracker = path / TRACKER
        if wanted is None and tracker.is_file():
            wanted = tracker.read_text(errors="replace").strip()
        if wanted is None:
            wanted = max(names, key=lambda name: (len(name), name))
        if wanted not in names:
            raise CheckpointError(f"{path} has no checkpoint {wanted}; it has {', '.join(names)}")
        return path / wanted

    def _find_config(self) -> Path:
        return self.folder / CONFIG

    def _read_config(self, config: Path) -> dict[str, Any]:
        content = yaml_of(config)
        model = content.get("model")
        inner = model.get("model_config") if isinstance(model, dict) else None
        if not isinstance(inner, dict) or not all(isinstance(name, str) for name in inner):
            raise CheckpointError(f"{config} has no model.model_config")
        given = Settings(inner, config)
        if given.value("hidden_act", "silu") != "silu":
            raise given.wrong("hidden_act", "silu")
        heads, hidden = given.whole("num_attention_heads"), given.whole("hidden_size")
        self._pairs = given.flag("rope_interleaved", True)
        keys = {
            **LLAMA_KEYS,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": given.whole("num_key_value_heads", heads),
            "num_hidden_layers": given.whole("num_hidden_layers"),
            "intermediate_size": given.whole("intermediate_size"),
            "max_position_embeddings": given.whole("max_position_embeddings"),
            "rms_norm_eps": given.number("rms_norm_eps", 1e-6),
            "rope_theta": given.number("rope_theta", 10_000.0),
            "tie_word_embeddings": given.flag("tie_word_embeddings", False),
            "vocab_size": given.whole("vocab_size"),
        }
        if given.value("rope_scaling") is not None:
            keys["rope_scaling"] = given.value("rope_scaling")
        given.refuse(_HARMLESS)
        return keys

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        root = self.folder / "model" / "model"
        parts: dict[tuple[str, str], dict[int, Path]] = {}
        sizes: dict[tuple[str, str], int] = {}
        for path in sorted(root.rglob("model_*.safetensors")):
            match = _FILE.fullmatch(path.name)
            if match is None:
                raise CheckpointError(f"{path} is not a file of a parameter")
            key = path.parent.relative_to(root).as_posix(), match[1]
            parts.setdefault(key, {})[int(match[2] or 0)] = path
            sizes[key] = int(match[3] or 1)
        if not parts:
            raise CheckpointError(f"{root} has no parameters")
        stored: dict[str, FileTensor] = {}
        heads, groups = content["num_attention_heads"], content["num_key_value_heads"]
        width = content["hidden_size"] // heads
        for (module, kind), files in parts.items():
            for rank in range(sizes[module, kind]):
                if rank not in files:
                    raise CheckpointError(
                        f"{next(iter(files.values())).parent} has no file of tensor rank {rank}"
                    )
            whole = _whole(list(files.values()))
            block = _BLOCK.fullmatch(module)
            names = _INSIDE.get(block[2]) if block else (_OUTSIDE.get(module),)
            if not names or names[0] is None:
                raise CheckpointError(f"{whole.path} is not a known parameter of a Llama")
            prefix = f"model.layers.{block[1]}." if block else ""
            if len(names) == 1:
                stored[f"{prefix}{names[0]}.{kind}"] = whole
                continue
            inner = content["intermediate_size"]
            of_qkv = (heads * width, groups * width, groups * width)
            rows = of_qkv if len(names) == 3 else (inner, inner)
            start = 0
            for name, count, turned in zip(names, rows, (heads, groups, 0), strict=False):
                each = whole.rows(start, start + count)
                if self._pairs and len(names) == 3 and turned:
                    each = each.changed(lambda values, n=turned: halves_from_pairs(values, n))  # type: ignore[misc]
                stored[f"{prefix}{name}.{kind}"] = each
                start += count
            if whole.shape[0] != start:
                raise CheckpointError(f"{whole.path} has {whole.shape[0]} rows, not {start}")
        return root, stored


def _fits(path: Path) -> bool:
    return (path / METADATA).is_file() and (path / CONFIG).is_file() and (path / "model").is_dir()


def _whole(files: list[Path]) -> FileTensor:
    """Return a parameter that is joined from the tensor-parallel ranks' shards."""
    shapes = [_header(path) for path in files]
    path, (shape, dtype, metadata) = files[0], shapes[0]
    if "unsharded_shape" not in metadata:
        if len(files) > 1:
            raise CheckpointError(f"{path} does not say which part of the whole it is")
        return FileTensor(path, shape, dtype, lambda: _data(path))
    unsharded = _numbers(metadata["unsharded_shape"], path)

    def read() -> Tensor:
        values, filled = torch.empty(unsharded, dtype=dtype), 0
        for file in files:
            part, pairs = _data(file), _header(file)[2].get("local_global_slices_pairs", "")
            for local, place in _pairs(pairs, file):
                try:
                    values[place] = part[local]
                    filled += part[local].numel()
                except (RuntimeError, IndexError, ValueError) as error:
                    raise CheckpointError(f"{file}: its part does not fit: {error}") from None
        if filled != values.numel():
            raise CheckpointError(f"{path}: the ranks have {filled} of {values.numel()} elements")
        return values

    return FileTensor(path, unsharded, dtype, read)


def _pairs(text: str, path: Path) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Parse pairs of slices, in the shard and in the whole parameter:
    ``0,4,None|None,None,None#4,8,None|None,None,None;...``"""

    def place(part: str) -> tuple[slice, ...]:
        return tuple(
            slice(*(None if n == "None" else int(n) for n in each.split(",")))
            for each in part.split("|")
        )

    try:
        return [(place(a), place(b)) for a, b in (pair.split("#") for pair in text.split(";"))]
    except (ValueError, TypeError):
        raise CheckpointError(f"{path}: local_global_slices_pairs is {text!r:.100}") from None


def _numbers(text: str, path: Path) -> tuple[int, ...]:
    text = re.sub(r"np\.int64\((\d+)\)", r"\1", text)  # NumPy 2 writes numbers like this
    numbers = [each for each in text.strip("()").replace(" ", "").split(",") if each]
    if not numbers or not all(each.isdigit() and len(each) < 12 for each in numbers):
        raise CheckpointError(f"{path}: unsharded_shape is {text!r:.100}")
    return tuple(map(int, numbers))


def _header(path: Path) -> tuple[tuple[int, ...], torch.dtype, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice("data")
            dtype = part[:0].dtype if part.get_shape() else file.get_tensor("data").dtype
            return tuple(part.get_shape()), dtype, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _data(path: Path) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            values: Tensor = file.get_tensor("data")
            return values
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
