"""Llama-like architectures with experts instead of the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE, Mellum,
OLMoE, FlexOlmo and Granite-MoE."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DENSE,
    INNER,
    LLAMA_EXPERTS,
    experts,
    experts_in,
    fused_experts,
    normalised,
    read_experts,
    read_mlp_kinds,
    read_normalisation,
    requirements,
    router,
    shared_experts,
    write_experts,
    write_mlp_kinds,
)
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_scaling,
    read_windows,
    write_rope,
)
from megatron.formats.huggingface.decoders.granite import (
    FACTORS,
    read_multipliers,
    write_multipliers,
)
from megatron.formats.huggingface.decoders.relatives import SIZES, relative, relative_entries
from megatron.formats.huggingface.entries import Entry, norm
from megatron.formats.huggingface.llama import (
    ACTIVATION,
    HEAD_DIM,
    KEYS,
    LOCAL_UNSCALED,
    QK_NORMS,
    by_kind,
    local_base,
    read_kinds,
)

_NUMBER = ("num_experts", "num_local_experts")


def _write_alike(model: ModelConfig, number: str) -> dict[str, Any]:
    """Return the keys of a model with experts of width ``intermediate_size`` in all blocks."""
    inner = model.part(ExpertsConfig).moe_ffn_hidden_size
    return {"intermediate_size": inner, **write_experts(model, number)}


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    noise = model.part(ExpertsConfig).moe_input_jitter_eps
    return {**_write_alike(model, "num_local_experts"), "router_jitter_noise": noise or 0.0}


def _read_mixtral(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    # transformers applies the noise to the experts' inputs too, this project only to the router's.
    noise = given.number("router_jitter_noise")
    return {
        **read_experts(given, fields, _NUMBER[::-1]),
        **read_normalisation(given, fields, summing=True),
        "moe_input_jitter_eps": noise or None,
    }


MIXTRAL = relative(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    relative_entries(
        mlp=(
            *router("block_sparse_moe.gate.weight"),
            *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        )
    ),
    keys=SIZES | CHOICES | {"sliding_window": "sliding_window"},
    features=("layer_experts",),
    base=1e6,
    requirements=requirements(summing=True),
    read=_read_mixtral,
    write=_write_mixtral,
    endings={"block_sparse_moe.gate.weight": "mlp.gate.weight"},
)
"""Mixtral: Mistral with experts. The weights of a token's experts add up to 1."""


def read_pattern(given: HFConfigReader, fields: dict[str, Any]) -> list[bool]:
    """Return, for each block of a Qwen model, whether it has experts."""
    layers, every = fields["num_layers"], given.whole("decoder_sparse_step")
    dense = given.content.get("mlp_only_layers") or []
    given.unused("mlp_only_layers")
    if not isinstance(dense, list) or not all(n in range(layers) for n in dense):
        given.refuse("mlp_only_layers", dense, f"expected numbers from 0 to {layers - 1}")
    sparse = [n not in dense and (n + 1) % every == 0 for n in range(layers)]
    if not any(sparse):
        plain = given.title.removesuffix("-MoE").lower()
        given.refuse(
            "decoder_sparse_step", every, f"no layer has experts; write such a model as {plain}"
        )
    return sparse


def write_pattern(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_layers)
    sparse = [bool(experts_in(model, n)) for n in layers]
    regular = (
        every
        for every in range(1, model.num_layers + 1)
        if sparse == [(n + 1) % every == 0 for n in layers]
    )
    every = next(regular, None)
    dense = [n for n in layers if not sparse[n]] if every is None else []
    return {"decoder_sparse_step": every or 1, "mlp_only_layers": dense}


def _read_window(given: HFConfigReader, layers: int) -> dict[str, Any]:
    window = given.optional_whole("sliding_window") if given.flag("use_sliding_window") else None
    kinds = [FULL if window is None else SLIDING] * layers
    given.only("layer_types", (kinds, None), "all blocks of such models have a window, or none")
    given.unused("sliding_window", "max_window_layers")
    return {"sliding_window": window}


