"""GPT-2: learned positions, LayerNorm, biases everywhere, one plain activation.

Its linear layers are Conv1D, which hold the weight as [inputs, outputs]; the fused [q | k | v] is
in our order.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.huggingface.table import Architecture, Entry, Requirement
from megatron.config import ModelConfig

_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "squared_relu": "relu2"}


def _untied(model: ModelConfig) -> bool:
    return not model.tied


def _heads_fill_width(model: ModelConfig) -> bool:
    assert model.num_attention_heads and model.kv_channels
    return model.num_attention_heads * model.kv_channels == model.hidden_size


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.unpadded_vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": _ACTIVATIONS[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tied,
    }


# fmt: off
GPT2 = Architecture(
    title="GPT-2",
    entries=(
        Entry("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
        Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        Entry("layers.{n}.attention_norm.weight", ("transformer.h.{n}.ln_1.weight",)),
        Entry("layers.{n}.attention_norm.bias", ("transformer.h.{n}.ln_1.bias",)),
        Entry("layers.{n}.attention.qkv.weight", ("transformer.h.{n}.attn.c_attn.weight",),
              transposed=True),
        Entry("layers.{n}.attention.qkv.bias", ("transformer.h.{n}.attn.c_attn.bias",)),
        Entry("layers.{n}.attention.proj.weight", ("transformer.h.{n}.attn.c_proj.weight",),
              transposed=True),
        Entry("layers.{n}.attention.proj.bias", ("transformer.h.{n}.attn.c_proj.bias",)),
        Entry("layers.{n}.mlp_norm.weight", ("transformer.h.{n}.ln_2.weight",)),
        Entry("layers.{n}.mlp_norm.bias", ("transformer.h.{n}.ln_2.bias",)),
        Entry("layers.{n}.mlp.up.weight", ("transformer.h.{n}.mlp.c_fc.weight",),
              transposed=True),
        Entry("layers.{n}.mlp.up.bias", ("transformer.h.{n}.mlp.c_fc.bias",)),
        Entry("layers.{n}.mlp.down.weight", ("transformer.h.{n}.mlp.c_proj.weight",),
              transposed=True),
        Entry("layers.{n}.mlp.down.bias", ("transformer.h.{n}.mlp.c_proj.bias",)),
        Entry("final_norm.norm.weight", ("transformer.ln_f.weight",)),
        Entry("final_norm.norm.bias", ("transformer.ln_f.bias",)),
        Entry("output_layer.weight", ("lm_head.weight",), when=_untied),
    ),
    requirements=(
        Requirement(lambda m: m.position_embedding_type == "learned_absolute",
                    "--position-embedding-type learned_absolute"),
        Requirement(lambda m: m.normalization == "LayerNorm", "--normalization LayerNorm"),
        Requirement(lambda m: not m.swiglu, "no --swiglu"),
        Requirement(lambda m: m.add_bias_linear, "no --disable-bias-linear"),
        Requirement(lambda m: m.num_query_groups == m.num_attention_heads,
                    "--num-query-groups equal to --num-attention-heads"),
        Requirement(_heads_fill_width,
                    "--num-attention-heads times --kv-channels equal to --hidden-size"),
    ),
    config=_config,
)
# fmt: on
"""The table of GPT-2."""
