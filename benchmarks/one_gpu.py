"""Estimate of the speed of one GPU: an estimate of a training step by its parts, none measured.

A step is matrix products at a share of the peak that grows with their width, attention at another,
and passes over memory at a share of its bandwidth, one after the other. The numbers of bytes are
those of compiled blocks, the compiled loss head and the one-pass update at ZeRO 1. What fits is by
:mod:`megatron.apps.planning.memory`, whose blocks are not compiled and keep more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_suite.shapes import SHAPES, Shape

from megatron.apps.planning.memory import peak_memory
from megatron.apps.planning.parameters import linear_parameters, model_parameters
from megatron.apps.planning.step_time import Hardware
from megatron.config.layouts import Layout, StateDtypes
from megatron.features.measured_peak.rates import peak_flops_of
from megatron.model.flops import TransformerShape
from megatron.parallel.cross_entropy import COMPILED_CHUNK_TOKENS


@dataclass(frozen=True)
class Gpu:
    """Numbers of the makers' data sheets, without sparsity; memory as nvidia-smi shows it.

    Attributes:
        fp8: peak TFLOP/s; None where there are no 8-bit matrix products.
        bandwidth: of its memory, TB/s.
        memory: GiB.
    """

    name: str
    fp8: float | None
    bandwidth: float
    memory: float

    @property
    def bf16(self) -> float:
        """Peak TFLOP/s."""
        peak = peak_flops_of(self.name)
        assert peak is not None
        return peak / 1e12

    @property
    def usable_memory(self) -> int:
        """Bytes, with the planner's reserve left over."""
        return Hardware(gpu_memory=f"{self.memory}GiB").usable_memory


GPUS = (
    Gpu("A100", None, 2.04, 80.0),
    Gpu("H100", 1979, 3.35, 79.6),
    Gpu("H200", 1979, 4.8, 140.4),
    Gpu("B200", 4500, 8.0, 179.0),
)


@dataclass(frozen=True)
class States:
    """A format of the optimizer's states (docs/guides/gpu.md).

    Attributes:
        dtypes: None for float32 tensors of their own.
        moved: bytes of traffic of a parameter in an update.
    """

    name: str
    dtypes: StateDtypes | None
    moved: int


STATES = (
    States("fp32", None, 30),
    States("A", StateDtypes("fp32", "bf16", "bf16"), 20),
    States("C", StateDtypes("fp32", "int8", "int8"), 16),
    States("B", StateDtypes("bf16", "bf16", "bf16"), 16),
)
"""The most exact first: 16, 10, 8.03 and 8 bytes of a parameter in weights, gradients and states.
C has exact main weights and 8-bit moments, B bf16 weights alone and bf16 moments."""

MODELS = tuple(
    SHAPES[name] for name in ("1.3B", "3B", "7B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B")
)

ATTENTION = 0.45
"""Share of the bf16 peak that attention kernels reach, both passes together, causal."""
BANDWIDTH = 0.82
"""Share of its memory's bandwidth that a GPU reaches."""
FP8_PRODUCTS = 0.85
"""Share of the peak that 8-bit products reach, relative to that of bf16 products."""
HEAD_BYTES, SUM_BYTES = 6, 6
"""Traffic of a logit; of a parameter where a micro batch's gradient is added to those before."""


def product_share(hidden: int) -> float:
    """Share of the bf16 peak that matrix products reach: 0.49 at a width of 768, 0.74 at 4096 and
    no more, as rates of H100 GPUs are reported."""
    return min(0.74, 0.485 + 0.107 * math.log2(hidden / 768))


@dataclass(frozen=True)
class Fit:
    """Layout and micro batch with which a model fits.

    Attributes:
        micro_tokens: tokens of a micro batch.
    """

    states: States
    micro_tokens: int


