"""The update of ZeRO 1 and 2 on a GPU: as torch generates it, and without a compiler."""

import pytest
import torch
from flat_partitions import flat_partitions, set_gradients
from gpu_runs import CPU, DEVICE, TINY, needs_gpu, no_waiting, peak_of_update, train
from torch import Tensor, nn

from megatron.engine.update import partition_update
from megatron.engine.update.adam import ElementwiseAdam, Float32States, FusedAdam
from megatron.engine.update.partition_update import PartitionUpdate
from megatron.kernels.compiler import missing_compiler

BETAS, EPS, MOST = (0.9, 0.95), 1e-8, 1 << 18
SHAPES = (((512, 512), (300, 7), (768, 256), (5,)), ((512,), (512,), (3,)))


def drawn(seed: int, dtype: torch.dtype) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=draw).to(dtype) for shape in group] for group in SHAPES]


def kernel(name: str) -> ElementwiseAdam | FusedAdam:
    if name == "fused":
        return FusedAdam(BETAS, EPS)
    if name == "compiled" and missing_compiler(DEVICE.type):
        pytest.skip(str(missing_compiler(DEVICE.type)))
    return ElementwiseAdam(Float32States(), BETAS, EPS, compiled=name == "compiled")


def expected(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Main weights, and second moments, of each group, in float64 on the CPU."""
    groups = [[each.double() for each in group] for group in drawn(0, torch.bfloat16)]
    main = [torch.cat([each.reshape(-1) for each in group]).requires_grad_() for group in groups]
    optimizer = torch.optim.AdamW(main, betas=BETAS, eps=EPS, lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        for each, grads in zip(main, drawn(1 + step, torch.bfloat16), strict=True):
            each.grad = torch.cat([grad.reshape(-1) for grad in grads]).double() * 0.5
        optimizer.step()
    return [each.detach() for each in main], [optimizer.state[each]["exp_avg_sq"] for each in main]


@pytest.mark.parametrize("name", ["compiled", "fused", "operations"])
def test_against_float64_and_without_waiting(name):
    """The third of four steps has a gradient that is not finite, and changes nothing."""
    on_device = [[each.to(DEVICE) for each in group] for group in drawn(0, torch.bfloat16)]
    wrapper, optimizer = flat_partitions([[nn.Parameter(x) for x in group] for group in on_device])
    for group in optimizer.param_groups:
        group.update(lr=1e-2, weight_decay=0.1)
    update = PartitionUpdate(wrapper, optimizer, Float32States(), kernel(name), MOST)
    factor, good, bad = (torch.tensor(x, device=DEVICE) for x in (0.5, 0.0, 1.0))
    for step, number in enumerate((0, 1, None, 2)):
        grads = [
            [x.to(DEVICE) for x in group] for group in drawn(1 + (number or 0), torch.bfloat16)
        ]
        if number is None:
            before = [each.clone() for each in wrapper.single_partition_of_fp32_groups]
            grads[0][0][3, 3] = float("nan")
        set_gradients(wrapper, grads)
        if step:
            with no_waiting():
                update.step(factor, bad if number is None else good)
        else:  # makes what is made once
            update.step(factor, good)
        if number is None:
            assert all(map(torch.equal, before, wrapper.single_partition_of_fp32_groups))
    for main, flat, weights, second in zip(
        wrapper.single_partition_of_fp32_groups,
        wrapper.bit16_groups_flat,
        *expected(3),
        strict=True,
    ):
        state = optimizer.state[main]
        torch.testing.assert_close(main.detach().to(CPU).double(), weights, rtol=5e-6, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].to(CPU).double(), second, rtol=5e-6, atol=0)
        assert torch.equal(flat, main.bfloat16())
        assert float(state["step"]) == 3


def test_one_graph_for_all_slices():
    from torch._dynamo.utils import counters

    counters.clear()
    adam = kernel("compiled")
    on_device = [[each.to(DEVICE) for each in group] for group in drawn(0, torch.bfloat16)]
    wrapper, optimizer = flat_partitions([[nn.Parameter(x) for x in group] for group in on_device])
    update = PartitionUpdate(wrapper, optimizer, Float32States(), adam, 1 << 16)
    for step in range(3):
        grads = [[x.to(DEVICE) for x in group] for group in drawn(step, torch.bfloat16)]
        set_gradients(wrapper, grads)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * step
        update.step(None, torch.zeros((), device=DEVICE))
    assert counters["stats"]["unique_graphs"] == 1


@needs_gpu
@pytest.mark.parametrize("name", ["compiled", "fused"])
def test_no_copy_of_the_gradients(name):
    size = 1 << 24
    params = [nn.Parameter(torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)) for _ in "abcd"]
    wrapper, optimizer = flat_partitions([params])
    update = PartitionUpdate(wrapper, optimizer, Float32States(), kernel(name), size // 4)
    assert peak_of_update(update, wrapper, params) <= (
        1 << 20 if name == "compiled" else size + (1 << 20)
    )


@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_run_with_and_without_a_compiler(monkeypatch, stage):
    monkeypatch.undo()
    losses = []
    for missing in (None, "none here"):
        if missing:
            monkeypatch.setattr(partition_update, "missing_compiler", lambda device: "none here")
        losses.append(train([*TINY, "--bf16", "--zero-stage", stage]).losses)
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0][-1] < losses[0][0]
