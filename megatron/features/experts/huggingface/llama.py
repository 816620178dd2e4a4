"""Llama with experts instead of its MLP: Mixtral, Qwen2-MoE, Qwen3-MoE, Mellum, OLMoE, FlexOlmo and
Granite-MoE."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_rope,
    read_scaling,
    read_windows,
    write_rope,
)
from megatron.formats.huggingface.decoders.granite import (
    FACTORS,
    read_multipliers,
    write_multipliers,
)
from megatron.formats.huggingface.entries import Entry, attention_biased, norm, qkv_biased
from megatron.formats.huggingface.llama import (
    ACTIVATION,
    FIXED,
    HEAD_DIM,
    KEYS,
    LOCAL_UNSCALED,
    NO_BIASES,
    QK_NORMS,
    by_kind,
    llama_entries,
    local_base,
    read_kinds,
)

_BIASED = {"attention_bias": "add_attention_bias"}
_FEATURES = frozenset({"layer_experts", "rope_scaling"})
_NO_PADDING = {"pad_token_id": None}
"""The default is a token that a small vocabulary does not have."""


def _write_alike(model: ModelConfig, number: str) -> dict[str, Any]:
    """The keys of a model whose blocks all have experts, of the width ``intermediate_size``."""
    inner = model.part(ExpertsConfig).moe_ffn_hidden_size
    return {"intermediate_size": inner, **write_experts(model, number), **write_rope(model)}


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    noise = model.part(ExpertsConfig).moe_input_jitter_eps
    return {**_write_alike(model, "num_local_experts"), "router_jitter_noise": noise or 0.0}


def _read_mixtral(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    # Theirs is noise of the experts' inputs too; ours of the router's alone.
    noise = given.number("router_jitter_noise")
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts")),
        **read_normalisation(given, fields, summing=True),
        **read_rope(given, fields, base=1e6),
        "moe_input_jitter_eps": noise or None,
    }


MIXTRAL = Architecture(
    title="Mixtral",
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    entries=llama_entries(
        mlp=(
            *router("block_sparse_moe.gate.weight"),
            *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        )
    ),
    keys=KEYS | HEAD_DIM | ACTIVATION | CHOICES | {"sliding_window": "sliding_window"},
    fixed=FIXED | NO_BIASES,
    features=_FEATURES,
    gated=True,
    requirements=requirements(summing=True),
    write=_write_mixtral,
    read=_read_mixtral,
    endings={"block_sparse_moe.gate.weight": "mlp.gate.weight"},
)
"""Mistral with experts; the weights of a token's experts sum up to 1."""


def read_pattern(given: HFConfigReader, fields: dict[str, Any]) -> list[bool]:
    """For each block of a Qwen, True if it has experts."""
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
        **write_rope(model),
        "moe_intermediate_size": model.part(ExpertsConfig).moe_ffn_hidden_size,
        "norm_topk_prob": normalised(model),
        **write_experts(model, "num_experts"),
        **write_pattern(model),
    }


def _read_qwen_moe(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    sparse = read_pattern(given, fields)
    return {
        **_read_window(given, fields["num_layers"]),
        **read_rope(given, fields),
        **read_experts(given, fields, ("num_experts", "num_local_experts"), sparse),
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


QWEN2_MOE = Architecture(
    title="Qwen2-MoE",
    model_type="qwen2_moe",
    model_class="Qwen2MoeForCausalLM",
    entries=llama_entries(
        qkv_bias=qkv_biased,
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
    fixed=FIXED | NO_BIASES | {"moe_shared_expert_gate": True},
    features=_FEATURES | {"sliding_window"},
    gated=True,
    requirements=(
        *requirements("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", dense=True),
        Requirement(
            lambda model: model.part(ExpertsConfig).moe_shared_expert_intermediate_size is not None,
            "--moe-shared-expert-intermediate-size",
        ),
    ),
    write=_write_qwen2_moe,
    read=_read_qwen2_moe,
)  # fmt: skip
"""Qwen2 with experts, and next to them one of all tokens whose output has a gate. A window is in
all blocks or in none."""


QWEN3_MOE = Architecture(
    title="Qwen3-MoE",
    model_type="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    entries=llama_entries(
        QK_NORMS,
        qkv_bias=attention_biased,
        proj_bias=attention_biased,
        mlp=(*DENSE, *router("mlp.gate.weight"), *LLAMA_EXPERTS),
    ),
    keys=KEYS | ACTIVATION | HEAD_DIM | CHOICES | INNER | _BIASED,
    fixed=FIXED | NO_BIASES | {"qk_layernorm": True},
    features=_FEATURES | {"sliding_window"},
    gated=True,
    requirements=requirements(dense=True),
    write=_write_qwen_moe,
    read=_read_qwen_moe,
)
"""Qwen3 with experts. A window is in all blocks or in none."""


_BASES = {FULL: {"rope_theta": 500_000.0}, SLIDING: {"rope_theta": 10_000.0}}
"""RoPE of a Mellum's config.json that does not say it."""


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
            ("num_local_experts", "num_experts"),
            read_mlp_kinds(given, ["sparse"] * layers),
        ),
        **read_normalisation(given, fields),
    }


