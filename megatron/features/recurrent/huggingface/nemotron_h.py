"""Nemotron-H and Nemotron 3: each block has one sublayer, which is Mamba-2, attention without
positions, an MLP or experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.deepseek import (
    FP32,
    GROUPS_FIT,
    SIGMOID,
    read_groups,
    read_scale,
    write_choice,
)
from megatron.features.experts.huggingface.parts import (
    DOWN,
    UP,
    correction,
    dense_in,
    experts_in,
    read_experts,
    requirements,
    router,
    write_experts,
)
from megatron.features.recurrent.flags import MambaConfig, shortest_limits
from megatron.features.recurrent.huggingface.bamba import (
    MAMBA_LAYERS,
    at,
    attention_entries,
    mamba_entries,
)
from megatron.features.recurrent.pattern import PatternConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader, Keys
from megatron.formats.huggingface.entries import (
    Condition,
    Entry,
    attention_biased,
    decoder_entries,
    norm,
    untied,
)
from megatron.formats.huggingface.llama import HEAD_DIM, KEYS, NO_BIASES

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()} | {"mamba": "M", "attention": "*"}
"""Letters of layer kinds, by their names in transformers 5 and in older files."""


def _dense(model: ModelConfig, n: int) -> int:
    return model.has("mlp", n) and dense_in(model, n)


def _sparse(model: ModelConfig) -> bool:
    return not model.part(ExpertsConfig).idle


def _any_dense(model: ModelConfig) -> bool:
    return any(_dense(model, n) for n in range(model.num_layers))


def _latent(model: ModelConfig) -> bool:
    return model.part(ExpertsConfig).moe_latent_size is not None


def _shares(model: ModelConfig) -> bool:
    part = model.part(ExpertsConfig)
    return part.idle or part.moe_shared_expert_intermediate_size is not None


def _of_experts() -> tuple[Entry, ...]:
    whole = [
        Entry(ours, (f"mixer.experts.{name}",), at=experts_in, parameter=f"mixer.experts.{name}")
        for ours, name in ((UP, "up_proj"), (DOWN, "down_proj"))
    ]
    single = (
        dataclasses.replace(
            entry,
            theirs=(entry.theirs[0].replace("experts.", "experts.{e}.") + ".weight",),
            slices=experts_in,
            others=(entry,),
        )
        for entry in whole
    )
    further = (
        Entry("mlp.latent_in.weight", ("mixer.fc1_latent_proj.weight",), when=_latent),
        Entry("mlp.latent_out.weight", ("mixer.fc2_latent_proj.weight",), when=_latent),
        Entry("mlp.shared.up.weight", ("mixer.shared_experts.up_proj.weight",)),
        Entry("mlp.shared.down.weight", ("mixer.shared_experts.down_proj.weight",)),
    )
    entries = (
        *router("mixer.gate.weight"),
        *correction("mixer.gate.e_score_correction_bias"),
        *single,
        *at(experts_in, *further),
    )

    def among_experts(when: Condition) -> Condition:
        return lambda model: _sparse(model) and when(model)

    return tuple(dataclasses.replace(entry, when=among_experts(entry.when)) for entry in entries)


def _dense_biased(model: ModelConfig) -> bool:
    return _any_dense(model) and model.mlp.bias


_MLP = (
    Entry("mlp.up.weight", ("mixer.up_proj.weight",), when=_any_dense),
    Entry("mlp.up.bias", ("mixer.up_proj.bias",), when=_dense_biased),
    Entry("mlp.down.weight", ("mixer.down_proj.weight",), when=_any_dense),
    Entry("mlp.down.bias", ("mixer.down_proj.bias",), when=_dense_biased),
)


_KEYS: Keys = {
    **{key: ours for key, ours in KEYS.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
    "layer_norm_epsilon": "norm_epsilon",
    **HEAD_DIM,
    "mlp_hidden_act": "activation",
    "ssm_state_size": "mamba_state_dim",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    ("n_groups", "mamba_n_groups"): "mamba_num_groups",
    ("conv_kernel", "mamba_d_conv"): "mamba_conv_kernel_dim",
    ("use_conv_bias", "mamba_conv_bias"): "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}


def _pattern(given: HFConfigReader) -> str:
    kinds = given.names("layers_block_type") or given.names("layer_types")
    pattern = given.content.get("hybrid_override_pattern")
    given.unused("hybrid_override_pattern", "num_hidden_layers")
    if kinds is not None:
        wrong = [kind for kind in kinds if kind not in _LETTERS]
        if wrong or not kinds:
            given.refuse("layers_block_type", kinds, f"expected {', '.join(_KINDS.values())}")
        listed = "".join(_LETTERS[kind] for kind in kinds)
        if pattern not in (None, listed):
            given.refuse("hybrid_override_pattern", pattern, f"layers_block_type says {listed}")
        return listed
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_KINDS):
        given.refuse("hybrid_override_pattern", pattern, f"expected letters of {''.join(_KINDS)}")
    return pattern


_ONLY = {
    "attention_bias": "attention of such models has no biases",
    "residual_in_fp32": "transformers does not read it",
    "mamba_proj_bias": "transformers reads use_bias",
    "sliding_window": "attention of such models has no window",
}


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    pattern = _pattern(given)
    for key, why in _ONLY.items():
        given.only(key, (False, None), why)
    given.only("tie_word_embeddings", (False,), "transformers does not tie the head to the table")
    given.only("mamba_hidden_act", ("silu",), "the convolution is always followed by SiLU")
    given.unused(
        "chunk_size", "mamba_chunk_size", "expand", "mamba_expand", "time_step_max",
        "mamba_dt_max", "time_step_floor", "mamba_dt_init_floor", "time_step_limit",
        "mamba_dt_limit", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep",
        "rescale_prenorm_residual", "hidden_dropout", "n_shared_experts", "rope_theta",
        "partial_rotary_factor", "moe_shared_expert_overlap", "num_nextn_predict_layers",
        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "output_router_logits",
    )  # fmt: skip
    least = given.number(("time_step_min", "mamba_dt_min"))
    if least < 0:
        given.refuse("time_step_min", least, "expected a number, 0 or more")
    if "M" not in pattern:
        given.refuse("layers_block_type", pattern, "no layer is Mamba-2")
    biased = given.flag("mlp_bias")
    if biased and "E" in pattern:
        given.refuse("mlp_bias", biased, "next to experts the MLP cannot have biases")
    return {
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "add_mlp_bias": biased,
        "mamba_step_limits": shortest_limits(least, math.inf),
        **_read_experts(given, fields | {"num_layers": len(pattern)}, pattern),
    }


_OF_EXPERTS = (
    "n_routed_experts", "num_local_experts", "n_group", "topk_group", "num_experts_per_tok",
    "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


def _read_experts(given: HFConfigReader, fields: dict[str, Any], pattern: str) -> dict[str, Any]:
    if "E" not in pattern:
        given.unused(*_OF_EXPERTS)
        return {}
    choices = {"moe_router_topk": given.whole("num_experts_per_tok")}
    inner = {"moe_ffn_hidden_size": given.whole("moe_intermediate_size")}
    return {
        **choices,
        **inner,
        **read_experts(
            given,
            {**fields, **choices, **inner},
            ("n_routed_experts", "num_local_experts"),
            [letter == "E" for letter in pattern],
            coefficient=None,
        ),
        **SIGMOID,
        **FP32,
        "moe_router_normalize": given.flag("norm_topk_prob"),
        **read_groups(given, choices["moe_router_topk"]),
        "moe_router_topk_scaling_factor": read_scale(given),
        "moe_latent_size": given.optional_whole("moe_latent_size"),
        "moe_shared_expert_intermediate_size": given.whole("moe_shared_expert_intermediate_size"),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    pattern = model.part(PatternConfig).hybrid_layer_pattern or ""
    written = {
        "layers_block_type": [_KINDS[letter] for letter in pattern],
        "time_step_min": model.part(MambaConfig).step_limits[0],
        "mamba_hidden_act": "silu",
        "mlp_bias": model.mlp.bias,
        "pad_token_id": None,
    }
    part = model.part(ExpertsConfig)
    if part.idle:
        return written
    return {
        **written,
        **write_experts(model, "n_routed_experts", coefficient=None),
        "num_experts_per_tok": part.moe_router_topk,
        "moe_intermediate_size": part.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": part.moe_shared_expert_intermediate_size,
        "moe_latent_size": part.moe_latent_size,
        **write_choice(model),
    }


def _sigmoid(model: ModelConfig) -> bool:
    part = model.part(ExpertsConfig)
    return part.idle or all(getattr(part, name) == value for name, value in SIGMOID.items())


def _where_sparse(need: Requirement) -> Requirement:
    return Requirement(lambda model: not _sparse(model) or need.holds(model), need.wanted)


NEMOTRON_H = Architecture(
    title="Nemotron-H",
    model_type="nemotron_h",
    rewards=False,
    model_class="NemotronHForCausalLM",
    entries=decoder_entries(
        "backbone.embeddings",
        "backbone.layers.{n}",
        "backbone.norm_f",
        at(lambda m, n: m.has("attention", n), *norm("attention_norm", "norm")),
        mamba_entries("mixer"),
        attention_entries("mixer", attention_biased),
        at(lambda m, n: m.has("mlp", n), *norm("mlp_norm", "norm")),
        at(_dense, *_MLP),
        _of_experts(),
    ),
    keys=_KEYS,
    fixed={"position_embedding_type": "none", "normalization": "RMSNorm", **NO_BIASES},
    features=frozenset({"mixers", "layer_experts", "add_mlp_bias"}),
    requirements=(
        *MAMBA_LAYERS,
        Requirement(untied, "--untie-embeddings-and-output-weights"),
        Requirement(
            lambda m: m.part(PatternConfig).hybrid_layer_pattern is not None,
            "--hybrid-layer-pattern",
        ),
        Requirement(
            lambda m: m.part(MambaConfig).step_limits[1] == math.inf,
            "--mamba-step-limits without a largest step",
        ),
        *map(
            _where_sparse,
            requirements(
                *SIGMOID, "moe_router_topk_scaling_factor", "moe_router_num_groups",
                "moe_router_group_topk", "moe_shared_expert_intermediate_size", "moe_latent_size",
                dense=True,
            ),
        ),
        Requirement(_sigmoid, "--moe-router-score-function sigmoid with "
                    "--moe-router-enable-expert-bias"),
        GROUPS_FIT,
        Requirement(_shares, "--moe-shared-expert-intermediate-size"),
        _where_sparse(Requirement(lambda m: not m.mlp.bias, "no --add-mlp-bias")),
    ),
    write=_write,
    read=_read,
    beginnings={"backbone.": "model."},  # prefix in models of transformers 5
    predicting=lambda model: r"mtp\..*",
)  # fmt: skip
