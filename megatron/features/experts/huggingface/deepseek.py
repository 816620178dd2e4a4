"""Architectures with DeepSeek-V3's experts (arXiv:2412.19437, section 2.1.2) but without latent
attention: GLM-4.5, dots.llm1 and Solar Open. The first blocks can be dense. A sigmoid scores each
expert. A correction is added to the score when choosing, but not to the weight, and only experts of
the best groups are chosen. All tokens also use shared experts, which are one MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.parts import (
    CHOICES,
    DENSE,
    INNER,
    LLAMA_EXPERTS,
    correction,
    experts_in,
    has_dense,
    natural,
    read_experts,
    requirements,
    router,
    shared_experts,
    write_experts,
)
from megatron.formats.features import Requirement
from megatron.formats.huggingface.ahead import DEEPSEEK_AHEAD
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    layer_types,
    read_windows,
)
from megatron.formats.huggingface.decoders.relatives import SIZES, relative, relative_entries
from megatron.formats.huggingface.entries import norm
from megatron.formats.huggingface.llama import QK_NORMS

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Flags of a router with sigmoid scores and a score correction."""
FP32 = {"moe_router_dtype": "fp32"}
"""Dtype in which `transformers` computes the router's logits, whatever the dtype of the weights."""
OF_GROUP = 2
"""Number of a group's best experts whose scores are summed into the group's score. `transformers`
has it as a constant; this project uses the number of choices divided by the number of chosen
groups."""


def shared_number(model: ModelConfig) -> int:
    """Return the number of shared experts, each as wide as the others."""
    part = model.part(ExpertsConfig)
    return (part.moe_shared_expert_intermediate_size or 0) // (part.moe_ffn_hidden_size or 1)


def _shares(model: ModelConfig) -> bool:
    part = model.part(ExpertsConfig)
    return (part.moe_shared_expert_intermediate_size or 0) % (part.moe_ffn_hidden_size or 1) == 0


WHOLE_SHARED = Requirement(
    _shares, "--moe-shared-expert-intermediate-size that --moe-ffn-hidden-size divides"
)
HAS_SHARED = Requirement(
    lambda model: shared_number(model) > 0, "--moe-shared-expert-intermediate-size"
)
ONE_SHARED = Requirement(
    lambda model: shared_number(model) == 1,
    "--moe-shared-expert-intermediate-size equal to --moe-ffn-hidden-size",
)


def _groups_fit(model: ModelConfig) -> bool:
    part = model.part(ExpertsConfig)
    kept = part.moe_router_group_topk
    return part.moe_router_num_groups is None or part.moe_router_topk == OF_GROUP * (kept or 0)


GROUPS_FIT = Requirement(_groups_fit, f"--moe-router-topk {OF_GROUP} times --moe-router-group-topk")


def _dense_first(model: ModelConfig) -> bool:
    sparse = [bool(experts_in(model, n)) for n in range(model.num_layers)]
    return sparse == sorted(sparse)


DENSE_FIRST = Requirement(
    _dense_first, "--moe-layer-freq with the layers of experts after all others"
)
ALL_SPARSE = Requirement(lambda model: not has_dense(model), "--moe-layer-freq 1")

CORRECTED = (
    *requirements(
        *SIGMOID, "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk", "moe_shared_expert_intermediate_size", dense=True,
    ),
    GROUPS_FIT,
    DENSE_FIRST,
    WHOLE_SHARED,
    HAS_SHARED,
)  # fmt: skip
"""Requirements of architectures with sigmoid scores and a score correction."""


def read_dense_first(given: HFConfigReader, layers: int) -> list[bool]:
    """Return, for each block, whether it has experts."""
    dense = natural(given, "first_k_dense_replace")
    if dense >= layers:
        given.refuse("first_k_dense_replace", dense, f"of {layers} blocks none has experts")
    # A key of the authors' own code, which transformers ignores.
    given.only("moe_layer_freq", (1, None), "all blocks after the dense ones must have experts")
    return [n >= dense for n in range(layers)]


def read_scale(given: HFConfigReader) -> float | None:
    """Return the scaling factor of a token's expert weights, or None if it is 1."""
    factor = given.number("routed_scaling_factor")
    if factor <= 0:
        given.refuse("routed_scaling_factor", factor, "expected a positive number")
    return None if factor == 1.0 else factor


def read_groups(given: HFConfigReader, top: int) -> dict[str, Any]:
    """Return the flags for the number of groups and the number of groups per token. Both are None
    if there is only one group."""
    groups, kept = given.optional_whole("n_group"), given.optional_whole("topk_group")
    if groups in (None, 1):
        groups = kept = None
    elif top != OF_GROUP * (kept or 1):
        given.refuse(
            "topk_group", kept, f"a group is chosen by its best {OF_GROUP} experts; this needs "
            f"num_experts_per_tok, which is {top}, {OF_GROUP} times as large"
        )  # fmt: skip
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


NUMBER = ("n_routed_experts", "num_local_experts", "num_experts")
"""Possible config.json keys for the number of experts."""


