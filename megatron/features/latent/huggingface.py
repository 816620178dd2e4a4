"""Hugging Face architectures with latent attention: DeepSeek-V2 and V3 (also the shapes of Kimi-K2
and Moonlight), GLM-4 MoE Lite, Youtu and MiniCPM3.

RoPE rotates channels in pairs. Most of these formats store a pair in adjacent channels of queries
and keys; in this trainer channels i and i + R/2 are a pair. Norms of latent vectors have their own
epsilon.

Shapes: N heads, C channels of a head without positions, R rotated channels, L latent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.deepseek import (
    CORRECTED,
    CORRECTED_MLP,
    DENSE_FIRST,
    FP32,
    HAS_SHARED,
    NORMALISED,
    NUMBER,
    SIGMOID,
    WHOLE_SHARED,
    read_corrected,
    read_dense_first,
    read_scale,
    shared_number,
    write_corrected,
)
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DENSE,
    INNER,
    LLAMA_EXPERTS,
    read_experts,
    read_mlp_kinds,
    requirements,
    router,
    shared_experts,
    write_experts,
    write_mlp_kinds,
)
from megatron.features.latent.flags import LatentConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.ahead import DEEPSEEK_AHEAD
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader, read_rope, short, write_rope
from megatron.formats.huggingface.decoders.relatives import relative
from megatron.formats.huggingface.entries import (
    SAME,
    Entry,
    Reordering,
    attention_biased,
    linear,
    norm,
)
from megatron.formats.huggingface.llama import ACTIVATION, KEYS, gated_mlp, llama_entries

_EPSILON = 1e-6
"""Epsilon that `transformers` uses in the norms of latent vectors, regardless of config.json."""


def _rotated(rows: Tensor, model: ModelConfig, head: int, pairs: bool) -> Tensor:
    """Reorder the last R of each head's ``head`` rows from halves to adjacent pairs or back."""
    part = model.part(LatentConfig)
    if not part.latent_pairs:
        return rows
    rotated = part.qk_pos_emb_head_dim
    heads = rows.unflatten(0, (-1, head)).clone()
    shape = (2, rotated // 2) if pairs else (rotated // 2, 2)
    turned = heads[:, head - rotated :].unflatten(1, shape).transpose(1, 2)
    heads[:, head - rotated :] = turned.flatten(1, 2)
    return heads.flatten(0, 1)


def _of_width(name: str, width: Any) -> Reordering:
    return Reordering(
        name,
        1,
        lambda values, model: (_rotated(values, model, width(model), True),),
        lambda parts, model: _rotated(parts[0], model, width(model), False),
        of_rows=True,
    )


_QUERIES = _of_width("queries, rotated by pairs", lambda model: model.attention.kv_channels)
"""Reordering of query heads with C + R rows each."""
_DOWN = _of_width("latent and key, rotated by pairs", lambda m: m.part(LatentConfig).latent_width)
"""Reordering of the L + R rows of the latent vector and the shared key."""


def _ranked(model: ModelConfig) -> bool:
    return model.part(LatentConfig).q_lora_rank is not None


def latent_entries(mlp: Sequence[Entry], pairs: bool = True) -> tuple[Entry, ...]:
    """Return the weight entries of a model with latent attention. ``pairs`` is True if its
    checkpoints may store rotated channels in adjacent pairs."""
    queries, down = (_QUERIES, _DOWN) if pairs else (SAME, SAME)
    prefix, theirs = "attention.kv_down", "self_attn.kv_a_proj_with_mqa"
    maps = (
        Entry("attention.q.weight", ("self_attn.q_proj.weight",), queries,
              lambda model: not _ranked(model)),
        Entry("attention.q_down.weight", ("self_attn.q_a_proj.weight",), when=_ranked),
        Entry("attention.q_down.bias", ("self_attn.q_a_proj.bias",),
              when=lambda model: _ranked(model) and attention_biased(model)),
        *norm("attention.q_norm", "self_attn.q_a_layernorm", when=_ranked),
        Entry("attention.q_up.weight", ("self_attn.q_b_proj.weight",), queries, _ranked),
        *linear(prefix, theirs, form=down, bias=attention_biased),
        *norm("attention.kv_norm", "self_attn.kv_a_layernorm"),
        Entry("attention.kv_up.weight", ("self_attn.kv_b_proj.weight",)),
    )  # fmt: skip
    return llama_entries(qkv=maps, proj_bias=attention_biased, mlp=mlp)


_LATENT_KEYS = KEYS | ACTIVATION | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}  # fmt: skip
_LATENT_FIXED = {"multi_latent_attention": True, "qk_layernorm": True}


