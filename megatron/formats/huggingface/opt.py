"""OPT: learned positions from row 2 on, LayerNorm, biases everywhere or nowhere, ReLU."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import SEPARATE_QKV, block, linear, norm, untied, weight


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "word_embed_proj_dim": model.hidden_size,
        "do_layer_norm_before": True,
        "pad_token_id": None,
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    hidden = fields["hidden_size"]
    given.only("do_layer_norm_before", (True,), "norms must precede attention and MLP")
    given.only(
        "word_embed_proj_dim", (hidden, None),
        f"embeddings must have the width of the hidden states, {hidden}",
    )  # fmt: skip
    given.only("_remove_final_layer_norm", (False,), "the last block must be normalised")
    given.only("layer_norm_elementwise_affine", (True,), "norms must have weights")
    given.unused("activation_dropout", "output_projection")  # of another model, and of metaseq
    given.only("layerdrop", (0, 0.0), "blocks cannot be dropped in training")
    return {}


OPT = Architecture(
    title="OPT",
    model_type="opt",
    model_class="OPTForCausalLM",
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
    keys={
        "max_position_embeddings": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "ffn_dim": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "activation_function": "activation",
        "enable_bias": "add_bias_linear",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "init_method_std",
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "position_embedding_offset": 2,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,  # that of torch.nn.LayerNorm; config.json has no key for it
    },
    write=_write,
    read=_read,
)  # fmt: skip
