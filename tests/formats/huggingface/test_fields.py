"""Fields of the network's configuration: each is written for an architecture, or refused there."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
from hf_classic_cases import CLASSIC_FLAGS
from hf_flags import BASES
from hf_modern_cases import MODERN_FLAGS
from samples import sampled

from megatron.config import ConfigError, ModelFlags
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.latent.flags import LatentConfig
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.features.recurrent.flags import DeltaConfig, MambaConfig
from megatron.features.recurrent.pattern import PatternConfig
from megatron.features.retrieval.flags import BiencoderConfig
from megatron.features.retro.flags import RetrievalConfig
from megatron.formats.huggingface import architecture_named, architectures

PATH = Path("some/config.json")

FREE = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "max_position_embeddings", "rotary_base", "norm_epsilon", "unpadded_vocab_size",
    "untie_embeddings_and_output_weights",
}  # fmt: skip
"""Fields that any architecture can have at any value."""
TRAINING = {
    "seq_length", "attention_dropout", "hidden_dropout", "init_method_std", "padded_vocab_size",
    "make_vocab_size_divisible_by", "attention_backend", "hf_architecture", "decoder_seq_length",
    "init_method_xavier_uniform", "fp32_residual_connection",
}  # fmt: skip
"""Fields that make no difference to logits."""
RETRIEVAL = {
    field.name for part in (RetrievalConfig, BiencoderConfig) for field in dataclasses.fields(part)
}
EXPERTS = {field.name for field in dataclasses.fields(ExpertsConfig)}
"""All but one are written or refused where there are experts; see :mod:`test_experts`."""
LATENT = {field.name for field in dataclasses.fields(LatentConfig)}
"""Written or refused where there are latent vectors; see tests/features/latent/test_files.py."""
MULTI_TOKEN = {field.name for field in dataclasses.fields(MultiTokenConfig)}
RECURRENT = {
    field.name
    for part in (DeltaConfig, MambaConfig, PatternConfig)
    for field in dataclasses.fields(part)
}
"""Fields of models with Mamba-2 are written or refused too; see :mod:`test_hybrids`."""
OTHER_FAMILIES = {"encoder_decoder"} | (RETRIEVAL | EXPERTS | LATENT | MULTI_TOKEN | RECURRENT) - {
    "retro_add_retriever",
    "num_experts",
    "multi_latent_attention",
    "mtp_num_layers",
}
"""Fields that these models do not have."""
OTHER_SPELLINGS = {
    "group_query_attention", "use_rotary_position_embeddings", "use_rope_scaling",
    "rope_scaling_factor", "swiglu", "quick_geglu", "openai_gelu", "no_position_embedding",
    "encoder_num_layers", "encoder_seq_length",
}  # fmt: skip
UNUSUAL = {
    "family": "bert", "position_embedding_type": "none", "normalization": "LayerNorm",
    "num_query_groups": 2,
    "kv_channels": 12, "position_embedding_offset": 1, "rotary_percent": 0.5,
    "rotary_base_local": 5.0, "rope_scaling": '{"rope_type": "linear", "factor": 2.0}',
    "sliding_window": 8, "window_attn_skip_freq": 2, "query_pre_attn_scalar": 3.0,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "qk_layernorm": True,
    "apply_layernorm_1p": True, "embed_layernorm": True, "scale_embeddings": True,
    "post_norm": True, "apply_residual_connection_post_layernorm": True,
    "parallel_residual": True, "shared_parallel_norm": True,
    "glu_activation": "geglu", "relu": True, "squared_relu": True, "bias_gelu_fusion": False,
    "softmax_type": "off-by-one", "glu_linear_offset": 0.5, "activation_func_clamp_value": 5.0,
    "add_bias_linear": False, "add_qkv_bias": True, "add_attention_bias": True,
    "decoder_num_layers": 3, "scale_head_input": True,
    "relative_attention_num_buckets": 16, "relative_attention_max_distance": 64,
    "bert_binary_head": False, "num_tokentypes": 3, "lm_head_activation": "relu",
    "retro_add_retriever": True,
    "head": "span", "num_labels": 3, "label_names": ("yes", "no"),
    "clip_qkv": 0.5, "qk_layernorm_whole": True, "pre_norm": False, "embedding_multiplier": 2.0,
    "logits_scaling": 2.0, "residual_multiplier": 0.5, "num_experts": (5,),
    "add_mlp_bias": True, "add_proj_bias": True,
    "lm_head_bias": True, "qk_layernorm_after_rope": True, "multi_latent_attention": True,
    "mtp_num_layers": 2, "qk_l2_norm": True,
    "attention_output_gate": True, "rotary_interleaved": True, "no_rope_freq": 2,
    "attention_temperature": 0.5, "attention_temperature_floor": 4, "attention_chunk_size": 5,
    "attention_temperature_rotary": True, "xielu": True, "sub_norm": True,
    "qk_layernorm_per_head": True, "first_norm": False, "relative_attention_per_block": True,
    "separate_decoder_embedding": True, "global_kv_channels": 14, "global_num_query_groups": 1,
    "global_keys_as_values": True, "value_norm": True, "block_scalar": True,
}  # fmt: skip
"""Another value of each field that changes the network."""
AGAIN = {"position_embedding_type": "rope", "rotary_percent": 0.25}
"""For those that have the one above."""
CLASSIC = CLASSIC_FLAGS.keys() - {"gptj"}
FURTHER = {
    "num_experts", "multi_latent_attention", "experimental_attention_variant",
    "hybrid_layer_pattern",
}  # fmt: skip
"""Fields of models of which a sample is tested by default."""
RELATIVES = {
    "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mt5", "umt5", "bart", "mbart",
    "plbart",
    "modernbert",
}  # fmt: skip
"""Architectures of which the same is so, because others have almost their tables."""


def test_every_field_of_the_model_is_thought_of():
    fields = {field.name for field in dataclasses.fields(ModelFlags)}
    assert fields == FREE | TRAINING | OTHER_FAMILIES | OTHER_SPELLINGS | set(UNUSUAL)


def other(field, plain):
    """Another value than that of a plain model."""
    value = getattr(plain.flags(), field)
    if isinstance(value, bool):
        return not value
    if field == "family":
        return "gpt" if value == "bert" else "bert"
    if field == "normalization":
        return "LayerNorm" if value == "RMSNorm" else "RMSNorm"
    if field == "glu_activation":
        return "swiglu" if value == "geglu" else "geglu"
    if field in AGAIN and value == UNUSUAL[field]:
        return AGAIN[field]
    return UNUSUAL[field]


@functools.cache
def written_plainly(model_type, gpt_config):
    """An architecture, the model that it has by default, and what config.json has of it."""
    known = architecture_named({"model_type": model_type}, PATH)
    plain = gpt_config(**BASES[model_type]).model
    assert known.misfits(plain) == []
    return known, plain, known.config(plain)


@pytest.mark.parametrize(
    "model_type",
    sampled(
        BASES,
        lambda name: (
            name == "mixtral"
            or not (
                FURTHER & BASES[name].keys() or name in RELATIVES | CLASSIC | MODERN_FLAGS.keys()
            )
        ),
    ),
)
def test_a_feature_is_written_or_refused(model_type, gpt_config):
    """Whatever a model has otherwise than those of its architecture: it is in config.json, from
    where it is read again, or it does not fit; never is it left out."""
    for field in UNUSUAL:
        check_that_it_is_written_or_refused(model_type, field, gpt_config)


def check_that_it_is_written_or_refused(model_type, field, gpt_config):
    known, plain, plain_written = written_plainly(model_type, gpt_config)
    changes = BASES[model_type] | {field: other(field, plain)}
    if field == "glu_activation":
        changes["swiglu"] = False
    try:
        model = gpt_config(**changes).model
    except ConfigError:  # there is no such network
        return
    if known.misfits(model):
        return
    written = json.loads(json.dumps(known.config(model)))
    if written == plain_written:
        second_head = set() if known.family == "bert" else {"bert_binary_head"}
        alone = {"attention_temperature_floor"} | second_head
        assert field in NO_EFFECT[model_type] | alone, "the feature is lost"
        return
    if field == "mtp_num_layers":  # read where a run asks for it, and the files have them
        assert written[known.ahead.keys[0]] == 2
        return
    back = known.model(written, PATH)
    actual, expected = getattr(back.flags(), field), getattr(model.flags(), field)
    assert actual == expected


_ROTARY = {
    "rotary_percent", "rotary_base_local", "rope_scaling", "rotary_interleaved", "no_rope_freq",
    "qk_l2_norm",
}  # fmt: skip
_WINDOWS = {"window_attn_skip_freq", "rotary_base_local"}
_BIASES = {"add_qkv_bias", "add_attention_bias"}
_GATED = {"relu", "squared_relu", "bias_gelu_fusion"}
NO_EFFECT = {
    "bert": _ROTARY | _WINDOWS | _BIASES | {"shared_parallel_norm"},
    "megatron-bert": _ROTARY | _WINDOWS | _BIASES | {"shared_parallel_norm"},
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "electra", "distilbert"),
        _ROTARY | _WINDOWS | _BIASES | {"shared_parallel_norm"}),
    **dict.fromkeys(("mt5", "umt5"), _ROTARY | _WINDOWS | _GATED), "modernbert": _GATED,
    **dict.fromkeys(("bart", "mbart", "plbart"), _ROTARY | _WINDOWS | _BIASES | {"lm_head_bias"}),
    "gpt2": _ROTARY | _WINDOWS | _BIASES | {"shared_parallel_norm"},
    "opt": _ROTARY | _WINDOWS | _BIASES,
    "bloom": _ROTARY | _WINDOWS | _BIASES | {"relu"},
    "gpt_neox": _WINDOWS | _BIASES,
    "falcon": _WINDOWS | _BIASES,
    "llama": _GATED | _WINDOWS, "mistral": _GATED | {"rotary_base_local"},
    "qwen2": _GATED | _WINDOWS, "qwen3": _GATED | _WINDOWS, "phi3": _GATED | _WINDOWS,
    "gemma2": _GATED | {"rotary_base_local"}, "gemma3_text": _GATED,
    "t5": _ROTARY | _WINDOWS | {"bias_gelu_fusion"},
    "mixtral": _GATED | _WINDOWS, "qwen2_moe": _GATED | _WINDOWS, "qwen3_moe": _GATED | _WINDOWS,
    "mellum": _GATED | _WINDOWS,
    "olmoe": _GATED | _WINDOWS, "flex_olmo": _GATED | _WINDOWS, "granitemoe": _GATED | _WINDOWS,
    "gpt_oss": _GATED | _BIASES | {"rotary_base_local"},
    **dict.fromkeys(
        ("glm4_moe", "dots1", "solar_open", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe",
         "phimoe"),
        _GATED | _WINDOWS),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu", "minicpm3"),
        _GATED | _WINDOWS | {"kv_channels"}),
    "llama4_text": _GATED | {"rotary_base_local"},
    "bamba": _GATED | _WINDOWS, "nemotron_h": _ROTARY | _WINDOWS | {"bias_gelu_fusion"},
    "stablelm": _GATED | _WINDOWS, "starcoder2": _BIASES | _WINDOWS,
    **dict.fromkeys(("phi", "persimmon", "gptj", "codegen"), _BIASES | _WINDOWS),
    "mpt": _ROTARY | _WINDOWS,
    **dict.fromkeys(("gpt_bigcode", "gpt_neo", "biogpt", "xglm"), _ROTARY | _WINDOWS | _BIASES),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED | _WINDOWS),
    **dict.fromkeys(MODERN_FLAGS, _GATED | _WINDOWS | {"attention_temperature_floor"}),
}  # fmt: skip
"""Fields that do nothing next to the others of such a model."""


def test_every_architecture_is_thought_of():
    known = {architecture.model_type for architecture in architectures()}
    assert known == set(BASES) == set(NO_EFFECT)
