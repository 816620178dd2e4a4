"""What fits which architecture, and what in a config.json is refused."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from samples import sampled
from transformers import AutoConfig

from megatron.checkpoint.files import CheckpointError
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, ModelFlags
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.latent.flags import LatentConfig
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.features.recurrent.delta_flags import DeltaConfig
from megatron.features.recurrent.mamba_flags import MambaConfig
from megatron.features.recurrent.pattern import PatternConfig
from megatron.features.retro.flags import RetrievalConfig
from megatron.formats.features import FEATURES, spelled, without
from megatron.formats.huggingface import architecture_named, architecture_of, architectures
from megatron.formats.huggingface.config_reader import HFConfigReader

PATH = Path("some/config.json")

QWEN2 = {"add_qkv_bias": True}
GEMMA2 = {
    "glu_activation": "geglu", "swiglu": False, "apply_layernorm_1p": True, "post_norm": True,
    "scale_embeddings": True,
}  # fmt: skip
T5 = {
    "family": "t5", "encoder_decoder": True, "position_embedding_type": "relative",
    "normalization": "RMSNorm", "add_bias_linear": False, "query_pre_attn_scalar": 1.0,
    "relu": True, "scale_head_input": True,
}  # fmt: skip
T5_11 = T5 | {
    "relu": False, "glu_activation": "geglu", "scale_head_input": False,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MEGATRON_BERT = {"family": "bert"}
BERT = MEGATRON_BERT | {"apply_residual_connection_post_layernorm": True}
MIXTRAL = {"llama": True, "num_experts": (4,)}
CORRECTED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
DEEPSEEK = MIXTRAL | CORRECTED | {
    "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
LATENT_FLAGS = {
    "multi_latent_attention": True, "qk_layernorm": True, "latent_norm_epsilon": 1e-6,
    "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 2,
}  # fmt: skip
QWEN3_5 = {
    "llama": True, "apply_layernorm_1p": True, "qk_layernorm": True, "attention_output_gate": True,
    "rotary_percent": 0.25, "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "[1,0]", "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
QWEN3_NEXT = QWEN3_5 | {
    "num_experts": (4,), "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True,
}  # fmt: skip
OLMOE = MIXTRAL | {"qk_layernorm": True, "qk_layernorm_whole": True}
NEOX = {"position_embedding_type": "rope", "parallel_residual": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "gpt2"),
        ({"llama": True}, "llama"),
        ({"llama": True, "add_bias_linear": True}, "llama"),
        ({"llama": True, "add_attention_bias": True}, "llama"),
        ({"llama": True, "kv_channels": 12}, "llama"),
        ({"llama": True, "sliding_window": 9}, "mistral"),
        ({"llama": True, **QWEN2}, "qwen2"),
        ({"llama": True, **QWEN2, "sliding_window": 9}, "qwen2"),
        ({"llama": True, "qk_layernorm": True}, "qwen3"),
        ({"llama": True, "rotary_percent": 0.5}, "phi3"),
        ({"llama": True, **GEMMA2}, "gemma2"),
        ({"llama": True, **GEMMA2, "qk_layernorm": True}, "gemma3_text"),
        (NEOX, "gpt_neox"),
        (NEOX | {"parallel_residual": False}, "gpt_neox"),
        ({"position_embedding_offset": 2, "relu": True}, "opt"),
        (NEOX | {"shared_parallel_norm": True}, "falcon"),
        (NEOX | {"num_query_groups": 2}, "falcon"),
        (NEOX | {"add_bias_linear": False}, "falcon"),
        ({"position_embedding_type": "alibi", "embed_layernorm": True, "ffn_hidden_size": 128},
         "bloom"),
        (MEGATRON_BERT, "megatron-bert"),
        (MEGATRON_BERT | {"bert_binary_head": False, "openai_gelu": True}, "megatron-bert"),
        (BERT | {"relu": True, "lm_head_activation": "relu", "num_tokentypes": 3}, "bert"),
        (T5, "t5"),
        (T5_11 | {"kv_channels": 12, "decoder_num_layers": 1}, "t5"),
        (T5 | {"scale_head_input": False}, "t5"),
    ],
)  # fmt: skip
def test_the_plainest_that_fits(changes, expected, gpt_config):
    assert architecture_of(gpt_config(**changes).model).model_type == expected


def test_one_can_be_forced(gpt_config):
    model = gpt_config(llama=True).model
    for wanted in ("llama", "mistral", "phi3"):
        assert architecture_of(model, wanted).model_type == wanted
    with pytest.raises(ValueError, match="--architecture qwen2: .* Qwen2 needs --add-qkv-bias$"):
        architecture_of(model, "qwen2")
    with pytest.raises(
        ValueError, match="--architecture lama is unknown; expected one of gpt2, llama"
    ):
        architecture_of(model, "lama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "RMSNorm"}, "GPT-2 needs --normalization LayerNorm$"),
        ({"add_bias_linear": False}, "GPT-2 needs --disable-bias|GPT-2 needs no --disable-bias"),
        ({"num_query_groups": 2}, "GPT-2 needs --num-query-groups equal to --num-attention-heads$"),
        ({"kv_channels": 12}, "GPT-2 needs --num-attention-heads times --kv-channels equal to"),
        ({"embed_layernorm": True}, "GPT-2 needs no --embed-layernorm$"),
        ({"final_logit_softcapping": 9.0}, "GPT-2 needs no --final-logit-softcapping$"),
        ({"position_embedding_type": "alibi"}, "GPT-2 needs --position-embedding-type learned_abs"),
        ({"llama": True, "normalization": "LayerNorm"}, "Llama needs --normalization RMSNorm$"),
        ({"llama": True, "swiglu": False}, "Llama needs --swiglu or --glu-activation$"),
        ({"llama": True, "post_norm": True}, "Llama needs no --post-norm$"),
        ({"llama": True, **GEMMA2, "query_pre_attn_scalar": 1.5}, "that is an integer"),
        ({"llama": True, "parallel_residual": True}, "Llama needs no --parallel-residual$"),
        (
            {"family": "t5", "encoder_decoder": True},  # Megatron's of 2023
            "T5 needs --position-embedding-type relative, --normalization RMSNorm, "
            "--disable-bias-linear, --query-pre-attn-scalar 1.0$",
        ),
        (T5 | {"num_query_groups": 2}, "T5 needs --num-query-groups equal to"),
        (BERT | {"lm_head_activation": "relu"}, "BERT needs --lm-head-activation with the activ"),
        (MEGATRON_BERT | {"embed_layernorm": True}, "MegatronBERT needs no --embed-layernorm$"),
        (MEGATRON_BERT | {"sliding_window": 8}, "MegatronBERT needs no --sliding-window$"),
        ({"num_tokentypes": 2}, "GPT-2 needs no --num-tokentypes$"),
        (T5_11 | {"scale_head_input": True}, "T5 needs no --scale-head-input with --untie"),
    ],
)
def test_what_fits_nothing_says_what_would(changes, message, gpt_config):
    with pytest.raises(ValueError, match=f"(?m){message}"):
        architecture_of(gpt_config(**changes).model)


def test_every_flag_of_a_requirement_exists():
    """The messages name flags; they must be the flags of the command line."""
    flags = FlagParser(*FLAG_CLASSES)._option_string_actions
    wanted = [need.wanted for known in architectures() for need in known.requirements]
    wanted += [spelled(*item) for known in architectures() for item in known.fixed.items()]
    for words in [*wanted, *map(without, FEATURES)]:
        for flag in re.findall(r"--[a-z0-9-]+", words):
            assert flag in flags, flag


FREE = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "max_position_embeddings", "rotary_base", "norm_epsilon", "unpadded_vocab_size",
    "untie_embeddings_and_output_weights",
}  # fmt: skip
"""What any architecture can have at any value."""
TRAINING = {
    "seq_length", "attention_dropout", "hidden_dropout", "init_method_std", "padded_vocab_size",
    "make_vocab_size_divisible_by", "attention_backend", "hf_architecture", "decoder_seq_length",
    "init_method_xavier_uniform", "fp32_residual_connection",
}  # fmt: skip
"""What makes no difference to logits."""
RETRIEVAL = {field.name for field in dataclasses.fields(RetrievalConfig)}
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
"""Those of models with Mamba-2 are written or refused too; see :mod:`test_hybrids`."""
OTHER_FAMILIES = {"encoder_decoder"} | (RETRIEVAL | EXPERTS | LATENT | MULTI_TOKEN | RECURRENT) - {
    "retro_add_retriever",
    "num_experts",
    "multi_latent_attention",
    "mtp_num_layers",
}
"""What these models do not have."""
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
    "lm_head_bias": True, "qk_layernorm_after_rope": True, "multi_latent_attention": True,
    "mtp_num_layers": 2, "qk_l2_norm": True,
    "attention_output_gate": True, "rotary_interleaved": True, "no_rope_freq": 2,
    "attention_temperature": 0.5, "attention_temperature_floor": 4, "attention_chunk_size": 5,
}  # fmt: skip
"""Another value of each field that changes the network."""
AGAIN = {"position_embedding_type": "rope", "rotary_percent": 0.25}
"""For those that have the one above."""
BASES = {
    "gpt2": {}, "llama": {"llama": True}, "mistral": {"llama": True, "sliding_window": 9},
    "qwen2": {"llama": True, **QWEN2}, "qwen3": {"llama": True, "qk_layernorm": True},
    "phi3": {"llama": True, "rotary_percent": 0.75},
    "gemma2": {"llama": True, **GEMMA2, "sliding_window": 9},
    "gemma3_text": {"llama": True, **GEMMA2, "qk_layernorm": True, "sliding_window": 9,
                    "rotary_base_local": 7.0},
    "gpt_neox": NEOX, "opt": {"position_embedding_offset": 2},
    "falcon": NEOX | {"shared_parallel_norm": True},
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True, "ffn_hidden_size": 128},
    "t5": T5, "bert": BERT, "megatron-bert": MEGATRON_BERT,
    "mixtral": MIXTRAL,
    "qwen2_moe": MIXTRAL | QWEN2 | {
        "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True},
    "qwen3_moe": MIXTRAL | {"qk_layernorm": True},
    "olmoe": OLMOE, "flex_olmo": OLMOE | {"pre_norm": False, "post_norm": True},
    "granitemoe": MIXTRAL,
    "gpt_oss": MIXTRAL | {
        "add_bias_linear": True, "swiglu": False, "glu_activation": "quick_geglu",
        "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "moe_router_bias": True,
        "softmax_type": "learnable", "sliding_window": 9, "window_attn_skip_freq": 3},
    "glm4_moe": DEEPSEEK | {"rotary_percent": 0.75}, "dots1": DEEPSEEK | {"qk_layernorm": True},
    "minimax_m2": OLMOE | CORRECTED | {"moe_router_normalize": True},
    "ernie4_5_moe": MIXTRAL | {
        "moe_router_pre_softmax": True, "moe_router_normalize": True,
        "moe_router_enable_expert_bias": True},
    "hunyuan_v1_moe": MIXTRAL | {
        "qk_layernorm": True, "qk_layernorm_after_rope": True, "ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 24},
    "phimoe": MIXTRAL | {"normalization": "LayerNorm", "moe_gate": "sparsemixer"},
    "deepseek_v3": DEEPSEEK | LATENT_FLAGS, "glm4_moe_lite": DEEPSEEK | LATENT_FLAGS,
    "deepseek_v2": MIXTRAL | LATENT_FLAGS | {
        "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 24},
    "youtu": {"llama": True, **LATENT_FLAGS}, "minicpm3": {"llama": True, **LATENT_FLAGS},
    "llama4_text": MIXTRAL | {
        "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "ffn_hidden_size": 24,
        "moe_router_normalize": False, "moe_apply_probs_on_input": True, "no_rope_freq": 1,
        "moe_shared_expert_intermediate_size": 24, "attention_chunk_size": 9, "qk_l2_norm": True,
        "window_attn_skip_freq": 3, "attention_temperature": 0.1},
    "bamba": MAMBA | {
        "llama": True, "experimental_attention_variant": "mamba2", "rotary_percent": 0.5,
        "linear_attention_freq": "[1,0]"},
    "nemotron_h": MAMBA | {
        "position_embedding_type": "none", "normalization": "RMSNorm", "add_bias_linear": False,
        "squared_relu": True, "num_layers": 3, "hybrid_layer_pattern": "M*-",
        "untie_embeddings_and_output_weights": True},
    "qwen3_next": QWEN3_NEXT, "qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_NEXT,
}  # fmt: skip


FURTHER = {
    "num_experts", "multi_latent_attention", "experimental_attention_variant",
    "hybrid_layer_pattern",
}  # fmt: skip
"""What models have of which a sample is tested by default."""


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


@pytest.mark.parametrize("field", UNUSUAL)
@pytest.mark.parametrize(
    "model_type",
    sampled(BASES, lambda name: name == "mixtral" or not FURTHER & BASES[name].keys()),
)
def test_a_feature_is_written_or_refused(model_type, field, gpt_config):
    """Whatever a model has otherwise than those of its architecture: it is in config.json, from
    where it is read again, or it does not fit; never is it left out."""
    known = architecture_named({"model_type": model_type}, PATH)
    plain = gpt_config(**BASES[model_type]).model
    assert known.misfits(plain) == []
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
    if written == known.config(plain):
        second_head = set() if known.family == "bert" else {"bert_binary_head"}
        alone = {"attention_temperature_floor"} | second_head
        assert field in NO_EFFECT[model_type] | alone, "the feature is lost"
        return
    if field == "mtp_num_layers":  # read where a run asks for it, and the files have them
        assert written[known.ahead.keys[0]] == 2
        return
    back = known.model(written, PATH)
    found, wanted = getattr(back.flags(), field), getattr(model.flags(), field)
    assert found == wanted


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
    "olmoe": _GATED | _WINDOWS, "flex_olmo": _GATED | _WINDOWS, "granitemoe": _GATED | _WINDOWS,
    "gpt_oss": _GATED | _BIASES | {"rotary_base_local"},
    **dict.fromkeys(
        ("glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe"),
        _GATED | _WINDOWS),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu", "minicpm3"),
        _GATED | _WINDOWS | {"kv_channels"}),
    "llama4_text": _GATED | {"rotary_base_local"},
    "bamba": _GATED | _WINDOWS, "nemotron_h": _ROTARY | _WINDOWS | {"bias_gelu_fusion"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _GATED | _WINDOWS),
}  # fmt: skip
"""Fields that do nothing beside the others of such a model."""


def test_every_architecture_is_thought_of():
    known = {architecture.model_type for architecture in architectures()}
    assert known == set(BASES) == set(NO_EFFECT)


SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 8,
    "max_position_embeddings": 64, "num_key_value_heads": 4,
}  # fmt: skip
NARROW = SMALL.copy()
"""The same for those that have no such keys."""
for key in ("head_dim", "num_key_value_heads"):
    del NARROW[key]
REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "all blocks must scale scores in the same"),
    ("gpt2", {"scale_attn_weights": False}, "attention scores are always scaled"),
    ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu' .* gelu_new"),
    ("gpt2", {"n_embd": 768, "n_head": 5}, "n_head|num_attention_heads is 5"),
    ("gpt2", {"n_layer": "12"}, "n_layer is '12' .*positive integer"),
    ("gpt2", {"n_layer": 12, "num_hidden_layers": 6}, "n_layer is 12, but num_hidden_layers is 6"),
    ("gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' .*true or false"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "effect of quantization_config = .*not known"),
    ("llama", SMALL | {"mlp_bias": True}, "mlp_bias is True .*attention_bias is False"),
    ("llama", SMALL | {"rope_scaling": {"rope_type": "proportional"}}, "needs partial_rotary"),
    ("llama", SMALL | {"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs factor"),
    ("llama", SMALL | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 .*whole heads"),
    ("llama", SMALL | {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
     "rope_theta is 5.0 .*rope_parameters says 6.0"),
    ("llama", SMALL | {"rope_scaling": {"type": "linear", "factor": 2},
                       "rope_parameters": {"rope_type": "linear", "factor": 3}},
     "rope_scaling is .*rope_parameters differs"),
    ("llama", SMALL | {"num_key_value_heads": 3}, "num_key_value_heads is 3 .*must divide"),
    ("llama", SMALL | {"num_local_experts": 8}, "num_local_experts = 8"),
    ("llama", SMALL | {"rope_interleaved": True}, "effect of rope_interleaved = True"),
    ("llama", SMALL | {"scale_depth": 1.4, "use_mup": True}, "scale_depth = 1.4, use_mup = True"),
    ("mistral", SMALL | {"layer_types": ["full_attention"] * 3}, "layer_types is .*all blocks"),
    ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 9,
                       "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("qwen3", SMALL | {"attention_bias": True}, "attention_bias is True"),
    ("phi3", SMALL | {"rope_scaling": {"type": "longrope", "short_factor": [1.0],
                                       "long_factor": [1.0]}}, "must be a list of 4 positive"),
    ("gemma2", SMALL | {"use_bidirectional_attention": True}, "attention must be causal"),
    ("gemma3_text", SMALL | {"attn_logit_softcapping": 50.0}, "does not softcap"),
    ("gpt_neox", NARROW | {"attention_bias": False}, "attention_bias is False"),
    ("opt", NARROW | {"do_layer_norm_before": False}, "do_layer_norm_before is False .*precede"),
    ("opt", NARROW | {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16 .*width of the"),
    ("falcon", NARROW | {"alibi": True}, "alibi is True .*rounds them to bfloat16"),
    ("falcon", NARROW | {"new_decoder_architecture": True, "parallel_attn": False},
     "parallel_attn is False .*always parallel"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "residual cannot be normalised"),
    ("bloom", {"n_inner": 100}, "n_inner is 100 .*four times"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder is False .*encoder and a decoder"),
    ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu' .*gated-silu"),
    ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'"),
    ("umt5", {}, "model_type is 'umt5' .*each block"),
    ({"a": 1}, {}, "model_type is {'a': 1}; expected one of"),
    ("gemma3", {}, "model_type is 'gemma3' .*images"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "content", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused(model_type, content, message):
    content = {"model_type": model_type} | content
    with pytest.raises(CheckpointError, match=message) as error:
        architecture_named(content, PATH).model(content, PATH)
    assert str(error.value).startswith("some/config.json: ")


def test_both_versions_are_read_alike():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}  # fmt: skip
    older = SMALL | {"rope_theta": 500, "rope_scaling": scaling | {"rope_type": "llama3"},
                     "torch_dtype": "float16"}  # fmt: skip
    newer = SMALL | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 500.0},
                     "dtype": "float16"}  # fmt: skip
    known = architecture_named({"model_type": "llama"}, PATH)
    assert known.model(older, PATH) == known.model(newer, PATH) == known.model(older | newer, PATH)
    assert known.model(newer, PATH).positions.rotary_base == 500.0
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip
    older = SMALL | {"rope_theta": 5e5, "rope_local_base_freq": 100.0,
                     "rope_scaling": {"type": "linear", "factor": 8}}  # fmt: skip
    gemma = architecture_named({"model_type": "gemma3_text"}, PATH)
    assert gemma.model(older, PATH) == gemma.model(SMALL | {"rope_parameters": nested}, PATH)
    neox = architecture_named({"model_type": "gpt_neox"}, PATH)
    older = SMALL | {"rotary_pct": 0.5, "rotary_emb_base": 500}
    newer = SMALL | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    for content in (older, newer):
        del content["head_dim"], content["num_key_value_heads"]
    assert neox.model(older, PATH) == neox.model(newer, PATH)


def test_defaults_are_those_of_transformers():
    """As transformers has them before others are derived: key and value heads are the query heads
    of the file."""
    read = {}
    for model_type in ("llama", "mistral", "gemma2"):
        content = {"model_type": model_type, "num_attention_heads": 16}
        read[model_type] = architecture_named(content, PATH).model(content, PATH)
        theirs = AutoConfig.for_model(model_type, num_attention_heads=16)
        attention = read[model_type].attention
        assert attention.num_query_groups == theirs.num_key_value_heads
        assert attention.kv_channels == theirs.head_dim
        assert read[model_type].vocabulary.size == theirs.vocab_size
        assert read[model_type].embedding.tied == theirs.tie_word_embeddings
    assert read["llama"].attention.num_query_groups == 16
    assert read["mistral"].attention.num_query_groups == 8


def test_a_model_that_transformers_does_not_know():
    """A key that the file has needs no default; any other is refused by name."""
    given = HFConfigReader({"hidden_size": 32}, PATH, "Some", "not_a_model_type")
    assert given.whole("hidden_size") == 32
    with pytest.raises(CheckpointError, match="has no num_layers, and transformers .* no default"):
        given.whole("num_layers")


def test_rotated_share_of_gemma3_is_refused():
    part = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    for kind in ("full_attention", "sliding_attention"):
        content = SMALL | {"model_type": "gemma3_text", "rope_parameters": {kind: part}}
        with pytest.raises(CheckpointError, match="such models rotate whole heads"):
            architecture_named(content, PATH).model(content, PATH)
