"""A block that sees all tokens and one that attends to its output, cut over 2 and 4 ranks, against
one process in float64: outputs, gradients of the inputs and of every parameter."""

from __future__ import annotations

import pytest
import torch
from configs import model_config
from pool import tensor_group
from torch import Tensor

from megatron.features.cross_attention.layers import CrossBlock
from megatron.model.attention_masks import AttentionMasks
from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

WIDTH, ENCODED, DECODED = 32, 12, 8
PADDING = torch.arange(ENCODED) >= torch.tensor([[12], [7]])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    lengths = (ENCODED, DECODED, DECODED)
    return tuple(
        torch.randn(2, length, WIDTH, generator=draw, dtype=torch.float64) for length in lengths
    )


def compute(kv_heads: int, tp: TensorParallel) -> dict[str, tuple[Tensor, object]]:
    """This rank's share of everything, and how it is cut: by a shard, or, an activation, along the
    sequence or not."""
    model = model_config(
        num_layers=2, hidden_size=WIDTH, ffn_hidden_size=48, num_attention_heads=8,
        num_query_groups=kv_heads, kv_channels=4, seq_length=ENCODED, attention_dropout=0.0,
        max_position_embeddings=ENCODED, hidden_dropout=0.0,
    )  # fmt: skip
    blocks = torch.nn.ModuleDict(
        {
            "encoder": Block(model, 0, tp, False, "full"),
            "decoder": CrossBlock(model, 1, tp, False),
        }
    ).double()
    for name, param in blocks.named_parameters():
        param.init = Init(std=0.3)
        whole = shard_of(param).whole  # queries, keys and values are drawn as one
        drawn = name if whole is None else f"{name.rpartition('.')[0]}.{whole}"
        initialise(drawn, param, 1, tp.coordinates)
    encoded, decoded, weights = (tp.own(x, 1) for x in inputs())
    encoded.requires_grad_(), decoded.requires_grad_()
    masks = AttentionMasks(padding_BT=PADDING)
    encoder = blocks["encoder"](LayerState(encoded, masks=masks)).hidden
    after = blocks["decoder"](LayerState(decoded, encoder, masks=masks)).hidden
    (after * weights).sum().backward()
    cut = tp.split
    found: dict[str, tuple[Tensor, object]] = {
        "output": (after.detach(), cut),
        "encoder output": (encoder.detach(), cut),
        "gradient of the encoder's input": (encoded.grad, cut),
        "gradient of the decoder's input": (decoded.grad, cut),
    }
    for name, param in blocks.named_parameters():
        found[name] = (param.grad, shard_of(param))
    return found


def on_rank(kv_heads: int, sequence: bool) -> dict[str, float]:
    """Largest relative error of everything; for the pool."""
    group = tensor_group()
    expected = compute(kv_heads, TensorParallel())
    largest = max(float(values.abs().max()) for values, _ in expected.values())
    errors = {}
    tp = TensorParallel(group, sequence)
    for name, (values, cut) in compute(kv_heads, tp).items():
        kind = name.rpartition(".")[2]
        if kind in ("kv_weight", "kv_bias") and name not in expected:
            whole = expected[f"{name.rpartition('.')[0]}.{kind.removeprefix('kv_')}"][0]
        else:
            whole = expected[name][0]
        if isinstance(cut, bool):
            share = whole.chunk(group.size, 1)[group.rank] if cut else whole
        else:
            share = cut.cut(whole, tp.coordinates)
        bound = max(float(share.abs().max()), 1e-3 * largest)
        errors[name] = float((values - share).abs().max()) / bound
    return errors


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size, kv_heads", [(2, 8), (2, 1), (4, 2), (4, 8)])
def test_against_one_process(pool, size, kv_heads, sequence):
    for errors in pool.run(size, on_rank, kv_heads, sequence):
        assert "decoder.cross_attention.kv.weight" in errors
        assert {name: error for name, error in errors.items() if error > 1e-12} == {}
