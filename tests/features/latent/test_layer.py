"""The layer against the one of `transformers`, in float64: output and every gradient."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from latent_sizes import (
    HEADS,
    HIDDEN,
    LATENT,
    LENGTH,
    PLAIN,
    RANK,
    ROTATED,
    SHAPES,
    SIZES,
    VALUE,
    YARN,
)
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from megatron.config import ConfigError
from megatron.features.latent.attention import LatentAttention, WholeParallelLinear
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel import tensor_parallel
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

NAMES = {
    "q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj",
    "proj": "o_proj",
}  # fmt: skip


def pair(**changes):
    """Both layers with equal weights of which none is zero."""
    config = model_config(**SIZES | changes)
    scaling = changes.get("rope_scaling")
    reference = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=changes.get("q_lora_rank", RANK), kv_lora_rank=LATENT,
        qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED,
        v_head_dim=changes.get("v_head_dim", VALUE), max_position_embeddings=LENGTH,
        attention_bias=changes.get("add_attention_bias", False), rope_interleave=False,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"}
        | (json.loads(scaling) if scaling else {}), attn_implementation="eager",
    )  # fmt: skip
    layer = LatentAttention(config, 0, TensorParallel(), False).double()
    other = theirs.DeepseekV3Attention(reference, 0).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in layer.named_parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4
            param.copy_(values + 1.0 if "norm" in name else values)
            place, kind = name.split(".")
            getattr(getattr(other, NAMES[place]), kind).copy_(param)
    rotary = theirs.DeepseekV3RotaryEmbedding(reference).double()
    rotary.inv_freq = rotary.inv_freq.double()
    return layer, other, rotary


class Wide(theirs.DeepseekV3RMSNorm):
    """Their norm without its cast to float32."""

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def their_output(layer, other, x_BSH):
    """Their layer with angles in float64: its own are in float32."""
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if getattr(other, name) is not None:
            getattr(other, name).__class__ = Wide
    assert layer.rotation is not None
    cos, sin = layer.rotation.angles(LENGTH, None, None, x_BSH.device, torch.float64)
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    angles = cos[:, 0][None], sin[:, 0][None]
    with pytest.MonkeyPatch.context() as patch:  # a softmax in float64
        softmax = F.softmax
        patch.setattr(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        return other(x_BSH, angles, mask[None, None])[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_output_and_gradients_against_transformers(shape, recompute):
    layer, other, _ = pair(**SHAPES[shape])
    layer.recompute = recompute
    x_BSH = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    grad_BSH = torch.randn(x_BSH.shape, dtype=torch.float64)
    y_BSH = layer(x_BSH, LayerState(x_BSH))
    wanted_BSH = their_output(layer, other, x_BSH)
    torch.testing.assert_close(y_BSH, wanted_BSH, rtol=1e-10, atol=1e-10)
    params = dict(layer.named_parameters())
    places = [name.split(".") for name in params]
    rest = [getattr(getattr(other, NAMES[place]), kind) for place, kind in places]
    ours = torch.autograd.grad(y_BSH, [x_BSH, *params.values()], grad_BSH)
    wanted = torch.autograd.grad(wanted_BSH, [x_BSH, *rest], grad_BSH)
    for name, mine, reference in zip(["input", *params], ours, wanted, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10, msg=name)


class PlainCache:
    """All latent vectors of one pass: attention with the latent vectors as the only key, written as
    in the paper (arXiv:2405.04434, section 2.1.2)."""

    lengths_BS = torch.full((2, LENGTH), LENGTH)

    def attend_latents(self, layer, q_BSNW, latents_BSW, width, scores, sinks_N):
        products = torch.einsum("bsnw,btw->bnst", q_BSNW, latents_BSW) * scores.scale
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights_BNST = products.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bnst,btw->bsnw", weights_BNST, latents_BSW[..., :width])


@pytest.mark.parametrize("shape", ["direct", "yarn"])
def test_the_absorbed_form_equals_the_expanded_one(shape):
    layer, _, _ = pair(**SHAPES[shape])
    x_BSH = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        expanded = layer(x_BSH, LayerState(x_BSH))
        absorbed = layer(x_BSH, LayerState(x_BSH, cache=PlainCache()))
    torch.testing.assert_close(absorbed, expanded, rtol=1e-12, atol=1e-12)


def test_the_softmax_factor_is_theirs():
    """0.1 w ln(s) + 1, squared, of the root of all channels of a head."""
    layer, other, rotary = pair(rope_scaling=json.dumps(YARN))
    assert layer.scores.scale == pytest.approx(other.scaling, rel=1e-15)
    factor = 0.1 * 0.7 * math.log(2.5) + 1
    assert layer.scores.scale == pytest.approx(factor**2 / math.sqrt(PLAIN + ROTATED), rel=1e-15)
    positions = torch.arange(LENGTH)[None]
    cos, _ = rotary(torch.zeros(1, dtype=torch.float64), positions)
    assert layer.rotation is not None
    mine, _ = layer.rotation.angles(LENGTH, None, None, cos.device, torch.float64)
    torch.testing.assert_close(mine[:, 0], cos[0], rtol=1e-6, atol=1e-6)


def test_a_document_does_not_see_another():
    """Tokens of the second document have the outputs that they have alone."""
    layer, _, _ = pair()
    x_BSH = torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    ids = (torch.arange(LENGTH)[None] >= 10).long()
    positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None]
    state = LayerState(x_BSH, position_ids=positions, masks=AttentionMasks(ids))
    with torch.no_grad():
        together = layer(x_BSH, state)[:, 10:]
        alone = layer(x_BSH[:, 10:], LayerState(x_BSH))
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_recomputed_heads_are_not_kept():
    """From the latent vectors alone."""

    def kept(recompute):
        layer, _, _ = pair()
        layer.recompute, sizes = recompute, {}
        x_BSH = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)

        def pack(x):
            if not isinstance(x, torch.nn.Parameter):
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = layer(x_BSH, LayerState(x_BSH))
        return sum(sizes.values()), y

    (whole, _), (less, _) = kept(False), kept(True)
    heads = 2 * LENGTH * HEADS * (2 * (PLAIN + ROTATED) + VALUE) * 8
    assert less < whole - heads


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_query_groups": 1}, "--num-query-groups 1.* contradicts --multi-latent"),
        ({"add_qkv_bias": True}, "--add-qkv-bias.* contradicts --multi-latent-attention"),
        ({"clip_qkv": 2.0}, "--clip-qkv 2.0.* contradicts"),
        ({"qk_layernorm_whole": True}, "--qk-layernorm-whole.* contradicts"),
        ({"qk_pos_emb_head_dim": 3}, "must be positive and even"),
        ({"kv_lora_rank": 0}, "--kv-lora-rank 0.* must be positive"),
    ],
)
def test_what_contradicts_is_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        model_config(**SIZES | flags)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_maps_to_latent_vectors_are_sums_where_ranks_have_slices(
    sequence, monkeypatch
):
    """In every backward pass, unless an engine sums them once a step; here of two equal ranks."""
    monkeypatch.setattr(tensor_parallel, "start_all_reduce", lambda x, group: lambda: 2 * x)
    tp = TensorParallel(Group((0, 1), 0), sequence=sequence)
    layer = WholeParallelLinear(HIDDEN, RANK, bias=True, init=Init(0.1), tp=tp)
    layer(torch.ones(2, LENGTH, HIDDEN)).sum().backward()
    for param in layer.parameters():
        assert torch.equal(param.grad, torch.full_like(param, 2 * LENGTH * (1 + sequence)))
