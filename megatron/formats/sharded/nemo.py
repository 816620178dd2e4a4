"""The network of a NeMo 2 checkpoint, from its ``context/model.yaml``, as Megatron's arguments.

NeMo writes the fields of its configuration, a subclass of Megatron-Core's ``TransformerConfig`` and
of its own ``GPTConfig``: numbers and texts, and functions by their names
(``activation_func: {_target_: torch.nn.functional.silu, _call_: false}``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron.checkpoint.files import CheckpointError, read_bytes

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
"""Fields of the configuration, and the argument of Megatron that means the same."""
_POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}
_GATED = {"silu": "swiglu", "quick_gelu": "quick_geglu"}
_PLAIN = {"gelu": "", "squared_relu": "squared_relu"}


def arguments_of_nemo(path: Path) -> dict[str, Any]:
    """The arguments of Megatron that describe the network of ``context/model.yaml``. Raises
    CheckpointError if the file is malformed, or has a network without such arguments."""
    config = _config(path)
    arguments = {theirs: config[name] for name, theirs in _SAME.items() if name in config}
    kind = config.get("position_embedding_type", "learned_absolute")
    if kind not in _POSITIONS:
        raise CheckpointError(f"{path}: position_embedding_type is {kind!r:.80}")
    groups = config.get("num_query_groups")
    length = config.get("seq_length")
    scaled = "scale_factor" in config and kind == "rope"  # that of Llama 3.1
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
