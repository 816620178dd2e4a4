"""Loss and gradients on a GPU, against float64 and plain products on the CPU."""

import contextlib
import importlib.util

import pytest
import torch
from gpt_forward import forward
from gpu_runs import CPU, DEVICE, ON_GPU, needs_gpu, no_waiting
from small_gpts import BATCH, KINDS, LENGTH, VOCAB, small_gpt
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.config.engine import FastPathsConfig
from megatron.data.loader import mapped
from megatron.engine.compilation import compile_blocks
from megatron.engine.update.async_step import AsyncOptimizerStep
from megatron.engine.update.optimizer import build_optimizer
from megatron.features.float8.linear import FIRST_CAPABILITY, Float8
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.mesh import Mesh
from megatron.parallel.tensor_parallel import TensorParallel

pytestmark = pytest.mark.also_on_cpu
# torch's memory-efficient attention may multiply float32 by TF32 inside.
LIMITS = {torch.float32: 2e-3 if ON_GPU else 1e-4, torch.bfloat16: 0.05}
"""Largest error of a gradient, as a share of its norm."""
Outcome = tuple[Tensor, dict[str, Tensor]]


def build(device: torch.device, dtype: torch.dtype, **changes) -> LayerStack:
    stack = small_gpt(device, dtype, **changes)
    for name, param in stack.canonical_parameters():
        initialise(name, param, 1)
        with torch.no_grad():  # the initial weights are so small that layers hardly matter
            param.mul_(4.0 if param.dim() > 1 else 1.0)
    return stack


