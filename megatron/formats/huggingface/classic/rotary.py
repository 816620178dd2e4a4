"""Decoders with LayerNorm and rotary positions: StableLM, StarCoder2, Phi-1 to Phi-2, Persimmon,
GPT-J and CodeGen.

All except StarCoder2 rotate only the first channels of each head. GPT-J and CodeGen pair
neighbouring channels, the others use Llama's order. GPT-J and CodeGen compute attention and MLP in
parallel after one norm, and have biases only in the MLP and on the logits.

Shapes: H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader, read_rope, write_rope
from megatron.formats.huggingface.entries import (
    GROUPED_QKV,
    SEPARATE_QKV,
    Entry,
    Reordering,
    attention_biased,
    decoder_entries,
    head_bias,
    linear,
    norm,
    qkv_biased,
)
from megatron.formats.huggingface.layer_norm_decoders import GPT2, write_gpt2
from megatron.formats.huggingface.llama import ACTIVATION, HEAD_DIM, KEYS, NO_BIASES, llama_entries

_SHARE = "partial_rotary_factor"
_FIXED = {"position_embedding_type": "rope", "normalization": "LayerNorm"}
_BIASED = {"add_bias_linear": True}
_KEYS = {key: field for key, field in KEYS.items() if key != "rms_norm_eps"} | ACTIVATION | {
    "layer_norm_eps": "norm_epsilon",
}  # fmt: skip


def _normalised(model: ModelConfig) -> bool:
    return model.norm.qk_layernorm


_QK_NORMS = (
    *norm("attention.q_norm", "self_attn.q_layernorm", when=_normalised),
    *norm("attention.k_norm", "self_attn.k_layernorm", when=_normalised),
)


def _decoder(*parts: Sequence[Entry], attention: str, up: str, down: str) -> tuple[Entry, ...]:
    """Return the entries of Phi or Persimmon, which use other names for three of the linear
    layers."""
    return decoder_entries(
        "model.embed_tokens",
        "model.layers.{n}",
        "model.final_layernorm",
        norm("attention_norm", "input_layernorm"),
        *parts,
        _QK_NORMS,
        linear("attention.proj", attention),
        linear("mlp.up", up),
        linear("mlp.down", down),
    )


_NORM_OF_EACH_HEAD = (
    Entry(
        "attention.q_norm.weight", ("self_attn.q_layernorm.norms.{e}.weight",), when=_normalised,
        slices=lambda model, n: model.attention.num_attention_heads,
    ),
    Entry(
        "attention.k_norm.weight", ("self_attn.k_layernorm.norms.{e}.weight",), when=_normalised,
        slices=lambda model, n: model.attention.num_query_groups,
    ),
)  # fmt: skip


STABLELM = Architecture(
    title="StableLM",
    model_type="stablelm",
    model_class="StableLmForCausalLM",
    entries=llama_entries(
        norm("attention_norm", "input_layernorm"),
        norm("mlp_norm", "post_attention_layernorm", when=lambda m: not m.shared_parallel_norm),
        _NORM_OF_EACH_HEAD,
        mlp_norm=None,
        qkv_bias=qkv_biased,
    ),
    keys=_KEYS | {
        "use_qkv_bias": "add_qkv_bias",
        "use_parallel_residual": "parallel_residual",
        "hidden_dropout": "hidden_dropout",
        "qk_layernorm": "qk_layernorm",
    },
    fixed=_FIXED | NO_BIASES,
    features=frozenset({
        "qk_layernorm_per_head", "rotary_percent", "rope_scaling", "shared_parallel_norm",
    }),
    gated=True,
    requirements=(
        Requirement(
            lambda m: m.shared_parallel_norm or not m.parallel_residual,
            "--shared-parallel-norm with --parallel-residual",
        ),
        Requirement(
            lambda m: m.norm.qk_layernorm_per_head == m.norm.qk_layernorm,
            "--qk-layernorm-per-head with --qk-layernorm",
        ),
    ),
    write=lambda model: write_rope(model, share_key=_SHARE),
    read=lambda given, fields: {
        "qk_layernorm_per_head": fields["qk_layernorm"],
        "shared_parallel_norm": fields["parallel_residual"],
        **read_rope(given, fields, share_key=_SHARE, share=0.25),
    },
)  # fmt: skip
"""StableLM 2 and 3B: a gated MLP, rotation of a quarter of each head, and optional biases on
queries, keys and values. Attention and MLP run in sequence, or in parallel after one norm. With
query and key norms, each head has its own weight (StableLM 2 12B)."""


def _read_starcoder2(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("embedding_dropout")
    # Config files of the first releases have these keys; transformers ignores both.
    given.only("mlp_type", ("default",), "the MLP must have no gate")
    given.only("norm_type", ("layer_norm",), "norms must be LayerNorm")
    return read_rope(given, fields)


STARCODER2 = Architecture(
    title="StarCoder2",
    model_type="starcoder2",
    model_class="Starcoder2ForCausalLM",
    entries=llama_entries(
        mlp=(*linear("mlp.up", "mlp.c_fc"), *linear("mlp.down", "mlp.c_proj")),
    ),
    keys={key: field for key, field in _KEYS.items() if key != "layer_norm_eps"} | HEAD_DIM | {
        "norm_epsilon": "norm_epsilon",
        "use_bias": "add_bias_linear",
        "residual_dropout": "hidden_dropout",
        "sliding_window": "sliding_window",
    },
    fixed=_FIXED,
    features=frozenset({"rope_scaling"}),
    write=lambda model: {"embedding_dropout": model.hidden_dropout, **write_rope(model)},
    read=_read_starcoder2,
)  # fmt: skip
"""StarCoder2: grouped queries, biases everywhere or nowhere, and a window in all blocks or none."""


def _read_phi(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("embd_pdrop")
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    if fields["qk_layernorm"] and fields["kv_channels"] != usual:
        given.refuse("head_dim", fields["kv_channels"], f"with qk_layernorm it must be {usual}")
    return read_rope(given, fields, share_key=_SHARE, share=0.5)


def _usual_width(model: ModelConfig) -> bool:
    attention = model.attention
    return attention.kv_channels == model.hidden_size // attention.num_attention_heads


def _write_phi(model: ModelConfig) -> dict[str, Any]:
    width = {} if _usual_width(model) else {"head_dim": model.attention.kv_channels}
    return {"embd_pdrop": model.hidden_dropout, **width, **write_rope(model, share_key=_SHARE)}


PHI = Architecture(
    title="Phi",
    model_type="phi",
    model_class="PhiForCausalLM",
    entries=(
        *_decoder(
            linear("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                   form=SEPARATE_QKV),
            attention="self_attn.dense", up="mlp.fc1", down="mlp.fc2",
        ),
        *head_bias("lm_head.bias"),
    ),
    keys=_KEYS | {"resid_pdrop": "hidden_dropout", "qk_layernorm": "qk_layernorm"},
    fixed=_FIXED | _BIASED | {
        "parallel_residual": True, "shared_parallel_norm": True, "lm_head_bias": True,
    },
    features=frozenset({"kv_channels", "rotary_percent", "rope_scaling"}),
    requirements=(
        Requirement(
            lambda m: _usual_width(m) or not _normalised(m),
            "--num-attention-heads times --kv-channels equal to --hidden-size with --qk-layernorm",
        ),
    ),
    only_read=HEAD_DIM,
    write=_write_phi,
    read=_read_phi,
)  # fmt: skip
"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one norm, rotation of half of each
head, and a bias on the logits."""


