"""Attention sinks and all else of gpt-oss but its routers, against transformers' own model, whose
only expert here is the MLP; the kernels against its attention.

Its experts' gate and up channels alternate; here they are one after the other.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from gpt_forward import forward
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, eager_attention_forward

from megatron.config import ModelConfig, ParallelConfig
from megatron.families import build_model
from megatron.features.gpu_attention.kernels import flash
from megatron.kernels import cpu_kernels
from megatron.model import attention_backends
from megatron.model.attention_backends import eager, sdpa
from megatron.model.attention_masks import (
    AttentionMasks,
    AttentionScoring,
    causal_mask,
    distance_biases,
)
from megatron.parallel.shard import init_of, shard_of

HEADS, WIDTH = 4, 8
SLOPES = (0.5, 0.125, 0.3, 0.01)
SCORES = {
    "plain": AttentionScoring(),
    "scale": AttentionScoring(scale=0.2),
    "window": AttentionScoring(window=3),
    "alibi": AttentionScoring(slopes=SLOPES),
    "full": AttentionScoring(causal=False),
}


class Theirs:
    """What their attention reads of a module."""

    num_key_value_groups, training = 2, False

    def __init__(self, sinks):
        self.sinks = sinks


def their_attention(q, k, v, sinks, scores, masks, bias=None):
    """[B, N, S, D] by gpt-oss's definition, with all that is added to the scores as its mask."""
    queries, keys = q.shape[2], k.shape[2]
    added = torch.zeros((), dtype=q.dtype)
    if scores.slopes:
        added = distance_biases(queries, keys, SLOPES, q.device, torch.float64)[None]
    visible = masks.visible(queries, keys, scores.window, q.device, scores.causal)
    if visible is None and scores.causal:
        visible = causal_mask(queries, keys, q.device)
    if visible is not None:
        added = added.masked_fill(~visible, -torch.inf)
    if bias is not None:
        added = added + bias
    scale = scores.scale or 1 / math.sqrt(q.shape[-1])
    return eager_attention_forward(Theirs(sinks), q, k, v, added, scale)[0].transpose(1, 2)


