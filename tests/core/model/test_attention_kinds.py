"""Attention that is not causal: of all tokens of a sequence, with padding, and to another one.
Kernels against torch's, blocks against torch.nn's encoder and decoder layers, float64."""

import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from configs import model_config
from torch import Tensor, nn

from megatron.config import ConfigError, ModelConfig
from megatron.features.cross_attention.layers import CrossAttention, CrossBlock
from megatron.features.gpu_attention.kernels import cudnn, flash
from megatron.model import attention
from megatron.model.attention import Attention
from megatron.model.attention_backends import eager, sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring, alibi_slopes
from megatron.model.block import Block
from megatron.model.layer_list import LayerState
from megatron.parallel.context import Context
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import TensorParallel

BATCH, HEADS, WIDTH = 3, 4, 8
PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2, [False] + [True] * 6])


def tensors(queries: int, keys: int, kv_heads: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(queries)
    shapes = [(BATCH, HEADS, queries, WIDTH), *[(BATCH, kv_heads, keys, WIDTH)] * 2]
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in made]


@pytest.fixture
def flash_attn(monkeypatch):
    """A module in the place of the flash-attn package."""

    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, deterministic):
        assert not causal and dropout_p == 0
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        left, right = (q.shape[2] + k.shape[2] if size < 0 else size for size in window_size)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(right).triu(-left)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


SHAPES = [(7, 4), (7, 2), (3, 4), (9, 1), (1, 2)]
# Positions of two sequences have no distance.
SHAPES_WITH_ALIBI = [(*shape, False) for shape in SHAPES] + [(7, 4, True), (7, 2, True)]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("queries, kv_heads, alibi", SHAPES_WITH_ALIBI)
@pytest.mark.parametrize("backend", [sdpa, eager, cudnn, flash])
@pytest.mark.usefixtures("flash_attn")
def test_kernels_against_torch(backend, queries, kv_heads, padded, alibi):
    slopes = alibi_slopes(HEADS) if alibi else ()
    inputs, reference = (tensors(queries, 7, kv_heads) for _ in range(2))
    mask = torch.zeros(BATCH, HEADS, queries, 7, dtype=torch.float64)
    if padded:
        mask = mask.masked_fill(PADDING[:, None, None, :], -torch.inf)
    if alibi:
        places = torch.arange(7.0)
        distances = (places[:, None] - places).abs().double()
        mask = mask - torch.tensor(slopes).double()[:, None, None] * distances
    expected = F.scaled_dot_product_attention(*reference, attn_mask=mask, enable_gqa=True)
    masks = AttentionMasks(padding_BT=PADDING if padded else None)
    found = backend(*inputs, AttentionScoring(causal=False, slopes=slopes), masks, 0.0)
    # ALiBi's distances and slopes are float32.
    close = {"rtol": 1e-6, "atol": 1e-7} if alibi else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    others = torch.autograd.grad((expected * weights).sum(), reference)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, **close)


def test_short_sequences_on_cpus_do_not_take_the_causal_kernel():
    q, k, v = (x.detach().bfloat16() for x in tensors(7, 7))
    found = sdpa(q, k, v, AttentionScoring(causal=False), AttentionMasks(), 0.0)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def config(**changes) -> ModelConfig:
    shape = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": HEADS,
        "num_query_groups": HEADS, "kv_channels": WIDTH, "seq_length": 9,
        "max_position_embeddings": 9, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "relu": True,
    }  # fmt: skip
    return model_config(**(shape | changes))


