"""Tiled MLPs against the same MLP in plain autograd, in float64, and the memory that they hold."""

import pytest
import torch
from configs import model_config
from live_bytes import LiveBytes

from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.layers import Addition, add_adapters
from megatron.features.context.flags import LongContextConfig
from megatron.features.context.tiles import chunk_losses, tile_mlps
from megatron.model.block import Block
from megatron.model.layer_list import LayerState
from megatron.parallel.tensor_parallel import TensorParallel

SHAPE = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 48, "swiglu": True}


def block(dtype=torch.float64, **flags):
    torch.manual_seed(3)
    block = Block(model_config(**SHAPE | flags), 0, TensorParallel(), False)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return block.to(dtype)


def tiled(tokens, dtype=torch.float64, **flags):
    """The MLP of such a block in tiles of so many tokens, as the block calls it."""
    after = block(dtype, **flags)
    tile_mlps([after], lambda length, whole: tokens)
    assert not after.mlp_is_plain
    return lambda x: after.mlp(x, LayerState(x))[0], after.mlp


def gradients(mlp, x, params):
    y = mlp(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return y, torch.autograd.grad(y, [x, *params], weight)


@pytest.mark.parametrize("length, tokens", [(12, 4), (13, 5), (13, 1), (12, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_against_plain_autograd(length, tokens, bias):
    plain = block(add_bias_linear=bias).mlp
    call, mlp = tiled(tokens, add_bias_linear=bias)
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True)
    expected, reference = gradients(plain, x, list(plain.parameters()))
    y, grads = gradients(call, x, list(mlp.parameters()))
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads, reference, rtol=1e-12, atol=1e-12)


def test_only_what_is_trained_has_gradients():
    call, mlp = tiled(3)
    plain = block().mlp
    for each in (mlp, plain):
        each.up.requires_grad_(False)
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    down, reference = mlp.down.weight, plain.down.weight
    call(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(down.grad, reference.grad, rtol=1e-12, atol=1e-12)
    assert mlp.up.weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(call(x), plain(x), rtol=1e-13, atol=1e-13)


def test_sums_over_tiles_are_not_rounded():
    """300 addends of 1 are 300; sums in bfloat16 stop at 256."""
    call, mlp = tiled(1, torch.bfloat16)
    x = torch.randn(1, 300, 16, dtype=torch.bfloat16, requires_grad=True)
    call(x).sum().backward()
    assert mlp.down.bias.grad.tolist() == [300.0] * 16


def test_autocast_is_that_of_the_forward_pass():
    plain, (call, mlp) = block(torch.float32).mlp, tiled(4, torch.float32)
    x = torch.randn(1, 8, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = plain(x), call(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    y.sum().backward()
    got = mlp.up.weight.grad
    expected.sum().backward()
    torch.testing.assert_close(got, plain.up.weight.grad, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        halves = [plain(half) for half in x.detach().chunk(2, 1)]
    assert torch.equal(y, torch.cat(halves, 1))


def test_adapters_drop_again_what_they_dropped():
    """Gradients of the tiles' own masks: those of plain autograd over the same tiles and seed."""
    config = AdapterConfig(lora=True, lora_rank=4, lora_dropout=0.5)
    both = []
    for after in (block(), block()):
        after.mlp.requires_grad_(False)
        add_adapters(after.mlp.up, [Addition()], config)
        torch.manual_seed(5)
        for name in ("lora_a", "lora_b"):
            torch.nn.init.normal_(getattr(after.mlp.up, name))
        both.append(after.double())
    plain, other = both[0].mlp, both[1]
    tile_mlps([other], lambda length, whole: 3)
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)

    def seeded(call):
        torch.manual_seed(7)
        return call()

    expected = seeded(lambda: torch.cat([plain(tile) for tile in x.split(3, 1)], 1))
    y = seeded(lambda: other.mlp(x, LayerState(x))[0])
    assert torch.equal(y, expected)
    draws = torch.get_rng_state()
    trained = [[p for p in mlp.parameters() if p.requires_grad] for mlp in (plain, other.mlp)]
    assert len(trained[0]) == 2
    reference = torch.autograd.grad(expected.square().sum(), [x, *trained[0]])
    grads = torch.autograd.grad(y.square().sum(), [x, *trained[1]])
    torch.testing.assert_close(grads, reference, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), draws)


def test_inner_activations_are_those_of_a_tile():
    """Without tiles forward and backward hold several tensors of inner width for all tokens."""
    x = torch.randn(1, 1024, 16, requires_grad=True)
    peaks = []
    for call in (block(torch.float32).mlp, tiled(16, torch.float32)[0]):
        with LiveBytes() as live:
            y = call(x)
            kept = live.bytes() - y.untyped_storage().nbytes()
            y.sum().backward()
        peaks.append((kept, live.peak))
        x.grad = None
    inner = 1024 * 48 * 4
    assert peaks[0][0] >= 4 * inner  # gate and up, the gate's activation, the product
    assert peaks[1][0] == 0
    assert peaks[1][1] < 0.25 * peaks[0][1]


@pytest.mark.parametrize(
    "flags, tile",
    [
        ({"mlp_chunks_for_training": 4}, 250),
        ({"mlp_chunks_for_training": 3}, 334),
        ({"mlp_chunks_for_training": 0}, 63),  # ceil(2000 / 128) = 16 tiles
        ({"ds_sequence_parallel_fpdt": True, "ds_sequence_parallel_fpdt_chunk_size": 800}, 100),
    ],
)
def test_length_of_a_tile(flags, tile):
    """A slice of 1,000 of 2,000 tokens; FPDT's tile is chunk / P / 2, here of P = 2 ranks."""
    assert LongContextConfig(**flags).tile(1000, 2000, 128, 2) == tile


def test_losses_in_chunks(random_gpt, gpt_config):
    stack = random_gpt(gpt_config())
    chunk_losses(stack, 3)
    (head,) = {m.head for m in stack.modules() if hasattr(m, "rows_local")}
    rows = next(m for m in stack.modules() if hasattr(m, "rows_local"))
    assert head.chunk_bytes == 3 * rows.rows_local * rows.weight.element_size()
