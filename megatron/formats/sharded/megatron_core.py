"""Distributed checkpoints (``torch_dist``) of Megatron-Core and NeMo 2, for GPT models.

::

    iter_0000100/metadata.json        {"sharded_backend": "torch_dist", ...}
    iter_0000100/common.pt            arguments of Megatron-LM, counters, the optimizer's settings
    iter_0000100/.metadata, *.distcp  the whole tensors, independent of any rank's layout
    weights/..., context/             the same in NeMo 2; context/model.yaml describes the network

A block's tensors are stacked over the blocks, as ``decoder.layers.mlp.linear_fc2.weight [L, H,
F]``, or have the block's index in their name. The two halves of a gated MLP may be separate, as
``weight_w`` and ``weight_v``. Moments are ``optimizer.state.exp_avg.<name>``. Float32 weights are
``optimizer.state.fp32_param.<name>`` or, with the distributed optimizer,
``optimizer.state.param.<name>``. See ``megatron/core/dist_checkpointing`` and
``megatron/core/optimizer`` in Megatron-Core 0.16.1.

NeMo writes the fields of its configuration, a subclass of Megatron-Core's ``TransformerConfig`` and
of its own ``GPTConfig``. They are numbers, strings and, by name, functions (``activation_func:
{_target_: torch.nn.functional.silu, _call_: false}``).
"""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_bytes, read_json
from megatron.checkpoint.folder import MEGATRON_TRACKER
from megatron.checkpoint.slices import Slice
from megatron.config import ModelConfig, Vocabulary
from megatron.formats.features import buffers_of, whole_shards
from megatron.formats.legacy_megatron.arguments import (
    DescribedSource,
    end_of_text,
    model_of_arguments,
    tokenizer_of_arguments,
    unpadded_vocabulary,
)
from megatron.formats.legacy_megatron.experts import of_one_expert, require_experts
from megatron.formats.legacy_megatron.names import is_buffer, qkv_from_megatron, rename
from megatron.formats.legacy_megatron.rank_files import MOMENTS
from megatron.formats.sharded.files import METADATA, ShardedFiles, load_common

COMMON, BACKEND = "common.pt", "metadata.json"
VERSION = 3.0
"""Megatron checkpoint version that defines the row order of the query-key-value matrix."""
EMBEDDING = "embedding.word_embeddings.weight"
_MASTERS = ("fp32_param", "param")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OTHER_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(distributed|state)\b.*")
_BLOCK = re.compile(r"(decoder\.layers)\.(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc\d)\.(weight|bias)")
_HALF = re.compile(r"(.+\.(?:weight|bias))_([wv])")
_ITERATION = re.compile(r"(?:iter_0*(?!0\d))?(\d+|release)")


class CorePart(NamedTuple):
    """Tensor in the files that stores all or some of a parameter. ``block`` is an index into a
    tensor that stacks all blocks, and ``expert`` the index of the expert that it belongs to.
    ``half`` is 0 for a gate, 1 for the up projection, None for neither."""

    key: str
    block: int | None
    expert: int | None
    half: int | None


