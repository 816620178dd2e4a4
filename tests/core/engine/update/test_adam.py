"""Adam on slices: against torch's AdamW, as operations and as the function that torch compiles."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.engine.update.adam import ElementwiseAdam, Float32States, FusedAdam
from megatron.kernels.compiler import missing_compiler

BETAS, EPS = (0.9, 0.95), 1e-8
DECODED = [torch.float32] * 3
RATES = [(1e-2, 0.1), (3e-3, 0.0), (1e-3, 0.2)]
"""Learning rate and decay of each update."""


class Compiled(NamedTuple):
    """``code`` is generated for the first slice, ``graphs`` counts those of all of them."""

    adam: ElementwiseAdam
    code: str
    graphs: Callable[[], int]


@pytest.fixture(scope="module")
def compiled():
    if missing_compiler("cpu"):
        pytest.skip("needs a C++ compiler")
    import torch._dynamo.testing
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compile_with = partial(torch.compile, backend=counter)
    adam = ElementwiseAdam(Float32States(), BETAS, EPS, compiled=True)
    with config.patch("fx_graph_cache", False), mock.patch.object(torch, "compile", compile_with):
        _, (code,) = run_and_get_code(updated, adam, 4096)
        yield Compiled(adam, code, lambda: counter.frame_count)
    torch.compiler.reset()


def slices(length: int, seed: int) -> tuple[Tensor, ...]:
    """Weights of a model, main weights and moments, parts of larger tensors at various places."""
    draw, start = torch.Generator().manual_seed(seed), length % 3 * 256
    values = torch.randn(length, generator=draw)
    whole = [torch.zeros(start + length + 256, dtype=kind) for kind in (torch.bfloat16, *DECODED)]
    model, main, *moments = (each[start : start + length] for each in whole)
    model.copy_(values)
    main.copy_(values)
    return model, main, *moments


def gradients(length: int, step: int) -> Tensor:
    """Those of a part of a matrix, where they are many."""
    draw = torch.Generator().manual_seed(100 + step)
    grads = torch.randn(length, generator=draw).bfloat16()
    return grads if length < 1024 else grads.view(2, -1).view(-1)


@torch.no_grad()
def updated(adam, length: int, factor: float | None = 0.5, bad: int | None = None):
    """What three updates make of a slice, the ``bad`` one with a gradient that is not finite."""
    stored, count = slices(length, 1), torch.zeros(())
    scale = None if factor is None else torch.tensor(factor)
    for step, (lr, decay) in enumerate(RATES):
        held = torch.tensor(float(step == bad))
        grad = gradients(length, step).to(adam.gradient_dtype(torch.bfloat16))
        if step == bad:
            grad[length // 2] = float("nan")
            scale = torch.tensor(float("nan"))
            before = [each.clone() for each in (*stored, count)]
        count += 1
        update = adam.of_group({"lr": lr, "weight_decay": decay}, count, scale, held)
        update(grad, torch.tensor(0), stored)
        count -= held
        if step == bad:
            assert all(map(torch.equal, before, (*stored, count)))
            scale = torch.tensor(factor)
    return stored


def expected(length: int, dtype: torch.dtype, factor: float = 0.5) -> list[Tensor]:
    """Main weights and moments by torch.optim's plain AdamW in this dtype."""
    main = slices(length, 1)[1].to(dtype).clone().requires_grad_()
    optimizer = torch.optim.AdamW([main], betas=BETAS, eps=EPS, foreach=False, fused=False)
    for step, (lr, decay) in enumerate(RATES):
        optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
        main.grad = gradients(length, step).to(dtype) * factor
        optimizer.step()
    state = optimizer.state[main]
    return [main.detach(), state["exp_avg"], state["exp_avg_sq"]]


def assert_near(found: tuple[Tensor, ...], length: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for values, wanted in zip(found[1:], expected(length, dtype), strict=True):
            torch.testing.assert_close(values.to(dtype), wanted, rtol=2e-6, atol=1e-7)
    assert torch.equal(found[0], found[1].bfloat16())


@pytest.mark.parametrize("length", [2, 300, 4096])
def test_operations_against_torch(length):
    assert_near(
        updated(ElementwiseAdam(Float32States(), BETAS, EPS, compiled=False), length), length
    )
    assert_near(updated(FusedAdam(BETAS, EPS), length), length)


@pytest.mark.proof
def test_compiled_against_torch(compiled):
    """One graph for slices of every size and all rates; of slices as small as the number of
    rates too."""
    for length in (4096, 300, 2, 6, 70_000):
        assert_near(updated(compiled.adam, length), length)
    assert compiled.graphs() == 1


@pytest.mark.parametrize("bad", [0, 2])
def test_what_is_not_finite_changes_nothing(compiled, bad):
    kernels = (
        compiled.adam,
        ElementwiseAdam(Float32States(), BETAS, EPS, False),
        FusedAdam(BETAS, EPS),
    )
    for adam in kernels:
        updated(adam, 600, bad=bad)


def test_bytes_per_parameter(compiled):
    """One kernel loads 14 bytes of an element and stores 14. With the norm of the gradients, which
    reads 2, a step moves 30; DeepSpeed's moves 50."""
    (kernel,) = re.findall(r"void\s+kernel\((.*?)\n}", compiled.code, re.DOTALL)
    found = re.findall(r"(at::BFloat16|float|double|int64_t)\* (\w+_ptr\d+)", kernel)
    size = {name: {"at::BFloat16": 2, "float": 4}.get(kind, 8) for kind, name in found}
    of_element = r"(\w+_ptr\d+)(?: \+ |\[)static_cast<int64_t>\(x0"
    loads = set(re.findall(r"= .*?" + of_element, kernel))
    stores = set(re.findall(r"(?:\.store\(|^\s*)" + of_element, kernel, re.MULTILINE))
    assert sum(size[name] for name in loads) == 14
    assert sum(size[name] for name in stores) == 14


def test_what_random_bits_depend_on():
    """Formats that round at random get the elements, and the number of the update."""
    found = []

    class Spy(Float32States):
        def encode(self, stored, new, held, elements, step):
            found.append((int(step), int(elements)))

    adam, stored = ElementwiseAdam(Spy(), BETAS, EPS, compiled=False), slices(256, 1)
    group, no = {"lr": 1e-3, "weight_decay": 0.1}, torch.zeros(())
    for step in (1.0, 2.0):
        update = adam.of_group(group, torch.tensor(step), None, no)
        for place in (0, 256):
            update(gradients(256, 0), torch.tensor(place), stored)
    assert found == [(step, place) for step in (1, 2) for place in (0, 256)]
