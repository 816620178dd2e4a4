"""GPT-J and CodeGen: attention and MLP in parallel from one norm, biases of the MLP and of logits
alone; the first channels of each head are rotated, neighbouring ones together.

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
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import (
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

_PARTS = 4
"""TPU cores that CodeGen was trained on; each has a part of the rows of its fused projection."""


def _to_parts(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
    q, k, v = values.unflatten(0, (3, _PARTS, -1)).unbind()
    return (torch.cat([q, v, k], 1).flatten(0, 1),)


def _from_parts(tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    q, v, k = tensors[0].unflatten(0, (_PARTS, 3, -1)).unbind(1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)])


_PARTED = Reordering("q, v, k in four parts", 1, _to_parts, _from_parts, of_rows=True)
"""A quarter of the heads' queries, values and keys follow each other: [4, 3, H / 4, H]."""


def _entries(qkv: Sequence[Entry]) -> tuple[Entry, ...]:
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
    """The ``--rotary-percent`` that rotates so many channels of a head of a width."""
    share = rotated / width
    return share if int(width * share) == rotated else math.nextafter(share, 1.0)


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"rotary_dim": model.rotated, **write_gpt2(model)}


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("scale_attn_weights", (True,), "attention scores are always scaled")
    given.only("rotary", (True,), "queries and keys are always rotated")  # of the first files
    given.unused("embd_pdrop", "n_ctx", "rotary_pct", "parallel_attn_mlp")
    rotated, width = given.whole("rotary_dim"), fields["kv_channels"]
    if rotated > width:
        given.refuse("rotary_dim", rotated, f"a head has {width} channels")
    return {"rotary_percent": share_of(rotated, width)}


def _read_codegen(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    if heads % _PARTS:
        given.refuse("n_head", heads, f"{_PARTS} must divide it")
    return _read(given, fields)


GPTJ = Architecture(
    title="GPT-J",
    model_type="gptj",
    model_class="GPTJForCausalLM",
    entries=_entries(
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
    write=_write,
    read=_read,
    base_prefix="transformer.",
)  # fmt: skip

CODEGEN = Architecture(
    title="CodeGen",
    model_type="codegen",
    model_class="CodeGenForCausalLM",
    entries=_entries(linear("attention.qkv", "attn.qkv_proj", form=_PARTED, bias=qkv_biased)),
    keys=GPT2.keys,
    fixed=GPTJ.fixed,
    features=GPTJ.features,
    requirements=(
        Requirement(
            lambda m: m.attention.num_attention_heads % _PARTS == 0,
            f"--num-attention-heads that {_PARTS} divides",
        ),
    ),
    write=_write,
    read=_read_codegen,
    rewards=False,  # transformers has no such class
    base_prefix="transformer.",
)
"""GPT-J with queries, values and keys in one tensor."""
