"""Further architectures with experts: MiniMax-M2, ERNIE 4.5, HunYuan, Phi-3.5-MoE and gpt-oss.

Experts of gpt-oss are [inputs, outputs], with biases and a clamped gate whose channels alternate
with the up channels. MXFP4 weights are read (:mod:`megatron.formats.huggingface.packed.mxfp4`) but
written in the model's dtype. Attention has sinks, and every other block has a sliding window.

Shapes: E experts, F inner width of an expert, H hidden size.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.gates import SPARSE_MIXER_EPS
from megatron.features.experts.huggingface.deepseek import (
    FP32,
    HAS_SHARED,
    ONE_SHARED,
    SIGMOID,
    WHOLE_SHARED,
    shared_number,
)
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DENSE,
    INNER,
    LLAMA_EXPERTS,
    correction,
    experts,
    experts_in,
    natural,
    read_experts,
    requirements,
    router,
    shared_experts,
    write_experts,
)
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    layer_types,
    read_rope,
    read_windows,
    write_rope,
)
from megatron.formats.huggingface.decoders.llamas import HUNYUAN_FIXED, HUNYUAN_NORMS, read_alpha
from megatron.formats.huggingface.decoders.relatives import SIZES, relative, relative_entries
from megatron.formats.huggingface.entries import (
    AS_ROW,
    INTERLEAVED_QKV,
    SAME,
    TRANSPOSED,
    Entry,
    Reordering,
    head_bias,
)
from megatron.formats.huggingface.llama import FIXED, HEAD_DIM, KEYS, QK_NORMS, llama_entries
from megatron.formats.huggingface.packed.mxfp4 import check_quantization

_MIXTRAL_EXPERTS = experts("block_sparse_moe.experts", "w1", "w3", "w2")
_MIXTRAL_ROUTER = router("block_sparse_moe.gate.weight")


def _inner(model: ModelConfig) -> int | None:
    return model.part(ExpertsConfig).moe_ffn_hidden_size


def _read_noise(given: HFConfigReader, name: str) -> dict[str, Any]:
    """Return the flag for the noise in training. transformers applies it to the inputs of the
    experts and the router, this project only to the router's."""
    return {"moe_input_jitter_eps": given.number(name) or None}


def _noise(model: ModelConfig) -> float:
    return model.part(ExpertsConfig).moe_input_jitter_eps or 0.0


