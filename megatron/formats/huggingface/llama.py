"""Llama 1, 2 and 3, and close relatives: Mistral, Qwen2, Qwen3, Phi-3, Gemma 2 and the text model
of Gemma 3. All have RoPE, RMSNorm, a gated MLP and grouped-query attention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import (
    FULL,
    SLIDING,
    HFConfigReader,
    agreed,
    layer_types,
    read_biases,
    read_rope,
    read_scaling,
    read_windows,
    write_biases,
    write_rope,
)
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    SEPARATE_QKV,
    Condition,
    Entry,
    Reordering,
    attention_biased,
    biased,
    decoder_entries,
    linear,
    norm,
    qkv_biased,
)

KEYS = {
    "max_position_embeddings": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "attention_dropout": "attention_dropout",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Keys for sizes, in Llama and other architectures with the same names."""
ACTIVATION = {"hidden_act": "activation"}
HEAD_DIM = {"head_dim": "kv_channels"}
FIXED = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
NO_BIASES = {"add_bias_linear": False}
NO_ATTENTION_BIAS = "all linear layers must have biases, or none"

DIVISIBLE = Requirement(
    lambda m: m.hidden_size % m.attention.num_attention_heads == 0,
    "--num-attention-heads that divide --hidden-size",
)
"""Some configuration classes require this even if the head width is given."""
QK_NORMS = (
    *norm("attention.q_norm", "self_attn.q_norm"),
    *norm("attention.k_norm", "self_attn.k_norm"),
)


def gated_mlp(ours: str, theirs: str, fused: bool = False) -> tuple[Entry, ...]:
    """Return a gated MLP's entries. With ``fused``, gate and up are one tensor in our order."""
    up = linear(f"{ours}.up", f"{theirs}.gate_proj", f"{theirs}.up_proj", form=GATE_AND_UP)
    if fused:
        up = linear(f"{ours}.up", f"{theirs}.gate_up_proj")
    return (*up, *linear(f"{ours}.down", f"{theirs}.down_proj"))


