"""8-bit layers of whole runs: losses next to those of bf16, resuming, and products by blocks."""

import pytest
import torch
from gpu_runs import DEVICE, ON_GPU, TINY, needs_gpu, train

from megatron.features.float8.linear import FIRST_CAPABILITY, NOTHING_KEPT, Float8, Kept
from megatron.parallel.linear import linear

if ON_GPU and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
    pytest.skip("needs a GPU with 8-bit products", allow_module_level=True)

BF16 = [*TINY, "--bf16", "--train-iters", "40", "--lr", "1e-3"]
FP8 = [*BF16, "--fp8-format", "hybrid", "--fp8-recipe"]
RECIPES = {
    "tensorwise": ["tensorwise"],
    "rowwise": ["rowwise"],
    "delayed": ["delayed", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"],
    "blockwise": ["blockwise", "--ffn-hidden-size", "384"],
}


def has_blocks() -> bool:
    """Whether the GPU multiplies by blocks; on a CPU they are always emulated."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return not ON_GPU or (torch.cuda.get_device_capability()[0] == 9 and cuda >= (12, 9))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_next_to_bf16(recipe, compiled):
    """Every step's loss within 3 percent of that of bf16, and the last ones lower than the
    first."""
    if recipe == "blockwise" and not has_blocks():
        pytest.skip("needs a Hopper and CUDA 12.9")
    width = ["--ffn-hidden-size", "384"] if recipe == "blockwise" else []
    more = ["--torch-compile"] if compiled else []
    plain = train([*BF16, *width, *more]).losses
    found = train([*FP8, *RECIPES[recipe], *more]).losses
    assert found != plain
    assert found == pytest.approx(plain, rel=0.03)
    assert sum(found[-5:]) < sum(found[:5])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_resuming_is_bitwise(recipe, tmp_path):
    flags = [*FP8, *RECIPES[recipe], "--train-iters", "8"]
    whole = train(flags).losses
    saving = [*flags, "--save", str(tmp_path), "--save-interval", "4"]
    first = train([*saving, "--exit-interval", "4"]).losses
    rest = train([*saving, "--load", str(tmp_path)]).losses
    assert first + rest == whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_against_float64(recipe):
    """Output and gradients, to the rounding of 8 bits; a weight that is kept, which on a GPU a
    compiled function casts, and one that is not."""
    if recipe == "blockwise" and not has_blocks():
        pytest.skip("needs a Hopper and CUDA 12.9")
    float8, draw = Float8(True, recipe), torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=draw).bfloat16()
        for shape in ((1, 256, 384), (640, 384), (1, 256, 640))
    )
    exact = x.double() @ weight.double().t(), grad.double() @ weight.double()
    exact += (grad[0].double().t() @ x[0].double(),)
    cast = float8.weight_rows(weight.to(DEVICE), NOTHING_KEPT)
    delayed = recipe == "delayed"
    largest = torch.tensor([8.0, 8.0], device=DEVICE, requires_grad=True) if delayed else None
    for kept in (Kept(cast, largest, delayed), Kept(None, largest, delayed)):
        inputs = [each.to(DEVICE).detach().requires_grad_() for each in (x, weight)]
        y = linear(*inputs, None, float8, kept)
        found = [y, *torch.autograd.grad(y, inputs, grad.to(DEVICE))]
        for ours, theirs, limit in zip(found, exact, (0.045, 0.08, 0.08), strict=True):
            error = (ours.double().cpu() - theirs).norm() / theirs.norm()
            assert float(error) < limit
