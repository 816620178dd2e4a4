"""Gemma 2: norms around attention and MLP that multiply by 1 + weight, GEGLU, scaled embeddings,
bent scores and logits, a sliding window in every other block."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import (
    GATED,
    NO_BIASES,
    RMS_NORM,
    ROPE,
    Requirement,
)
from megatron.formats.huggingface.llama import divisible
from megatron.formats.huggingface.parts import (
    EMBEDDING,
    FINAL,
    GATE_NAMES,
    llama_block,
    norm,
    read_rms,
    read_shape,
    write_shape,
)
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture, Entry
from megatron.formats.huggingface.windows import FULL, SLIDING, layer_types, read_windows


def _whole_scalar(model: ModelConfig) -> bool:
    """Its configuration class takes no other."""
    return float(model.attention.query_pre_attn_scalar).is_integer()


GEMMA = (
    ROPE,
    RMS_NORM,
    GATED,
    NO_BIASES,
    Requirement(lambda m: m.norm.apply_layernorm_1p, "--apply-layernorm-1p"),
    Requirement(lambda m: m.norm.post_norm, "--post-norm"),
    Requirement(lambda m: m.embedding.scale_embeddings, "--scale-embeddings"),
    Requirement(divisible, "--num-attention-heads that divide --hidden-size"),
    Requirement(_whole_scalar, "--query-pre-attn-scalar that is a whole number"),
)
"""What Gemma 2 and 3 have in common."""
POST_NORMS: tuple[Entry, ...] = (
    *norm("attention_post_norm", "post_attention_layernorm"),
    *norm("mlp_post_norm", "post_feedforward_layernorm"),
)
GEMMA_FEATURES = frozenset(
    {
        "grouped", "head_dim", "norm_1p", "post_norm", "embed_scale", "query_scalar",
        "attention_cap", "final_cap", "rope_scaling", "window", "window_pattern",
    }
)  # fmt: skip


def write_gemma(model: ModelConfig) -> dict[str, Any]:
    """The keys that Gemma 2 and 3 have in common, but for positions."""
    return {
        **write_shape(model),
        "head_dim": model.attention.kv_channels,
        "hidden_activation": GATE_NAMES[model.mlp.activation],
        "query_pre_attn_scalar": int(model.attention.query_pre_attn_scalar),
        "attn_logit_softcapping": model.attention.attn_logit_softcapping,
        "final_logit_softcapping": model.embedding.final_logit_softcapping,
        # Its code asks for one even where no block has a window.
        "sliding_window": model.attention.sliding_window or model.positions.max_position_embeddings,
        "layer_types": layer_types(model),
        "attention_bias": False,
        "pad_token_id": None,
    }


def read_gemma(
    given: HFConfigReader,
    shape: dict[str, Any],
    caps: tuple[float | None, float | None],
    every: int,
) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 have in common, but for positions.

    Args:
        given: the keys.
        shape: the sizes.
        caps: defaults of the two softcappings, of scores and of logits.
        every: every so-manieth block sees all tokens.
    """
    given.only("attention_bias", (False,), "here all linear layers have biases or none has")
    given.only("use_bidirectional_attention", (False, None), "attention is causal here")
    given.unused("hidden_act", "sliding_window_size")  # beside those that are read, in older files
    kinds = [SLIDING if (n + 1) % every else FULL for n in range(shape["num_layers"])]
    return {
        **shape,
        **read_rms(given, 1e-6, "hidden_activation", "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": given.number("query_pre_attn_scalar", 256),
        "attn_logit_softcapping": given.optional_number("attn_logit_softcapping", caps[0]),
        "final_logit_softcapping": given.optional_number("final_logit_softcapping", caps[1]),
        "apply_layernorm_1p": True,
        "post_norm": True,
        "scale_embeddings": True,
        **read_windows(given, given.optional_whole("sliding_window", 4096), kinds),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {**write_gemma(model), **write_rope(model)}


def _read(given: HFConfigReader) -> dict[str, Any]:
    shape = read_shape(given, 2304, 9216, 26, 8, 4, 8192, 256)
    return {
        **read_gemma(given, shape, (50.0, 30.0), 2),
        **read_rope(given, shape["kv_channels"], shape["max_position_embeddings"], 10000.0),
    }


GEMMA2 = Architecture(
    title="Gemma 2",
    model_type="gemma2",
    causal_lm="Gemma2ForCausalLM",
    entries=(*EMBEDDING, *llama_block(POST_NORMS, mlp_norm="pre_feedforward_layernorm"), *FINAL),
    requirements=GEMMA,
    features=GEMMA_FEATURES,
    write=_write,
    read=_read,
    vocab_size=256000,
    tied=True,
)
"""The table of Gemma 2."""
