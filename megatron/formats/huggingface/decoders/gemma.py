"""Gemma 1 and VaultGemma: Gemma 2 without norms after attention and MLP, the first also without
windows and softcaps."""

from __future__ import annotations

from typing import Any

from megatron.formats.huggingface.config_reader import HFConfigReader, read_rope, write_rope
from megatron.formats.huggingface.decoders.relatives import relative, relative_entries
from megatron.formats.huggingface.llama import GEMMA2, read_gemma, write_gemma

_FIXED = {"apply_layernorm_1p": True, "scale_embeddings": True}


def _read_gemma1(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("use_bidirectional_attention", (False, None), "attention must be causal")
    given.only(
        "hidden_activation", ("gelu_pytorch_tanh", None), "transformers reads hidden_act"
    )  # fmt: skip
    return {}


GEMMA = relative(
    "Gemma",
    "gemma",
    "GemmaForCausalLM",
    # Files of the first releases say gelu for what transformers computes as gelu_pytorch_tanh.
    fixed=_FIXED,
    activations={
        name: {"glu_activation": "geglu"} for name in ("gelu", "gelu_pytorch_tanh", "gelu_new")
    }
    | {"silu": {"glu_activation": "swiglu"}},
    biases=("attention",),
    read=_read_gemma1,
)

VAULTGEMMA = relative(
    "VaultGemma",
    "vaultgemma",
    "VaultGemmaForCausalLM",
    relative_entries(mlp_norm="pre_feedforward_layernorm"),
    keys=GEMMA2.keys,
    fixed=_FIXED,
    features=GEMMA2.features,
    requirements=GEMMA2.requirements,
    rope=False,
    read=lambda given, fields: {**read_gemma(given, fields, 2), **read_rope(given, fields)},
    write=lambda model: write_gemma(model) | write_rope(model),
    rewards=False,
)
