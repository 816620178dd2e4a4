"""Further decoder architectures of llama.cpp, and the list of all architectures of GGUF files. The
facts are from the same sources as in :mod:`megatron.formats.gguf.architectures`.

Shapes: D head width, E experts, F inner width of the MLP, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.gguf.architectures import (
    CLASSIC,
    LLAMA_KEYS,
    PAIRED,
    SHIFTED,
    SILU,
    SIZES,
    TURNED,
    Kind,
    Split,
    read_head_and_rope,
    read_rope,
    usual_width,
    write_head,
)
from megatron.formats.gguf.container import Content, Keys
from megatron.formats.gguf.rope import write_factors
from megatron.formats.huggingface import architecture_named, architecture_of
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import FULL, SLIDING

Read = Callable[[Keys, Content], Content]
_GROUPS = {"attention.head_count_kv": "num_key_value_heads"}
_EPSILON = "attention.layer_norm_epsilon"
_LAYER_NORM = SIZES | _GROUPS | {_EPSILON: "layer_norm_eps"}
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}


def _without_width(content: Content) -> Content:
    """Return config.json without the head width, for architectures whose heads always have the
    usual width."""
    return {key: value for key, value in content.items() if key != "head_dim"}


def _one_key_each(given: Keys) -> int:
    """Return the number of heads. Raises CheckpointError if the number of key and value heads
    differs."""
    heads = given.whole("attention.head_count")
    given.only("attention.head_count_kv", heads)
    return heads


def _biases(given: Keys) -> Content:
    return {
        "attention_bias": "blk.0.attn_q.bias" in given.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in given.tensors,
    }


def _read_share(given: Keys, content: Content) -> Content:
    """Return the head settings of models that rotate only the first channels of each head."""
    width = given.get("attention.key_length", usual_width(content))
    given.only("attention.value_length", width)
    rotated = given.get("rope.dimension_count", width)
    head = {"head_dim": width, "partial_rotary_factor": rotated / max(1, width)}
    return head | read_rope(given, content | head)


def _write_share(content: Content) -> Content:
    keys = write_head(content)
    share = content["partial_rotary_factor"]
    return keys | {"rope.dimension_count": int(share * keys["attention.key_length"])}


def _usual(read: Read) -> Read:
    """Add a check to ``read``, for architectures in which llama.cpp requires the usual head width:
    the hidden size divided by the number of heads."""

    def checked(given: Keys, content: Content) -> Content:
        given.only("attention.key_length", usual_width(content))
        return read(given, content)

    return checked


def _kinds(given: Keys, content: Content, every: int) -> list[str]:
    """Return each block's type of attention: every N-th block has no window. Raises CheckpointError
    if the file contradicts this."""
    layers = range(content["num_hidden_layers"])
    given.only("attention.sliding_window_pattern", [bool((n + 1) % every) for n in layers])
    return [SLIDING if (n + 1) % every else FULL for n in layers]


def _write_kinds(content: Content) -> Content:
    """Return the metadata for sliding windows in some blocks, or nothing if no block has a
    window."""
    kinds = content["layer_types"]
    if SLIDING not in kinds:
        return {}
    return {
        "attention.sliding_window": content["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
    }


def _read_olmo(given: Keys, content: Content) -> Content:
    given.only(_EPSILON, 1e-5)
    clip = given.get("attention.clamp_kqv")
    return read_head_and_rope(given, content) | {"clip_qkv": clip}


OLMO = Kind(
    "olmo", ("olmo",), SIZES | _GROUPS, SILU | {"attention_bias": False}, _usual(_read_olmo),
    lambda content: write_head(content) | {
        _EPSILON: 1e-5, "attention.clamp_kqv": content["clip_qkv"],
    },
    PAIRED,
)  # fmt: skip


def _read_olmo2(given: Keys, content: Content) -> Content:
    window = given.get("attention.sliding_window", 0)
    rope = read_head_and_rope(given, content)
    if not window:
        return rope
    kinds = _kinds(given, content, 4)
    return rope | {"model_type": "olmo3", "sliding_window": window, "layer_types": kinds}


OLMO2 = Kind(
    "olmo2", ("olmo2", "olmo3"), LLAMA_KEYS, SILU | {"attention_bias": False}, _usual(_read_olmo2),
    lambda content: {
        **write_head(content), **(_write_kinds(content) if "layer_types" in content else {}),
    },
)  # fmt: skip
OLMOE = Kind(
    "olmoe", ("olmoe",),
    LLAMA_KEYS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    SILU | {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False},
    lambda given, content: _without_width(read_head_and_rope(given, content)) | {
        "num_key_value_heads": _one_key_each(given),
    },
    write_head,
)  # fmt: skip
STARCODER2 = Kind(
    "starcoder2", ("starcoder2",), SIZES | _GROUPS | {_EPSILON: "norm_epsilon"},
    {"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    _usual(read_head_and_rope), write_head,
)  # fmt: skip
PHI2 = Kind(
    "phi2", ("phi",), _LAYER_NORM, {"hidden_act": "gelu_new", "qk_layernorm": False},
    _usual(_read_share), _write_share,
)  # fmt: skip
STABLELM = Kind(
    "stablelm", ("stablelm",), _LAYER_NORM | {"use_parallel_residual": "use_parallel_residual"},
    SILU,
    lambda given, content: _without_width(_read_share(given, content)) | {
        "use_qkv_bias": "blk.0.attn_q.bias" in given.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in given.tensors,
    },
    _write_share,
)  # fmt: skip
NEMOTRON = Kind(
    "nemotron", ("nemotron",), SIZES | _GROUPS | {_EPSILON: "norm_eps"}, {"hidden_act": "relu2"},
    _usual(lambda given, content: _read_share(given, content) | _biases(given)), _write_share,
    SHIFTED,
)  # fmt: skip
ARCEE = Kind(
    "arcee", ("arcee",), LLAMA_KEYS, {"hidden_act": "relu2"} | _NO_BIASES,
    read_head_and_rope, write_head, PAIRED,
    extra=write_factors,
)  # fmt: skip
JAIS2 = Kind(
    "jais2", ("jais2",), _LAYER_NORM,
    {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    read_head_and_rope, write_head,
)  # fmt: skip


_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GRANITE = Kind(
    "granite", ("granite",), LLAMA_KEYS, SILU,
    lambda given, content: {
        **read_head_and_rope(given, content), **_biases(given),
        **{ours: given.require(key) for key, ours in _MULTIPLIERS.items()},
    },
    lambda content: write_head(content) | {
        key: float(content[ours]) for key, ours in _MULTIPLIERS.items()
    },
    PAIRED, extra=write_factors,
)  # fmt: skip


def _read_cohere(given: Keys, content: Content) -> Content:
    return read_head_and_rope(given, content) | {
        "logit_scale": given.require("logit_scale"),
        # this is how llama.cpp recognises Command R+
        "use_qk_norm": content["num_hidden_layers"] >= 64,
    }


def _write_cohere(content: Content) -> Content:
    return write_head(content) | {"logit_scale": float(content["logit_scale"])}


COHERE = Kind(
    "command-r", ("cohere",), _LAYER_NORM, SILU | {"attention_bias": False},
    _usual(_read_cohere), _write_cohere,
)  # fmt: skip
COHERE2 = Kind(
    "cohere2", ("cohere2",), _LAYER_NORM, SILU | {"attention_bias": False},
    _usual(lambda given, content: _read_cohere(given, content) | {
        "sliding_window": given.whole("attention.sliding_window"),
        "layer_types": _kinds(given, content, 4), "use_qk_norm": False,
    }),
    lambda content: {
        **_write_cohere(content), "attention.sliding_window": content["sliding_window"],
    },
)  # fmt: skip
GEMMA = Kind(
    "gemma", ("gemma",), LLAMA_KEYS, {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    read_head_and_rope, write_head, SHIFTED,
)  # fmt: skip
SMOLLM3 = Kind(
    "smollm3", ("smollm3",), LLAMA_KEYS, SILU | _NO_BIASES | {"use_sliding_window": False},
    lambda given, content: read_head_and_rope(given, content) | {
        "no_rope_layers": [int((n + 1) % 4 > 0) for n in range(content["num_hidden_layers"])],
    },
    write_head, PAIRED,
)  # fmt: skip
EXAONE4 = Kind(
    "exaone4", ("exaone4",), LLAMA_KEYS, SILU | {"sliding_window": None},
    _usual(read_head_and_rope), write_head, extra=write_factors,
)  # fmt: skip
SEED_OSS = Kind(
    "seed_oss", ("seed_oss",), LLAMA_KEYS,
    SILU | _NO_BIASES | {"attention_bias": True, "attention_out_bias": False},
    read_head_and_rope, write_head,
)  # fmt: skip


def _read_glm(given: Keys, content: Content) -> Content:
    biases = {"attention_bias": _biases(given)["attention_bias"]}
    return _read_share(given, content) | biases


GLM = Kind(
    "chatglm", ("glm",), LLAMA_KEYS, SILU,
    _usual(_read_glm), _write_share,
)  # fmt: skip
GLM4 = Kind("glm4", ("glm4",), LLAMA_KEYS, SILU, _read_glm, _write_share)
ERNIE4_5 = Kind(
    "ernie4_5", ("ernie4_5",), LLAMA_KEYS, SILU | {"use_bias": False},
    read_head_and_rope, write_head,
)  # fmt: skip
HUNYUAN = Kind(
    "hunyuan-dense", ("hunyuan_v1_dense",), LLAMA_KEYS, SILU | {"attention_bias": False},
    read_head_and_rope, write_head,
)  # fmt: skip


def _read_mpt(given: Keys, content: Content) -> Content:
    given.only("feed_forward_length", 4 * content["d_model"])
    given.only("attention.head_count_kv", content["n_heads"])
    given.only("attention.max_alibi_bias", 8.0)
    return {"attn_config": {"clip_qkv": given.get("attention.clamp_kqv")}}


MPT = Kind(
    "mpt", ("mpt",),
    {"context_length": "max_seq_len", "embedding_length": "d_model", "block_count": "n_layers",
     "attention.head_count": "n_heads", _EPSILON: "layer_norm_epsilon"},
    {}, _read_mpt,
    lambda content: {
        "feed_forward_length": 4 * content["d_model"],
        "attention.head_count_kv": content["n_heads"], "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": content["attn_config"]["clip_qkv"],
    },
)  # fmt: skip

_LOCAL_EXPERTS = {
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
_HALVES = Split(
    ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    lambda values: values.chunk(2, 1),
    lambda parts: torch.cat([*parts], 1),
)
"""Split into gate projections, then up projections, [E, 2F, H]."""
GRANITE_MOE = Kind(
    "granitemoe", ("granitemoe",), LLAMA_KEYS | _LOCAL_EXPERTS, SILU | {"attention_bias": False},
    lambda given, content: {
        key: value for key, value in GRANITE.read(given, content).items()
        if key not in ("head_dim", "mlp_bias")
    },
    GRANITE.write, PAIRED, splits={"block_sparse_moe.input_linear": _HALVES},
)  # fmt: skip
_IN_TURN = Split(
    ("gate_proj", "up_proj"),
    lambda values: (values[..., ::2], values[..., 1::2]),
    lambda parts: torch.stack([*parts], -1).flatten(-2),
)
"""Split of gate and up projections whose elements alternate in the last dimension."""


def _read_gpt_oss(given: Keys, content: Content) -> Content:
    rope = read_head_and_rope(given, content)
    given.only("expert_feed_forward_length", content["intermediate_size"])
    # the original model uses YaRN
    scaling = rope.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # GGUF files do not store this setting of the original model
        rope["rope_scaling"] = scaling | {"truncate": False}
    return rope | {
        "sliding_window": given.whole("attention.sliding_window"),
        "layer_types": _kinds(given, content, 2),
    }


def _write_gpt_oss(content: Content) -> Content:
    scaling = content.get("rope_scaling") or {}
    kept = {key: value for key, value in scaling.items() if (key, value) != ("truncate", False)}
    return {
        **write_head(content | {"rope_scaling": kept}),
        "expert_feed_forward_length": content["intermediate_size"],
        "attention.sliding_window": content["sliding_window"],
    }


GPT_OSS = Kind(
    "gpt-oss", ("gpt_oss",), LLAMA_KEYS | _LOCAL_EXPERTS,
    SILU | {"attention_bias": True, "swiglu_limit": 7.0}, _read_gpt_oss, _write_gpt_oss,
    {r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight": TURNED},
    {"_proj_bias": "_proj.bias"}, splits={"gate_up_proj": _IN_TURN},
)  # fmt: skip
_CORRECTED = {
    "expert_used_count": "num_experts_per_tok", "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
}  # fmt: skip
_SIGMOID = 2
"""Value of ``expert_gating_func`` for sigmoid gating."""


def _read_corrected(given: Keys, content: Content) -> Content:
    """Return the settings of experts that follow dense blocks and are selected by bias-corrected
    sigmoid scores."""
    given.only("expert_gating_func", _SIGMOID)
    for key in ("expert_group_count", "expert_group_used_count"):
        given.only(key, 1)
    given.only("nextn_predict_layers", 0)
    return {
        "first_k_dense_replace": given.get("leading_dense_block_count", 0),
        "routed_scaling_factor": given.get("expert_weights_scale", 1.0),
        "norm_topk_prob": given.get("expert_weights_norm", False), "n_group": 1, "topk_group": 1,
    }  # fmt: skip


def _write_corrected(content: Content) -> Content:
    return {
        "expert_gating_func": _SIGMOID,
        "expert_weights_norm": content["norm_topk_prob"],
        "leading_dense_block_count": content["first_k_dense_replace"],
        "expert_weights_scale": float(content["routed_scaling_factor"]),
    }


_CORRECTION = {"e_score_correction_bias": "e_score_correction.bias"}
DOTS1 = Kind(
    "dots1", ("dots1",), LLAMA_KEYS | _CORRECTED,
    SILU | {"attention_bias": False, "sliding_window": None},
    lambda given, content: {
        **read_head_and_rope(given, content), **_read_corrected(given, content),
        "num_key_value_heads": _one_key_each(given),
    },
    lambda content: write_head(content) | _write_corrected(content), names=_CORRECTION,
)  # fmt: skip
GLM4_MOE = Kind(
    "glm4moe", ("glm4_moe",), LLAMA_KEYS | _CORRECTED, SILU,
    lambda given, content: _read_glm(given, content) | _read_corrected(given, content) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in given.tensors, "num_nextn_predict_layers": 0,
    },
    lambda content: _write_share(content) | _write_corrected(content), names=_CORRECTION,
)  # fmt: skip


def _read_minimax(given: Keys, content: Content) -> Content:
    given.only("expert_gating_func", _SIGMOID)
    given.only("expert_feed_forward_length", content["intermediate_size"])
    read = _read_share(given, content)
    rotated = given.get("rope.dimension_count", read["head_dim"])
    return read | {"rotary_dim": rotated}


MINIMAX_M2 = Kind(
    "minimax-m2", ("minimax_m2",), LLAMA_KEYS | _LOCAL_EXPERTS, SILU, _read_minimax,
    lambda content: {
        **_write_share(
            content | {"partial_rotary_factor": content["rotary_dim"] / content["head_dim"]}
        ),
        "expert_gating_func": _SIGMOID, "expert_feed_forward_length": content["intermediate_size"],
    },
    names=_CORRECTION,
)  # fmt: skip


def _read_hunyuan(given: Keys, content: Content) -> Content:
    given.only("expert_shared_count", 1)
    for kind in ("expert", "expert_shared"):
        given.only(f"{kind}_feed_forward_length", content["intermediate_size"])
    return read_head_and_rope(given, content)


HUNYUAN_MOE = Kind(
    "hunyuan-moe", ("hunyuan_v1_moe",),
    LLAMA_KEYS | {"expert_count": "num_experts", "expert_used_count": "moe_topk"},
    SILU | {"attention_bias": False, "num_shared_expert": 1}, _read_hunyuan,
    lambda content: write_head(content) | {
        "expert_shared_count": 1,
        "expert_feed_forward_length": content["intermediate_size"],
        "expert_shared_feed_forward_length": content["intermediate_size"],
    },
)  # fmt: skip

KINDS = (
    *CLASSIC, OLMO, OLMO2, OLMOE, STARCODER2, PHI2, STABLELM, NEMOTRON, ARCEE, JAIS2, GRANITE,
    COHERE, COHERE2, GEMMA, SMOLLM3, EXAONE4, SEED_OSS, GLM, GLM4, ERNIE4_5, HUNYUAN, MPT,
    GRANITE_MOE, GPT_OSS, DOTS1, GLM4_MOE, MINIMAX_M2, HUNYUAN_MOE,
)  # fmt: skip
"""All architectures. A model whose own architecture GGUF lacks is written as the first that
fits."""


def kind_named(name: Any, where: str) -> Kind:
    """Return the architecture that a file names. Raises CheckpointError if it is unknown."""
    known = next((kind for kind in KINDS if kind.name == name), None)
    if known is None:
        raise CheckpointError(
            f"{where}: general.architecture is {name!r:.100}; expected one of "
            f"{', '.join(kind.name for kind in KINDS)}"
        )
    return known


def form_of(model: ModelConfig) -> Architecture:
    """Return the tensor table for writing a model. It is that of the model's own architecture or,
    if GGUF lacks it, of the first of :data:`KINDS` that fits."""
    own = architecture_of(model)
    names = [name for kind in KINDS for name in kind.model_types]
    if own.model_type in names:
        return own
    known = (architecture_named({"model_type": name}, Path(name)) for name in names)
    return next((form for form in known if not form.misfits(model)), own)


def kind_of(model_type: str) -> Kind:
    """Return the architecture as which a model type of `transformers` is written. Raises ValueError
    if GGUF has no such architecture."""
    for kind in KINDS:
        if model_type in kind.model_types:
            return kind
    known = ", ".join(name for kind in KINDS for name in kind.model_types)
    raise ValueError(f"{model_type} cannot be written as GGUF; expected one of {known}")
