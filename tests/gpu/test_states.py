"""Stored optimizer states on a GPU: the same numbers as on the CPU, no float32 copies, bitwise
resumes."""

import numpy as np
import pytest
import torch
from flat_partitions import flat_partitions, set_gradients
from gpu_runs import CPU, DEVICE, TINY, needs_gpu, no_waiting, peak_of_update, train
from torch import Tensor, nn

from megatron.config.layouts import StateDtypes
from megatron.engine.update.adam import ElementwiseAdam
from megatron.engine.update.partition_update import PartitionUpdate
from megatron.features.low_bit_states.stored_states import StoredStates, more_bits, random_bits
from megatron.kernels.compiler import missing_compiler

BETAS, EPS = (0.9, 0.999), 1e-8
SHAPES = (((512, 512), (300, 7), (768, 256), (5,)), ((512,), (512,), (3,)))
DTYPES = {
    "A": StateDtypes("fp32", "bf16", "bf16"),
    "B": StateDtypes("bf16", "bf16", "bf16"),
    "C": StateDtypes("fp32", "int8", "int8"),
}
FLAGS = [*TINY, "--bf16", "--use-precision-aware-optimizer"]
LOSS = {"fp32": 0.0, "bf16": 2.0**-7, "int8": 2.0**-3}


def drawn(seed: int) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=draw).bfloat16() for shape in group] for group in SHAPES]


def states_after(name: str, steps: int, device: torch.device, compiled: bool) -> list[Tensor]:
    """Main weights and moments, float32 on the CPU, after updates that the host does not wait
    for."""
    form = StoredStates(DTYPES[name])
    params = [[nn.Parameter(each.to(device)) for each in group] for group in drawn(0)]
    wrapper, optimizer = flat_partitions(params, padding=3)
    form.take_main_weights(wrapper, optimizer)
    for group in optimizer.param_groups:
        group.update(lr=1e-2, weight_decay=0.1)
    form.keys = {param: 10**6 * n for n, param in enumerate(p for group in params for p in group)}
    kernel = ElementwiseAdam(form, BETAS, EPS, compiled)
    update = PartitionUpdate(wrapper, optimizer, form, kernel, 1 << 17)
    factor, held = torch.tensor(0.5, device=device), torch.tensor(0.0, device=device)
    for step in range(steps):
        set_gradients(wrapper, [[each.to(device) for each in group] for group in drawn(1 + step)])
        if step and device.type == "cuda":
            with no_waiting():
                update.step(factor, held)
        else:
            update.step(factor, held)
    partitions = [
        form.partition(main, optimizer.state[main])
        for main in wrapper.single_partition_of_fp32_groups
    ]
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return [part.get(kind, 0, part._model.numel()).to(CPU) for part in partitions for kind in kinds]


def test_random_bits_are_those_of_the_cpu():
    elements = torch.arange(-(2**20), 2**20, dtype=torch.int32)
    step = torch.tensor(123_456, dtype=torch.int32)
    expected = random_bits(elements, step)
    found = random_bits(elements.to(DEVICE), step.to(DEVICE))
    assert torch.equal(found.to(CPU), expected)
    assert torch.equal(more_bits(found).to(CPU), more_bits(expected))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_updates_against_the_cpu(name, compiled):
    """But for roots and joined products and sums, which change few numbers, to a neighbour."""
    if compiled and missing_compiler(DEVICE.type):
        pytest.skip(str(missing_compiler(DEVICE.type)))
    found = states_after(name, 3, DEVICE, compiled)
    expected = states_after(name, 3, CPU, compiled=False)
    for a, b, dtype in zip(found, expected, [*DTYPES[name]] * 2, strict=True):
        floor = 1e-6 + float(b.abs().max()) * 2**-15
        torch.testing.assert_close(a, b, rtol=max(1e-4, 2 * LOSS[dtype]), atol=2e-3 * 0.5 + floor)
        assert torch.isclose(a, b, rtol=1e-4, atol=1e-6).float().mean() > 0.99


@needs_gpu
@pytest.mark.parametrize("name", DTYPES)
def test_nothing_is_made_of_a_slices_size(name):
    """Of 8 bits a kernel may keep moments before they are encoded."""
    size, form = 1 << 24, StoredStates(DTYPES[name])
    params = [nn.Parameter(torch.zeros(size, device=DEVICE, dtype=torch.bfloat16)) for _ in "abcd"]
    wrapper, optimizer = flat_partitions([params])
    form.take_main_weights(wrapper, optimizer)
    kernel = ElementwiseAdam(form, BETAS, EPS, compiled=True)
    form.keys = {param: n for n, param in enumerate(params)}
    update = PartitionUpdate(wrapper, optimizer, form, kernel, size // 4)
    assert peak_of_update(update, wrapper, params) <= (1 << 20) + (2 * size if name == "C" else 0)


def flags_of(name: str) -> list[str]:
    main, first, second = DTYPES[name]
    return ["--main-params-dtype", main, "--exp-avg-dtype", first, "--exp-avg-sq-dtype", second]


@pytest.mark.parametrize("stage", ["1", "2"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_trainer_resumes_bitwise(tmp_path, name, stage):
    flags = [*FLAGS, *flags_of(name), "--zero-stage", stage, "--train-iters", "4"]
    straight = train(flags)
    assert straight.losses[-1] < straight.losses[0]
    first = train([*flags, "--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"])
    resumed = train([*flags, "--load", str(tmp_path)])
    assert first.losses + resumed.losses == straight.losses
    assert straight.state.keys() == resumed.state.keys()
    for name, values in straight.state.items():
        np.testing.assert_array_equal(resumed.state[name], values, err_msg=name)
