"""Checkpoints of litgpt: ``lit_model.pth`` and ``model_config.yaml``.

Names and order of rows follow ``litgpt/model.py`` and ``convert_lit_checkpoint.py`` of litgpt
0.5.13: one matrix ``attn.qkv`` has all queries, then all keys, then all values. Supported models
are Llama, Mistral and Qwen (RMSNorm, ``LLaMAMLP``) and GPT-NeoX (LayerNorm, ``GptNeoxMLP``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.formats.trainers.renamed import (
    LLAMA_KEYS,
    FileTensor,
    Settings,
    TrainerFolder,
    renamed,
    tensors_of,
    yaml_of,
)
from megatron.formats.unpickle import load_pickle

WEIGHTS, CONFIG = "lit_model.pth", "model_config.yaml"
_OF_LLAMA = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.h.{}.norm_1.weight": "model.layers.{}.input_layernorm.weight",
    "transformer.h.{}.norm_2.weight": "model.layers.{}.post_attention_layernorm.weight",
    "transformer.h.{}.attn.proj.weight": "model.layers.{}.self_attn.o_proj.weight",
    "transformer.h.{}.attn.norm_q.weight": "model.layers.{}.self_attn.q_norm.weight",
    "transformer.h.{}.attn.norm_k.weight": "model.layers.{}.self_attn.k_norm.weight",
    "transformer.h.{}.mlp.fc_1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "transformer.h.{}.mlp.fc_2.weight": "model.layers.{}.mlp.up_proj.weight",
    "transformer.h.{}.mlp.proj.weight": "model.layers.{}.mlp.down_proj.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_OF_NEOX = {
    "transformer.wte": "gpt_neox.embed_in",
    "transformer.h.{}.norm_1": "gpt_neox.layers.{}.input_layernorm",
    "transformer.h.{}.norm_2": "gpt_neox.layers.{}.post_attention_layernorm",
    "transformer.h.{}.attn.qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "transformer.h.{}.attn.proj": "gpt_neox.layers.{}.attention.dense",
    "transformer.h.{}.mlp.fc": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "transformer.h.{}.mlp.proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "transformer.ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
_HARMLESS = {
    "name": ..., "hf_config": ..., "vocab_size": ..., "padding_multiple": ..., "norm_1": True,
    "norm_2": True, "gelu_approximate": ..., "routed_scaling_factor": ..., "rope_condense_ratio": 1,
    "norm_qk_type": "default", "rope_n_elem": ..., "n_query_groups": ...,
}  # fmt: skip
"""Settings that do not affect the model if they have this value; ... means any value."""


class LitFolder(TrainerFolder):
    """Folder with ``lit_model.pth``, which is memory-mapped."""

    title = "model of litgpt"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        path = path.parent if path.name in (WEIGHTS, CONFIG) else path
        if not (path / WEIGHTS).is_file() or not (path / CONFIG).is_file():
            return None
        if wanted is not None:
            raise CheckpointError(f"{path} is a model of litgpt, and has no {wanted}")
        return path

    def _find_config(self) -> Path:
        return self.folder / CONFIG

    def _read_config(self, config: Path) -> dict[str, Any]:
        given = Settings(yaml_of(config), config)
        kind = (given.value("norm_class_name", "LayerNorm"), given.value("mlp_class_name"))
        readers = {("RMSNorm", "LLaMAMLP"): _llama, ("LayerNorm", "GptNeoxMLP"): _neox}
        if kind not in readers:
            raise CheckpointError(
                f"{config}: norm_class_name and mlp_class_name are {kind}, expected one of "
                f"{', '.join(map(str, readers))}"
            )
        common = {
            "hidden_size": given.whole("n_embd"),
            "num_hidden_layers": given.whole("n_layer"),
            "num_attention_heads": given.whole("n_head"),
            "vocab_size": given.whole("padded_vocab_size", given.value("vocab_size")),
            "intermediate_size": given.whole("intermediate_size", 4 * given.whole("n_embd")),
            "max_position_embeddings": given.whole("block_size"),
            "tie_word_embeddings": False,
        }
        keys = common | readers[kind](given)
        given.refuse(_HARMLESS)
        return keys

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        path = self.folder / WEIGHTS
        loaded = load_pickle(path)
        if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict):
            loaded = loaded["model"]  # the file is from a training run
        stored = tensors_of(path, loaded)
        if any(name.endswith(".attn.attn.weight") for name in stored):
            raise CheckpointError(
                f"{path} has attn.attn, the interleaved rows of litgpt before 0.5.4: convert it "
                "with a newer litgpt"
            )
        heads, groups = content["num_attention_heads"], self._groups(content)
        width = content.get("head_dim") or content["hidden_size"] // heads
        if content["model_type"] == "gpt_neox":
            names = {
                f"{a}.{k}": f"{b}.{k}" for a, b in _OF_NEOX.items() for k in ("weight", "bias")
            }
            for name, each in stored.items():
                if ".attn.qkv." in name:
                    stored[name] = each.changed(lambda values: _by_head(values, heads))
            return path, renamed(stored, names, path)
        cuts = {
            "q": (0, heads),
            "k": (heads, heads + groups),
            "v": (heads + groups, heads + 2 * groups),
        }
        result: dict[str, FileTensor] = {}
        for name in [name for name in stored if ".attn.qkv." in name]:
            fused, (_, _, n, _, _, kind) = stored.pop(name), name.split(".")
            for part, (start, end) in cuts.items():
                theirs = f"model.layers.{n}.self_attn.{part}_proj.{kind}"
                result[theirs] = fused.rows(start * width, end * width)
        return path, result | renamed(stored, _OF_LLAMA, path)

    def _groups(self, content: Mapping[str, Any]) -> int:
        groups: int = content.get("num_key_value_heads", content["num_attention_heads"])
        return groups


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Reorder rows from [all queries, all keys, all values] to [heads, query + key + value]."""
    return torch.stack(
        [part.reshape(heads, -1, *values.shape[1:]) for part in values.chunk(3)], 1
    ).reshape(values.shape)


