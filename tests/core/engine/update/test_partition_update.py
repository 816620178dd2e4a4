"""A rank's partition cut into slices, and its update against torch's AdamW on whole partitions."""

import pytest
import torch
from flat_partitions import flat_partitions, set_gradients
from torch import Tensor, nn

from megatron.engine.update import partition_update
from megatron.engine.update.adam import BLOCK, ElementwiseAdam, Float32States, FusedAdam
from megatron.engine.update.partition_update import Part, PartitionUpdate, cut

BETAS, EPS = (0.9, 0.999), 1e-8


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Nobody to gather from; even small gradients have slices of their own."""
    monkeypatch.setattr(partition_update, "LEAST", 2 * BLOCK)


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ([1024, 4096, 7, 9, 700, 2048, 1], 8192),
        ([100_000, 3], 100_004),
        ([5], 6),
        ([256, 512], 768),
        ([2, 513, 4096], 5000),
    ],
)
@pytest.mark.parametrize("most", [BLOCK, 2048, 1 << 20])
def test_cut(sizes, length, most):
    pieces = cut(sizes, length, 2 * BLOCK, most)
    assert pieces[0].start == 0 and sum(piece.length for piece in pieces) == length
    for piece, following in zip(pieces, pieces[1:], strict=False):
        assert piece.start + piece.length == following.start
        assert piece.length % BLOCK == 0
    assert max(piece.length for piece in pieces) <= most
    found: list[list[Part]] = [[] for _ in sizes]
    for piece in pieces:
        for part in piece.parts:
            found[part.gradient].append(part)
    for size, parts in zip(sizes, found, strict=True):
        assert sum(part.length for part in parts) == size
        assert [part.start for part in parts] == sorted({part.start for part in parts})
        assert not parts or parts[0].start == 0


def test_large_gradients_are_not_copied():
    """Matrices are whole blocks in most models; small vectors between them share a slice."""
    sizes = [4096, 8192, 256, 256, 300, 4096 - 300]
    assert [piece.whole for piece in cut(sizes, sum(sizes), 512, 1 << 20)] == [
        True,
        True,
        False,
        True,
    ]


def groups(dtype: torch.dtype) -> list[list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(3)
    shapes = [[(64, 48), (30, 101), (9,), (40, 64)], [(48,), (7,)]]
    return [
        [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in group]
        for group in shapes
    ]


def gradients(step: int, dtype: torch.dtype) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [
        [torch.randn(param.shape, generator=draw).to(dtype) for param in group]
        for group in groups(dtype)
    ]


def main_weights(pair) -> list[Tensor]:
    return pair[0].single_partition_of_fp32_groups


def assert_same(found, expected) -> None:
    """States of wrappers and optimizers, bit for bit."""
    for a, b in zip(*(main_weights(each) for each in (found, expected)), strict=True):
        assert torch.equal(a, b)
        assert found[1].state[a].keys() == expected[1].state[b].keys()
        for name, values in expected[1].state[b].items():
            assert torch.equal(found[1].state[a][name], values), name
    for a, b in zip(*(pair[0].bit16_groups_flat for pair in (found, expected)), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def whole_step(wrapper, optimizer, grads, factor: Tensor, held: Tensor) -> None:
    """What DeepSpeed does: float32 copies of all gradients, torch's step, a copy of the weights."""
    for number, main in enumerate(wrapper.single_partition_of_fp32_groups):
        flat = torch.cat([grad.reshape(-1).float() for grad in grads[number]])
        main.grad = torch.nn.functional.pad(flat, (0, len(main) - len(flat))).mul_(factor)
    optimizer.found_inf = held
    optimizer.step()
    for number, main in enumerate(wrapper.single_partition_of_fp32_groups):
        wrapper.bit16_groups_flat[number].copy_(main)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("most", [BLOCK, 4 * BLOCK, 1 << 20])
def test_fused_bitwise_as_whole_partitions(most, dtype):
    """The third step has gradients that are not finite."""
    found, expected = (flat_partitions(groups(dtype), padding=600) for _ in range(2))
    update = PartitionUpdate(*found, Float32States(), FusedAdam(BETAS, EPS), most)
    for step in range(4):
        bad = step == 2
        factor = torch.tensor(float("nan") if bad else 0.3 + step / 7)
        held = torch.tensor(float(bad))
        set_gradients(found[0], gradients(step, dtype))
        for _, optimizer in (found, expected):
            for number, group in enumerate(optimizer.param_groups):
                group.update(lr=1e-2 / (step + 1), weight_decay=0.1 * number)
        update.step(factor, held)
        whole_step(*expected, gradients(step, dtype), factor, held)
        assert_same(found, expected)
    assert set(found[0].averaged_gradients.values()) == {None}


def test_elementwise_near_whole_partitions():
    found, expected = (flat_partitions(groups(torch.bfloat16), padding=3) for _ in range(2))
    kernel = ElementwiseAdam(Float32States(), BETAS, EPS, compiled=False)
    update = PartitionUpdate(*found, Float32States(), kernel, 1 << 20)
    for step in range(3):
        set_gradients(found[0], gradients(step, torch.bfloat16))
        factor, held = torch.tensor(0.7), torch.tensor(0.0)
        update.step(factor, held)
        whole_step(*expected, gradients(step, torch.bfloat16), factor, held)
    for a, b in zip(*(main_weights(each) for each in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_a_slice_knows_its_elements():
    """By the parameter that they are of, from where this rank's part of the first one begins."""
    found = []

    class Spy(FusedAdam):
        def of_group(self, *arguments):
            def update(grad, elements, stored):
                if elements.dim() == 0:
                    elements = elements + torch.arange(len(grad), dtype=torch.int32)
                found.append(elements)

            return update

    wrapper, optimizer = flat_partitions(groups(torch.bfloat16)[:1], padding=3)
    wrapper.first_offset = [77]
    firsts = (2**31 - 5, -1000, -2000, 12)
    keys = dict(zip(wrapper.bit16_groups[0], firsts, strict=True))
    form = Float32States()
    form.keys = keys
    update = PartitionUpdate(wrapper, optimizer, form, Spy(BETAS, EPS), 4 * BLOCK)
    set_gradients(wrapper, gradients(0, torch.bfloat16))
    update.step(None, torch.tensor(0.0))
    begins = (firsts[0] + 77, *firsts[1:])
    counts = [param.numel() for param in keys]
    expected = [torch.arange(a, a + n) for a, n in zip(begins, counts, strict=True)]
    expected.append(torch.zeros(3, dtype=torch.int64))
    assert torch.equal(torch.cat(found), torch.cat(expected).to(torch.int32))
