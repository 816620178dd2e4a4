"""Limits of the device: bytes copied, and products and attention of the shapes that are trained.

Shapes: T tokens, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from contestants.setting import Setting
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_suite.device import attend, attention_inputs, attention_shapes
from gpu_suite.shapes import SHAPES, products
from megatron.features.measured_peak.products import measure_matmul_peak

REPEATS = 5
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TRAINED = ("1.3B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B")
HEAD_TOKENS = 8192
"""Tokens of the head's products: a chunk of the loss."""


def ceilings() -> dict[str, Any]:
    """The ceilings cell. Rates are FLOP/s, medians of several calls."""
    cuda = torch.cuda.is_available()
    names = TRAINED if cuda else ("tiny", "tiny-qwen")
    if cuda:  # a GPU that was idle needs a moment to reach its clocks
        measure_matmul_peak(torch.bfloat16, torch.device("cuda"), 1.0)
    found: dict[str, Any] = {"copy_bytes_per_second": copy_rate(2**30 if cuda else 2**22)}
    side = 8192 if cuda else 256
    found["square"] = {kind: rate(kind, side, side, side) for kind in ("bf16", "fp8")}
    found["products"] = {name: of_shape(SHAPES[name].setting()) for name in names}
    found["attention"] = {name: attention(*shape) for name, shape in attention_shapes().items()}
    return found


def copy_rate(elements: int) -> float:
    """Bytes read and written by a copy from one part of the device's memory to another."""
    source = torch.empty(elements, dtype=torch.bfloat16, device=_device()).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def of_shape(setting: Setting) -> dict[str, Any]:
    """Every product of a micro batch: ``rows`` [layer, pass, M, N, K, rate in bf16, rate in fp8],
    and seconds of all of a step, ``step_seconds`` by dtype, where the head stays in bf16."""
    tokens = setting.micro_batch * setting.seq_length
    rows, step = [], {"bf16": 0.0, "fp8": 0.0}
    for layer, (inputs, outputs) in products(setting).items():
        head = layer == "head"
        count = min(tokens, HEAD_TOKENS) if head else tokens
        times = tokens / count * (1 if head else setting.layers) * setting.micro_batches
        for kind, (m, n, k) in _passes(count, inputs, outputs):
            rates: dict[str, float | None] = {
                dtype: rate(dtype, m, n, k, kind) for dtype in ("bf16", *(() if head else ("fp8",)))
            }
            rows.append([layer, kind, m, n, k, rates["bf16"], rates.get("fp8")])
            for dtype in step:
                reached = rates.get(dtype) or rates["bf16"]
                assert reached is not None
                step[dtype] += times * 2 * m * n * k / reached
    return {"rows": rows, "step_seconds": step}


def _passes(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    yield "output", (tokens, outputs, inputs)
    yield "input gradient", (tokens, inputs, outputs)
    yield "weight gradient", (outputs, inputs, tokens)


def rate(kind: str, m: int, n: int, k: int, which: str = "output") -> float:
    """FLOP/s of [m, k] x [k, n]. In bf16 in the layouts that the pass has in a linear layer; in fp8
    with one scale a matrix, outputs by the faster accumulation, gradients E5M2 x E4M3 by the more
    precise one, as the trainer does it."""
    device = _device()
    if kind == "bf16":
        left = torch.randn(m, k, device=device).bfloat16()
        right = torch.randn(k, n, device=device).bfloat16()
        if which == "output":  # x W^T
            right = right.t().contiguous().t()
        elif which == "weight gradient":  # g^T x
            left = left.t().contiguous().t()
        return 2 * m * n * k / seconds(lambda: torch.mm(left, right))
    one, fast = torch.ones((), device=device), which == "output"
    a = torch.randn(m, k, device=device).to(E4M3 if fast else E5M2)
    b = torch.randn(n, k, device=device).to(E4M3).t()
    wide = torch.bfloat16 if a.is_cuda else torch.float32

    def call() -> Any:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=fast)

    return 2 * m * n * k / seconds(call)


def attention(*shape: int) -> dict[str, Any]:
    """FLOP/s of causal attention, forward, and forward with backward; half of the whole counts, and
    the backward pass 2.5 times the forward (its scores are computed again)."""
    samples, heads, _, length, width = shape
    flops = 2 * samples * heads * length**2 * width
    found: dict[str, Any] = {"shape": list(shape)}
    for name, backend in _backends().items():
        inputs = attention_inputs(*shape)
        try:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                grad = torch.randn_like(attend(*inputs))
                forward = seconds(partial(attend, *inputs))
                both = seconds(partial(_with_gradients, inputs, grad))
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0][:200]
            continue
        found[name] = {"forward": flops / forward, "both": 3.5 * flops / both}
    return found


def _with_gradients(inputs: tuple[Tensor, ...], grad: Tensor) -> None:
    torch.autograd.grad(attend(*inputs), inputs, grad)


def _backends() -> dict[str, Any]:
    named = {"chosen by torch": None, "flash": SDPBackend.FLASH_ATTENTION}
    return named | ({"cuDNN": SDPBackend.CUDNN_ATTENTION} if torch.cuda.is_available() else {})


def seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a call, after one that does not count."""
    call()
    if not torch.cuda.is_available():
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    # Launched together, so that the GPU does not wait for the CPU in between.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return (
        statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) / 1e3
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