class CoreFolder(DescribedSource):
    """Checkpoint of Megatron-Core or NeMo 2. Weights are the optimizer's float32 weights if it has
    them. Tensors are read on demand, and only this rank's slice if the rows are in our order.
    Raises CheckpointError if a file is missing or damaged, if tensors are missing, superfluous or
    have a wrong shape, or if the model is not supported."""

    title = "distributed checkpoint of Megatron-Core"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.notes: list[str] = []
        weights = _weights_of(folder)
        self._files, self._common = ShardedFiles(weights), load_common(weights / COMMON)
        self._parts = _parts_of(self._files, self._files.tensors)
        where = weights / COMMON
        context = folder / CONTEXT
        if context.is_file():
            self._arguments, where = arguments_of_nemo(context), context
        else:
            args = self._common.get("args")
            if not isinstance(args, Namespace):
                raise CheckpointError(
                    f"{where} has no args of Megatron-LM, and {context} does not exist: nothing "
                    "describes the network"
                )
            self._arguments = vars(args)
        self.model = self._model(where)
        self._shards = whole_shards(self.model)
        self._check(self._parts, where)
        self._masters, self._moments = self._optimizer(where)
        self.has_moments = bool(self._moments)
        self.tokenizer = tokenizer_of_arguments(self._arguments)
        self.end_of_text = end_of_text(self._arguments, self.model.vocabulary.size)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        if path.is_file() and path.name in (COMMON, BACKEND, METADATA):
            path = path.parent
        if (path.parent / CONTEXT).is_file():
            path = path.parent
        if _fits(path):
            known = {path.name, *_ITERATION.findall(path.name)}
            if wanted is not None and wanted not in known:
                raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
            return path
        folders = [each for each in path.iterdir() if _fits(each)] if path.is_dir() else []
        if not folders:
            return None
        names = {each.name: each for each in folders}
        names |= {m[1]: each for each in folders if (m := _ITERATION.fullmatch(each.name))}
        tracker = path / MEGATRON_TRACKER
        if wanted is None and tracker.is_file():
            wanted = tracker.read_text(errors="replace").strip()
        if wanted is None:
            wanted = max(
                names, key=lambda name: (name.isdigit(), int(name) if name.isdigit() else 0)
            )
        if wanted not in names:
            raise CheckpointError(
                f"{path} has no checkpoint {wanted}; it has {', '.join(sorted(names))}"
            )
        return names[wanted]

    def dtype(self, name: str, kind: str = "weight") -> str:
        part = self._place(name, kind)[0]
        return str(self._files.dtype(part.key)).removeprefix("torch.")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        shard = self._shard(name)
        whole = _assembled(self._files, self._place(name, kind)).float()
        if ".attention.qkv." in name:
            attention = self.model.attention
            whole = qkv_from_megatron(
                whole, VERSION, attention.num_attention_heads, attention.num_query_groups,
                attention.kv_channels,
            )  # fmt: skip
        return shard.join([whole])

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        """See :meth:`Source.read`. Only the slice is read if rows are in our order and the tensor
        is not padded."""
        (first, *others), shape = self._place(name, kind), self.shape(name)
        alone = not others and (first.block, first.expert, first.half) == (None, None, None)
        if alone and ".qkv." not in name and self._files.shape(first.key) == shape == wanted.shape:
            return self._files.read(first.key, wanted).float()
        return super().read(name, kind, wanted)

    def _place(self, name: str, kind: str) -> Sequence[CorePart]:
        self._shard(name)
        if kind == "weight":
            return self._masters.get(name, self._parts[name])
        if name not in self._moments.get(kind, {}):
            raise CheckpointError(f"{self.folder} has no {kind} of {name}")
        return self._moments[kind][name]

    def _model(self, where: Path) -> ModelConfig:
        embedding = self._parts.get(EMBEDDING)
        rows = self._files.shape(embedding[0].key)[:1] if embedding else ()
        if not rows or not rows[0]:
            raise CheckpointError(f"{self._files.path} has no {EMBEDDING}")
        model = model_of_arguments(self._arguments, where)
        size = unpadded_vocabulary(self._arguments, rows[0])
        if size is None:
            self.notes.append(
                f"the token embedding has {rows[0]:,} rows, and the checkpoint does not say how "
                "many are padding: all count as tokens"
            )
        vocabulary = Vocabulary(size or rows[0], rows[0])
        return dataclasses.replace(model, vocabulary=vocabulary)

    def _check(self, parts: Mapping[str, Sequence[CorePart]], where: Path) -> None:
        """Raise CheckpointError if the names, experts and shapes of the tensors are not the
        model's."""
        for name, shard in self._shards.items():
            if name not in parts:
                raise CheckpointError(
                    f"{self._files.path} has no tensor for {name}, which a network as {where} "
                    "describes it has"
                )
            shape = _shape_of(self._files, parts[name], name)
            if shape != shard.full_shape:
                raise CheckpointError(
                    f"{self._files.path}: {parts[name][0].key} makes {name} {shape}; {where} makes "
                    f"it {shard.full_shape}"
                )
        for name in parts:
            if name not in self._shards:
                raise CheckpointError(
                    f"{self._files.path}: {parts[name][0].key} is not part of the network that "
                    f"{where} describes"
                )

    def _optimizer(
        self, where: Path
    ) -> tuple[dict[str, list[CorePart]], dict[str, dict[str, list[CorePart]]]]:
        """Return the tensors of the float32 weights, and of the moments by kind. Sets the counters
        if they and all moments are present."""
        by_kind: dict[str, dict[str, str]] = {}
        for key in self._files.tensors:
            if match := _STATE.fullmatch(key):
                by_kind.setdefault(match[1], {})[match[2]] = key
        parts = {
            kind: _parts_of(self._files, keys)
            for kind, keys in by_kind.items()
            if kind in (*MOMENTS, *_MASTERS)
        }
        masters = next((parts[kind] for kind in _MASTERS if kind in parts), {})
        trained = self._shards.keys() - buffers_of(self.model)
        counters = self._counters()
        if any(map(_OTHER_STATE.fullmatch, self._files.tensors)) and not parts:
            self.notes.append("weights only: its optimizer state is not stored by parameter")
        elif parts and (counters is None or any(kind not in parts for kind in MOMENTS)):
            self.notes.append("weights only: no counters or no Adam's moments are stored")
        for kind, places in parts.items():
            if missing := sorted(trained - places.keys()):
                raise CheckpointError(f"{self._files.path} has no {kind} of {missing[0]}")
            self._check({**self._parts, **places}, where)
        if counters is None or any(kind not in parts for kind in MOMENTS):
            return masters, {}
        self.state = counters
        return masters, {kind: parts[kind] for kind in MOMENTS}

    def _counters(self) -> dict[str, Any] | None:
        """Return the run's counters, or None if the checkpoint does not record them."""
        iteration = self._common.get("iteration")
        consumed = self._arguments.get("consumed_train_samples")
        step = _step_of(self._common.get("optimizer"))
        if not all(type(each) is int for each in (iteration, consumed)) or step is None:
            return None
        return {
            "iteration": iteration, "consumed_samples": consumed, "optimizer_step": step,
            "loss_scaler": {},
        }  # fmt: skip


