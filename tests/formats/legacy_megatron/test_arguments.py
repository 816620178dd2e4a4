"""Megatron's arguments in our configuration and back."""

import dataclasses
import sys
import typing
from pathlib import Path

import pytest
import torch

from megatron.config import ModelFlags
from megatron.config.flags import value_type
from megatron.config.positions import llama3_scaling
from megatron.formats.legacy_megatron.arguments import (
    arguments_of_model,
    complete,
    model_of_arguments,
    tokenizer_of_arguments,
    unpadded_vocabulary,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "golden" / "megatron_arguments"))
from namespaces import NAMESPACES  # noqa: E402

WHERE = Path("file.pt")
BASE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 8}


def test_what_is_left_out_is_derived():
    """As Megatron derives it; GELU was always the tanh approximation before it had a flag."""
    model = model_of_arguments(BASE, WHERE)
    assert (
        model.mlp.ffn_hidden_size,
        model.attention.kv_channels,
        model.attention.num_query_groups,
    ) == (64, 4, 4)
    assert (model.mlp.activation, model.positions.position_embedding_type) == (
        "gelu_tanh",
        "learned_absolute",
    )
    assert model.seq_length == 8


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"bias_gelu_fusion": False}, "activation", "gelu_erf"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "activation", "gelu_tanh"),
        ({"swiglu": True, "bias_gelu_fusion": False}, "activation", "swiglu"),
        ({"squared_relu": True}, "activation", "squared_relu"),
        ({"quick_geglu": True}, "activation", "quick_geglu"),
        ({"quick_geglu": True, "glu_linear_offset": 1}, "glu_linear_offset", 1.0),
        ({"swiglu": True, "activation_func_clamp_value": 7.0}, "activation_func_clamp_value", 7.0),
        ({"num_query_groups": 2}, "num_query_groups", 4),
        ({"num_query_groups": 2, "group_query_attention": True}, "num_query_groups", 2),
        ({"num_key_value_heads": 1}, "num_query_groups", 1),
        ({"use_rotary_position_embeddings": True}, "position_embedding_type", "rope"),
        ({"add_position_embedding": False}, "position_embedding_type", "none"),
        ({"normalization": "rmsnorm"}, "normalization", "RMSNorm"),
        ({"layernorm_epsilon": 1e-6}, "norm_epsilon", 1e-6),
        ({"norm_epsilon": 1e-6}, "norm_epsilon", 1e-6),
        ({"attention_dropout": 0}, "attention_dropout", 0.0),
        ({"num_experts": [1]}, "num_layers", 2),
        ({"num_experts": 4}, "layer_experts", (4, 4)),
        ({"num_experts": 4, "moe_layer_freq": [0, 1]}, "layer_experts", (0, 4)),
        ({"num_experts": 4, "moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff", (0.1,)),
        ({"num_experts": [4], "expert_interval": 2}, "layer_experts", (0, 4)),
        ({"num_experts": [4], "expert_interval": 2}, "moe_router_topk", 1),
        ({"num_experts_switch": 4}, "moe_router_pre_softmax", True),
        ({"rope_theta": 500000}, "rotary_base", 500000.0),
        ({"rope_theta": 500000, "rotary_base": 10000}, "rotary_base", 500000.0),
        ({"layernorm_zero_centered_gamma": True}, "apply_layernorm_1p", True),
        ({"window_size": (127, 0)}, "sliding_window", 128),
        ({"window_size": (127, -1), "window_attn_skip_freq": 4}, "window_attn_skip_freq", 4),
        ({"window_size": (127, 0), "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq", 2),
        ({"window_size": (-1, -1)}, "sliding_window", None),
        ({"use_rotary_position_embeddings": True, "rotary_interleaved": True},
         "rotary_interleaved", True),
        ({"softmax_scale": 0.125}, "query_pre_attn_scalar", 64.0),
        ({"use_rope_scaling": False, "rope_scaling_factor": 8.0}, "rope_scaling", None),
        ({"rope_scaling_factor": 1.0}, "rope_scaling", None),
        ({"use_rotary_position_embeddings": True, "use_rope_scaling": True}, "rope_scaling",
         llama3_scaling(8.0).to_json()),
        ({"use_rotary_position_embeddings": True, "rotary_seq_len_interpolation_factor": 4},
         "rope_scaling",
         '{"rope_type": "linear", "factor": 4.0}'),
    ],
)  # fmt: skip
def test_fields(arguments, field, value):
    model = model_of_arguments(BASE | arguments, WHERE)
    assert (dataclasses.asdict(model.flags()) | {"activation": model.mlp.activation})[
        field
    ] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_experts": 4, "moe_router_force_load_balancing": True},
            "balancing True, which cannot",
        ),
        ({"num_experts": 4, "moe_router_topk": "two"}, "moe_router_topk"),
        ({"multi_latent_attention": True}, "multi_latent_attention True"),
        ({"window_size": (127, 3)}, r"window_size is \(127, 3\), expected \(N, 0\)"),
        ({"window_size": (7, 0), "window_attn_skip_freq": [1]}, r"skip-freq \[1\] has 1 values"),
        ({"rotary_base": 1e5, "rope_theta": 5e5}, "rope_theta is 500000.0 and rotary_base is 1"),
        ({"rope_scaling_factor": 4.0}, "rope_scaling_factor is 4, of a program without"),
        (
            {"group_query_attention": True, "num_query_groups": 2, "num_key_value_heads": 1},
            "num_key_value_heads is 1 and num_query_groups is 2",
        ),
        ({"qk_l2_norm": True}, "qk_l2_norm True, which cannot be represented"),
        ({"no_rope_freq": 4}, "no_rope_freq 4"),
        ({"no_rope_freq": [0, 1]}, r"no_rope_freq \[0, 1\]"),
        ({"softmax_type": "off-by-one"}, "softmax_type 'off-by-one'"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a positive number"),
        ({"mask_type": "prefix"}, "mask_type 'prefix'"),
        ({"activation_func_clamp_value": 7.0}, "value 7.0 has an effect with --glu-activation"),
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset 1.0 needs --glu-activation"),
        ({"sliding_window_size": 128}, "sliding_window_size = 128"),
        ({"parallel_attn": True}, "parallel_attn True"),
        ({"my_logit_scale": 0.5, "another": "x"}, "my_logit_scale = 0.5, another = 'x'"),
        ({"hidden_size": None}, "the argument hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size is missing or not positive"),
        ({"hidden_size": True}, "hidden_size is True; expected a value of type int"),
        ({"hidden_size": 18}, "file.pt: .*18"),
        ({"num_key_value_heads": 3}, "3 key and value heads do not divide 4"),
        ({"rotary_seq_len_interpolation_factor": "x"}, "factor is 'x'; expected"),
        ({"swiglu": 1}, "swiglu is 1; expected a value of type bool"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        model_of_arguments(BASE | arguments, WHERE)


@pytest.mark.parametrize("program", NAMESPACES)
def test_whole_namespaces_are_read(program):
    """Arguments about training, and those of features that are not used, are known."""
    arguments = NAMESPACES[program] | {"window_size": None}
    model = model_of_arguments(arguments, WHERE)
    assert (model.hidden_size, model.mlp.ffn_hidden_size) == (16, 64)
    for name in ("my_lr_factor_file", "wandb_team", "num_workers"):
        model_of_arguments(arguments | {name: "x"}, WHERE)
    with pytest.raises(ValueError, match="the effect of my_lr_factor = 2 on the network"):
        model_of_arguments(arguments | {"my_lr_factor": 2}, WHERE)


OF_FORKS = """
    attn_logit_softcapping final_logit_softcapping logits_scaling residual_multiplier rope_ratio
    attention_multiplier parallel_residual post_norm use_rms_norm use_post_ln partial_rotary_factor
    rotary_dim rotary_emb_base rotary_ndims hidden_act activation_function tie_embed_logits use_mqa
    multi_query_attention num_attention_heads_kv full_attention_interval attention_sink mlp_bias
    query_pre_attn_scalar use_dynamic_ntk log_n_scaling use_logn_attn num_shared_layers depth_mup
    scale_emb qk_norm_type rms_norm_eps sliding_window attention_window rope_scaling exit_layer_nums
    normalize_embedding cross_layer_kv value_residual token_shift prefix_lm attn_temperature_tuning
"""


@pytest.mark.parametrize("name", OF_FORKS.split())
def test_arguments_of_forks_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"the effect of {name} = 3 on the network is not known"):
        model_of_arguments(BASE | {name: 3}, WHERE)
    for value in (None, False, 0, "", []):
        assert model_of_arguments(BASE | {name: value}, WHERE) == model_of_arguments(BASE, WHERE)


def test_a_user_names_arguments_without_effect(monkeypatch):
    arguments = BASE | {"my_lr_factor": 2, "my_colour": "red", "parallel_attn": True}
    monkeypatch.setenv("MEGATRON_HARMLESS_ARGUMENTS", "my_lr_factor,my_colour")
    with pytest.raises(ValueError, match="parallel_attn"):
        model_of_arguments(arguments, WHERE)
    monkeypatch.setenv("MEGATRON_HARMLESS_ARGUMENTS", "my_lr_factor my_colour parallel_attn")
    assert model_of_arguments(arguments, WHERE) == model_of_arguments(BASE, WHERE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": True, "add_qkv_bias": True,
         "add_bias_linear": False},
        {"position_embedding_type": "rope", "rotary_base": 5e5, "rotary_percent": 0.5,
         "num_query_groups": 2, "normalization": "RMSNorm", "norm_epsilon": 1e-6},
        {"swiglu": True, "glu_activation": "swiglu", "ffn_hidden_size": 24, "kv_channels": 8},
        {"bias_gelu_fusion": False},
        {"squared_relu": True, "apply_layernorm_1p": True},
        {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
        {"position_embedding_type": "rope",
         "rope_scaling": '{"rope_type": "linear", "factor": 2.0}'},
        {"position_embedding_type": "rope", "rope_scaling": llama3_scaling(32.0).to_json()},
    ],
)  # fmt: skip
def test_round_trip(changes):
    model = complete(ModelFlags(**(BASE | changes)), WHERE)
    back = model_of_arguments(arguments_of_model(model), WHERE)
    assert back == model


