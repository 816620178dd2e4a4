"""Folders of torch.distributed.checkpoint with a Hugging Face config.json in or above them: of FSDP
and accelerate (``pytorch_model_fsdp_0``), with Hugging Face's names, and of torchtitan, with its
own.

torchtitan's folders do not describe the network: the config.json is that of the model which it was
given, or of one of the same shape. Names and order of rows are those of
``torchtitan/models/{llama3,qwen3}/state_dict_adapter.py`` of torchtitan 0.3, and of those before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.formats.sharded.files import METADATA, ShardedFiles
from megatron.formats.trainers.renamed import (
    CONFIG,
    FileTensor,
    TrainerFolder,
    config_near,
    halves_from_pairs,
    renamed,
)

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_STATE = ("optim", "lr_scheduler", "scheduler", "train_state", "dataloader", "ft_", "rng")
"""Beginnings of the names of what is not a weight."""
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
"""Hugging Face's names of torchtitan's tensors."""


class DcpFolder(TrainerFolder):
    """A sharded checkpoint of a Hugging Face model, or of torchtitan's Llama or Qwen3."""

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
        files = ShardedFiles(self.folder)
        stored = {name: each for name, each in _weights(files).items() if name}
        if "tok_embeddings.weight" in stored:
            stored = _titan(stored, content, files.path)
        return files.path, stored


def _sharded(path: Path) -> Path | None:
    """The folder with the weights: this one, that of accelerate in it, or torchtitan's newest."""
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
    """The weights, by their names in the model."""
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
    """A tensor of a sharded checkpoint."""
    path, shape, dtype = files.files[name], files.shape(name), files.dtype(name)
    return FileTensor(path, shape, dtype, lambda: files.tensor(name))


def _titan(
    stored: Mapping[str, FileTensor], content: Mapping[str, Any], path: Path
) -> dict[str, FileTensor]:
    stored = {name: each for name, each in stored.items() if not name.endswith("freqs_cis")}
    result = renamed(stored, TITAN, path)
    if any(name.endswith("q_norm.weight") for name in result):
        return result  # Qwen3 has Hugging Face's order of rows
    heads, hidden = content.get("num_attention_heads"), content.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise CheckpointError(f"{path}: config.json has no num_attention_heads and hidden_size")
    groups = content.get("num_key_value_heads") or heads
    for name, each in result.items():
        count = heads if name.endswith("q_proj.weight") else groups
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            result[name] = each.changed(lambda values, n=count: halves_from_pairs(values, n))  # type: ignore[misc]
    return result
