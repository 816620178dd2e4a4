"""A weight update on a device that is not the CPU (tests/unit/one_device.py): nothing of it is made
on the CPU, and the host neither reads a number nor sends one."""

import sys

import pytest
import torch
from flat_partitions import flat_partitions, set_gradients
from one_device import GPU, OneDevice
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron.config import OptimizerConfig
from megatron.engine.update import partition_update
from megatron.engine.update.adam import ElementwiseAdam, Float32States
from megatron.engine.update.async_step import AsyncOptimizerStep
from megatron.engine.update.optimizer import build_optimizer, norm_of_groups
from megatron.engine.update.partition_update import PartitionUpdate
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init, Shard, parameter


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


class Largest(OneDevice):
    """Also notes the number of bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if all(each.alias_info is None for each in func._schema.returns):
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self.bytes = max([self.bytes, *(each.numel() * each.element_size() for each in made)])
        return result


def generated(grad, place, stored, *rates):
    """In place of the function that torch generates, which makes nothing."""
    for each in stored:
        each.copy_(each)


@pytest.mark.parametrize("compiled", [False, True])
def test_update_of_flat_parts(monkeypatch, compiled):
    """As DeepSpeed's ZeRO 1 and 2 call it: no copy of the gradients but of a few at a time."""
    gathered: list[int] = []
    monkeypatch.setattr(partition_update, "LEAST", 512)
    monkeypatch.setattr(partition_update, "_MOST_COPIED", 1024)
    with GPU:
        shapes = (((64, 256), (32, 256)), ((256,), (3,)))
        groups = [[parameter(Shard(s), Init()) for s in shapes_] for shapes_ in shapes]
    params = [param for group in groups for param in group]
    for param in params:
        param.data = param.data.to(torch.bfloat16)
    wrapper, optimizer = flat_partitions(groups, padding=5)
    wrapper.step = []
    wrapper.update_by = wrapper.step.append
    wrapper.norm = lambda: norm_of_groups(
        [*wrapper.averaged_gradients.values()], torch.float32, torch.float32, [], GPU
    )
    wrapper.start_gather = gathered.append
    update = queued(wrapper, optimizer, params)
    if compiled:
        kernel = ElementwiseAdam(Float32States(), (0.9, 0.95), 1e-8, compiled=False)
        kernel._update = generated
        update._update = PartitionUpdate(wrapper, optimizer, Float32States(), kernel, 1 << 30)

    def step(made: Largest | None = None) -> None:
        set_gradients(wrapper, [[torch.zeros_like(param) for param in each] for each in groups])
        if made is not None:
            made.bytes = 0
        update.prepare()
        wrapper.step[0]()

    step()
    with Largest() as made:
        step(made)
    assert gathered == [0, 1] * 2, "each group as soon as it is updated"
    # Of the second group's end, 8 elements are collected; else at most 1024 of any.
    assert made.bytes == (2 * 8 if compiled else 4 * 1024)
    assert update.held is not None and update.held.device == update.norm.device == GPU
    for main in wrapper.single_partition_of_fp32_groups:
        assert {each.device for each in optimizer.state[main].values()} == {GPU}
