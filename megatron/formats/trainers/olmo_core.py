"""Checkpoints of OLMo-core: ``config.json`` and ``model_and_optim/``, a sharded checkpoint (DCP).

Names follow ``olmo_core/nn/hf/convert.py`` of OLMo-core 3.0, and rows are in Hugging Face's order.
Supported blocks are of the kinds ``default`` (Llama) and ``reordered_norm`` (OLMo 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.formats.sharded.files import METADATA, ShardedFiles
from megatron.formats.trainers.dcp import counter, sharded, states_of
from megatron.formats.trainers.renamed import (
    CONFIG,
    LLAMA_KEYS,
    FileTensor,
    Settings,
    TrainerFolder,
    TrainerStates,
    renamed,
)
from megatron.formats.unpickle import load_pickle

WEIGHTS = "model_and_optim"
_NAMES = {
    "embeddings.weight": "model.embed_tokens.weight",
    "lm_head.norm.weight": "model.norm.weight",
    "lm_head.w_out.weight": "lm_head.weight",
    "blocks.{}.attention.w_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blocks.{}.attention.w_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blocks.{}.attention.w_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blocks.{}.attention.w_out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blocks.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blocks.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blocks.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blocks.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "blocks.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
}
_NORMS = {
    "default": ("input_layernorm", "post_attention_layernorm"),
    "reordered_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""Hugging Face names of the norms for attention and MLP, by kind of block."""

_HARMLESS = {
    "_CLASS_": ..., "name": "default", "type": "attention", "dtype": ..., "full_precision": ...,
    "partial_rotary_factor": 1.0, "activation": "silu", "init_method": ..., "init_seed": ...,
    "init_std": ..., "use_flash": ..., "backend": ..., "elementwise_affine": True,
    "fused_ops": ..., "compile": ..., "dp_config": ..., "ac_config": ...,
}  # fmt: skip
"""Settings that do not affect a supported network if they have this value; ... means any value."""


class OlmoCoreFolder(TrainerFolder):
    """Folder ``step<N>`` of OLMo-core."""

    title = "checkpoint of OLMo-core"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        path = path.parent if path.name in (CONFIG, WEIGHTS) else path
        if not (path / WEIGHTS / METADATA).is_file() or not (path / CONFIG).is_file():
            return None
        if wanted not in (None, path.name, path.name.removeprefix("step")):
            raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
        return path

    def _find_config(self) -> Path:
        return self.folder / CONFIG

    def _read_config(self, config: Path) -> dict[str, Any]:
        content = read_json(config, lenient=True)
        model = content.get("model") if isinstance(content, dict) else None
        given = _settings(model, "model", config)
        block = _settings(given.value("block"), "model.block", config)
        attention = _settings(
            block.value("attention", block.value("sequence_mixer")), "attention", config
        )
        norm = _settings(
            block.value("layer_norm", attention.value("qk_norm")), "layer_norm", config
        )
        rope = _settings(attention.value("rope"), "rope", config)
        inner = _settings(block.value("feed_forward"), "feed_forward", config)
        self._kind = str(block.value("name", "default"))
        normed = attention.value("qk_norm") is not None
        having = "with" if normed else "without"
        if self._kind not in _NORMS or normed != (self._kind == "reordered_norm"):
            raise CheckpointError(
                f"{config}: model.block.name is {self._kind!r:.50} {having} "
                "qk_norm; expected default without or reordered_norm with it"
            )
        if norm.value("name", "rms") not in ("rms", "fused_rms"):
            raise norm.wrong("name", "rms")
        if normed and attention.content["qk_norm"] != norm.content:
            raise attention.wrong("qk_norm", f"the same as layer_norm, {norm.content}")
        given.value("lm_head")
        heads = attention.whole("n_heads")
        keys = {
            "hidden_size": given.whole("d_model"),
            "num_hidden_layers": given.whole("n_layers"),
            "vocab_size": given.whole("vocab_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": attention.whole("n_kv_heads", heads),
            "intermediate_size": inner.whole("hidden_size"),
            "rms_norm_eps": norm.number("eps", 1e-5),
            "rope_theta": rope.number("theta", 500_000),
            "max_position_embeddings": _length(content),
            "tie_word_embeddings": False,
        }
        for part in (given, block, attention, norm, rope, inner):
            part.refuse(_HARMLESS)
        if self._kind == "default":
            return {**LLAMA_KEYS, **keys}
        return {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False, **keys}

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        self._files = files = ShardedFiles(self.folder / WEIGHTS)
        stored = {
            name.removeprefix("model."): sharded(files, name)
            for name in files.tensors
            if name.startswith("model.")
        }
        return files.path, renamed(stored, self._names(), files.path)

    def _names(self) -> dict[str, str]:
        attention, mlp = _NORMS[self._kind]
        norms = {
            "blocks.{}.attention_norm.weight": f"model.layers.{{}}.{attention}.weight",
            "blocks.{}.feed_forward_norm.weight": f"model.layers.{{}}.{mlp}.weight",
        }
        return _NAMES | norms

    def _list_states(self, content: Mapping[str, Any]) -> TrainerStates | str | None:
        native, step = states_of(self._files)
        if not native or not isinstance(step, int):
            return step if native and isinstance(step, str) else None
        path = self._files.path
        tensors = {kind: renamed(each, self._names(), path) for kind, each in native.items()}
        progress = self.folder / "train" / "rank0.pt"
        run = counter(load_pickle(progress), "global_step") if progress.is_file() else None
        counters = {"consumed_samples": 0, "optimizer_step": step}
        return TrainerStates(tensors, {"iteration": step if run is None else run, **counters})


def _settings(content: Any, name: str, path: Path) -> Settings:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: {name} is {content!r:.50}, expected an object")
    return Settings(content, path)


def _length(content: Mapping[str, Any]) -> int:
    """Return the maximum sequence length of the run's data, since the model has no such setting."""
    for name in ("dataset", "train_module"):
        part = content.get(name)
        for key in ("sequence_length", "max_sequence_length"):
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
                return value
    return 4096
