"""Quantisers, schedules, masks and compressed layers against DeepSpeed 0.19.6, the last version
with compression: its values in tests/golden/compression, and its code, where
MEGATRON_TEST_DEEPSPEED names the folder of its source."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.features.compression.layers import SCORES, Clock, CompressedLayer, uses_of
from megatron.features.compression.quantisers import bits_after, quantise, share_of_weights, within
from megatron.features.compression.settings import compression_of
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

FOLDER = Path(__file__).parents[2] / "golden" / "compression"
MAKE = runpy.run_path(str(FOLDER / "make.py"))
SOURCE = os.environ.get("MEGATRON_TEST_DEEPSPEED")
weights = MAKE["weights"]


@pytest.fixture(scope="module", params=["golden", "code"])
def theirs(request):
    """Values by name, as make.py writes them."""
    if request.param == "golden":
        return load_file(FOLDER / "values.safetensors")
    if not SOURCE:
        pytest.skip("MEGATRON_TEST_DEEPSPEED is not the folder of DeepSpeed 0.19.6's source")
    modules = MAKE["modules_of"](Path(SOURCE))
    parts = (MAKE[name](modules) for name in ("quantised", "scheduled", "ranges", "pruned"))
    return {name: each.detach() for part in parts for name, each in part.items()}


def test_quantised_weights(theirs):
    """Bitwise, in three dtypes, for every number of bits with a rule of its own."""
    for number, (bits, symmetric, groups, dtype) in enumerate(MAKE["WEIGHT_CASES"]):
        ours = quantise(weights(number, 12, 10).to(dtype), bits, groups, symmetric)
        assert torch.equal(ours, theirs[f"quantised/{number}"]), (number, bits, dtype)
        for group in ours.reshape(groups, -1):
            assert len(group.unique()) <= max(3, 2**bits) if bits > 1 else 3


@pytest.mark.parametrize("mixed", [False, True])
def test_the_schedule_of_bits(theirs, mixed):
    """Bits of every quantisation, and its values. Their share of the weights is a sum of as many
    subtractions as steps, ours one product: rounding of float16 may differ by a unit."""
    for step in range(MAKE["STEPS"]):
        x, bits = weights(100 + step, 8, 6).half(), bits_after(step + 1, 12, 4, 5)
        assert bits == int(theirs[f"bits/{mixed}"][step])
        ours = quantise(x, bits, 4)
        if mixed:
            share = share_of_weights(step + 1, 12, 4, 5, 0.05)
            ours = share * x + (1 - share) * ours
        expected = theirs[f"scheduled/{mixed}"][step]
        assert torch.allclose(ours, expected, atol=2e-3) if mixed else torch.equal(ours, expected)
    assert bits == 8 and step_of_the_last_bit() == 5 * 2**7


def step_of_the_last_bit() -> int:
    return next(n for n in range(1, 10_000) if bits_after(n, 12, 4, 5) == 4)


def layer_of(section, module=None, name="layers.0.mlp.up"):
    compression = compression_of(json.dumps(section))
    module = module or ColumnParallelLinear(12, (8,), bias=True, init=Init(), tp=TensorParallel())
    layer = CompressedLayer(name, module, uses_of(compression, name, embedding=False))
    layer.wrap()
    layer.attach(Clock(10), Mesh(), torch.device("cpu"))
    return layer


def technique(kind, shared, params):
    group = {"params": params, "modules": ["*"]}
    return {
        kind: {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
            "different_groups": {"g": group},
        }
    }


SECTIONS = {
    "l1": technique("sparse_pruning", {"method": "l1"}, {"dense_ratio": 0.3}),
    "topk": technique("sparse_pruning", {"method": "topk"}, {"dense_ratio": 0.3}),
    "row_l1": technique("row_pruning", {"method": "l1"}, {"dense_ratio": 0.4}),
    "row_topk": technique("row_pruning", {"method": "topk"}, {"dense_ratio": 0.4}),
    "head": technique("head_pruning", {"num_heads": 4}, {"dense_ratio": 0.5}),
    "forward": technique(
        "weight_quantization",
        {
            "quantize_weight_in_forward": True,
            "quantization_type": "asymmetric",
            "quantize_groups": 6,
        },
        {"start_bits": 8, "target_bits": 4},
    ),
    "dynamic": technique(
        "activation_quantization", {"quantization_type": "asymmetric"}, {"bits": 8}
    ),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_layers(theirs, kind, request):
    """Outputs, and gradients of input, weight, bias and scores, bitwise: the same operations. The
    products of the golden file are another CPU's, whose kernels may add up in another order."""
    close = {"rtol": 0, "atol": 0}
    if request.node.callspec.params["theirs"] == "golden":
        close = {"rtol": 1e-5, "atol": 2e-6}
    tp = TensorParallel()
    row = kind == "head"  # the output projection of an attention
    make = RowParallelLinear(12, 8, bias=True, init=Init(), tp=tp) if row else None
    layer = layer_of(SECTIONS[kind], make)
    module = layer.module
    module.weight.data, module.bias.data = weights(400, 8, 12), weights(401, 8)
    for name in layer.learned:
        scores = getattr(module, SCORES[name])
        scores.data = weights(402, *scores.shape)
    if kind in ("l1", "row_l1"):
        name = "sparse_pruning" if kind == "l1" else "row_pruning"
        layer.masks[name] = layer.mask_of(name, module.weight.detach())
    x = weights(403, 2, 5, 12).requires_grad_()
    y = module(x)
    (y * weights(404, 2, 5, 8)).sum().backward()
    results = {"output": y, "x": x.grad, "weight": module.weight.grad, "bias": module.bias.grad}
    for name in layer.learned:
        results["scores"] = getattr(module, SCORES[name]).grad
    for name, ours in results.items():
        torch.testing.assert_close(ours, theirs[f"{kind}/{name}"], **close)


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_static_ranges(theirs, mode):
    """The range after each batch, and inputs in it. Ours follows a step after its batch, so that
    ranks that see other samples have the same range."""
    shared = {"quantization_type": mode, "range_calibration": "static"}
    layer = layer_of(technique("activation_quantization", shared, {"bits": 8}))
    layer.module.train()
    for step in range(6):
        layer.input(weights(200 + step, 4, 5, 6))
        layer.follow(layer.measured)
        layer.measured = None
        assert torch.equal(layer.range, theirs[f"range/{mode}"][step])
    x = weights(300, 4, 5, 6)
    ours = within(x, *layer.range, 8, mode == "symmetric")
    assert torch.equal(ours, theirs[f"activations/{mode}"])
    layer.module.eval()
    assert torch.equal(layer.input(x), ours)
    assert layer.measured is None, "an evaluation measures nothing"


def test_groups_of_zeros_stay_finite():
    for bits in (1, 2, 4):
        assert torch.equal(quantise(torch.zeros(4, 6), bits, 2), torch.zeros(4, 6))
    same = torch.full((2, 6), 0.3)
    assert torch.equal(quantise(same, 4, 2, symmetric=False), same)


def test_stochastic_rounding_has_the_mean_of_its_input():
    x = weights(7, 1, 64).repeat(4000, 1)
    x[:, 0] = 4.0
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    mean = quantise(x, 4, 4000, noise=noise).mean(0)
    nearest = quantise(x[:1], 4, 1)[0]
    assert (mean - x[0])[1:].abs().max() < 0.05 < (nearest - x[0])[1:].abs().max()