def choices():
    """Fields with each of their choices."""
    hints = typing.get_type_hints(ModelFlags)
    for field in dataclasses.fields(ModelFlags):
        switch = (False, True) if value_type(hints[field.name]) is bool else ()
        for value in field.metadata["choices"] or switch:
            # The same results, up to rounding; and what changes models with latents alone.
            if field.name not in ("attention_backend", "latent_pairs"):
                yield field.name, value


OTHERS = {"position_embedding_type": "rope", "add_bias_linear": False, "parallel_residual": True}
"""Arguments that some choices need."""
DECODER = {"family": "t5", "encoder_decoder": True}
SHORT_CHUNKS = {"retro_gpt_chunk_length": 4}
NORMS = {"qk_layernorm": True, "post_norm": True, "normalization": "RMSNorm"}
EXPERTS = {"num_experts": (4,), "moe_router_topk": 1, "moe_router_pre_softmax": True}
RECURRENT = {"linear_attention_freq": "2", "normalization": "RMSNorm", "add_bias_linear": False,
             "linear_num_key_heads": 2, "linear_num_value_heads": 2,
             "mamba_num_groups": 1, "mamba_head_dim": 4}  # fmt: skip


MODELS = ({}, OTHERS, DECODER, SHORT_CHUNKS, EXPERTS, NORMS, RECURRENT)


