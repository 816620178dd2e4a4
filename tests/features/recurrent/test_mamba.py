"""Blocks with Mamba-2 in a model: documents, patterns, and flags that are refused."""

import math

import pytest
import torch
from gpt_forward import forward

from megatron.config import ConfigError
from megatron.config.features import features
from megatron.config.sections import States, memory_of
from megatron.features.recurrent.flags import MambaConfig
from megatron.features.recurrent.pattern import PatternConfig
from megatron.model.flops import TransformerShape
from megatron.run.run import parse_run

SIZES = {
    "mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}  # fmt: skip
ONE = {"hybrid_layer_pattern": "M*-M", "num_layers": 4, **SIZES}
BOTH = {
    "experimental_attention_variant": "mamba2", "linear_attention_freq": "[1,0,1]",
    "num_layers": 3, **SIZES,
}  # fmt: skip


@pytest.mark.parametrize("flags", [ONE, BOTH], ids=["one", "both"])
def test_packed_documents_equal_each_alone(flags, gpt_config, random_gpt):
    """Logits and gradients in float64; borders are inside of chunks and of convolutions."""
    config = gpt_config(**flags)
    model = random_gpt(config).double()
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(61, (1, n), generator=draw) for n in (1, 7, 2, 14)]
    tokens = torch.cat(texts, 1)
    ids = torch.cat([torch.full_like(text, n) for n, text in enumerate(texts)], 1)
    positions = torch.cat([torch.arange(text.shape[1])[None] for text in texts], 1)
    weights = torch.randn(tokens.shape[1], 128, generator=draw, dtype=torch.float64)
    trained = list(model.parameters())

    actual = forward(model, tokens, positions, ids)
    gradients = torch.autograd.grad((actual[0] * weights[:, : actual.shape[-1]]).sum(), trained)
    alone = torch.cat([forward(model, text) for text in texts], 1)
    expected = torch.autograd.grad((alone[0] * weights[:, : alone.shape[-1]]).sum(), trained)
    torch.testing.assert_close(actual, alone, rtol=1e-12, atol=1e-12)
    for each, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-11)
    leaking = forward(model, tokens, positions)
    assert (leaking - alone)[:, :1].abs().max() < 1e-12 < 1e-3 < (leaking - alone).abs().max()


def test_patterns_say_what_blocks_have(gpt_config):
    model = gpt_config(**ONE).model
    assert model.part(PatternConfig).mixers == ("mamba", "attention", "", "mamba")
    assert [model.has("attention", n) for n in range(4)] == [True, True, False, True]
    assert [model.has("mlp", n) for n in range(4)] == [False, False, True, False]
    assert model.flags().resolve() == model.flags().resolve()
    every_second = gpt_config(**BOTH | {"linear_attention_freq": "2"}).model
    assert every_second.part(PatternConfig).mixers == ("mamba", "attention", "mamba")


def test_memory_of_generation(gpt_config):
    """As many numbers of a sequence as the last inputs and states of a layer have."""
    model = gpt_config(**ONE).model
    heads = 2 * model.hidden_size // 8
    assert memory_of(model, 0) == States(((3, 8 * heads + 2 * 2 * 8), (2, 8, heads // 2, 8)))
    assert memory_of(model, 0, 4) == States(((3, 2 * heads + 2 * 8), (1, 8, heads // 4, 8)))
    assert memory_of(model, 2) is None


def test_flops_of_a_hybrid(gpt_config):
    """By hand: projections, convolutions, states, attention and MLP of the blocks that have
    them."""
    config = gpt_config(**ONE)
    model = config.model
    shape = features()["recurrent"].shape(TransformerShape.of(model), config)
    hidden, tokens, width = model.hidden_size, model.seq_length, 2 * model.hidden_size
    heads, channels = width // 8, width + 2 * 2 * 8
    mamba = 2 * (hidden * (width + channels + heads) + 4 * channels + width * hidden)
    mamba += 2 * 2 * width * 8
    attention = 2 * 4 * hidden**2 + 4 * hidden * tokens / 2
    mlp = 2 * 2 * hidden * model.mlp.ffn_hidden_size
    head = 2 * hidden * model.vocabulary.padded
    assert shape.flops_per_token(causal=True) == 3 * (2 * mamba + attention + mlp + head)


RUN = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 " \
    "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer " \
    "--vocab-size 99"  # fmt: skip
VARIANT = "--experimental-attention-variant mamba2"
REFUSED = {
    "--hybrid-layer-pattern MX*": "'X' is not a layer here; expected M, G",
    "--hybrid-layer-pattern M|*": "'|' is not a layer here; stages of a pipeline",
    "--hybrid-layer-pattern M*/M": "'/' is not a layer here; layers of multi-token prediction",
    "--hybrid-layer-pattern M* --num-layers 3": "has 2 letters; expected one for each",
    "--hybrid-layer-pattern ME": "has layers of experts: give --num-experts",
    "--hybrid-layer-pattern M* --num-experts 4": "has no layer E of experts",
    "--hybrid-layer-pattern ME --num-experts 4 --moe-layer-freq [1,0]": "--moe-layer-freq [1,0] "
    "contradicts --hybrid-layer-pattern ME",
    f"--hybrid-layer-pattern M* {VARIANT}": "contradicts --experimental-attention-variant",
    f"--num-layers 2 {VARIANT}": "needs --linear-attention-freq",
    "--num-layers 2 --linear-attention-freq 2": "--linear-attention-freq 2 has an effect with",
    f"--num-layers 2 {VARIANT} --linear-attention-freq [1]": "--linear-attention-freq [1] has 1",
    "--hybrid-layer-pattern M* --mamba-num-groups 3": "--mamba-num-groups 3 must divide",
    "--hybrid-layer-pattern M* --mamba-head-dim 24": "--mamba-head-dim 24 must divide 2 x",
    "--hybrid-layer-pattern M* --mamba-step-limits 2 1": "must be one number or two",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_refused_is_named(flags):
    with pytest.raises(ConfigError) as error:
        parse_run(None, [*RUN.split(), *flags.split()])
    assert REFUSED[flags] in str(error.value)


def test_flags_of_megatron_scripts():
    flags = "--is-hybrid-model --hybrid-override-pattern M-*E --num-experts 4 --mamba-num-heads 4"
    model = parse_run(None, [*RUN.split(), *flags.split(), "--mamba-num-groups", "2"]).config.model
    assert (model.num_layers, model.part(MambaConfig).width) == (4, 256)
    assert model.part(MambaConfig).step_limits == (0.0, math.inf)
    assert [bool(p) for p in model.flags().layer_experts] == [False, False, False, True]
