"""Checkpoints of torch.distributed.checkpoint (DCP) with a Hugging Face config.json in or above
their folder: those of FSDP and accelerate (``pytorch_model_fsdp_0``), with Hugging Face's names,
and those of torchtitan, with its own. Adam's moments have the form of torch's
``get_optimizer_state_dict``, by weight name: under ``optim`` or ``optimizer``, flattened or not.
accelerate stores them in ``optimizer_0``.

torchtitan's folders do not describe the network. The config.json must be that of the model from
which training started, or of one with the same shape. Names and row order follow
``torchtitan/models/{llama3,qwen3}/state_dict_adapter.py`` of torchtitan up to 0.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.formats.sharded.files import METADATA, ShardedFiles
from megatron.formats.trainers.renamed import (
    CONFIG,
    MOMENTS,
    FileTensor,
    TrainerFolder,
    TrainerStates,
    config_near,
    halves_from_pairs,
    renamed,
)
from megatron.formats.unpickle import load_pickle

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_STATE = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "ft_", "rng")
"""Name prefixes of values that are not weights."""
_OPTIMIZER = re.compile(r"(?:optim|optimizer)\.state\.(.+)\.(\w+)")
"""Pattern for the weight name and the kind of an optimizer state. In torch's own form, the weight
name is a number."""
_BARE = ("model.layers.", "model.decoder.", "model.embed_tokens.", "model.norm.")
TITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.qkv_linear.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.qkv_linear.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.qkv_linear.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Hugging Face names, by torchtitan's tensor names."""


class DcpFolder(TrainerFolder):
    """Sharded checkpoint of a Hugging Face model, or of torchtitan's Llama or Qwen3."""

    title = "sharded checkpoint (DCP)"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        if path.name == METADATA:
            path = path.parent
        folder = _sharded(path)
        if folder is None or config_near(folder) is None:
            return None
        if wanted is not None and wanted not in path.name:
            raise CheckpointError(f"{path} is a sharded checkpoint, and has no {wanted}")
        return folder

    def _find_config(self) -> Path:
        return config_near(self.folder) or self.folder / CONFIG

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        self._files = files = ShardedFiles(self.folder)
        self._native = {name: each for name, each in _weights(files).items() if name}
        return files.path, self._renamed(self._native, content)

    def _renamed(
        self, stored: Mapping[str, FileTensor], content: Mapping[str, Any]
    ) -> Mapping[str, FileTensor]:
        """Return the tensors by Hugging Face name."""
        if "tok_embeddings.weight" in self._native:
            return _titan(stored, content, self._files.path)
        return stored

    def _list_states(self, content: Mapping[str, Any]) -> TrainerStates | str | None:
        apart = self.folder.parent / "optimizer_0"
        files = ShardedFiles(apart) if (apart / METADATA).is_file() else self._files
        native, step = states_of(files)
        if not native:
            return None
        if not isinstance(step, int):
            return step
        tensors = {}
        for kind, by_name in native.items():
            named = {_WRAPPERS.sub("", name): each for name, each in by_name.items()}
            named = {
                f"model.{name}" if f"model.{name}" in self._native else name: each
                for name, each in _unfused(named, content, files.path).items()
            }
            if other := sorted(named.keys() - self._native.keys()):
                return f"its optimizer has {kind} of {other[0]}, which is no weight of it"
            tensors[kind] = self._renamed(named, content)
        iteration, scheduler = self._steps()
        iteration = step if iteration is None else iteration
        counters = {"iteration": iteration, "consumed_samples": 0, "optimizer_step": step}
        return TrainerStates(tensors, counters, scheduler)

    def _steps(self) -> tuple[int | None, int | None]:
        """Return the step counts of the run and of its learning rate schedule; None if not
        stored."""
        run = whole_number(self._files, "train_state.step")
        scheduler = whole_number(self._files, "lr_scheduler.last_epoch")
        for place in (self.folder, self.folder.parent):  # files that transformers' Trainer writes
            path = place / "trainer_state.json"
            if run is None and path.is_file():
                run = counter(read_json(path, lenient=True), "global_step")
            path = place / "scheduler.pt"
            if scheduler is None and path.is_file():
                scheduler = counter(load_pickle(path), "last_epoch")
        return run, scheduler


