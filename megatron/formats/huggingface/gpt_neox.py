"""GPT-NeoX and Pythia: LayerNorm, biases everywhere, part of each head rotated, attention and MLP
in parallel with a norm each, or in sequence."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import GROUPED_QKV, block, linear, norm, untied, weight
from megatron.formats.huggingface.rope_and_windows import read_rope, write_rope


def _write(model: ModelConfig) -> dict[str, Any]:
    rope, share = write_rope(model, "rotary_emb_base"), model.positions.rotary_percent
    rope["rope_parameters"]["partial_rotary_factor"] = share
    return {"attention_bias": True, "rotary_pct": share, **rope}


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("attention_bias", (True,), "all linear layers must have biases")
    given.only("is_decoder", (True, False), "it is always a decoder")
    # In the file of the model of 20 billion parameters; transformers reads other names.
    given.unused("attention_probs_dropout_prob", "hidden_dropout_prob")
    return read_rope(given, fields, "rotary_emb_base", share_key="rotary_pct", share=0.25)


GPT_NEOX = Architecture(
    title="GPT-NeoX",
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "gpt_neox.embed_in"),
        *block(
            "gpt_neox.layers.{n}",
            norm("attention_norm", "input_layernorm"),
            linear("attention.qkv", "attention.query_key_value", form=GROUPED_QKV),
            linear("attention.proj", "attention.dense"),
            norm("mlp_norm", "post_attention_layernorm"),
            linear("mlp.up", "mlp.dense_h_to_4h"),
            linear("mlp.down", "mlp.dense_4h_to_h"),
        ),
        *norm("final_norm.norm", "gpt_neox.final_layer_norm"),
        # transformers 5 calls it lm_head, but in files it is still embed_out.
        *weight("output_layer", "embed_out", when=untied),
    ),
    keys={
        "max_position_embeddings": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_act": "activation",
        "use_parallel_residual": "parallel_residual",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "layer_norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "rope",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    features=frozenset({"rotary_percent", "rope_scaling"}),
    write=_write,
    read=_read,
    base_prefix="gpt_neox.",
    endings={"embed_out.weight": "lm_head.weight"},
)