def _latent(title: str, model_type: str, model_class: str, **others: Any) -> Architecture:
    """Return the architecture of a decoder with latent attention. The arguments are passed to
    :func:`relative`."""
    others["fixed"] = _LATENT_FIXED | others.get("fixed", {})
    others["features"] = {"kv_channels", *others.get("features", ("layer_experts",))}
    return relative(title, model_type, model_class, biases=("attention",), rope=False, **others)


def _has_epsilon(model: ModelConfig) -> bool:
    own = model.part(LatentConfig).latent_norm_epsilon
    return (own or model.norm.norm_epsilon) == _EPSILON


_OF_NORMS = Requirement(_has_epsilon, f"--latent-norm-epsilon {_EPSILON:g}")


def read_latent(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the attention flags that are derived from several keys of config.json."""
    rotated = fields["qk_pos_emb_head_dim"]
    if fields["num_query_groups"] != fields["num_attention_heads"]:
        given.refuse(
            "num_key_value_heads", fields["num_query_groups"],
            f"every head has its keys; there are {fields['num_attention_heads']}",
        )  # fmt: skip
    given.only("qk_head_dim", (fields["qk_head_dim"] + rotated,), "it is the sum of its parts")
    given.unused("head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
    given.unused("num_nextn_predict_layers", "num_mtp_layers", "embedding_initializer_range")
    own = None if fields["norm_epsilon"] == _EPSILON else _EPSILON
    of_rope = read_rope(given, fields | {"kv_channels": rotated})
    return {**of_rope, "latent_norm_epsilon": own}


def _read_pairs(given: HFConfigReader) -> dict[str, Any]:
    return {"latent_pairs": given.flag("rope_interleave")}


def _write_pairs(model: ModelConfig) -> dict[str, Any]:
    return {"rope_interleave": model.part(LatentConfig).latent_pairs}


def _read_v2(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("scoring_func", ("softmax", None), "scores are a softmax over all experts")
    given.only("norm_topk_prob", (False, None), "transformers does not read it")
    grouped = given.choice(
        "topk_method", {"greedy": {"grouped": 0}, "group_limited_greedy": {"grouped": 1}}
    )["grouped"]
    groups, kept = given.optional_whole("n_group"), given.optional_whole("topk_group")
    if not grouped or groups in (None, 1):
        groups = kept = None
    sparse = read_dense_first(given, fields["num_layers"])
    return {
        **read_latent(given, fields),
        **read_experts(given, fields, NUMBER, sparse, coefficient=None),
        **FP32,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_group_score": "max" if groups else "sum",
        "moe_router_topk_scaling_factor": read_scale(given),
        "moe_shared_expert_intermediate_size": given.whole("n_shared_experts")
        * fields["moe_ffn_hidden_size"],
    }


def _write_v2(model: ModelConfig) -> dict[str, Any]:
    part = model.part(ExpertsConfig)
    groups = part.moe_router_num_groups
    return {
        **write_rope(model),
        **write_experts(model, "n_routed_experts", coefficient=None),
        "first_k_dense_replace": part.layer_experts.count(0),
        "n_shared_experts": shared_number(model),
        "topk_method": "greedy" if groups is None else "group_limited_greedy",
        "n_group": groups,
        "topk_group": part.moe_router_group_topk,
        "norm_topk_prob": False,
        "routed_scaling_factor": part.moe_router_topk_scaling_factor or 1.0,
    }


def _by_best(model: ModelConfig) -> bool:
    part = model.part(ExpertsConfig)
    best = part.moe_router_group_score == "max"
    return part.moe_router_num_groups is None or best or (
        part.moe_router_topk == part.moe_router_group_topk
    )  # fmt: skip


_MLP = (
    *DENSE,
    *router("mlp.gate.weight"),
    *LLAMA_EXPERTS,
    *shared_experts("mlp.shared_experts"),
)

DEEPSEEK_V2 = _latent(
    "DeepSeek-V2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    entries=latent_entries(_MLP),
    keys=_LATENT_KEYS | CHOICES | INNER,
    fixed={"moe_router_pre_softmax": True},
    requirements=(
        *requirements(
            "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
            "moe_router_group_score", "moe_shared_expert_intermediate_size", dense=True,
        ),
        Requirement(_by_best, "--moe-router-group-score max"),
        Requirement(
            lambda model: model.part(LatentConfig).latent_pairs,
            "rotated channels that were read as pairs",
        ),
        DENSE_FIRST, WHOLE_SHARED, HAS_SHARED, _OF_NORMS,
    ),
    read=_read_v2,
    write=_write_v2,
    rewards=False,
)  # fmt: skip
"""DeepSeek-V2: softmax router scores without renormalisation. Experts are chosen in groups ranked
by their best expert, or without groups. V2-Lite has no latent vectors for queries."""


def _write_v3(model: ModelConfig) -> dict[str, Any]:
    return {**write_rope(model), **_write_pairs(model), **write_corrected(model)}


DEEPSEEK_V3 = _latent(
    "DeepSeek-V3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    entries=latent_entries(CORRECTED_MLP),
    keys=_LATENT_KEYS | CHOICES | INNER | NORMALISED,
    fixed=SIGMOID,
    requirements=(*CORRECTED, _OF_NORMS),
    read=lambda given, fields: {
        **read_latent(given, fields),
        **_read_pairs(given),
        **read_corrected(given, fields),
    },
    write=_write_v3,
    ahead=DEEPSEEK_AHEAD,
    other_types=("kimi_k2",),
)
"""DeepSeek-V3: sigmoid router scores with a correction, in groups ranked by their two best experts.
Kimi-K2 and Moonlight have one group."""


def _read_glm(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    if given.names("mlp_layer_types") is None:
        given.only("first_k_dense_replace", (1,), "transformers reads mlp_layer_types alone")
    given.unused("first_k_dense_replace", "moe_layer_freq")
    default = ["dense"] + ["sparse"] * (fields["num_layers"] - 1)
    return {
        **read_latent(given, fields),
        **_read_pairs(given),
        **read_corrected(given, fields, read_mlp_kinds(given, default)),
    }


GLM4_MOE_LITE = _latent(
    "GLM-4 MoE Lite",
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    entries=DEEPSEEK_V3.entries,
    keys=DEEPSEEK_V3.keys,
    fixed=SIGMOID,
    requirements=(*(need for need in CORRECTED if need is not DENSE_FIRST), _OF_NORMS),
    read=_read_glm,
    write=lambda model: {**_write_v3(model), **write_mlp_kinds(model)},
    rewards=False,
    ahead=DEEPSEEK_AHEAD,
)
"""GLM-4.7-Flash: like DeepSeek-V3, but any block can be dense."""

YOUTU = _latent(
    "Youtu",
    "youtu",
    "YoutuForCausalLM",
    entries=latent_entries(gated_mlp("mlp", "mlp")),
    keys=_LATENT_KEYS,
    features=(),
    requirements=(_OF_NORMS,),
    read=lambda given, fields: {**read_latent(given, fields), **_read_pairs(given)},
    write=lambda model: {**write_rope(model), **_write_pairs(model)},
    rewards=False,
)
"""Youtu: DeepSeek-V3's attention with a dense MLP in every block."""


def _read_minicpm(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    depth, base = given.number("scale_depth"), given.whole("dim_model_base")
    factors = {
        "residual_multiplier": short(depth / math.sqrt(fields["num_layers"])),
        "embedding_multiplier": given.number("scale_emb"),
        "logits_scaling": fields["hidden_size"] / base,
    }
    given.unused("mup_denominator")
    return {
        **read_latent(given, fields),
        **{name: None if value == 1.0 else value for name, value in factors.items()},
        "latent_pairs": False,
    }


def _write_minicpm(model: ModelConfig) -> dict[str, Any]:
    flags, depth = model.flags(), math.sqrt(model.num_layers)
    if flags.residual_multiplier is not None:
        depth = short(flags.residual_multiplier * depth)
    return {
        **write_rope(model),
        "scale_depth": depth,
        "scale_emb": flags.embedding_multiplier or 1.0,
        "dim_model_base": round(model.hidden_size / (flags.logits_scaling or 1.0)),
    }


def _whole_base(model: ModelConfig) -> bool:
    base = model.hidden_size / (model.embedding.logits_scaling or 1.0)
    return base >= 1 and math.isclose(base, round(base), rel_tol=1e-12)


MINICPM3 = _latent(
    "MiniCPM3",
    "minicpm3",
    "MiniCPM3ForCausalLM",
    entries=latent_entries(gated_mlp("mlp", "mlp"), pairs=False),
    keys=_LATENT_KEYS,
    features=("residual_multiplier", "embedding_multiplier", "logits_scaling"),
    requirements=(
        Requirement(_whole_base, "--logits-scaling that leads from --hidden-size to an integer"),
        _OF_NORMS,
    ),
    read=_read_minicpm,
    write=_write_minicpm,
)
"""MiniCPM3: rotated channels in two halves; multipliers for embeddings, residual sums and
logits."""


ARCHITECTURES = (DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE, YOUTU, MINICPM3)
