"""Models that fit an architecture, and values of a config.json that are refused."""

import re
from pathlib import Path

import pytest
from hf_classic_cases import CLASSIC_FITTING, CLASSIC_REFUSED
from hf_encoder_cases import ENCODER_REFUSED
from hf_flags import BERT, ELECTRA, MEGATRON_BERT, NEOX, T5, T5_11
from hf_modern_cases import GEMMA2, MODERN_REFUSED, QWEN2
from transformers import AutoConfig

from megatron.checkpoint.files import CheckpointError
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.formats.features import FEATURES, spelled, without
from megatron.formats.huggingface import architecture_named, architecture_of, architectures
from megatron.formats.huggingface.config_reader import HFConfigReader

PATH = Path("some/config.json")


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
        ({"llama": True, "add_mlp_bias": True}, "llama"),
        *CLASSIC_FITTING,
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
    for expected in ("llama", "mistral", "phi3"):
        assert architecture_of(model, expected).model_type == expected
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
        (
            {"llama": True, "normalization": "LayerNorm", "add_attention_bias": True},
            "Llama needs --normalization RMSNorm$",
        ),
        (
            {"llama": True, "swiglu": False, "clip_qkv": 5.0},
            "Llama needs --swiglu or --glu-activation, no --clip-qkv$",
        ),
        (
            {"llama": True, "post_norm": True, "clip_qkv": 5.0},
            "Llama needs no --clip-qkv, no --post-norm$",
        ),
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
        (BERT | {"num_tokentypes": 0, "relu": True}, " ELECTRA needs --bert-no-binary-head$"),
        (
            ELECTRA | {"position_embedding_offset": 2, "openai_gelu": True},
            "RoBERTa needs --lm-head-activation gelu_erf$",
        ),
        ({"num_tokentypes": 2}, "GPT-2 needs no --num-tokentypes$"),
        (T5_11 | {"scale_head_input": True}, "T5 needs no --scale-head-input with --untie"),
    ],
)
def test_what_fits_nothing_says_what_would(changes, message, gpt_config):
    with pytest.raises(ValueError, match=message.replace("$", "(;|$)")):
        architecture_of(gpt_config(**changes).model)


def test_the_nearest_of_a_model_with_experts_have_experts(gpt_config):
    shape = {"llama": True, "num_experts": (4,), "moe_router_topk": 2, "moe_router_num_groups": 2}
    shape |= {"moe_router_group_topk": 2, "moe_router_score_function": "sigmoid"}
    with pytest.raises(ValueError, match="fits none of the") as raised:
        architecture_of(gpt_config(**shape, residual_multiplier=0.5, clip_qkv=5.0).model)
    (nearest,) = re.findall("The nearest: (.*)", str(raised.value))
    assert len(nearest.split("; ")) == 4 and "--num-experts" not in nearest


def test_every_flag_of_a_requirement_exists():
    """The messages name flags; they must be the flags of the command line."""
    flags = FlagParser(*FLAG_CLASSES)._option_string_actions
    expected = [need.wanted for known in architectures() for need in known.requirements]
    expected += [spelled(*item) for known in architectures() for item in known.fixed.items()]
    for words in [*expected, *map(without, FEATURES)]:
        for flag in re.findall(r"--[a-z0-9-]+", words):
            assert flag in flags, flag


SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 8,
    "max_position_embeddings": 64, "num_key_value_heads": 4,
}  # fmt: skip
NARROW = SMALL.copy()
"""The same for those that have no such keys."""
for key in ("head_dim", "num_key_value_heads"):
    del NARROW[key]
_GEMMA4 = SMALL | {"hidden_size_per_layer_input": 0, "layer_types": [
    "sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip
REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "all blocks must scale scores in the same"),
    ("gpt2", {"scale_attn_weights": False}, "attention scores are always scaled"),
    ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu' .* gelu_new"),
    ("gpt2", {"n_embd": 768, "n_head": 5}, "n_head|num_attention_heads is 5"),
    ("gpt2", {"n_layer": "12"}, "n_layer is '12' .*positive integer"),
    ("gpt2", {"n_layer": 12, "num_hidden_layers": 6}, "n_layer is 12, but num_hidden_layers is 6"),
    ("gpt2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' .*true or false"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config is .*weights of None"),
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
    *CLASSIC_REFUSED,
    ("gemma3n_text", {}, "model_type is 'gemma3n_text' .*AltUp"),
    ("gemma4_text", {}, "hidden_size_per_layer_input is 256 .*embeddings of each layer"),
    ("gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2 .*share"),
    ("gemma4_text", _GEMMA4 | {"enable_moe_block": True}, "enable_moe_block is True .*experts"),
    ("gemma4_text", _GEMMA4 | {"use_bidirectional_attention": "all"}, "must be causal"),
    ("gemma4_text", _GEMMA4 | {"layer_types": ["sliding_attention"] * 3}, "the last block full"),
    ("gemma4_text", _GEMMA4 | {"per_layer_config": {"2": {"head_dim": 9, "v_dim": 3}}}, "v_dim"),
    ("gemma4_text", _GEMMA4 | {"per_layer_config": {"0": {"head_dim": 9}}}, "for the blocks 2$"),
    ("gemma4_text", _GEMMA4 | {"rope_parameters": {"full_attention": {
        "rope_type": "proportional"}}}, "needs partial_rotary_factor"),
    ("ctrl", {}, "model_type is 'ctrl' .*other frequencies"),
    *MODERN_REFUSED,
    *ENCODER_REFUSED,
    ({"a": 1}, {}, "model_type is {'a': 1}; expected one of"),
    ("paligemma", {}, "model_type is 'paligemma' .*both sides of a prompt"),
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