def _write_mellum(model: ModelConfig) -> dict[str, Any]:
    keys = write_rope(model)
    return {
        **write_experts(model, "num_experts"),
        **write_mlp_kinds(model),
        "moe_intermediate_size": model.part(ExpertsConfig).moe_ffn_hidden_size,
        "norm_topk_prob": normalised(model),
        "sliding_window": model.attention.sliding_window,
        "layer_types": layer_types(model),
        "rope_parameters": by_kind(keys["rope_parameters"], local_base(model)),
    }


MELLUM = dataclasses.replace(
    QWEN3_MOE,
    title="Mellum 2",
    model_type="mellum",
    rewards=False,
    model_class="MellumForCausalLM",
    features=_FEATURES | {"sliding_window", "window_attn_skip_freq", "rotary_base_local"},
    requirements=(*requirements(dense=True), LOCAL_UNSCALED),
    write=_write_mellum,
    read=_read_mellum,
    predicting=lambda model: r"mtp\..*",
)
"""Qwen3-MoE with windows and experts in any blocks; RoPE has another base where a window is."""


def _write_olmo(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_alike(model, "num_experts"),
        "norm_topk_prob": normalised(model),
        **_NO_PADDING,
    }


def _read_olmo(
    given: HFConfigReader, fields: dict[str, Any], base: float = 10_000.0
) -> dict[str, Any]:
    return {
        **read_experts(given, fields, ("num_experts", "num_local_experts")),
        **read_normalisation(given, fields),
        **read_rope(given, fields, base=base),
    }


def _olmo_entries(*further: Sequence[Entry], mlp_norm: str | None) -> tuple[Entry, ...]:
    return llama_entries(
        QK_NORMS,
        *further,
        mlp_norm=mlp_norm,
        qkv_bias=attention_biased,
        proj_bias=attention_biased,
        mlp=(*router("mlp.gate.weight"), *LLAMA_EXPERTS),
    )


_OLMO_FIXED = FIXED | NO_BIASES | {"qk_layernorm": True, "qk_layernorm_whole": True}

OLMOE = Architecture(
    title="OLMoE",
    model_type="olmoe",
    rewards=False,
    model_class="OlmoeForCausalLM",
    entries=_olmo_entries(mlp_norm="post_attention_layernorm"),
    keys=KEYS | ACTIVATION | CHOICES | _BIASED | {"clip_qkv": "clip_qkv"},
    fixed=_OLMO_FIXED,
    features=_FEATURES,
    gated=True,
    requirements=requirements(),
    write=_write_olmo,
    read=_read_olmo,
)
"""Llama with experts, and a norm over all queries, and one over all keys."""

FLEX_OLMO = Architecture(
    title="FlexOlmo",
    model_type="flex_olmo",
    rewards=False,
    model_class="FlexOlmoForCausalLM",
    entries=_olmo_entries(
        norm("attention_post_norm", "post_attention_layernorm"),
        norm("mlp_post_norm", "post_feedforward_layernorm"),
        mlp_norm=None,
    ),
    keys=KEYS | ACTIVATION | CHOICES | _BIASED,
    fixed=_OLMO_FIXED | {"pre_norm": False, "post_norm": True},
    features=_FEATURES,
    gated=True,
    requirements=requirements(),
    write=_write_olmo,
    read=lambda given, fields: _read_olmo(given, fields, base=500_000.0),
)
"""OLMoE with norms after attention and experts instead of before them."""


def _write_granite(model: ModelConfig) -> dict[str, Any]:
    return {**_write_alike(model, "num_local_experts"), **write_multipliers(model)}


def _read_granite(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("position_embedding_type", ("rope", None), "positions must be rotary")
    return {
        **read_experts(given, fields, ("num_local_experts", "num_experts")),
        **read_normalisation(given, fields, summing=True),
        **read_rope(given, fields),
        **read_multipliers(given),
    }


GRANITE_MOE = Architecture(
    title="Granite-MoE",
    model_type="granitemoe",
    rewards=False,
    model_class="GraniteMoeForCausalLM",
    entries=llama_entries(
        qkv_bias=attention_biased,
        proj_bias=attention_biased,
        mlp=(
            *router("block_sparse_moe.router.layer.weight"),
            *fused_experts(
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.experts",
            ),
        ),
    ),
    keys=KEYS | ACTIVATION | CHOICES | _BIASED,
    fixed=FIXED | NO_BIASES,
    features=_FEATURES | FACTORS,
    gated=True,
    requirements=requirements(summing=True),
    write=_write_granite,
    read=_read_granite,
    endings={
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    },
)
"""Llama with experts in two tensors, whose embeddings, residual sums, scores and logits have
factors."""


ARCHITECTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, MELLUM, OLMOE, FLEX_OLMO, GRANITE_MOE)
