"""Decoders with an ungated MLP: Arcee, Jais 2, Nemotron, Apertus and nanochat."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.formats.huggingface.config_reader import ACTIVATIONS, BIASES, write_rope
from megatron.formats.huggingface.decoders.relatives import (
    LAYER_NORM_SIZES,
    SIZES,
    relative,
    relative_entries,
    scaled_by_default,
)
from megatron.formats.huggingface.entries import SEPARATE_QKV, Entry, Reordering, linear, norm
from megatron.formats.huggingface.llama import DIVISIBLE, QK_NORMS

_MLP = (*linear("mlp.up", "mlp.up_proj"), *linear("mlp.down", "mlp.down_proj"))

ARCEE = relative(
    "Arcee",
    "arcee",
    "ArceeForCausalLM",
    relative_entries(mlp=_MLP),
    gated=False,
    biases=BIASES,
    requirements=(DIVISIBLE,),
)
"""Arcee: Llama with an ungated MLP and squared ReLU."""

JAIS2 = relative(
    "Jais 2",
    "jais2",
    "Jais2ForCausalLM",
    relative_entries(mlp=_MLP),
    keys=LAYER_NORM_SIZES,
    fixed={"normalization": "LayerNorm"},
    gated=False,
    biases=BIASES,
    requirements=(DIVISIBLE,),
    rewards=False,
)
"""Jais 2: Arcee with LayerNorm instead of RMSNorm."""

NEMOTRON = relative(
    "Nemotron",
    "nemotron",
    "NemotronForCausalLM",
    relative_entries(mlp=_MLP),
    keys={key if key != "rms_norm_eps" else "norm_eps": field for key, field in SIZES.items()},
    fixed={"normalization": "LayerNorm", "apply_layernorm_1p": True},
    gated=False,
    biases=BIASES,
    share=0.5,
)
"""Nemotron: LayerNorm that multiplies by 1 + weight, and rotation of half of each head."""


def _learned(model: ModelConfig) -> bool:
    return model.mlp.activation == "xielu"


def _constants(model: ModelConfig) -> dict[str, Tensor]:
    """Return xIELU's constants, which are the same in every model but stored in the files."""
    values = {"beta": 0.5, "eps": -1e-6} if _learned(model) else {}
    return {
        f"model.layers.{n}.mlp.act_fn.{name}": torch.tensor(value)
        for n in range(model.num_layers)
        for name, value in values.items()
    }


APERTUS = relative(
    "Apertus",
    "apertus",
    "ApertusForCausalLM",
    relative_entries(
        norm("attention_norm", "attention_layernorm"),
        norm("mlp_norm", "feedforward_layernorm"),
        QK_NORMS,
        [
            Entry(f"mlp.activation.{name}", (f"mlp.act_fn.{name}",), when=_learned)
            for name in ("alpha_p", "alpha_n")
        ],
        mlp_norm=None,
        mlp=_MLP,
    ),
    fixed={"qk_layernorm": True},
    features=("xielu",),
    gated=False,
    activations=ACTIVATIONS | {"xielu": {"xielu": True}},
    biases=("attention",),
    rope=False,
    read=lambda given, fields: scaled_by_default(given, fields, 8.0, 12e6),
    write=write_rope,
    constants=_constants,
    rewards=False,
)
"""Apertus: xIELU activation, with two learned factors in each block."""


def _exchanged(rows: Tensor, model: ModelConfig) -> Tensor:
    """Swap the first and the second half of each head's rows."""
    return rows.unflatten(0, (-1, 2, model.attention.kv_channels // 2)).flip(1).flatten(0, 2)


def _to_backwards(values: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = SEPARATE_QKV.to_hf(values, model)
    return _exchanged(q, model), _exchanged(k, model), v


_BACKWARDS = Reordering(
    "separate q, k, v, halves exchanged",
    3,
    _to_backwards,
    lambda parts, model: torch.cat(
        [_exchanged(parts[0], model), _exchanged(parts[1], model), parts[2]]
    ),
)
"""Queries and keys of models whose RoPE rotates by negative angles. Swapping the halves of each
head makes the angles positive."""

NANOCHAT = relative(
    "nanochat",
    "nanochat",
    "NanoChatForCausalLM",
    relative_entries(
        qkv_form=_BACKWARDS, mlp=(*linear("mlp.up", "mlp.fc1"), *linear("mlp.down", "mlp.fc2"))
    ),
    keys=SIZES | {"final_logit_softcapping": "final_logit_softcapping"},
    fixed={"normalization": "PlainRMSNorm", "qk_l2_norm": True, "embed_layernorm": True},
    gated=False,
    biases=("attention",),
    rewards=False,
)
"""nanochat: norms without parameters, also on the embeddings and on rotated queries and keys."""
