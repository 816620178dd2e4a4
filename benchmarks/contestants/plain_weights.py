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
BERT = {
    "norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "pair": "cls.seq_relationship",
    "dense": "cls.predictions.transform.dense",
    "dense_norm": "cls.predictions.transform.LayerNorm",
}
BERT_BLOCK = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_MLP = {
    "norm": ("layer_norm",),
    "up": ("DenseReluDense.wi",),
    "down": ("DenseReluDense.wo",),
}
_SELF = {
    "norm": ("layer_norm",),
    "qkv": tuple(f"SelfAttention.{name}" for name in "qkv"),
    "proj": ("SelfAttention.o",),
}
_CROSS = {
    "norm": ("layer_norm",),
    "q": ("EncDecAttention.q",),
    "kv": ("EncDecAttention.k", "EncDecAttention.v"),
    "proj": ("EncDecAttention.o",),
}
ENCODER_BLOCK, DECODER_BLOCK = (_SELF, _MLP), (_SELF, _CROSS, _MLP)


def plain_weights(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """The state dictionary of the plain model of the setting's family."""
    found = weights(setting, device)
    return READERS.get(setting.architecture, _from_llama)(found, setting)


def _from_gpt2(found: dict[str, Tensor], setting: Setting) -> dict[str, Tensor]:
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


def _from_bert(found: dict[str, Tensor], setting: Setting) -> dict[str, Tensor]:
    words = found["bert.embeddings.word_embeddings.weight"]
    result = {
        "tokens.weight": words,
        "head.weight": words,
        "head.bias": found["cls.predictions.bias"],
        "positions.weight": found["bert.embeddings.position_embeddings.weight"],
        "types.weight": found["bert.embeddings.token_type_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        for ours, theirs in BERT.items():
            result[f"{ours}.{kind}"] = found[f"{theirs}.{kind}"]
        for layer in range(setting.layers):
            for ours, names in BERT_BLOCK.items():
                parts = [found[f"bert.encoder.layer.{layer}.{name}.{kind}"] for name in names]
                result[f"blocks.{layer}.{ours}.{kind}"] = torch.cat(parts)
    return result


def _from_t5(found: dict[str, Tensor], setting: Setting) -> dict[str, Tensor]:
    result = {"tokens.weight": found["shared.weight"]}
    for stack, sublayers in (("encoder", ENCODER_BLOCK), ("decoder", DECODER_BLOCK)):
        relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        result[f"{stack}.relative.weight"] = found[relative]
        result[f"{stack}.norm.weight"] = found[f"{stack}.final_layer_norm.weight"]
        for layer in range(setting.layers):
            for place, parts in enumerate(sublayers):
                for ours, names in parts.items():
                    tensors = [
                        found[f"{stack}.block.{layer}.layer.{place}.{name}.weight"]
                        for name in names
                    ]
                    result[f"{stack}.blocks.{layer}.{place}.{ours}.weight"] = torch.cat(tensors)
    return result


READERS = {"gpt2": _from_gpt2, "bert": _from_bert, "t5": _from_t5}