def states_of(files: ShardedFiles) -> tuple[dict[str, dict[str, FileTensor]], int | str]:
    """Return the optimizer states, by kind and weight name, and Adam's number of steps or, if the
    states cannot be used, the reason."""
    by_kind: dict[str, dict[str, FileTensor]] = {}
    steps = set()
    for name in (*files.tensors, *files.objects):
        match = _OPTIMIZER.fullmatch(name)
        if match is None:
            continue
        if match[1].isdecimal():
            return {MOMENTS[0]: {}}, "its optimizer numbers the weights, in an order of its model"
        if match[2] == "step":
            steps.add(whole_number(files, name))
        elif name in files.tensors:
            by_kind.setdefault(match[2], {})[match[1]] = sharded(files, name)
    if len(steps) != 1 or None in steps:
        return by_kind, f"its weights have {len(steps)} numbers of Adam's steps"
    return by_kind, steps.pop() or 0


def whole_number(files: ShardedFiles, name: str) -> int | None:
    """Return the non-negative integer that a sharded checkpoint stores as ``name``, or None if
    there is no such number."""
    if name in files:
        value = files.tensor(name).item() if files.shape(name) in ((), (1,)) else None
    else:
        value = files.object(name) if name in files.objects else None
    return counter({name: value}, name)


def counter(content: Any, name: str) -> int | None:
    """Return the non-negative integer under the key ``name``, or None if there is no such
    number."""
    value = content.get(name) if isinstance(content, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value) if value == int(value) else None


def _sharded(path: Path) -> Path | None:
    """Return the folder with the weights: ``path`` itself, accelerate's subfolder, or the folder of
    torchtitan's newest step. Return None if there are no such weights."""
    if not path.is_dir():
        return None
    for folder in (path, path / "pytorch_model_fsdp_0"):
        if (folder / METADATA).is_file():
            return folder
    steps = {
        int(match[1]): each
        for each in path.iterdir()
        if (match := re.fullmatch(r"step-(\d+)", each.name)) and (each / METADATA).is_file()
    }
    return steps[max(steps)] if steps else None


def _weights(files: ShardedFiles) -> dict[str, FileTensor]:
    """Return the weights by their names in the model, without the prefixes that wrappers add."""
    names = {
        name: _WRAPPERS.sub("", name)
        for name in files.tensors
        if not name.startswith(_STATE) and "_extra_state" not in name
    }
    nested = bool(names) and all(name.startswith("model.") for name in names.values())
    if nested and not any(name.startswith(_BARE) for name in names.values()):
        names = {name: inner.removeprefix("model.") for name, inner in names.items()}
    return {inner: sharded(files, name) for name, inner in names.items()}


def sharded(files: ShardedFiles, name: str) -> FileTensor:
    """Return a tensor of a sharded checkpoint."""
    path, shape, dtype = files.files[name], files.shape(name), files.dtype(name)
    return FileTensor(path, shape, dtype, lambda: files.tensor(name))


def _unfused(
    stored: Mapping[str, FileTensor], content: Mapping[str, Any], path: Path
) -> dict[str, FileTensor]:
    """Split torchtitan's fused queries, keys and values in the optimizer's states, so that their
    names match the saved weights'. The layout is [groups, queries + 2, head width, ...]."""
    result = dict(stored)
    for name in [name for name in stored if ".qkv_linear.wqkv." in name]:
        heads, groups = _heads(content, path)
        fused = result.pop(name).changed(
            lambda values, g=groups, h=heads: values.unflatten(0, (g, h // g + 2, -1))  # type: ignore[misc]
        )
        for part, cut in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
            theirs = name.replace(".wqkv.", f".w{part}.")
            result[theirs] = fused.changed(lambda values, cut=cut: values[:, cut].flatten(0, 2))  # type: ignore[misc]
    return result


def _titan(
    stored: Mapping[str, FileTensor], content: Mapping[str, Any], path: Path
) -> dict[str, FileTensor]:
    stored = {name: each for name, each in stored.items() if not name.endswith("freqs_cis")}
    result = renamed(stored, TITAN, path)
    if any(name.endswith("q_norm.weight") for name in result):
        return result  # Qwen3's rows already have Hugging Face's order
    heads, groups = _heads(content, path)
    for name, each in result.items():
        count = heads if name.endswith("q_proj.weight") else groups
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            result[name] = each.changed(lambda values, n=count: halves_from_pairs(values, n))  # type: ignore[misc]
    return result


def _heads(content: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Return the numbers of query heads and of key and value heads."""
    heads = content.get("num_attention_heads")
    groups = content.get("num_key_value_heads") or heads
    for number in (heads, groups):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise CheckpointError(f"{path}: config.json has no num_attention_heads")
    return heads, groups  # type: ignore[return-value]