def models_with_choices():
    """Each choice with all models; a test run has it with the first two, in turn, that can have
    it."""
    for number, (field, value) in enumerate(choices()):
        turn = number % len(MODELS)
        yield field, value, (*MODELS[turn:], *MODELS[:turn]), 2
        yield pytest.param(field, value, MODELS, len(MODELS), marks=pytest.mark.proof)


@pytest.mark.parametrize(("field", "value", "models", "enough"), list(models_with_choices()))
def test_every_choice_is_written_or_refused(field, value, models, enough):
    resolved, given = 0, {field: value}
    if value == "classification":
        given["num_labels"] = 3
    for changes in models:
        if resolved == enough:
            break
        try:
            model = complete(ModelFlags(**(BASE | changes | given)), WHERE)
        except ValueError:
            continue
        resolved += 1
        try:
            written = arguments_of_model(model)
        except ValueError as error:
            assert "a checkpoint of Megatron requires" in str(error)
        else:
            assert model_of_arguments(written, WHERE, model.family) == model
    assert resolved


def test_an_unknown_norm_or_activation_is_refused():
    model = complete(ModelFlags(**BASE), WHERE)
    mlp = dataclasses.replace(model.mlp, activation="another")
    with pytest.raises(ValueError, match=r"--squared-relu \(not another\)$"):
        arguments_of_model(dataclasses.replace(model, mlp=mlp))
    norm = dataclasses.replace(model.norm, normalization="another")
    with pytest.raises(ValueError, match="requires --normalization LayerNorm or RMSNorm$"):
        arguments_of_model(dataclasses.replace(model, norm=norm))


