"""OPT: learned positions from row 2 on, LayerNorm, biases everywhere, ReLU."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import (
    LAYER_NORM,
    LEARNED,
    NOT_GATED,
    Requirement,
)
from megatron.formats.huggingface.parts import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    block,
    head_width,
    linear,
    norm,
    untied,
    weight,
)
from megatron.formats.huggingface.reorder import SEPARATE_QKV
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture

_OFFSET = 2
_EPSILON = 1e-5
"""That of torch.nn.LayerNorm; config.json has no key for it."""


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": model.positions.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.hidden_size,
        "ffn_dim": model.mlp.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_attention_heads,
        "activation_function": ACTIVATION_NAMES[model.mlp.activation],
        "enable_bias": model.mlp.bias,
        "do_layer_norm_before": True,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention.attention_dropout,
        "init_std": model.init_method_std,
        "pad_token_id": None,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    hidden = given.whole("hidden_size", 768)
    heads = given.whole("num_attention_heads", 12)
    given.only("do_layer_norm_before", (True,), "here norms stand in front of attention and MLP")
    given.only(
        "word_embed_proj_dim", (hidden, None),
        f"here embeddings have the width of the hidden states, {hidden}",
    )  # fmt: skip
    given.only("_remove_final_layer_norm", (False,), "here the last block is normalised")
    given.only("layer_norm_elementwise_affine", (True,), "here norms have weights")
    given.unused("activation_dropout")  # that of another model
    given.only("layerdrop", (0, 0.0), "here no blocks are left out in training")
    return {
        "position_embedding_offset": _OFFSET,
        "hidden_size": hidden,
        "ffn_hidden_size": given.whole("ffn_dim", 3072),
        "num_layers": given.whole("num_hidden_layers", 12),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": head_width(given, hidden, heads),
        "max_position_embeddings": given.whole("max_position_embeddings", 2048),
        "add_bias_linear": given.flag("enable_bias", True),
        "norm_epsilon": _EPSILON,
        "hidden_dropout": given.number("dropout", 0.1),
        "attention_dropout": given.number("attention_dropout", 0.0),
        "init_method_std": given.number("init_std", 0.02),
        **given.choice("activation_function", "relu", ACTIVATIONS),
    }


OPT = Architecture(
    title="OPT",
    model_type="opt",
    causal_lm="OPTForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "model.decoder.embed_tokens"),
        *weight("embedding.position_embeddings", "model.decoder.embed_positions"),
        *block(
            "model.decoder.layers.{n}",
            norm("attention_norm", "self_attn_layer_norm"),
            linear("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                   form=SEPARATE_QKV),
            linear("attention.proj", "self_attn.out_proj"),
            norm("mlp_norm", "final_layer_norm"),
            linear("mlp.up", "fc1"),
            linear("mlp.down", "fc2"),
        ),
        *norm("final_norm.norm", "model.decoder.final_layer_norm"),
        *weight("output_layer", "lm_head", when=untied),
    ),
    requirements=(
        LEARNED,
        LAYER_NORM,
        NOT_GATED,
        Requirement(
            lambda m: m.positions.position_embedding_offset == _OFFSET,
            f"--position-embedding-offset {_OFFSET}",
        ),
        Requirement(lambda m: m.norm.norm_epsilon == _EPSILON, f"--norm-epsilon {_EPSILON}"),
    ),
    features=frozenset({"position_offset"}),
    write=_write,
    read=_read,
    vocab_size=50272,
    tied=True,
)  # fmt: skip
"""The table of OPT."""