def micro_batch(number: int, documents: bool) -> dict:
    """On the CPU: tokens, what they should be, and documents and positions if asked for."""
    draw = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=draw)
    mask = (torch.rand(BATCH, LENGTH, generator=draw) < 0.8).float()
    ids = torch.arange(LENGTH).div(LENGTH // 4, rounding_mode="floor").repeat(BATCH, 1)
    positions = torch.arange(LENGTH).remainder(LENGTH // 4).repeat(BATCH, 1)
    more = {"document_ids_BS": ids, "position_ids_BS": positions} if documents else {}
    return {"tokens_BS": tokens, "targets": Targets(labels, mask), **more}


def moved(batch: dict, device: torch.device) -> dict:
    targets = mapped(batch["targets"], Tensor, lambda x: x.to(device))
    return {name: x.to(device) for name, x in batch.items() if name != "targets"} | {
        "targets": targets
    }


def run(stack: LayerStack, documents: bool = False, micro_batches: int = 1) -> Outcome:
    """Sum of the losses, and of the gradients, of some micro batches."""
    stack.zero_grad()
    device = next(stack.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number in range(micro_batches):
        torch.compiler.cudagraph_mark_step_begin()
        loss = forward(stack, **moved(micro_batch(number, documents), device))
        loss.backward()
        total += loss.detach()
    grads = {name: param.grad for name, param in stack.canonical_parameters()}
    return total, {name: grad.double().cpu() for name, grad in grads.items() if grad is not None}


def expected(kind: str, documents: bool = False, micro_batches: int = 1, **changes) -> Outcome:
    shape = KINDS[kind] | changes | {"attention_backend": "eager"}
    return run(build(CPU, torch.float64, **shape), documents, micro_batches)


def assert_near(found: Outcome, reference: Outcome, limit: float) -> None:
    torch.testing.assert_close(found[0].cpu(), reference[0], rtol=limit, atol=0.0)
    assert found[1].keys() == reference[1].keys()
    # A bias of keys has a gradient of zero in theory.
    least = 1e-2 * max(float(grad.norm()) for grad in reference[1].values())
    for name, grad in reference[1].items():
        error = float((found[1][name] - grad).norm()) / max(float(grad.norm()), least)
        assert error <= limit, (name, error)


@pytest.mark.parametrize(
    ("dtype", "documents"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        pytest.param(torch.float32, False, marks=pytest.mark.proof),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.proof),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind, dtype, documents):
    found = run(build(DEVICE, dtype, **KINDS[kind]), documents)
    assert_near(found, expected(kind, documents), LIMITS[dtype])


@pytest.mark.parametrize("backend", ["eager", "cudnn", "flash"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "window"])
def test_attention_kernels_against_float64(kind, backend):
    if backend == "cudnn" and not ON_GPU:
        pytest.skip("needs a GPU")
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs the flash-attn package")
    stack = build(DEVICE, torch.bfloat16, **KINDS[kind], attention_backend=backend)
    assert_near(run(stack), expected(kind), LIMITS[torch.bfloat16])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["gpt2", "window"])
def test_recomputation_against_float64(kind, recompute):
    stack = build(DEVICE, torch.float32, **KINDS[kind], recompute=recompute)
    reference = expected(kind, micro_batches=2)
    assert_near(run(stack, micro_batches=2), reference, LIMITS[torch.float32])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
def test_8_bit_products_against_float64(hybrid, recipe):
    if ON_GPU and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip("needs a GPU with 8-bit products")
    stack = build(DEVICE, torch.bfloat16, **KINDS["llama"], float8=Float8(hybrid, recipe))
    assert_near(run(stack), expected("llama"), 0.25)


@pytest.mark.parametrize("tokens", [64, 16], ids=["whole", "chunks"])
def test_the_heads_gradients_have_their_scale(tokens):
    """Each number is rounded to bfloat16, by chance up or down; what all are multiplied by is not.
    (For GPUs torch rounds a factor without dimensions to the format of what it is multiplied by.)
    """
    draw, counted = torch.Generator().manual_seed(0), 51
    assert abs(float(torch.tensor(1 / counted).bfloat16()) * counted - 1) > 2e-3
    x = torch.randn(1, 64, 256, generator=draw).bfloat16()
    weight = (torch.randn(512, 256, generator=draw) * 0.1).bfloat16()
    labels = torch.randint(512, (1, 64), generator=draw)
    mask = (torch.arange(64) < counted).float()[None]
    grads = []
    for device, dtype in ((DEVICE, torch.bfloat16), (CPU, torch.float64)):
        inputs = [each.clone().to(device, dtype).requires_grad_() for each in (x, weight)]
        head = LossHead(512, None, tokens * 512 * inputs[0].element_size(), TensorParallel())
        targets = Targets(labels.to(device), mask.to(device))
        linear_cross_entropy(*inputs, targets, head).backward()
        grads.append([each.grad.double().cpu() for each in inputs])
    for found, wanted in zip(*grads, strict=True):
        scale = float((found * wanted).sum() / (wanted * wanted).sum())
        assert abs(scale - 1) < 1e-3, scale


@needs_gpu
@pytest.mark.parametrize(
    "mode",
    [
        "default",
        "reduce-overhead",
        pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.proof),
        pytest.param("max-autotune", marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compiled_blocks_against_float64(kind, mode):
    """Steps of two micro batches, whose gradients are added, and an evaluation after each: CUDA
    graphs are warmed up and recorded by the first ones, and replayed by the last."""
    stack, reference = build(DEVICE, torch.bfloat16, **KINDS[kind]), expected(kind, micro_batches=2)
    compile_blocks([stack.sequence], FastPathsConfig(torch_compile_mode=mode), DEVICE)
    for _ in range(4):
        assert_near(run(stack, micro_batches=2), reference, LIMITS[torch.bfloat16])
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            loss = forward(stack, **moved(micro_batch(0, False), DEVICE))
        torch.testing.assert_close(loss.double().cpu(), expected(kind)[0], rtol=0.05, atol=0.0)


@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.proof), True], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_nothing_and_holds_back_what_is_not_finite(kind, documents):
    """Forward, backward and update; against the same on the CPU."""
    weights: dict[torch.device, list[Tensor]] = {}
    for device in (CPU, DEVICE):
        stack = build(device, torch.float32, **KINDS[kind])
        params = dict.fromkeys(stack.parameters())
        optimizer = build_optimizer(params, OptimizerConfig(lr=1e-2))
        update = AsyncOptimizerStep(optimizer, optimizer, params, Mesh(), device, 1.0, hold=False)
        batch = moved(micro_batch(0, documents), device)
        for number in range(3):  # the first makes what is made once
            with no_waiting() if number else contextlib.nullcontext():
                stack.zero_grad()
                loss = forward(stack, **batch)
                # The last gradients are infinite.
                (loss * (float("inf") if number == 2 else 1.0)).backward()
                before = [param.detach().clone() for param in params]
                update.prepare()
                optimizer.step()
            assert update.held is not None and bool(update.held) == (number == 2)
            same = [torch.equal(old, new) for old, new in zip(before, params, strict=True)]
            assert all(same) if number == 2 else not any(same)
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
        weights[device] = [param.detach().cpu() for param in params]
    for found, wanted in zip(weights[DEVICE], weights[CPU], strict=True):
        # Adam's first steps are the signs of gradients, and some of those are near zero.
        assert float((found - wanted).abs().mean()) <= 1e-3