def _read_minimax(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, width = fields["num_layers"], fields["kv_channels"]
    rotated = given.content.get("rotary_dim")
    given.unused("rotary_dim")
    if rotated is not None and (not isinstance(rotated, int) or not 0 < rotated <= width):
        given.refuse("rotary_dim", rotated, f"expected a number of channels, at most {width}")
    given.only("scoring_func", ("sigmoid", None), "scores are always sigmoids")
    for name in ("use_routing_bias", "use_qk_norm"):
        given.only(name, (True,), "all such models have it")
    given.only("qk_norm_type", ("per_layer", None), "all heads must be normalised together")
    given.only("shared_intermediate_size", (0, None), "such models have no shared expert")
    given.only("attn_type_list", ([1] * layers, None), "all blocks must have softmax attention")
    # Checkpoint files do not contain the multi-token prediction layers.
    given.unused("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    share = 1.0 if rotated is None else rotated / width
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts")),
        **read_rope(given, fields, share_key="partial_rotary_factor", share=share, base=5e6),
        **_read_noise(given, "router_jitter_noise"),
    }


def _write_minimax(model: ModelConfig) -> dict[str, Any]:
    rope, share = write_rope(model), model.positions.rotary_percent
    rope["rope_parameters"]["partial_rotary_factor"] = share
    return {
        **write_experts(model, "num_local_experts"),
        **rope,
        "intermediate_size": _inner(model),
        "rotary_dim": int(share * model.attention.kv_channels),
        "router_jitter_noise": _noise(model),
    }


MINIMAX_M2 = relative(
    "MiniMax-M2",
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    relative_entries(
        QK_NORMS,
        mlp=(
            *_MIXTRAL_ROUTER,
            *correction("block_sparse_moe.e_score_correction_bias"),
            *_MIXTRAL_EXPERTS,
        ),
    ),
    keys=SIZES | CHOICES,
    fixed=SIGMOID
    | {"qk_layernorm": True, "qk_layernorm_whole": True, "moe_router_normalize": True},
    features=("layer_experts", "rotary_percent"),
    rope=False,
    requirements=requirements(*SIGMOID),
    read=_read_minimax,
    write=_write_minimax,
    rewards=False,
    endings={
        "block_sparse_moe.gate.weight": "mlp.gate.weight",
        "block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias",
    },
)
"""MiniMax-M2: sigmoid scores with a correction as in DeepSeek-V3, without groups. RoPE rotates only
some channels of each head. One norm spans all query heads, and one all key heads."""


def _sparse(layers: int, first: int, last: int, every: int) -> list[bool]:
    """Return, for each block of an ERNIE model, whether it has experts."""
    return [first <= n <= last and (n + 1) % every == 0 for n in range(layers)]


def _bounds(model: ModelConfig) -> tuple[int, int, int] | None:
    """Return the first and last block of an ERNIE model with experts, and the interval between
    them, or None if the blocks with experts have no such pattern."""
    layers = model.num_layers
    sparse = [bool(experts_in(model, n)) for n in range(layers)]
    if not any(sparse):
        return None
    first, last = sparse.index(True), layers - 1 - sparse[::-1].index(True)
    possible = ((first, end, every) for every in range(1, layers + 1) for end in (layers - 1, last))
    return next((each for each in possible if _sparse(layers, *each) == sparse), None)


def _read_ernie(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, every = fields["num_layers"], given.whole("moe_layer_interval")
    first = natural(given, "moe_layer_start_index")
    last = natural(given, "moe_layer_end_index", least=-1)
    sparse = _sparse(layers, first, layers - 1 if last == -1 else last, every)
    if not any(sparse):
        given.refuse("moe_layer_interval", every, "no block has experts")
    given.only("use_bias", (False, None), "experts have no biases, and nothing else can have them")
    given.only("moe_norm_min", (1e-12, None), "the least sum of a token's weights must be 1e-12")
    given.only("moe_gate", ("topk", None), "a token must go to its best experts")
    given.only("moe_gate_act", ("softmax", None), "scores must be a softmax")
    # Keys of the original trainer, and of multi-token prediction layers.
    given.unused("moe_use_aux_free", "moe_capacity", "num_nextn_predict_layers")
    shared = natural(given, "moe_num_shared_experts")
    return {
        **read_experts(
            given, fields, ("moe_num_experts", "num_experts", "num_local_experts"), sparse
        ),
        **FP32,
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
    }


def _write_ernie(model: ModelConfig) -> dict[str, Any]:
    bounds = _bounds(model)
    assert bounds is not None
    keys = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    return {
        **write_experts(model, "moe_num_experts"),
        **dict(zip(keys, bounds, strict=True)),
        "moe_num_shared_experts": shared_number(model),
        "use_bias": False,
    }


_ERNIE_SOFTMAX = {
    "moe_router_pre_softmax": True, "moe_router_normalize": True,
    "moe_router_enable_expert_bias": True,
}  # fmt: skip

ERNIE4_5_MOE = relative(
    "ERNIE 4.5 MoE",
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    relative_entries(
        qkv_form=INTERLEAVED_QKV,
        mlp=(
            *DENSE,
            *router("mlp.gate.weight"),
            *correction("mlp.moe_statics.e_score_correction_bias", AS_ROW),
            *LLAMA_EXPERTS,
            *shared_experts("mlp.shared_experts", when=lambda model: shared_number(model) > 0),
        ),
    ),
    keys={ours: field for ours, field in SIZES.items() if ours != "attention_dropout"}
    | INNER
    | {("moe_k", "num_experts_per_tok"): "moe_router_topk"},
    fixed=_ERNIE_SOFTMAX | {"attention_dropout": 0.0},
    features=("layer_experts",),
    base=500_000.0,
    requirements=(
        *requirements(*_ERNIE_SOFTMAX, "moe_shared_expert_intermediate_size", dense=True),
        Requirement(
            lambda model: _bounds(model) is not None,
            "--moe-layer-freq with every N-th layer between two of them",
        ),
        WHOLE_SHARED,
    ),
    read=_read_ernie,
    write=_write_ernie,
    rewards=False,
    endings={
        "mlp.moe_statics.e_score_correction_bias": "mlp.gate.moe_statics.e_score_correction_bias"
    },
    predicting=lambda model: r".*\bmtp_.*",
)
"""ERNIE 4.5: scores are a softmax over all experts, with a correction when choosing. The weights of
the chosen experts are divided by their sum. RoPE rotates neighbouring channels of a head."""


def _alike(given: HFConfigReader, name: str, layers: int) -> int:
    """Return a number that may be given as a list with one equal entry per block."""
    value = given.content.get(name)
    if isinstance(value, list) and len(value) == layers and len(set(map(str, value))) == 1:
        given.content = given.content | {name: value[0]}
    elif isinstance(value, list):
        given.refuse(name, value, f"expected the same number for each of {layers} blocks")
    return given.whole(name)


def _read_hunyuan(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, inner = fields["num_layers"], fields["ffn_hidden_size"]
    top = _alike(given, "moe_topk", layers)
    _alike(given, "num_experts", layers)
    for name, value in (("num_shared_expert", 1), ("moe_intermediate_size", inner)):
        if name in given.content and _alike(given, name, layers) != value:
            given.refuse(name, given.content[name], f"transformers has {value} in all blocks")
    given.only("use_cla", (False, None), "blocks cannot share keys and values")
    given.only("use_qk_norm", (True, None), "queries and keys are always normalised")
    given.only("use_mixed_mlp_moe", (True, None), "all blocks have a shared expert")
    given.only("moe_layer_num_skipped", (0, None), "all blocks must have experts")
    given.only("norm_type", ("rms", None), "norms must be RMSNorm")
    given.unused("eod_token_id", "moe_drop_tokens", "attention_head_dim")
    rope = read_alpha(given, fields)
    return {
        **read_experts(given, fields | {"moe_router_topk": top}, "num_experts", coefficient=None),
        **rope,
        **FP32,
        "moe_router_topk": top,
        "moe_shared_expert_intermediate_size": inner,
    }


HUNYUAN_V1_MOE = relative(
    "HunYuan-MoE",
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    relative_entries(
        HUNYUAN_NORMS,
        mlp=(
            *router("mlp.gate.wg.weight"),
            *LLAMA_EXPERTS,
            *shared_experts("mlp.shared_mlp"),
        ),
    ),
    fixed=HUNYUAN_FIXED,
    features=("layer_experts",),
    biases=("attention",),
    rope=False,
    requirements=(
        *requirements("moe_shared_expert_intermediate_size", summing=True),
        WHOLE_SHARED,
        HAS_SHARED,
        ONE_SHARED,
    ),
    read=_read_hunyuan,
    write=lambda model: {
        **write_experts(model, "num_experts", coefficient=None),
        **write_rope(model),
        "moe_topk": model.part(ExpertsConfig).moe_router_topk,
        "intermediate_size": _inner(model),
    },
)
"""HunYuan with one shared expert. Queries and keys are normalised after RoPE."""


_LONGROPE = {
    "rope_type", "short_factor", "long_factor", "short_mscale", "long_mscale",
    "original_max_position_embeddings",
}  # fmt: skip


def _longrope_by_length(model: ModelConfig) -> bool:
    scaling = model.positions.rope_scaling
    return scaling.is_default or json.loads(scaling.to_json()).keys() == _LONGROPE


def _read_phi(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("hidden_dropout", (0, 0.0), "transformers has no dropout in such models")
    noise = SPARSE_MIXER_EPS
    given.only("router_jitter_noise", (noise,), f"SparseMixer here always has {noise}")
    given.only("num_experts_per_tok", (2,), "SparseMixer in transformers chooses two experts")
    rope = read_rope(given, fields, types={"su": "longrope"}, base=1e6)
    scaling = json.loads(rope["rope_scaling"] or "{}")
    if scaling and scaling.keys() != _LONGROPE:
        name = "rope_scaling" if "rope_scaling" in given.content else "rope_parameters"
        given.refuse(name, given.content[name], f"expected longrope with {sorted(_LONGROPE)}")
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts")),
        **rope,
        **_read_noise(given, "input_jitter_noise"),
    }


PHIMOE = relative(
    "Phi-3.5-MoE",
    "phimoe",
    "PhimoeForCausalLM",
    (
        *relative_entries(mlp=(*_MIXTRAL_ROUTER, *_MIXTRAL_EXPERTS)),
        *head_bias("lm_head.bias"),
    ),
    keys=SIZES | CHOICES | {"lm_head_bias": "lm_head_bias", "sliding_window": "sliding_window"},
    fixed={"normalization": "LayerNorm", "moe_gate": "sparsemixer", "moe_router_topk": 2},
    features=("layer_experts",),
    biases=("attention",),
    rope=False,
    requirements=(
        *requirements("moe_gate"),
        Requirement(_longrope_by_length, f"--rope-scaling with the keys {sorted(_LONGROPE)}"),
    ),
    read=_read_phi,
    write=lambda model: {
        **write_experts(model, "num_local_experts"),
        **write_rope(model),
        "intermediate_size": _inner(model),
        "router_jitter_noise": SPARSE_MIXER_EPS,
        "input_jitter_noise": _noise(model),
    },
    endings={"block_sparse_moe.gate.weight": "mlp.router.weight"},
)
"""Phi-3.5-MoE with LayerNorm. SparseMixer's two weights per token do not add up to 1."""


ARCHITECTURES = (MINIMAX_M2, ERNIE4_5_MOE, HUNYUAN_V1_MOE, PHIMOE)


def _alternating(values_EX: Tensor) -> Tensor:
    """Interleave gate and up channels of [E, 2F, ...], in which all gate channels come first."""
    return values_EX.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _gates_first(values_EX: Tensor) -> Tensor:
    return values_EX.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


_UP = Reordering(
    "transposed, gate and up in turn",
    1,
    lambda values, _: (_alternating(values).mT,),
    lambda parts, _: _gates_first(parts[0].mT),
)
_UP_BIAS = Reordering(
    "gate and up in turn",
    1,
    lambda values, _: (_alternating(values),),
    lambda parts, _: _gates_first(parts[0]),
)
_MLP = tuple(
    Entry(
        f"mlp.{ours}",
        (f"mlp.{theirs}",),
        form,
        at=experts_in,
        parameter=f"mlp.{theirs}" if theirs.endswith("_proj") else "",
    )
    for ours, theirs, form in (
        ("router.weight", "router.weight", SAME),
        ("router.bias", "router.bias", SAME),
        ("experts.up.weight", "experts.gate_up_proj", _UP),
        ("experts.up.bias", "experts.gate_up_proj_bias", _UP_BIAS),
        ("experts.down.weight", "experts.down_proj", TRANSPOSED),
        ("experts.down.bias", "experts.down_proj_bias", SAME),
    )
)
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Default RoPE scaling of a config.json without one."""


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    check_quantization(given)
    given.only("attention_bias", (True,), "experts have biases, and so must attention")
    given.only("hidden_act", ("silu",), "their gate is always x * sigmoid(1.702 x)")
    given.only("swiglu_alpha", (1.702,), "the factor in the gate's sigmoid must be 1.702")
    given.unused("initial_context_length")  # repeats original_max_position_embeddings
    if not given.table("rope_parameters") and not given.table("rope_scaling"):
        given.content = given.content | {"rope_scaling": _YARN}
    kinds = [FULL if n % 2 else SLIDING for n in range(fields["num_layers"])]
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts")),
        **read_rope(given, fields, base=150_000.0),
        **read_windows(given, given.optional_whole("sliding_window"), kinds),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_experts(model, "num_local_experts"),
        **write_rope(model),
        "intermediate_size": model.part(ExpertsConfig).moe_ffn_hidden_size,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        # transformers requires a window even if no block has one.
        "sliding_window": model.attention.sliding_window or model.positions.max_position_embeddings,
        "layer_types": layer_types(model),
    }


GPT_OSS = Architecture(
    title="gpt-oss",
    model_type="gpt_oss",
    model_class="GptOssForCausalLM",
    entries=llama_entries((Entry("attention.sinks", ("self_attn.sinks",)),), mlp=_MLP),
    keys=KEYS
    | HEAD_DIM
    | {
        ("num_experts_per_tok", "experts_per_token"): "moe_router_topk",
        "swiglu_limit": "activation_func_clamp_value",
    },
    fixed=FIXED
    | {
        "add_bias_linear": True,
        "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "moe_router_bias": True,
    },
    features=frozenset(
        {"layer_experts", "rope_scaling", "sliding_window", "window_attn_skip_freq"}
    ),
    gated=True,
    requirements=(
        *requirements("moe_router_bias", summing=True),
        Requirement(
            lambda model: model.mlp.activation_func_clamp_value is not None,
            "--activation-func-clamp-value",
        ),
    ),
    write=_write,
    read=_read,
)
