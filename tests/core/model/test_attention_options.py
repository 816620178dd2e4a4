"""Options of attention against the attention of transformers' own models, in float64."""

import pytest
import torch
from configs import model_config
from torch import nn
from transformers import Llama4TextConfig, Qwen3NextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from megatron.model.attention import Attention
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.shard import init_of
from megatron.parallel.tensor_parallel import TensorParallel

LENGTH, HIDDEN = 12, 24
SIZES = {"num_attention_heads": 4, "hidden_size": HIDDEN, "head_dim": 8, "num_key_value_heads": 2}
OURS = {
    "num_attention_heads": 4, "hidden_size": HIDDEN, "kv_channels": 8, "num_query_groups": 2,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False,
    "attention_dropout": 0.0, "seq_length": LENGTH, "num_layers": 4, "norm_epsilon": 1e-6,
}  # fmt: skip
EXACT = {"rtol": 1e-10, "atol": 1e-12}
BACKENDS = pytest.mark.parametrize("backend", ["eager", "sdpa"])


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Their norms and rotations, which cast to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def attention_of(layer: int = 0, **changes) -> Attention:
    """An attention with random weights, in float64."""
    torch.manual_seed(0)
    module = Attention(model_config(**OURS | changes), layer, TensorParallel(), False).double()
    for param in module.parameters():
        nn.init.normal_(param, init_of(param).constant, 0.3)
    return module


def with_weights(theirs: nn.Module, ours: Attention) -> nn.Module:
    """Their attention with the weights of ours."""
    theirs, weights = theirs.double(), dict(ours.named_parameters())
    rows = [getattr(theirs, f"{name}_proj").weight.shape[0] for name in "qkv"]
    with torch.no_grad():
        for name, part in zip("qkv", weights.pop("qkv.weight").split(rows), strict=True):
            getattr(theirs, f"{name}_proj").weight.copy_(part)
        theirs.o_proj.weight.copy_(weights.pop("proj.weight"))
        for name, weight in weights.items():
            theirs.get_parameter(name).copy_(weight)
    return theirs


def results(module, call):
    """The output for random hidden states, and all gradients, by the names of ours."""
    draw = torch.Generator().manual_seed(1)
    shape = (2, LENGTH, HIDDEN)
    x, grad = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    names, params = zip(*module.named_parameters(), strict=True)
    y = call(x.requires_grad_())
    x_grad, *grads = torch.autograd.grad(y, [x, *params], grad)
    actual = {"y": y.detach(), "x": x_grad, **dict(zip(names, grads, strict=True))}
    if "q_proj.weight" in actual:
        actual["qkv.weight"] = torch.cat([actual.pop(f"{name}_proj.weight") for name in "qkv"])
        actual["proj.weight"] = actual.pop("o_proj.weight")
    return actual


def compare(ours: Attention, theirs: nn.Module, angles, visible, masks=None):
    """Ours against theirs with a mask of the keys that queries see, bool [S, S]."""
    theirs = with_weights(theirs, ours)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    state = LayerState(mask, masks=masks or AttentionMasks())
    actual = results(ours, lambda x: ours(x, state))
    expected = results(theirs, lambda x: theirs(x, angles, mask)[0])
    torch.testing.assert_close(actual, expected, **EXACT)


def angles_of(base: float, rotated: int):
    """The angles [S, R / 2] of all positions: theirs are rounded to float32."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    return torch.arange(LENGTH)[:, None] * base**-exponents


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@BACKENDS
def test_output_gate_against_qwen3_next(backend):
    ours = attention_of(
        qk_layernorm=True, apply_layernorm_1p=True, rotary_percent=0.5, attention_output_gate=True,
        attention_backend=backend,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    config = Qwen3NextConfig(**SIZES, rope_parameters=rope, attn_implementation="sdpa")
    angles = angles_of(10_000.0, 4).repeat(1, 2)[None]
    compare(ours, Qwen3NextAttention(config, 3), (angles.cos(), angles.sin()), CAUSAL)


LLAMA4 = {
    "rotary_base": 500_000.0, "rotary_interleaved": True, "qk_l2_norm": True, "no_rope_freq": 2,
    "attention_temperature": 0.4, "attention_temperature_floor": 3, "attention_chunk_size": 5,
    "window_attn_skip_freq": "[1,0]*2",
}  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("layer", [2, 3], ids=["chunks", "no-rope"])
def test_against_llama4(backend, layer):
    """Chunks, interleaved channels and L2 norms with RoPE; a temperature of queries without."""
    config = Llama4TextConfig(
        **SIZES, rms_norm_eps=1e-6, attn_scale=0.4, floor_scale=3, attention_chunk_size=5,
        num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], attn_implementation="eager",
    )  # fmt: skip
    turns = angles_of(500_000.0, 8)[None]
    angles = torch.polar(torch.ones_like(turns), turns)
    ours = attention_of(layer, attention_backend=backend, **LLAMA4)
    chunks = torch.arange(LENGTH) // 5
    visible = CAUSAL if layer == 3 else CAUSAL & (chunks[:, None] == chunks)
    compare(ours, Llama4TextAttention(config, layer), angles, visible)
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 5] * 2)
    within = visible & (documents[0][:, None] == documents[0])
    theirs = Llama4TextAttention(config, layer)
    compare(ours, theirs, angles, within, AttentionMasks(documents))


def test_the_temperature_counts_positions_of_documents():
    """Positions that start again give the factors of a sequence of their own."""
    ours = attention_of(3, **LLAMA4)
    x = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    again = LayerState(x, position_ids=torch.arange(4)[None], masks=AttentionMasks())
    later = LayerState(x, position_ids=torch.arange(8, 12)[None], masks=AttentionMasks())
    first = ours(x, LayerState(x, masks=AttentionMasks()))
    torch.testing.assert_close(ours(x, again), first, rtol=0, atol=0)
    assert (ours(x, later) - first).abs().max() > 1e-3