def _fits(path: Path) -> bool:
    if not path.is_dir():
        return False
    weights = _weights_of(path)
    if not (weights / METADATA).is_file() or not (weights / COMMON).is_file():
        return False
    content = read_json(weights / BACKEND) if (weights / BACKEND).is_file() else None
    if isinstance(content, dict) and content.get("sharded_backend") == "zarr":
        raise CheckpointError(f"{weights / BACKEND}: the old backend zarr, which is not read here")
    return isinstance(content, dict) and content.get("sharded_backend") == "torch_dist"


def _weights_of(folder: Path) -> Path:
    """Return the folder that contains the tensors. In NeMo's checkpoints it is a subfolder."""
    return folder / "weights" if (folder / CONTEXT).is_file() else folder


def _step_of(optimizer: Any) -> int | None:
    """Return Adam's number of steps, which all parameters or groups share, or None if unknown."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict):
        return None
    state, groups = inner.get("state"), inner.get("param_groups")
    step = state.get("common_step") if isinstance(state, dict) else None
    if step is None and isinstance(groups, list) and groups and isinstance(groups[0], dict):
        step = groups[0].get("step")
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 else None
    return int(step) if isinstance(step, int | float) and step == step and step >= 0 else None


def _parts_of(files: ShardedFiles, keys: Mapping[str, Any]) -> dict[str, list[CorePart]]:
    """Return the tensors that store each parameter, in order. ``keys`` maps Megatron's names to the
    names in the files. Raises CheckpointError for an unknown name."""
    parts: dict[str, list[CorePart]] = {}
    for name, stored in keys.items():
        key = stored if isinstance(stored, str) else name
        theirs = name.removeprefix("module.")
        if _OTHER_STATE.fullmatch(theirs) or is_buffer(theirs):
            continue
        half = None
        if match := _HALF.fullmatch(theirs):
            theirs, half = match[1], "wv".index(match[2])
        block = _BLOCK.fullmatch(theirs)
        stacked = block is not None and block[2] is None
        numbers: Sequence[int | None] = range(_layers(files, key)) if stacked else (None,)
        for number in numbers:
            at = theirs if number is None else f"decoder.layers.{number}.{block[3]}"  # type: ignore[index]
            ours, expert = _canonical(at, name, files)
            parts.setdefault(ours, []).append(CorePart(key, number, expert, half))
    for places in parts.values():
        places.sort(key=lambda part: (part.expert or 0, part.half or 0))
    return parts


def _layers(files: ShardedFiles, key: str) -> int:
    shape = files.shape(key)
    if not shape or shape[0] > 2**16:
        raise CheckpointError(f"{files.path}: {key} of the shape {shape} has no blocks")
    return shape[0]


def _canonical(theirs: str, shown: str, files: ShardedFiles) -> tuple[str, int | None]:
    """Return the canonical name for one of Megatron's parameters, and the index of its expert, if
    any."""
    experts = _EXPERTS.search(theirs)
    if experts is not None:
        number = experts[1] or "0"
        theirs = theirs.replace(
            experts[0], f"mlp.experts.local_experts.{number}.{experts[2]}.{experts[3]}"
        )
    ours = rename(theirs)
    if ours is None:
        raise CheckpointError(f"{files.path}: {shown} is not a known parameter of a GPT")
    if experts is None:
        return ours, None
    name, number_there = of_one_expert(ours)
    return name, None if experts[1] is None else number_there


def _shape_of(files: ShardedFiles, parts: Sequence[CorePart], name: str) -> tuple[int, ...]:
    """Return the shape of a parameter, computed from the tensors that store it."""
    numbers = sorted({part.expert for part in parts if part.expert is not None})
    if numbers:
        require_experts(numbers, len(numbers), name, files.path)
    halves = 2 if parts[0].half is not None else 1
    if len(parts) != halves * max(1, len(numbers)):
        raise CheckpointError(f"{files.path}: {name} is made of {len(parts)} tensors")
    shapes = {_original(files, part.key)[0 if part.block is None else 1 :] for part in parts}
    if len(shapes) != 1:
        raise CheckpointError(f"{files.path}: the parts of {name} have the shapes {shapes}")
    (shape,) = shapes
    if halves == 2 and shape:
        shape = (2 * shape[0], *shape[1:])
    return (len(numbers), *shape) if numbers else shape


def _original(files: ShardedFiles, key: str) -> tuple[int, ...]:
    """Return the shape that a tensor had before Megatron-Core (up to 0.12) flattened its blocks."""
    return files.original_shapes.get(key, files.shape(key))


def _assembled(files: ShardedFiles, parts: Sequence[CorePart]) -> Tensor:
    """Assemble a whole parameter, with rows in Megatron's order."""
    tensors = [_part(files, part) for part in parts]
    if parts[0].half is not None:
        halves = zip(tensors[::2], tensors[1::2], strict=True)
        tensors = [torch.cat(pair) for pair in halves]
    return tensors[0] if parts[0].expert is None else torch.stack(tensors)


