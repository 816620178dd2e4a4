"""gpt-oss: experts with biases and a clamped gate, attention sinks, a window in every other block.

Its experts are [inputs, outputs], gate and up channels alternate; MXFP4 is read
(:mod:`megatron.formats.huggingface.packed.mxfp4`), and written as numbers of the dtype.

Shapes: E experts, F inner width of an expert, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.huggingface.parts import (
    experts_in,
    read_experts,
    requirements,
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
from megatron.formats.huggingface.entries import SAME, TRANSPOSED, Entry, Reordering
from megatron.formats.huggingface.llama import FIXED, HEAD_DIM, KEYS, llama_entries
from megatron.formats.huggingface.packed.mxfp4 import check_quantization


def _alternating(values_EX: Tensor) -> Tensor:
    """Gate and up channels in turn, from [E, 2F, ...] with all gates first."""
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
"""RoPE scaling of a config.json that has none."""


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
        # Their code requires one even where no block has a window.
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
