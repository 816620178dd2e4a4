"""Weights in 4 bits against their definition and bitsandbytes; every layout has a part of the same
numbers."""

import pytest
import torch

from megatron.features.adapters import nf4
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.layers import Addition, add_adapters
from megatron.features.adapters.nf4 import bytes_of, quantise, quantise_layer, quantised_weights
from megatron.features.cross_attention.layers import KeyValueLinear
from megatron.parallel.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
GOLD = (
    "3c68760a469a7711d476c6ca46465b435cf86d86423ab41d7f5bc77a4362d672"
    "76898648cdd633b8af478ad5b935335d72f6425384898d17584285276b443a82"
)
GOLD_SCALES = [2.7204, 2.8345]
SHAPES = [(96, 128), (256, 512), (33, 64)]


def numbers(matrix, shape, dtype=torch.float32):
    out = torch.empty(shape, dtype=dtype)
    matrix.write(out)
    return out


def drawn(shape, dtype=torch.float32, seed=4):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("double", [False, True])
def test_numbers_are_the_nearest_of_their_block(double):
    weight = drawn((6, 150))
    found = numbers(quantise(weight, double), weight.shape)
    largest = 0.0
    for row, values in zip(weight, found, strict=True):
        for block, of_block in zip(row.split(64), values.split(64), strict=True):
            scale = block.abs().max()
            code = torch.tensor(nf4._NF4) * scale
            nearest = (block[:, None] - code).abs().min(1).values
            largest = max(largest, float(((of_block - block).abs() - nearest).abs().max() / scale))
    assert largest < (0.02 if double else 1e-6)
    assert torch.equal(numbers(quantise(torch.zeros(3, 64), double), (3, 64)), torch.zeros(3, 64))


def test_bytes_of_bitsandbytes():
    """Those that bitsandbytes 0.50.2 makes of the same numbers."""
    matrix = quantise(drawn((2, 64)), False)
    assert matrix.codes_OP.numpy().tobytes().hex() == GOLD
    assert matrix.scales_OK.flatten().tolist() == pytest.approx(GOLD_SCALES, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="no bitsandbytes")
    weight = drawn(shape, dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    matrix = quantise(weight, False)
    assert torch.equal(matrix.codes_OP.flatten(), packed.flatten())
    for out in (torch.float32, torch.bfloat16):
        state.dtype = out
        theirs = functional.dequantize_4bit(packed, state)
        assert torch.equal(numbers(matrix, shape, out), theirs)
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    matrix = quantise(weight, True)
    assert torch.equal(matrix.codes_OP.flatten(), packed.flatten())
    assert torch.equal(nf4._dynamic_code(CPU), state.state2.code)
    assert torch.equal(matrix.groups_G, state.state2.absmax)
    assert torch.equal(matrix.mean, state.offset)
    # Its CPU kernel takes the neighbour of the nearest number at times.
    differences = (matrix.scales_OK.flatten().int() - state.absmax.int()).abs()
    assert differences.max() <= 1 and differences.float().mean() < 0.02


@pytest.mark.parametrize("double", [False, True])
def test_memory_is_that_of_the_formula(double):
    weight = drawn((512, 1024))
    matrix = quantise(weight, double)
    assert matrix.bytes == pytest.approx(bytes_of(weight.numel(), double), abs=8)
    assert matrix.bytes / weight.numel() == pytest.approx(0.5159 if double else 0.5625, abs=1e-4)


LAYERS = {
    "column": lambda tp: ColumnParallelLinear(128, [96, 160], bias=True, init=Init(0.1), tp=tp),
    "qkv": lambda tp: QKVParallelLinear(128, 8, 2, 16, bias=False, init=Init(0.1), tp=tp),
    "kv": lambda tp: KeyValueLinear(128, (32, 32), bias=False, init=Init(0.1), tp=tp, heads=2),
    "row": lambda tp: RowParallelLinear(160, 96, bias=True, init=Init(0.1), tp=tp),
}  # fmt: skip


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_have_parts_of_the_same_numbers(name, double):
    """Rows and columns that begin within a block of 64 or a group of 256 included."""

    def weights_of(size, rank):
        tp = TensorParallel(Group(tuple(range(size)), rank=rank)) if size > 1 else TensorParallel()
        layer = LAYERS[name](tp)
        shards = [shard_of(p) for n, p in layer.named_parameters() if "weight" in n]
        quantise_layer(layer, double)
        found = [weight for _, weight in quantised_weights(layer)]
        for weight in found:
            weight.fill(drawn(weight.shard.canonical_shape), CPU)
        assert not any("weight" in n for n, _ in layer.named_parameters())
        return found, shards, tp.coordinates

    (alone,), _, _ = weights_of(1, 0)
    whole = alone.to(torch.float32)
    assert (whole - drawn(whole.shape)).abs().max() < 0.7
    for size in (2, 4):
        for rank in range(size):
            found, shards, coordinates = weights_of(size, rank)
            for weight, shard in zip(found, shards, strict=True):
                own = shard.cut(whole, coordinates)
                assert torch.equal(weight.to(torch.float32), own)
                assert torch.equal(weight.to(torch.bfloat16), own.bfloat16())


def test_a_layer_computes_with_the_numbers_of_its_weight():
    """Outputs and gradients are those of a layer with these numbers, bit by bit, and so are those
    of a layer without additions."""
    for additions in ((Addition(),), ()):
        plain, quantised = (
            QKVParallelLinear(64, 4, 2, 16, bias=True, init=Init(0.1), tp=TensorParallel())
            for _ in range(2)
        )
        for layer in (plain, quantised):
            with torch.no_grad():
                layer.weight.copy_(drawn(layer.weight.shape))
                layer.bias.copy_(drawn(layer.bias.shape))
            layer.requires_grad_(False)
            add_adapters(layer, additions, AdapterConfig(lora=True, lora_rank=4))
            for number, param in enumerate(p for p in layer.parameters() if p.requires_grad):
                param.data.copy_(drawn(param.shape, seed=number))
        quantise_layer(quantised, True)
        ((_, weight),) = quantised_weights(quantised)
        weight.fill(plain.weight, CPU)
        plain.weight.data.copy_(weight.to(torch.float32))
        results = []
        for layer in (plain, quantised):
            x = drawn((2, 5, 64), seed=9).requires_grad_()
            outputs = torch.cat(layer(x), dim=-1)
            outputs.square().sum().backward()
            trained = [p.grad for p in layer.parameters() if p.requires_grad]
            results.append([outputs, x.grad, *trained])
        assert len(results[0]) == 2 + 2 * len(additions)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
