"""BLOOM: ALiBi, normalised embeddings, LayerNorm, biases everywhere, GELU by the tanh
approximation, an MLP four times as wide as the hidden states."""

from __future__ import annotations

from typing import Any

from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import GROUPED_QKV, block, linear, norm, untied, weight


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only(
        "apply_residual_connection_post_layernorm", (False,), "the residual cannot be normalised"
    )
    # How Megatron-DeepSpeed computed, which is in the first files; none of it changes the model.
    given.unused(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
        "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
    )  # fmt: skip
    given.only("n_inner", (None, 4 * fields["hidden_size"]), "such an MLP is four times as wide")
    return {}


BLOOM = Architecture(
    title="BLOOM",
    model_type="bloom",
    model_class="BloomForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "transformer.word_embeddings"),
        *norm("embedding.norm", "transformer.word_embeddings_layernorm"),
        *block(
            "transformer.h.{n}",
            norm("attention_norm", "input_layernorm"),
            linear("attention.qkv", "self_attention.query_key_value", form=GROUPED_QKV),
            linear("attention.proj", "self_attention.dense"),
            norm("mlp_norm", "post_attention_layernorm"),
            linear("mlp.up", "mlp.dense_h_to_4h"),
            linear("mlp.down", "mlp.dense_4h_to_h"),
        ),
        *norm("final_norm.norm", "transformer.ln_f"),
        *weight("output_layer", "lm_head", when=untied),
    ),
    keys={
        # Nothing limits the length; it is what the model was trained with, if the file says so.
        "seq_length": "max_position_embeddings",
        ("hidden_size", "n_embed"): "hidden_size",
        ("n_layer", "num_hidden_layers"): "num_layers",
        ("n_head", "num_attention_heads"): "num_attention_heads",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "alibi",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "embed_layernorm": True,
    },
    requirements=(
        Requirement(lambda m: m.mlp.activation == "gelu_tanh", "GELU by the tanh approximation"),
        Requirement(
            lambda m: m.mlp.ffn_hidden_size == 4 * m.hidden_size,
            "--ffn-hidden-size four times --hidden-size",
        ),
    ),
    read=_read,
    defaults={"seq_length": 2048},
    base_prefix="transformer.",
)