PERSIMMON = Architecture(
    title="Persimmon",
    model_type="persimmon",
    model_class="PersimmonForCausalLM",
    entries=_decoder(
        norm("mlp_norm", "post_attention_layernorm"),
        linear("attention.qkv", "self_attn.query_key_value", form=GROUPED_QKV),
        attention="self_attn.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
    ),
    keys={key: field for key, field in _KEYS.items() if field != "num_query_groups"} | {
        "hidden_dropout": "hidden_dropout", "qk_layernorm": "qk_layernorm",
    },
    fixed=_FIXED | _BIASED,
    features=frozenset({"rotary_percent", "rope_scaling"}),
    write=lambda model: write_rope(model, share_key=_SHARE),
    read=lambda given, fields: read_rope(given, fields, share_key=_SHARE, share=0.5),
)  # fmt: skip
"""Persimmon 8B: squared ReLU, query and key norms, and rotation of half of each head."""


_PARTS = 4
"""Number of TPU cores that CodeGen was trained on. Each stored a quarter of the fused
projection."""


def _to_parts(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    q, k, v = values.unflatten(0, (3, _PARTS, -1)).unbind()
    return (torch.cat([q, v, k], 1).flatten(0, 1),)


def _from_parts(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    q, v, k = tensors[0].unflatten(0, (_PARTS, 3, -1)).unbind(1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)])