def read_corrected(
    given: HFConfigReader, fields: dict[str, Any], sparse: Sequence[bool] | None = None
) -> dict[str, Any]:
    """Return the flags of a router with sigmoid scores and a score correction. ``sparse`` tells
    which blocks have experts; the default is :func:`read_dense_first`."""
    if sparse is None:
        sparse = read_dense_first(given, fields["num_layers"])
    # Keys of the authors' own code, which transformers ignores.
    given.only("scoring_func", ("sigmoid", "noaux_tc", None), "scores are always sigmoids")
    given.only("topk_method", ("noaux_tc", None), "expected a choice by corrected scores, noaux_tc")
    return {
        **read_experts(given, fields, NUMBER, sparse, coefficient=None),
        **FP32,
        **read_groups(given, fields["moe_router_topk"]),
        "moe_router_topk_scaling_factor": read_scale(given),
        "moe_shared_expert_intermediate_size": given.whole("n_shared_experts")
        * fields["moe_ffn_hidden_size"],
    }


def write_choice(model: ModelConfig) -> dict[str, Any]:
    """Return the keys for the groups, normalisation and scaling of the chosen experts' weights."""
    part = model.part(ExpertsConfig)
    normalize, several = part.moe_router_normalize, part.moe_router_topk != 1
    return {
        "n_group": part.moe_router_num_groups or 1,
        "topk_group": part.moe_router_group_topk or 1,
        "norm_topk_prob": several if normalize is None else normalize,
        "routed_scaling_factor": part.moe_router_topk_scaling_factor or 1.0,
    }


def write_corrected(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that :func:`read_corrected` reads."""
    return {
        **write_experts(model, "n_routed_experts", coefficient=None),
        **write_choice(model),
        "first_k_dense_replace": model.part(ExpertsConfig).layer_experts.count(0),
        "n_shared_experts": shared_number(model),
    }


NORMALISED = {"norm_topk_prob": "moe_router_normalize"}
_KEYS = SIZES | CHOICES | INNER | NORMALISED
CORRECTED_MLP = (
    *DENSE,
    *router("mlp.gate.weight"),
    *correction("mlp.gate.e_score_correction_bias"),
    *LLAMA_EXPERTS,
    *shared_experts("mlp.shared_experts"),
)


def _normalises(model: ModelConfig) -> bool:
    return model.norm.qk_layernorm


GLM4_MOE = relative(
    "GLM-4.5",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    relative_entries(
        norm("attention.q_norm", "self_attn.q_norm", when=_normalises),
        norm("attention.k_norm", "self_attn.k_norm", when=_normalises),
        mlp=CORRECTED_MLP,
    ),
    keys=_KEYS | {"use_qk_norm": "qk_layernorm"},
    fixed=SIGMOID,
    features=("layer_experts",),
    biases=("qkv",),
    share=0.5,
    requirements=CORRECTED,
    read=read_corrected,
    write=write_corrected,
    rewards=False,
    ahead=DEEPSEEK_AHEAD,
)
"""GLM-4.5 to 4.7. RoPE rotates a part of each head."""


def _read_dots(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    window, bound = given.optional_whole("sliding_window"), natural(given, "max_window_layers")
    kinds = [
        SLIDING if window is not None and n >= bound else FULL for n in range(fields["num_layers"])
    ]
    return {**read_corrected(given, fields), **read_windows(given, window, kinds)}


def _write_dots(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(model)
    return {
        **write_corrected(model),
        "sliding_window": model.attention.sliding_window,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers,
        "layer_types": kinds,
    }


DOTS1 = relative(
    "dots.llm1",
    "dots1",
    "Dots1ForCausalLM",
    relative_entries(QK_NORMS, mlp=CORRECTED_MLP),
    keys=_KEYS,
    fixed=SIGMOID | {"qk_layernorm": True},
    features=("layer_experts", "sliding_window", "window_attn_skip_freq"),
    biases=("attention",),
    requirements=CORRECTED,
    read=_read_dots,
    write=_write_dots,
    rewards=False,
)
"""dots.llm1, with Qwen3's attention."""


def _write_solar(model: ModelConfig) -> dict[str, Any]:
    keys = write_corrected(model)
    del keys["first_k_dense_replace"]
    return keys


SOLAR_OPEN = relative(
    "Solar Open",
    "solar_open",
    "SolarOpenForCausalLM",
    relative_entries(mlp=CORRECTED_MLP[len(DENSE) :]),
    keys={key: field for key, field in _KEYS.items() if key != "intermediate_size"},
    fixed=SIGMOID,
    features=("layer_experts",),
    biases=("qkv",),
    base=1e6,
    requirements=(*CORRECTED, ALL_SPARSE),
    read=lambda given, fields: read_corrected(given, fields, [True] * fields["num_layers"]),
    write=_write_solar,
    rewards=False,
)
"""Solar Open: GLM-4.5 with experts in every block. RoPE rotates whole heads."""


ARCHITECTURES = (GLM4_MOE, DOTS1, SOLAR_OPEN)