def llama_entries(*further: Sequence[Entry], mlp_norm: str | None = "post_attention_layernorm",
                  qkv_bias: Condition = biased, proj_bias: Condition = biased,
                  fused: bool = False, mlp: Sequence[Entry] | None = None,
                  qkv_form: Reordering = SEPARATE_QKV,
                  qkv: Sequence[Entry] | None = None) -> tuple[Entry, ...]:  # fmt: skip
    """Return the entries of Llama and of architectures with the same tensor names.

    Args:
        further: a block's entries that Llama does not have.
        mlp_norm: name of the norm before the MLP; None if no norms precede attention and MLP.
        fused: whether query, key and value are one tensor with our layout, and gate and up too.
        mlp, qkv: entries that replace those of the MLP, or of queries, keys and values.
        qkv_form: layout of queries, keys and values that are not fused.
    """
    if qkv is not None:
        pass
    elif fused:
        qkv = linear("attention.qkv", "self_attn.qkv_proj", bias=qkv_bias)
    else:
        qkv = linear("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                     form=qkv_form, bias=qkv_bias)  # fmt: skip
    norms: tuple[Entry, ...] = ()
    if mlp_norm is not None:
        norms = (*norm("attention_norm", "input_layernorm"), *norm("mlp_norm", mlp_norm))
    return decoder_entries(
        "model.embed_tokens",
        "model.layers.{n}",
        "model.norm",
        norms,
        qkv,
        linear("attention.proj", "self_attn.o_proj", bias=proj_bias),
        *further,
        gated_mlp("mlp", "mlp", fused) if mlp is None else mlp,
    )


def _read_llama(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    # The first affects only the order of partial sums; transformers does not read the others.
    given.unused("pretraining_tp", "max_sequence_length", "is_llama_config")
    return read_rope(given, fields) | read_biases(given)


LLAMA = Architecture(
    title="Llama",
    model_type="llama",
    model_class="LlamaForCausalLM",
    entries=llama_entries(qkv_bias=attention_biased, proj_bias=attention_biased),
    keys=KEYS | HEAD_DIM | ACTIVATION,
    fixed=FIXED,
    features=frozenset({"add_attention_bias", "add_mlp_bias", "rope_scaling"}),
    gated=True,
    requirements=(DIVISIBLE,),
    write=lambda model: write_biases(model) | write_rope(model),
    read=_read_llama,
)


def _read_mistral(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = [SLIDING] * fields["num_layers"]
    given.only("layer_types", (kinds,), f"all blocks of such models have {SLIDING}")
    return read_rope(given, fields)


MISTRAL = Architecture(
    title="Mistral",
    model_type="mistral",
    model_class="MistralForCausalLM",
    entries=llama_entries(),
    keys=KEYS | HEAD_DIM | ACTIVATION | {"sliding_window": "sliding_window"},
    fixed=FIXED | NO_BIASES,
    features=frozenset({"rope_scaling"}),
    gated=True,
    write=write_rope,
    read=_read_mistral,
)
"""Mistral: Llama without biases, and with a sliding window in all blocks or in none."""


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(model)
    return {
        "use_sliding_window": SLIDING in kinds,
        "sliding_window": model.attention.sliding_window,
        # For readers that ignore layer_types, which give a window to this and all later blocks.
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers,
        "layer_types": kinds,
        **write_rope(model),
    }


def _read_qwen(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    used, window = given.flag("use_sliding_window"), given.optional_whole("sliding_window")
    bound = given.content.get("max_window_layers", 28)
    given.unused("max_window_layers")
    if not isinstance(bound, int):
        given.refuse("max_window_layers", bound, "expected an integer")
    default = [
        SLIDING if used and window is not None and n >= bound else FULL
        for n in range(fields["num_layers"])
    ]
    return {
        **read_rope(given, fields),
        **read_windows(given, window if used else None, default),
    }


QWEN2 = Architecture(
    title="Qwen2",
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    entries=llama_entries(qkv_bias=qkv_biased),
    keys=KEYS | ACTIVATION,
    only_read=HEAD_DIM,
    fixed=FIXED | NO_BIASES | {"add_qkv_bias": True},
    features=frozenset({"rope_scaling", "sliding_window", "window_attn_skip_freq"}),
    gated=True,
    write=_write_qwen,
    read=_read_qwen,
)
"""Qwen2 and Qwen2.5: Llama with biases only on queries, keys and values."""


def _read_qwen3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    return _read_qwen(given, fields)


QWEN3 = Architecture(
    title="Qwen3",
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    entries=llama_entries(QK_NORMS),
    keys=KEYS | ACTIVATION | HEAD_DIM,
    fixed=FIXED | NO_BIASES | {"qk_layernorm": True},
    features=QWEN2.features,
    gated=True,
    write=lambda model: {**_write_qwen(model), "attention_bias": False},
    read=_read_qwen3,
)
"""Qwen3: Llama without biases, with query and key norms for each head."""


_ORIGINAL_LENGTH = "original_max_position_embeddings"
_LONGROPE = {"rope_type", "short_factor", "long_factor", _ORIGINAL_LENGTH}


def _longrope_only(model: ModelConfig) -> bool:
    scaling = model.positions.rope_scaling
    return scaling.is_default or set(json.loads(scaling.to_json())) == _LONGROPE


def _write_phi3(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model, share_key="partial_rotary_factor")
    scaling = rope.get("rope_scaling")
    if scaling is None:
        rope[_ORIGINAL_LENGTH] = model.positions.max_position_embeddings
    else:
        # transformers 4 accepts only these three keys, with the original length outside of them.
        rope[_ORIGINAL_LENGTH] = scaling[_ORIGINAL_LENGTH]
        factors = {name: scaling[name] for name in ("short_factor", "long_factor")}
        rope["rope_scaling"] = {"type": "longrope", **factors}
    return {
        "embd_pdrop": 0.0,
        # The configuration class's default pad token may be outside a small vocabulary.
        "pad_token_id": None,
        **rope,
    }


def _read_phi3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("embd_pdrop")
    for name in ("full_attn_mod", "interpolate_factor"):
        given.only(name, (1,), "transformers does not read it")
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    return read_rope(
        given, fields, share_key="partial_rotary_factor",
        types={"su": "longrope", "yarn": "longrope"},
    )  # fmt: skip


PHI3 = Architecture(
    title="Phi-3",
    model_type="phi3",
    model_class="Phi3ForCausalLM",
    entries=llama_entries(fused=True),
    keys=KEYS | ACTIVATION | {"resid_pdrop": "hidden_dropout", "sliding_window": "sliding_window"},
    only_read=HEAD_DIM,
    fixed=FIXED | NO_BIASES,
    features=frozenset({"rotary_percent", "rope_scaling"}),
    gated=True,
    requirements=(
        Requirement(_longrope_only, f"--rope-scaling with no other keys than {sorted(_LONGROPE)}"),
    ),
    write=_write_phi3,
    read=_read_phi3,
)
"""Phi-3 and Phi-4: Llama without biases, in which some channels of each head may not be rotated.
Query, key and value are one tensor, and so are gate and up."""


_MLP_NORM = "pre_feedforward_layernorm"
_POST_NORMS = (
    *norm("attention_post_norm", "post_attention_layernorm"),
    *norm("mlp_post_norm", "post_feedforward_layernorm"),
)
_GEMMA_FIXED = FIXED | NO_BIASES | {
    "apply_layernorm_1p": True, "post_norm": True, "scale_embeddings": True,
}  # fmt: skip
_GEMMA_FEATURES = frozenset(
    {"query_pre_attn_scalar", "rope_scaling", "sliding_window", "window_attn_skip_freq"}
)
_SAME_NAME = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_GEMMA_KEYS = (
    KEYS | HEAD_DIM | {"hidden_activation": "activation"} | {name: name for name in _SAME_NAME}
)
_WHOLE_SCALAR = Requirement(
    lambda m: float(m.attention.query_pre_attn_scalar).is_integer(),
    "--query-pre-attn-scalar that is an integer",
)
"""Gemma's configuration classes require an integer here."""


def write_gemma(model: ModelConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": int(model.attention.query_pre_attn_scalar),
        "attn_logit_softcapping": model.attention.attn_logit_softcapping,
        # transformers requires sliding_window even if no block has a window.
        "sliding_window": model.attention.sliding_window or model.positions.max_position_embeddings,
        "layer_types": layer_types(model),
        "attention_bias": False,
        "pad_token_id": None,
        **write_rope(model),
    }


def read_gemma(given: HFConfigReader, fields: dict[str, Any], every: int) -> dict[str, Any]:
    """Read the sliding windows. By default, every N-th block has none."""
    given.only("attention_bias", (False,), NO_ATTENTION_BIAS)
    given.only("use_bidirectional_attention", (False, None), "attention must be causal")
    given.unused("hidden_act", "sliding_window_size")  # keys of older files
    kinds = [SLIDING if (n + 1) % every else FULL for n in range(fields["num_layers"])]
    return read_windows(given, given.optional_whole("sliding_window"), kinds)


GEMMA2 = Architecture(
    title="Gemma 2",
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    entries=llama_entries(_POST_NORMS, mlp_norm=_MLP_NORM),
    keys=_GEMMA_KEYS,
    fixed=_GEMMA_FIXED,
    features=_GEMMA_FEATURES,
    gated=True,
    requirements=(DIVISIBLE, _WHOLE_SCALAR),
    write=write_gemma,
    read=lambda given, fields: {**read_gemma(given, fields, 2), **read_rope(given, fields)},
)
"""Gemma 2: norms before and after attention and MLP, which multiply by 1 + weight; GEGLU; scaled
embeddings; a sliding window in most blocks; softcaps on attention scores and logits."""


def read_kinds(given: HFConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``rope_parameters`` for (blocks without a window, blocks with a window). Raises
    CheckpointError if RoPE is scaled in windowed blocks."""
    nested = given.table("rope_parameters")
    if set(nested) - {FULL, SLIDING}:
        given.refuse("rope_parameters", nested, f"expected {FULL} and {SLIDING} alone")
    wide, narrow = (dict(nested.get(kind) or {}) for kind in (FULL, SLIDING))
    if narrow.get("rope_type", narrow.get("type", "default")) != "default":
        given.refuse("rope_parameters", nested, f"RoPE cannot be scaled in {SLIDING}")
    if any(part.get("partial_rotary_factor", 1.0) != 1.0 for part in (wide, narrow)):
        given.refuse("rope_parameters", nested, "such models rotate whole heads")
    return wide, narrow


def by_kind(wide: dict[str, Any], local: float) -> dict[str, Any]:
    """Return ``rope_parameters`` by attention type: ``wide`` for blocks without a window, and the
    base ``local`` for windowed blocks."""
    return {FULL: wide, SLIDING: {"rope_type": "default", "rope_theta": local}}


def local_base(model: ModelConfig) -> float:
    """Return the rotary base of windowed blocks."""
    return model.positions.rotary_base_local or model.positions.rotary_base


def _local_unscaled(model: ModelConfig) -> bool:
    """Return whether RoPE is unscaled in windowed blocks, as config.json requires."""
    return model.attention.sliding_window is None or (
        model.positions.rotary_base_local is not None or model.positions.rope_scaling.is_default
    )


LOCAL_UNSCALED = Requirement(_local_unscaled, "--rotary-base-local next to --rope-scaling")


def _write_gemma3(model: ModelConfig) -> dict[str, Any]:
    keys = write_gemma(model)
    local = local_base(model)
    every = model.attention.window_attn_skip_freq or model.num_layers + 1
    return keys | {
        "rope_local_base_freq": local,
        "rope_parameters": by_kind(keys["rope_parameters"], local),
        # transformers 4 reads this key if it does not support layer_types, and has no other
        # patterns.
        **({} if isinstance(every, str) else {"sliding_window_pattern": every}),
    }


def _read_gemma3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only(
        "attn_logit_softcapping", (None,),
        "transformers does not softcap the attention scores of such models",
    )  # fmt: skip
    windows = read_gemma(
        given, fields, given.whole(("sliding_window_pattern", "_sliding_window_pattern"))
    )
    wide, narrow = read_kinds(given)
    local = agreed(given, ("rope_local_base_freq",), narrow.get("rope_theta"), 10_000.0)
    return {
        **windows,
        "rotary_base": agreed(given, ("rope_theta",), wide.get("rope_theta"), 1_000_000.0),
        "rotary_base_local": None if windows["sliding_window"] is None else local,
        "rope_scaling": read_scaling(given, fields, wide),
    }


GEMMA3 = Architecture(
    title="Gemma 3",
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    entries=llama_entries((*QK_NORMS, *_POST_NORMS), mlp_norm=_MLP_NORM),
    keys={key: field for key, field in _GEMMA_KEYS.items() if key != "attn_logit_softcapping"},
    fixed=_GEMMA_FIXED | {"qk_layernorm": True},
    features=_GEMMA_FEATURES | {"rotary_base_local"},
    gated=True,
    requirements=(
        DIVISIBLE,
        _WHOLE_SCALAR,
        LOCAL_UNSCALED,
    ),
    write=_write_gemma3,
    read=_read_gemma3,
    # tie_word_embeddings is for versions of transformers that lack Gemma 3.
    defaults={"sliding_window_pattern": 6, "tie_word_embeddings": True},
)
"""Gemma 3: Gemma 2 with query and key norms instead of a softcap on attention scores, and with
another rotary base in windowed blocks."""