_PARTED = Reordering("q, v, k in four parts", 1, _to_parts, _from_parts, of_rows=True)
"""Rows [4, 3, H / 4, H]: each of four slices has the queries, values and keys of a quarter of the
heads."""


def _gptj_entries(qkv: Sequence[Entry]) -> tuple[Entry, ...]:
    return (
        *decoder_entries(
            "transformer.wte",
            "transformer.h.{n}",
            "transformer.ln_f",
            norm("attention_norm", "ln_1"),
            qkv,
            linear("attention.proj", "attn.out_proj", bias=attention_biased),
            linear("mlp.up", "mlp.fc_in"),
            linear("mlp.down", "mlp.fc_out"),
        ),
        *head_bias("lm_head.bias"),
    )


def share_of(rotated: int, width: int) -> float:
    """Return the ``--rotary-percent`` with which ``rotated`` of a head's ``width`` channels
    rotate."""
    share = rotated / width
    return share if int(width * share) == rotated else math.nextafter(share, 1.0)


def _write_gptj(model: ModelConfig) -> dict[str, Any]:
    return {"rotary_dim": model.rotated, **write_gpt2(model)}


def _read_gptj(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("scale_attn_weights", (True,), "attention scores are always scaled")
    # a key of the first releases
    given.only("rotary", (True,), "queries and keys are always rotated")
    given.unused("embd_pdrop", "n_ctx", "rotary_pct", "parallel_attn_mlp")
    rotated, width = given.whole("rotary_dim"), fields["kv_channels"]
    if rotated > width:
        given.refuse("rotary_dim", rotated, f"a head has {width} channels")
    return {"rotary_percent": share_of(rotated, width)}


def _read_codegen(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    if heads % _PARTS:
        given.refuse("n_head", heads, f"{_PARTS} must divide it")
    return _read_gptj(given, fields)


GPTJ = Architecture(
    title="GPT-J",
    model_type="gptj",
    model_class="GPTJForCausalLM",
    entries=_gptj_entries(
        linear("attention.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", form=SEPARATE_QKV,
               bias=qkv_biased)
    ),
    keys=GPT2.keys,
    fixed={
        "position_embedding_type": "rope", "rotary_interleaved": True, "rotary_base": 10000.0,
        "normalization": "LayerNorm", "add_bias_linear": False, "add_mlp_bias": True,
        "parallel_residual": True, "shared_parallel_norm": True, "lm_head_bias": True,
    },
    features=frozenset({"rotary_percent"}),
    write=_write_gptj,
    read=_read_gptj,
    base_prefix="transformer.",
)  # fmt: skip

CODEGEN = Architecture(
    title="CodeGen",
    model_type="codegen",
    model_class="CodeGenForCausalLM",
    entries=_gptj_entries(linear("attention.qkv", "attn.qkv_proj", form=_PARTED, bias=qkv_biased)),
    keys=GPT2.keys,
    fixed=GPTJ.fixed,
    features=GPTJ.features,
    requirements=(
        Requirement(
            lambda m: m.attention.num_attention_heads % _PARTS == 0,
            f"--num-attention-heads that {_PARTS} divides",
        ),
    ),
    write=_write_gptj,
    read=_read_codegen,
    rewards=False,  # transformers has no reward class
    base_prefix="transformer.",
)
"""CodeGen: GPT-J with queries, values and keys fused in one tensor."""