def as_ours(theirs: nn.Module, cross: bool) -> dict[str, Tensor]:
    """The weights of a layer of torch.nn under our names."""
    names = {
        "attention_norm": "norm1", "attention.qkv": "self_attn.in_proj",
        "attention.proj": "self_attn.out_proj", "mlp.up": "linear1", "mlp.down": "linear2",
        "mlp_norm": "norm3" if cross else "norm2",
    }  # fmt: skip
    if cross:
        names |= {
            "cross_attention_norm": "norm2", "cross_attention.proj": "multihead_attn.out_proj",
        }  # fmt: skip
    weights = dict(theirs.named_parameters())
    found = {
        f"{ours}.{kind}": weights.pop(f"{name}{'_' if name.endswith('in_proj') else '.'}{kind}")
        for ours, name in names.items()
        for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias") if cross else ():
        q, kv = weights.pop(f"multihead_attn.in_proj_{kind}").split([32, 64])
        found |= {f"cross_attention.q.{kind}": q, f"cross_attention.kv.{kind}": kv}
    assert not weights
    return found


def outcome(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and gradients of a weighted sum of it."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).double()
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


def randomised(theirs: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in theirs.double().parameters():
            param.copy_(torch.randn(param.shape, generator=draw))
    return theirs


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_encoder_block_against_torch(backend, recompute):
    theirs = randomised(nn.TransformerEncoderLayer(32, HEADS, 48, 0.0, norm_first=True,
                                                   batch_first=True))  # fmt: skip
    block = Block(config(attention_backend=backend), 0, TensorParallel(), recompute, "full")
    block.double().load_state_dict(as_ours(theirs, cross=False))
    x = torch.randn(BATCH, 7, 32, dtype=torch.float64, requires_grad=True)
    expected = outcome(theirs(x, src_key_padding_mask=PADDING), [x])
    masks = AttentionMasks(torch.zeros(BATCH, 7), PADDING)
    found = outcome(block(LayerState(x, masks=masks)).hidden, [x])
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_decoder_block_against_torch(backend, recompute):
    theirs = randomised(nn.TransformerDecoderLayer(32, HEADS, 48, 0.0, norm_first=True,
                                                   batch_first=True))  # fmt: skip
    block = CrossBlock(config(attention_backend=backend), 0, TensorParallel(), recompute)
    block.double().load_state_dict(as_ours(theirs, cross=True))
    x = torch.randn(BATCH, 5, 32, dtype=torch.float64, requires_grad=True)
    encoder = torch.randn(BATCH, 7, 32, dtype=torch.float64, requires_grad=True)
    later = nn.Transformer.generate_square_subsequent_mask(5).double()
    expected = outcome(
        theirs(x, encoder, tgt_mask=later, memory_key_padding_mask=PADDING), [x, encoder]
    )
    state = LayerState(x, encoder, masks=AttentionMasks(padding_BT=PADDING))
    after = block(state)
    assert after.encoder is encoder
    for ours, other in zip(outcome(after.hidden, [x, encoder]), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


def test_cross_attention_with_grouped_heads_norms_and_positions_elsewhere():
    """Rotary positions and windows are those of one sequence: between two they play no part."""
    changes = {"num_query_groups": 2, "qk_layernorm": True}
    placed = {"position_embedding_type": "rope", "sliding_window": 2}
    attend = CrossAttention(config(**changes, **placed), 0, TensorParallel(), False).double()
    plain = CrossAttention(config(**changes), 0, TensorParallel(), False).double()
    for param in attend.parameters():
        nn.init.normal_(param)
    plain.load_state_dict(attend.state_dict())
    x, encoder = torch.randn(BATCH, 9, 32).double(), torch.randn(BATCH, 7, 32).double()
    state = LayerState(x, encoder, masks=AttentionMasks(padding_BT=PADDING))
    found = attend(x, state)
    assert torch.equal(found, plain(x, state))
    heads = (attend.q(x), *attend.kv(encoder).chunk(2, -1))
    q, k, v = (y.unflatten(-1, (-1, WIDTH)) for y in heads)
    q, k, v = (y.transpose(1, 2) for y in (attend.q_norm(q), attend.k_norm(k), v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=~PADDING[:, None, None], enable_gqa=True)
    torch.testing.assert_close(found, attend.proj(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [1, 2, 5, 20])
@pytest.mark.parametrize("backend", [sdpa, eager, cudnn, flash])
@pytest.mark.usefixtures("flash_attn")
def test_windows_in_both_directions(backend, window, documents):
    """A query sees the keys that are at most half a window away, within its document."""
    inputs, places = tensors(7, 7, 2), torch.arange(7)
    seen = ((places[:, None] - places).abs() <= window // 2).expand(BATCH, 1, 7, 7)
    ids = None
    if documents:
        ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 0], [0] * 7])
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    masks = AttentionMasks(ids, causal=False)
    found = backend(*inputs, AttentionScoring(causal=False, window=window), masks, 0.0)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_what_makes_no_sense_is_refused_by_its_flag():
    with pytest.raises(ConfigError, match="--parallel-residual"):
        CrossBlock(config(parallel_residual=True), 0, TensorParallel(), False)


def test_without_the_feature_of_long_contexts_its_flag_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "taking_part", lambda: ())
    tp = TensorParallel(context=Context(Group((0, 1), 0)))
    with pytest.raises(ConfigError, match="--context-parallel-size 2: .* missing here"):
        Attention(model_config(), 0, tp, recompute=False)
