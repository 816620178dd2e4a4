"""The weights that all start from, under the names of the plain model."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from contestants.inputs import weights
from contestants.setting import Setting

GPT2 = {
    "ln_1": "attention_norm",
    "attn.c_attn": "qkv",
    "attn.c_proj": "proj",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
LLAMA = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "proj": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def plain_weights(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """The state dictionary of :class:`contestants.plain_model.GPT`."""
    found = weights(setting, device)
    return _from_gpt2(found) if setting.architecture == "gpt2" else _from_llama(found, setting)


def _from_gpt2(found: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
    result = {
        "tokens.weight": named["wte.weight"],
        "head.weight": named["wte.weight"],
        "positions.weight": named["wpe.weight"],
        "norm.weight": named["ln_f.weight"],
        "norm.bias": named["ln_f.bias"],
    }
    for name, tensor in named.items():
        parts = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
        if parts and parts[2] in GPT2:
            # Conv1D holds a matrix as [inputs, outputs].
            tensor = tensor.t().contiguous() if tensor.dim() == 2 else tensor
            result[f"blocks.{parts[1]}.{GPT2[parts[2]]}.{parts[3]}"] = tensor
    return result


def _from_llama(found: dict[str, Tensor], setting: Setting) -> dict[str, Tensor]:
    result = {
        "tokens.weight": found["model.embed_tokens.weight"],
        "head.weight": found["lm_head.weight"],
        "norm.weight": found["model.norm.weight"],
    }
    for layer in range(setting.layers):
        for ours, theirs in LLAMA.items():
            parts = [found[f"model.layers.{layer}.{name}.weight"] for name in theirs]
            result[f"blocks.{layer}.{ours}.weight"] = torch.cat(parts)
    return result