def _part(files: ShardedFiles, part: CorePart) -> Tensor:
    whole = _original(files, part.key)
    if whole != files.shape(part.key):
        # [X / x, Y / y, x y]: blocks of x by y elements, each flattened.
        grid = files.shape(part.key)[:-1]
        pieces = [size // max(1, count) for size, count in zip(whole, grid, strict=False)]
        order = [axis for dim in range(len(grid)) for axis in (dim, len(grid) + dim)]
        try:
            values = files.tensor(part.key).view(*grid, *pieces).permute(order).reshape(whole)
        except RuntimeError as error:
            raise CheckpointError(
                f"{files.path}: {part.key} {files.shape(part.key)} is not {whole}: {error}"
            ) from None
        return values if part.block is None else values[part.block]
    if part.block is None:
        return files.tensor(part.key)
    return files.part(part.key, part.block)


CONTEXT = "context/model.yaml"
_SAME = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "kv_channels",
    "layernorm_epsilon": "norm_epsilon",
    "normalization": "normalization",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "qk_layernorm": "qk_layernorm",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_method_std": "init_method_std",
    "rotary_percent": "rotary_percent",
    "rotary_base": "rotary_base",
    "rotary_interleaved": "rotary_interleaved",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "window_size": "window_size",
    "softmax_scale": "softmax_scale",
    "num_moe_experts": "num_experts",
    "moe_router_topk": "moe_router_topk",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_layer_freq": "moe_layer_freq",
    "multi_latent_attention": "multi_latent_attention",
    "qk_l2_norm": "qk_l2_norm",
    "glu_linear_offset": "glu_linear_offset",
    "activation_func_clamp_value": "activation_func_clamp_value",
    "mtp_num_layers": "mtp_num_layers",
    "heterogeneous_block_specs": "heterogeneous_layers_config_path",
}
"""Megatron's arguments, by equivalent field in NeMo's configuration."""
_POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}
_GATED = {"silu": "swiglu", "quick_gelu": "quick_geglu"}
_PLAIN = {"gelu": "", "squared_relu": "squared_relu"}