def _write_qwen_moe(model: ModelConfig) -> dict[str, Any]:
    window = model.attention.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "norm_topk_prob": normalised(model),
        **write_experts(model, "num_experts"),
        **write_pattern(model),
    }


def _read_qwen_moe(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    sparse = read_pattern(given, fields)
    return {
        **_read_window(given, fields["num_layers"]),
        **read_experts(given, fields, _NUMBER, sparse),
        **read_normalisation(given, fields),
    }


def _write_qwen2_moe(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(model)
    first = kinds.index(SLIDING) if SLIDING in kinds else model.num_layers
    return {**_write_qwen_moe(model), "layer_types": kinds, "max_window_layers": first}


def _read_qwen2_moe(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    flags = _read_qwen_moe(given, fields)
    if flags["sliding_window"] is not None and given.names("layer_types") is None:
        given.refuse(
            "use_sliding_window", True,
            "versions of transformers put windows into different blocks of such models; if all "
            f"have one, add layer_types with {SLIDING} for each",
        )  # fmt: skip
    return flags


QWEN2_MOE = relative(
    "Qwen2-MoE",
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    relative_entries(
        mlp=(
            *DENSE,
            *router("mlp.gate.weight"),
            *LLAMA_EXPERTS,
            *shared_experts("mlp.shared_expert"),
            Entry("mlp.shared_gate.weight", ("mlp.shared_expert_gate.weight",), at=experts_in),
        ),
    ),
    keys=KEYS | ACTIVATION | CHOICES | INNER | {
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "qkv_bias": "add_qkv_bias",
    },
    only_read=HEAD_DIM,
    fixed={"moe_shared_expert_gate": True},
    features=("layer_experts", "sliding_window"),
    requirements=(
        *requirements("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", dense=True),
        Requirement(
            lambda model: model.part(ExpertsConfig).moe_shared_expert_intermediate_size is not None,
            "--moe-shared-expert-intermediate-size",
        ),
    ),
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
)  # fmt: skip
"""Qwen2 with experts and a gated shared expert. Either all blocks have a sliding window or none."""

_QWEN3_ENTRIES = relative_entries(
    QK_NORMS, mlp=(*DENSE, *router("mlp.gate.weight"), *LLAMA_EXPERTS)
)
QWEN3_MOE = relative(
    "Qwen3-MoE",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _QWEN3_ENTRIES,
    keys=SIZES | CHOICES | INNER,
    fixed={"qk_layernorm": True},
    features=("layer_experts", "sliding_window"),
    biases=("attention",),
    requirements=requirements(dense=True),
    read=_read_qwen_moe,
    write=_write_qwen_moe,
)
"""Qwen3 with experts. Either all blocks have a sliding window or none."""


_BASES = {FULL: {"rope_theta": 500_000.0}, SLIDING: {"rope_theta": 10_000.0}}
"""Default RoPE parameters of a Mellum config.json without rope_parameters."""


def _read_mellum(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    given.content = given.content | {"rope_parameters": given.table("rope_parameters") or _BASES}
    wide, narrow = read_kinds(given)
    kinds = given.names("layer_types") or [FULL] * layers
    lacking = set(kinds) - {kind for kind, form in ((FULL, wide), (SLIDING, narrow)) if form}
    if lacking:
        nested = given.content["rope_parameters"]
        given.refuse("rope_parameters", nested, f"expected {' and '.join(sorted(lacking))} too")
    base = agreed(given, ("rope_theta",), (wide or narrow).get("rope_theta"), 10_000.0)
    local = agreed(given, (), narrow.get("rope_theta"), base)
    scaling = read_scaling(given, fields, wide)
    given.unused("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types")
    given.unused("mtp_mlp_layer_types")
    separate = SLIDING in kinds and (local != base or scaling is not None)
    return {
        "rotary_base": base,
        "rotary_base_local": local if separate else None,
        "rope_scaling": scaling,
        **read_windows(given, given.optional_whole("sliding_window"), [FULL] * layers),
        **read_experts(
            given,
            fields,
            _NUMBER[::-1],
            read_mlp_kinds(given, ["sparse"] * layers),
        ),
        **read_normalisation(given, fields),
    }


def _write_mellum(model: ModelConfig) -> dict[str, Any]:
    keys = write_rope(model)
    return {
        **write_experts(model, "num_experts"),
        **write_mlp_kinds(model),
        "norm_topk_prob": normalised(model),
        "sliding_window": model.attention.sliding_window,
        "layer_types": layer_types(model),
        "rope_parameters": by_kind(keys["rope_parameters"], local_base(model)),
    }


MELLUM = relative(
    "Mellum 2",
    "mellum",
    "MellumForCausalLM",
    _QWEN3_ENTRIES,
    keys=SIZES | CHOICES | INNER,
    fixed={"qk_layernorm": True},
    features=("layer_experts", "sliding_window", "window_attn_skip_freq", "rotary_base_local"),
    biases=("attention",),
    rope=False,
    requirements=(*requirements(dense=True), LOCAL_UNSCALED),
    read=_read_mellum,
    write=_write_mellum,
    rewards=False,
    predicting=lambda model: r"mtp\..*",
)
"""Mellum: Qwen3-MoE with experts and sliding windows (with their own RoPE base) in any blocks."""


def _write_olmo(model: ModelConfig) -> dict[str, Any]:
    return {**_write_alike(model, "num_experts"), "norm_topk_prob": normalised(model)}


def _read_olmo(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {**read_experts(given, fields, _NUMBER), **read_normalisation(given, fields)}


_OLMO_MLP = (*router("mlp.gate.weight"), *LLAMA_EXPERTS)
_OLMO_FIXED = {"qk_layernorm": True, "qk_layernorm_whole": True}

OLMOE = relative(
    "OLMoE",
    "olmoe",
    "OlmoeForCausalLM",
    relative_entries(QK_NORMS, mlp=_OLMO_MLP),
    keys=KEYS | ACTIVATION | CHOICES | {"clip_qkv": "clip_qkv"},
    fixed=_OLMO_FIXED,
    features=("layer_experts",),
    biases=("attention",),
    requirements=requirements(),
    read=_read_olmo,
    write=_write_olmo,
    rewards=False,
)
"""OLMoE: Llama with experts. One norm spans all query heads, and one all key heads."""

FLEX_OLMO = relative(
    "FlexOlmo",
    "flex_olmo",
    "FlexOlmoForCausalLM",
    relative_entries(
        QK_NORMS,
        norm("attention_post_norm", "post_attention_layernorm"),
        norm("mlp_post_norm", "post_feedforward_layernorm"),
        mlp_norm=None,
        mlp=_OLMO_MLP,
    ),
    keys=KEYS | ACTIVATION | CHOICES,
    fixed=_OLMO_FIXED | {"pre_norm": False, "post_norm": True},
    features=("layer_experts",),
    biases=("attention",),
    base=500_000.0,
    requirements=requirements(),
    read=_read_olmo,
    write=_write_olmo,
    rewards=False,
)
"""FlexOlmo: OLMoE with norms after attention and experts instead of before them."""


def _read_granite(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("position_embedding_type", ("rope", None), "positions must be rotary")
    return {
        **read_experts(given, fields, _NUMBER[::-1]),
        **read_normalisation(given, fields, summing=True),
        **read_multipliers(given),
    }


GRANITE_MOE = relative(
    "Granite-MoE",
    "granitemoe",
    "GraniteMoeForCausalLM",
    relative_entries(
        mlp=(
            *router("block_sparse_moe.router.layer.weight"),
            *fused_experts(
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.experts",
            ),
        ),
    ),
    keys=KEYS | ACTIVATION | CHOICES,
    features=FACTORS | {"layer_experts"},
    biases=("attention",),
    requirements=requirements(summing=True),
    read=_read_granite,
    write=lambda model: _write_alike(model, "num_local_experts") | write_multipliers(model),
    rewards=False,
    endings={
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    },
)
"""Granite-MoE: Llama with experts stored in two tensors per block, and with multipliers for
embeddings, residual connections, attention scores and logits."""


ARCHITECTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, MELLUM, OLMOE, FLEX_OLMO, GRANITE_MOE)