def inputs(queries, keys, width=WIDTH, dtype=torch.float64):
    """Queries, keys, values, sinks above and below the scores, and a gradient of the output."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, queries), (2, keys), (2, keys)]
    made = [torch.randn(2, *shape, width, generator=draw, dtype=torch.float64) for shape in shapes]
    grad = torch.randn(2, HEADS, queries, width, generator=draw, dtype=torch.float64)
    sinks = torch.tensor([-3.0, 0.3, 1.5, 6.0], dtype=torch.float64)
    return [x.to(dtype) for x in (*made, sinks, grad)]


def results(attend, q, k, v, sinks, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("shape", [(9, 9), (1, 9), (4, 9)], ids=str)
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("backend", [sdpa, eager])
def test_kernels_against_transformers(backend, kind, shape):
    tensors, scores, masks = inputs(*shape), SCORES[kind], AttentionMasks()
    found = results(lambda *x: backend(*x[:3], scores, masks, 0.0, None, x[3]), *tensors)
    expected = results(lambda *x: their_attention(*x, scores, masks), *tensors)
    # ALiBi's biases are the same float32 numbers in both.
    close = {"rtol": 1e-6, "atol": 1e-7} if scores.slopes else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close)


def test_the_package_flash_attn_is_not_called_with_sinks():
    """It is not installed here."""
    *tensors, _ = inputs(9, 9)
    arguments = (*tensors[:3], AttentionScoring(), AttentionMasks(), 0.0, None, tensors[3])
    torch.testing.assert_close(flash(*arguments), eager(*arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [sdpa, eager])
def test_within_documents_and_with_a_learned_bias(backend):
    tensors = inputs(9, 9)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, (2, 9), generator=draw).sort().values
    masks, scores = AttentionMasks(ids), AttentionScoring(window=4)
    ours = results(lambda *x: backend(*x[:3], scores, masks, 0.0, None, x[3]), *tensors)
    theirs = results(lambda *x: their_attention(*x, scores, masks), *tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    bias = torch.randn(1, HEADS, 9, 9, generator=draw, dtype=torch.float64, requires_grad=True)
    full, grads = AttentionScoring(causal=False), []
    for attend in (
        lambda q, k, v, s: backend(q, k, v, full, AttentionMasks(), 0.0, bias, s),
        lambda q, k, v, s: their_attention(q, k, v, s, full, AttentionMasks(), bias),
    ):
        leaves = [x.detach().requires_grad_() for x in tensors[:4]] + [bias]
        grads.append(torch.autograd.grad(attend(*leaves[:4]), leaves, tensors[4]))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_softcap_does_not_reach_the_sink():
    q, k, v, sinks, _ = inputs(1, 5)
    scores = AttentionScoring(softcap=0.7)
    found = sdpa(q, k, v, scores, AttentionMasks(), 0.0, None, sinks)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    capped = 0.7 * torch.tanh(q @ k.mT / math.sqrt(WIDTH) / 0.7)
    weights = capped.exp() / (capped.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(found, weights @ v, rtol=1e-12, atol=1e-12)


def test_dropout_acts_and_keeps_the_mean():
    torch.manual_seed(0)
    q, k, v, sinks, _ = inputs(6, 6)
    plain, *dropped = (
        sdpa(q, k, v, AttentionScoring(), AttentionMasks(), p, None, sinks)
        for p in (0.0, *[0.3] * 200)
    )
    assert not torch.equal(dropped[0], dropped[1])
    assert (torch.stack(dropped).mean(0) - plain).abs().max() < 0.4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [8, 256])
def test_own_kernel_for_cpus(monkeypatch, block, causal):
    """In float32 as close as sums in float32 can be, with a bias where it is not causal."""
    monkeypatch.setattr(cpu_kernels, "BLOCK", block)
    monkeypatch.setattr(cpu_kernels, "WHOLE_BLOCK", block)
    tensors, scores = inputs(30, 30), AttentionScoring(scale=0.3, causal=causal)
    bias = None if causal else torch.randn(2, 1, 1, 30, generator=torch.Generator().manual_seed(2))
    found = results(
        lambda q, k, v, s: cpu_kernels.attention(q, k, v, 0.3, causal, bias, s),
        *(x.float() for x in tensors),
    )
    exact = results(lambda *x: their_attention(*x, scores, AttentionMasks(), bias), *tensors)
    largest = max(x.abs().max() for x in exact)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 1e-6 * largest


@pytest.mark.parametrize("length", [100, 300])
def test_bfloat16_is_as_close_as_plain_products(monkeypatch, length):
    """By our own kernel, and by torch's where a sequence is too long for it; neither writes out
    all scores."""
    half, scores = inputs(length, length, 16, torch.bfloat16), AttentionScoring()
    masks = AttentionMasks()
    exact = results(lambda *x: their_attention(*x, scores, masks), *(x.double() for x in half))
    plain = results(lambda *x: eager(*x[:3], scores, masks, 0.0, None, x[3]), *half)
    monkeypatch.setattr(attention_backends, "eager", None)
    found = results(lambda *x: sdpa(*x[:3], scores, masks, 0.0, None, x[3]), *half)
    for ours, theirs, expected in zip(found, plain, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        error, allowed = ((x - expected).norm() / expected.norm() for x in (ours, theirs))
        assert error <= 1.3 * allowed + 1e-3, (error, allowed)


def test_a_sink_of_minus_infinity_is_none():
    q, k, v, sinks, _ = inputs(9, 9)
    arguments = (q, k, v, AttentionScoring(), AttentionMasks(), 0.0, None)
    torch.testing.assert_close(
        sdpa(*arguments, torch.full_like(sinks, -torch.inf)), sdpa(*arguments), rtol=0, atol=0
    )


VOCAB, LENGTH = 61, 24
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "beta_fast": 1.0, "beta_slow": 0.2,
    "truncate": False, "original_max_position_embeddings": 24,
}  # fmt: skip
OURS = {
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": HEADS,
    "num_query_groups": 2, "kv_channels": 12, "seq_length": LENGTH, "normalization": "RMSNorm",
    "norm_epsilon": 1e-5, "position_embedding_type": "rope", "rotary_base": 500.0,
    "max_position_embeddings": 64, "sliding_window": 5, "window_attn_skip_freq": 2,
    "untie_embeddings_and_output_weights": True, "quick_geglu": True, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.4, "softmax_type": "learnable", "unpadded_vocab_size": VOCAB,
    "padded_vocab_size": VOCAB, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "rope_scaling": '{"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 0.2, '
                    '"truncate": false, "original_max_position_embeddings": 24}',
}  # fmt: skip


class OneExpert(nn.Module):
    """Their experts, of which each token goes to the first with weight 1."""

    def __init__(self, experts: GptOssExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x):
        flat = x.flatten(0, 1)
        first = torch.zeros(len(flat), 1, dtype=torch.int64)
        return self.experts(flat, first, torch.ones(len(flat), 1, dtype=x.dtype)).view_as(x), None


def their_model():
    config = GptOssConfig(
        num_hidden_layers=3, num_local_experts=1, vocab_size=VOCAB, hidden_size=32,
        intermediate_size=48, head_dim=12, num_attention_heads=HEADS, num_key_value_heads=2,
        sliding_window=5, max_position_embeddings=64, rope_parameters=YARN, num_experts_per_tok=1,
        attn_implementation="eager", experts_implementation="eager", swiglu_limit=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).double()
    for layer in model.model.layers:
        layer.mlp = OneExpert(layer.mlp.experts)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.randn_like(param) * 0.3 + ("norm" in name))
            if name.endswith("sinks"):
                param.mul_(8)
    return model


def in_our_order(tensors: dict) -> dict:
    """Their parameters, or gradients, by our names within a block."""
    found = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "final_norm.norm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    for n in range(3):
        theirs, ours = f"model.layers.{n}", f"layers.{n}"
        attention, experts = f"{theirs}.self_attn", f"{theirs}.mlp.experts"
        found |= {
            f"{ours}.attention_norm.weight": tensors[f"{theirs}.input_layernorm.weight"],
            f"{ours}.mlp_norm.weight": tensors[f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.attention.sinks": tensors[f"{attention}.sinks"],
            f"{ours}.mlp.down.weight": tensors[f"{experts}.down_proj"][0].T,
            f"{ours}.mlp.down.bias": tensors[f"{experts}.down_proj_bias"][0],
        }
        for kind in ("weight", "bias"):
            parts = [tensors[f"{attention}.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{ours}.attention.qkv.{kind}"] = torch.cat(parts)
            found[f"{ours}.attention.proj.{kind}"] = tensors[f"{attention}.o_proj.{kind}"]
        weight = tensors[f"{experts}.gate_up_proj"][0].T
        bias = tensors[f"{experts}.gate_up_proj_bias"][0]
        for kind, values in (("weight", weight), ("bias", bias)):
            found[f"{ours}.mlp.up.{kind}"] = torch.cat([values[::2], values[1::2]])
    return found


def our_model(config: ModelConfig, recompute: str | None = None):
    stack = build_model(config, ParallelConfig(recompute_granularity=recompute))
    return stack.double()


@pytest.mark.parametrize("recompute", [None, "selective"])
def test_gpt_oss_with_one_expert_against_transformers(recompute):
    """Logits and every gradient in float64: sinks, windows in every other block, the first one
    included, YaRN without rounding, biases, and the clamped and shifted gate."""
    theirs, ours = their_model(), our_model(model_config(**OURS), recompute)
    values = in_our_order(dict(theirs.named_parameters()))
    named = dict(ours.canonical_parameters())
    assert set(named) == set(values)
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(values[name])
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    found, expected = forward(ours, ids), theirs(ids).logits
    # Their cosines and sines are computed in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    for logits in (found, expected):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    wanted = in_our_order({name: param.grad for name, param in theirs.named_parameters()})
    for name, param in named.items():
        assert (param.grad - wanted[name]).norm() < 2e-5 * wanted[name].norm(), name


def test_sinks_start_as_weights_do_and_are_cut_by_heads():
    stack = our_model(model_config(**OURS))
    sinks = dict(stack.canonical_parameters())["layers.0.attention.sinks"]
    assert init_of(sinks).std == 0.02 and shard_of(sinks).full_shape == (HEADS,)
    assert shard_of(sinks).ranges({"tensor": (1, 2)}) == {0: ((2, 2),)}


def test_off_by_one_is_a_learned_sink_of_zero():
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    learned, fixed, none = (
        our_model(model_config(**OURS | {"softmax_type": kind}))
        for kind in ("learnable", "off-by-one", "vanilla")
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in learned.canonical_parameters():
            param.normal_(0, 0.3)
            if name.endswith("sinks"):
                param.zero_()
    values = dict(learned.canonical_parameters())
    for stack in (fixed, none):
        named = dict(stack.canonical_parameters())
        assert {name for name in values if not name.endswith("sinks")} == set(named)
        with torch.no_grad():
            for name, param in named.items():
                param.copy_(values[name])
    assert torch.equal(forward(learned, ids), forward(fixed, ids))
    assert not torch.allclose(forward(none, ids), forward(fixed, ids))
