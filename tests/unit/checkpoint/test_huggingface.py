"""The tables against transformers: logits, gradients, and back again bit by bit."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.checkpoint.huggingface import ARCHITECTURES, GPT2, LLAMA, architecture_of
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.model.gpt import gpt_loss
from megatron.parallel.groups import SINGLE
from megatron.parallel.shard import shard_of

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}

GPT2_CASES = {
    "plain": {},
    "untied": {"untie_embeddings_and_output_weights": True},
    "gelu_erf": {"bias_gelu_fusion": False},
    "squared_relu": {"squared_relu": True},
    "square_mlp": {"ffn_hidden_size": 32},
    "one_head": {"num_attention_heads": 1, "num_query_groups": 1, "kv_channels": 32},
    "epsilon": {"norm_epsilon": 1e-2},
}
LLAMA_CASES = {
    "kv_heads=4": {},
    "kv_heads=2": {"num_query_groups": 2},
    "kv_heads=1": {"num_query_groups": 1},
    "untied": {"untie_embeddings_and_output_weights": True},
    "kv_heads=2,untied": {"num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    "head_dim=12": {"kv_channels": 12},
    "head_dim=6,kv_heads=2": {"kv_channels": 6, "num_query_groups": 2},
    "biases": {"add_bias_linear": True},
    "biases,kv_heads=1": {"add_bias_linear": True, "num_query_groups": 1},
    "rope_base": {"rotary_base": 500.0},
    "epsilon": {"norm_epsilon": 1e-2},
}


def theirs_from(architecture, config, tensors):
    """The model of transformers with our weights, put there by the table."""
    content = architecture.config(config.model)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{k: v for k, v in content.items() if k != "architectures"})
    )
    assert [type(model).__name__] == content["architectures"]
    state = dict(architecture.to_hf(config.model, tensors.__getitem__))
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert report.missing_keys == (["lm_head.weight"] if config.model.tied else [])
    return model


def compare_logits_and_gradients(architecture, config, model, canonical):
    vocab_size = config.model.unpadded_vocab_size
    generator = torch.Generator().manual_seed(1)
    shape = (3, config.model.max_position_embeddings)
    tokens, labels = (torch.randint(vocab_size, shape, generator=generator) for _ in range(2))
    theirs = theirs_from(architecture, config, canonical(model))

    logits = model(tokens)
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits[..., :vocab_size].detach(), expected.detach(), **CLOSE)

    gpt_loss(logits, labels, torch.ones(shape), vocab_size, SINGLE).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours = {
        name: shard_of(param).join([param.grad]) for name, param in model.canonical_parameters()
    }
    gradients = dict(architecture.to_hf(config.model, ours.__getitem__))
    assert set(gradients) == {name for name, _ in theirs.named_parameters()}
    for name, param in theirs.named_parameters():
        assert param.grad.abs().max() > 0 or "k_proj.bias" in name, name
        torch.testing.assert_close(
            gradients[name], param.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", GPT2_CASES)
def test_against_hf_gpt2(case, gpt_config, random_gpt, canonical):
    config = gpt_config(**GPT2_CASES[case])
    assert architecture_of(config.model) is GPT2
    compare_logits_and_gradients(GPT2, config, random_gpt(config), canonical)


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_against_hf_llama(case, gpt_config, random_gpt, canonical):
    config = gpt_config(llama=True, **LLAMA_CASES[case])
    assert architecture_of(config.model) is LLAMA
    compare_logits_and_gradients(LLAMA, config, random_gpt(config), canonical)


def changed(architecture, ours, **changes):
    entries = tuple(
        dataclasses.replace(entry, **changes) if entry.ours == ours else entry
        for entry in architecture.entries
    )
    assert entries != architecture.entries
    return dataclasses.replace(architecture, entries=entries)


def swapped(architecture, ours, *order):
    (entry,) = [entry for entry in architecture.entries if entry.ours == ours]
    return changed(architecture, ours, theirs=tuple(entry.theirs[place] for place in order))


# Each is a mistake that leaves every shape as it should be.
MISTAKES = {
    "gpt2: projection not transposed": (
        lambda: changed(GPT2, "layers.{n}.attention.proj.weight", transposed=False),
        False,
    ),
    "gpt2: norms exchanged": (
        lambda: changed(
            changed(
                GPT2, "layers.{n}.attention_norm.weight", theirs=("transformer.h.{n}.ln_2.weight",)
            ),
            "layers.{n}.mlp_norm.weight",
            theirs=("transformer.h.{n}.ln_1.weight",),
        ),
        False,
    ),
    "llama: key and value exchanged": (
        lambda: swapped(LLAMA, "layers.{n}.attention.qkv.weight", 0, 2, 1),
        True,
    ),
    "llama: gate and up exchanged": (
        lambda: swapped(LLAMA, "layers.{n}.mlp.up.weight", 1, 0),
        True,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_table_is_noticed(mistake, gpt_config, random_gpt, canonical):
    make, llama = MISTAKES[mistake]
    config = gpt_config(llama=llama)
    with pytest.raises(AssertionError, match="not close"):
        compare_logits_and_gradients(make(), config, random_gpt(config), canonical)


@pytest.mark.parametrize(
    ("llama", "changes"),
    [(False, changes) for changes in GPT2_CASES.values()]
    + [(True, changes) for changes in LLAMA_CASES.values()],
)
def test_back_again_is_bitwise(llama, changes, gpt_config, random_gpt, canonical):
    config = gpt_config(llama=llama, **changes)
    architecture = architecture_of(config.model)
    tensors = canonical(random_gpt(config))
    theirs = dict(architecture.to_hf(config.model, tensors.__getitem__))
    back = dict(architecture.from_hf(config.model, theirs.__getitem__))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("llama", [False, True])
def test_from_hf_against_transformers_own_weights(llama, gpt_config, random_gpt, canonical):
    """Weights that transformers drew, not we, give their logits in our model."""
    config = gpt_config(llama=llama)
    architecture = architecture_of(config.model)
    model = random_gpt(config)
    theirs = theirs_from(architecture, config, canonical(model))
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_(0.1, 0.15)
        ours = dict(architecture.from_hf(config.model, theirs.state_dict().__getitem__))
        for name, param in model.canonical_parameters():
            param.copy_(shard_of(param).cut(ours[name], 0, 1))
        tokens = torch.arange(20).view(2, 10)
        torch.testing.assert_close(model(tokens)[..., :61], theirs(tokens).logits, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "rope"}, "GPT-2 needs --position-embedding-type learned_abs"),
        ({"normalization": "RMSNorm"}, "GPT-2 needs --normalization LayerNorm"),
        ({"swiglu": True}, "GPT-2 needs no --swiglu"),
        ({"add_bias_linear": False}, "GPT-2 needs no --disable-bias-linear"),
        ({"num_query_groups": 2}, "GPT-2 needs --num-query-groups equal to --num-attention-heads"),
        ({"kv_channels": 12}, "GPT-2 needs --num-attention-heads times --kv-channels equal to"),
        ({"llama": True, "rotary_percent": 0.5}, "Llama needs --rotary-percent 1.0$"),
        ({"llama": True, "normalization": "LayerNorm"}, "Llama needs --normalization RMSNorm$"),
        ({"llama": True, "swiglu": False}, "Llama needs --swiglu$"),
        ({"llama": True, "add_qkv_bias": True}, "Llama needs no --add-qkv-bias .*Qwen2"),
        ({"llama": True, "num_attention_heads": 5, "num_query_groups": 1}, "that divide --hidden"),
    ],
)
def test_what_fits_nothing_says_what_would(changes, message, gpt_config):
    with pytest.raises(ValueError, match=f"(?m){message}") as error:
        architecture_of(gpt_config(**changes).model)
    for known in ARCHITECTURES:
        assert f"{known.title} needs" in str(error.value)


def test_every_flag_of_a_requirement_exists(gpt_config):
    """The messages name flags; they must be the flags of the command line."""
    flags = FlagParser(*FLAG_CLASSES)._option_string_actions
    for known in ARCHITECTURES:
        for need in known.requirements:
            for flag in re.findall(r"--[a-z-]+", need.wanted):
                assert flag in flags, flag