def _llama(given: Settings) -> dict[str, Any]:
    heads, window = given.whole("n_head"), given.value("sliding_window_size")
    if given.number("rotary_percentage", 0.25) != 1.0:
        raise given.wrong("rotary_percentage", "1.0 in a Llama")
    for name in ("bias", "parallel_residual"):
        if given.flag(name, True):
            raise given.wrong(name, "false in a Llama")
    if not all(given.value("sliding_window_indices") or [1]):
        raise given.wrong("sliding_window_indices", "windows in every block or in none")
    keys = {
        **LLAMA_KEYS,
        "num_key_value_heads": given.whole("n_query_groups", heads),
        "head_dim": given.whole("head_size", given.whole("n_embd") // heads),
        "rms_norm_eps": given.number("norm_eps", 1e-5),
        "rope_theta": given.number("rope_base", 10_000),
    }
    biased, normed = given.flag("attn_bias", False), given.flag("norm_qk", False)
    if biased or normed:
        del keys["attention_bias"], keys["mlp_bias"]
        keys["model_type"] = "qwen3" if normed else "qwen2"
        if normed:
            keys["attention_bias"] = biased
    elif window is not None:
        del keys["attention_bias"], keys["mlp_bias"]
        keys |= {"model_type": "mistral", "sliding_window": given.whole("sliding_window_size")}
    if given.value("rope_adjustments") is not None:
        keys["rope_scaling"] = _scaling(given)
    return keys


def _scaling(given: Settings) -> dict[str, Any]:
    inner = given.value("rope_adjustments")
    if not isinstance(inner, dict) or "original_max_seq_len" not in inner:
        raise given.wrong("rope_adjustments", "the factors of Llama 3.1")
    there = Settings(inner, given.path)
    return {
        "rope_type": "llama3",
        "factor": there.number("factor"),
        "low_freq_factor": there.number("low_freq_factor"),
        "high_freq_factor": there.number("high_freq_factor"),
        "original_max_position_embeddings": there.whole("original_max_seq_len"),
    }


def _neox(given: Settings) -> dict[str, Any]:
    heads = given.whole("n_head")
    if given.whole("n_query_groups", heads) != heads:
        raise given.wrong("n_query_groups", "that of n_head in a GPT-NeoX")
    if given.whole("head_size", given.whole("n_embd") // heads) * heads != given.whole("n_embd"):
        raise given.wrong("head_size", "n_embd divided by n_head in a GPT-NeoX")
    if not given.flag("bias", True):
        raise given.wrong("bias", "true in a GPT-NeoX")
    given.value("attn_bias")
    return {
        "model_type": "gpt_neox",
        "hidden_act": "gelu_new" if given.value("gelu_approximate") == "tanh" else "gelu",
        "layer_norm_eps": given.number("norm_eps", 1e-5),
        "rotary_pct": given.number("rotary_percentage", 0.25),
        "rotary_emb_base": given.number("rope_base", 10_000),
        "use_parallel_residual": given.flag("parallel_residual", True),
        "attention_bias": True,
    }