def fitting(shape: Shape, gpu: Gpu, fp8: bool = False) -> Fit | None:
    """The most exact states with which a model fits, and the largest micro batch up to its own by
    which it does; None if none does."""
    model = shape.model()
    layout = Layout(zero=1, precision="bf16", float8=fp8)
    for states in STATES:
        stored = replace(layout, states=states.dtypes)
        samples = shape.micro_tokens // shape.seq_length
        while samples:
            count = shape.step_tokens // (samples * shape.seq_length)
            if peak_memory(model, stored, samples, count).total <= gpu.usable_memory:
                return Fit(states, samples * shape.seq_length)
            samples //= 2
    return None


def seconds_per_token(training: Shape, gpu: Gpu, fit: Fit, fp8: bool = False) -> float:
    """Seconds of all parts of a step on one GPU."""
    model = training.model()
    shape = TransformerShape.of(model)
    table = shape.padded_vocab_size * shape.hidden_size
    width, bandwidth = shape.hidden_size, 1e12 * gpu.bandwidth * BANDWIDTH
    bf16 = 1e12 * gpu.bf16 * product_share(width)
    linear = model.num_layers * linear_parameters(model, 1)
    blocks = bf16
    if fp8:
        assert gpu.fp8 is not None
        blocks = 1e12 * gpu.fp8 * product_share(width) * FP8_PRODUCTS
    products = 6 * linear
    head = 6 * table
    attention = shape.flops_per_token(causal=True) - products - head
    inner = shape.ffn_hidden_size
    # Norms, rotations, gated activation and residuals, forward and backward, in 2 bytes.
    passes = 54.0 * width + 18.0 * inner
    if fp8:
        # Largest value, cast and transposed cast of inputs and gradients of each product.
        passes += 6 * (8 * width + 3 * inner)
    micro_batches = training.step_tokens / fit.micro_tokens
    per_step = model_parameters(model) * (fit.states.moved + SUM_BYTES * (micro_batches - 1))
    moved = shape.num_layers * passes + HEAD_BYTES * shape.padded_vocab_size
    moved += per_step / training.step_tokens
    # The gradient of the table in float32, and its scaling at the end of a micro batch.
    moved += 8 * table / COMPILED_CHUNK_TOKENS + 6 * table / fit.micro_tokens
    time = products / blocks + head / bf16 + attention / (1e12 * gpu.bf16 * ATTENTION)
    return time + moved / bandwidth


def rows() -> Iterator[list[str]]:
    """The table of the page "GPUs": its head, and a line for each model and GPU."""
    columns = ["states", "micro batch", "tokens/s"]
    bf16, fp8 = ([f"{name}: {columns[0]}", *columns[1:]] for name in ("bf16", "fp8"))
    yield ["model", "GPU", *bf16, "MFU", *fp8, "TFLOP/s"]
    for shape in MODELS:
        flops = TransformerShape.of(shape.model()).flops_per_token(causal=True)
        for gpu in GPUS:
            plain, plain_rate = _cells(shape, gpu, fp8=False)
            eight, eight_rate = _cells(shape, gpu, fp8=True)
            mfu = f"{plain_rate * flops / gpu.bf16 / 1e12:.0%}" if plain_rate else "-"
            reached = _two_digits(eight_rate * flops / 1e12) if eight_rate else "-"
            yield [shape.name, gpu.name, *plain, mfu, *eight, reached]


def _cells(shape: Shape, gpu: Gpu, fp8: bool) -> tuple[list[str], float]:
    """States, tokens of a micro batch and tokens per second, the last also as a number; dashes and
    0 where the model does not fit, or there are no 8-bit products."""
    fit = None if fp8 and gpu.fp8 is None else fitting(shape, gpu, fp8)
    if fit is None:
        return ["-", "-", "-"], 0.0
    rate = 1 / seconds_per_token(shape, gpu, fit, fp8)
    return [fit.states.name, f"{fit.micro_tokens:,}", _two_digits(rate)], rate


def _two_digits(number: float) -> str:
    """Rounded to two digits: an estimate has no more."""
    return f"{float(f'{number:.1e}'):,.0f}"


def markdown() -> str:
    """The table as Markdown."""
    head, *lines = rows()
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    print(markdown())