@pytest.mark.parametrize(
    "scaling",
    [
        '{"rope_type": "dynamic", "factor": 2.0}',
        llama3_scaling(8.0).to_json().replace("8192", "4096"),
    ],
)
def test_scaling_that_megatron_does_not_have(scaling):
    changes = {"position_embedding_type": "rope", "rope_scaling": scaling}
    with pytest.raises(ValueError, match="requires no --rope-scaling other than"):
        arguments_of_model(complete(ModelFlags(**(BASE | changes)), WHERE))


@pytest.mark.parametrize(
    ("arguments", "rows", "size"),
    [
        ({}, 50304, 50257),
        ({}, 30592, 30522),
        ({}, 29056, 28996),
        ({}, 1000, None),
        ({"tokenizer_type": "GPT2BPETokenizer"}, 50688, 50257),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_extra_ids": 100}, 50432, 50357),
        ({"tokenizer_type": "GPT2BPETokenizer"}, 128, None),
        ({"tokenizer_type": "GPT2BPETokenizer", "make_vocab_size_divisible_by": 128}, 50304, 50257),
        ({"tokenizer_type": "GPT2BPETokenizer", "make_vocab_size_divisible_by": 128}, 52096, None),
        (
            {
                "tokenizer_type": "GPT2BPETokenizer",
                "make_vocab_size_divisible_by": 128,
                "tensor_model_parallel_size": 8,
            },
            51200,
            50257,
        ),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 100}, 128, 101),
        ({"tokenizer_type": "SentencePieceTokenizer"}, 128, None),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_extra_ids": 100}, 29184, 29098),
        ({"tokenizer_type": torch.zeros(1), "vocab_size": "x"}, 128, None),
        ({"unpadded_vocab_size": 61}, 128, 61),
        ({"unpadded_vocab_size": 200}, 128, None),
    ],
)
def test_vocabulary(arguments, rows, size):
    assert unpadded_vocabulary(arguments, rows) == size


def test_tokenizer():
    arguments = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}
    actual = tokenizer_of_arguments(arguments)
    assert (actual.tokenizer_type, actual.vocab_file, actual.merge_file) == (
        "GPT2BPETokenizer", "v", "m",
    )  # fmt: skip
    actual = tokenizer_of_arguments(
        {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": "d"}
    )
    assert (actual.tokenizer_type, actual.tokenizer_model) == ("HFTokenizer", "d")
    assert tokenizer_of_arguments({}) is None