def arguments_of_nemo(path: Path) -> dict[str, Any]:
    """Return Megatron's arguments for the model in ``context/model.yaml``. Raises CheckpointError
    if the file is malformed, or if no arguments describe the model."""
    config = _config(path)
    arguments = {theirs: config[name] for name, theirs in _SAME.items() if name in config}
    kind = config.get("position_embedding_type", "learned_absolute")
    if kind not in _POSITIONS:
        raise CheckpointError(f"{path}: position_embedding_type is {kind!r:.80}")
    groups = config.get("num_query_groups")
    length = config.get("seq_length")
    scaled = "scale_factor" in config and kind == "rope"  # as in Llama 3.1
    return {
        **arguments,
        **_activation(config, path),
        "position_embedding_type": kind,
        "group_query_attention": groups is not None,
        "num_query_groups": groups,
        "seq_length": length,
        "max_position_embeddings": length,
        "untie_embeddings_and_output_weights": not config.get(
            "share_embeddings_and_output_weights", True
        ),
        "use_rope_scaling": scaled,
        "rope_scaling_factor": float(config["scale_factor"]) if scaled else 8.0,
    }


def _config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_bytes(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is not YAML: {reason}") from None
    config = content.get("config") if isinstance(content, dict) else None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise CheckpointError(f"{path} has no config of a GPT")
    return config


def _activation(config: dict[str, Any], path: Path) -> dict[str, bool]:
    function = config.get("activation_func", {"_target_": "torch.nn.functional.gelu"})
    named = function.get("_target_") if isinstance(function, dict) else function
    name = str(named).rpartition(".")[2]
    gated = bool(config.get("gated_linear_unit", False))
    flags = _GATED if gated else _PLAIN
    if name not in flags:
        raise CheckpointError(
            f"{path}: activation_func {named!r:.80} with gated_linear_unit {gated}; expected one "
            f"of {', '.join((*_GATED, *_PLAIN))}"
        )
    fused = {"bias_gelu_fusion": bool(config.get("bias_activation_fusion", False))}
    return {flags[name]: True} if flags[name] else fused
