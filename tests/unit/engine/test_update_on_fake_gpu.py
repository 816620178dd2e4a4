"""A weight update on a device that is not the CPU (tests/unit/one_device.py): nothing of it is made
on the CPU, and the host neither reads a number nor sends one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from megatron.config import OptimizerConfig
from megatron.engine.async_optimizer_step import AsyncOptimizerStep
from megatron.engine.optimizer import build_optimizer
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init, Shard, parameter

sys.path.append(str(Path(__file__).parents[1]))
from one_device import GPU, OneDevice  # noqa: E402


@pytest.fixture
def params(monkeypatch) -> list[nn.Parameter]:
    """A matrix and a vector; torch's fused AdamW knows no "meta" otherwise."""
    module = sys.modules[Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])
    with GPU:
        return [parameter(Shard(shape), Init()) for shape in ((6, 4), (5,))]


def queued(wrapper, optimizer: Optimizer, params: list[nn.Parameter]) -> AsyncOptimizerStep:
    return AsyncOptimizerStep(wrapper, optimizer, params, Mesh(), GPU, clip_grad=1.0, hold=True)


def test_update_of_whole_parameters(params):
    optimizer = build_optimizer(params, OptimizerConfig(lr=1e-3))
    update = queued(optimizer, optimizer, params)
    for step in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        if step:  # what is made once is there
            with OneDevice():
                update.prepare()
                optimizer.step()
        else:
            update.prepare()
            optimizer.step()
    assert update.held is not None and update.held.device == update.norm.device == GPU


def test_update_of_flat_parts(params):
    """As DeepSpeed's ZeRO 1 and 2 call it, a group at a time."""
    for param in params:
        param.data = param.data.to(torch.bfloat16)
    flat = [torch.zeros(param.numel() + 3, device=GPU) for param in params]
    optimizer = torch.optim.AdamW([{"params": [each]} for each in flat], lr=1e-3, fused=True)
    wrapper = SimpleNamespace(
        bit16_groups=[[param] for param in params],
        params_in_partition=[[param] for param in params],
        single_partition_of_fp32_groups=flat,
        averaged_gradients={},
    )
    update = queued(wrapper, optimizer, params)

    def step() -> None:
        for number, param in enumerate(params):
            wrapper.averaged_gradients[number] = [torch.zeros_like(param)]
        update.prepare()
        for number, weights in enumerate(flat):
            grad = wrapper._get_preflattened_grad_partition(number)
            assert grad.shape == weights.shape and grad.dtype == torch.float32
            wrapper.unscale_and_clip_grads([grad], None)
            weights.grad = grad
            optimizer.step()
            weights.grad = None

    step()
    with OneDevice():
        step()
    assert update.held is not None and update.held.device == update.norm.device == GPU
