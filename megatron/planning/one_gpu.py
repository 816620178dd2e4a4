"""What one GPU is expected to reach: an estimate of a training step by its parts, none measured.

A step is matrix products at a share of the peak that grows with their width, attention at another,
and passes over memory at a share of its bandwidth, one after the other. The numbers of bytes are
those of compiled blocks, the compiled loss head and the one-pass update at ZeRO 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parallel import COMPILED_CHUNK_TOKENS
from megatron.model.flops import TransformerShape


@dataclass(frozen=True)
class Gpu:
    """Of the makers' data sheets, without sparsity; memory as nvidia-smi shows it.

    Attributes:
        bf16, fp8: peak TFLOP/s; None where there are no 8-bit matrix products.
        bandwidth: of its memory, TB/s.
        memory: GiB.
    """

    name: str
    bf16: float
    fp8: float | None
    bandwidth: float
    memory: float


GPUS = (
    Gpu("A100", 312, None, 2.04, 80.0),
    Gpu("H100", 989, 1979, 3.35, 79.6),
    Gpu("H200", 989, 1979, 4.8, 140.4),
    Gpu("B200", 2250, 4500, 8.0, 179.0),
)


@dataclass(frozen=True)
class Training:
    """A model of Llama's kind and how it is trained.

    Attributes:
        micro_tokens, step_tokens: tokens of a micro batch, and of an optimizer step.
    """

    name: str
    shape: TransformerShape
    micro_tokens: int
    step_tokens: int
    tied: bool = False

    @property
    def block_parameters(self) -> float:
        """Parameters of the blocks' linear layers."""
        shape = self.shape
        heads = 2 * shape.num_attention_heads + 2 * shape.num_query_groups
        of_block = heads * shape.kv_channels + 3 * shape.ffn_hidden_size
        return float(shape.num_layers * shape.hidden_size * of_block)

    @property
    def parameters(self) -> float:
        """Of the blocks and the token embedding, with the head where it is not tied."""
        table = self.shape.padded_vocab_size * self.shape.hidden_size
        return self.block_parameters + table * (1 if self.tied else 2)


def _llama(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> TransformerShape:
    width = hidden // heads
    return TransformerShape(layers, hidden, ffn, heads, groups, width, 2048, 32_000, gated=True)


def _qwen(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> TransformerShape:
    return TransformerShape(layers, hidden, ffn, heads, groups, 128, 1024, 152_064, gated=True)


TRAININGS = (
    Training("1.3B", _llama(24, 2048, 16, 16, 5504), 16_384, 65_536),
    Training("3B", _llama(28, 3072, 24, 8, 8192), 8_192, 65_536),
    Training("7B", _llama(32, 4096, 32, 32, 11_008), 4_096, 131_072),
    Training("Qwen2.5-1.5B", _qwen(28, 1536, 12, 2, 8960), 16_384, 524_288, tied=True),
    Training("Qwen2.5-3B", _qwen(36, 2048, 16, 2, 11_008), 8_192, 524_288, tied=True),
    Training("Qwen2.5-7B", _qwen(28, 3584, 28, 4, 18_944), 4_096, 524_288),
)
"""Those of the GPU suite."""

ATTENTION = 0.45
"""Share of the bf16 peak that attention kernels reach, both passes together, causal."""
BANDWIDTH = 0.82
"""Share of its memory's bandwidth that a GPU reaches."""
FP8_PRODUCTS = 0.85
"""Share of the peak that 8-bit products reach, relative to that of bf16 products."""
HEAD_BYTES, UPDATE_BYTES, SUM_BYTES = 6, 30, 6
"""Traffic of a logit; of a parameter in an update; of a parameter where a micro batch's gradient is
added to those before."""


def product_share(hidden: int) -> float:
    """Share of the bf16 peak that matrix products reach: 0.49 at a width of 768, 0.74 at 4096 and
    no more, as rates of H100 GPUs are reported."""
    return min(0.74, 0.485 + 0.107 * math.log2(hidden / 768))


def seconds_per_token(training: Training, gpu: Gpu, fp8: bool = False) -> float:
    """Of all parts of a step on one GPU."""
    shape, table = training.shape, training.shape.padded_vocab_size * training.shape.hidden_size
    width, bandwidth = shape.hidden_size, 1e12 * gpu.bandwidth * BANDWIDTH
    bf16 = 1e12 * gpu.bf16 * product_share(width)
    blocks = bf16
    if fp8:
        assert gpu.fp8 is not None
        blocks = 1e12 * gpu.fp8 * product_share(width) * FP8_PRODUCTS
    products = 6 * training.block_parameters
    head = 6 * table
    attention = shape.flops_per_token(causal=True) - products - head
    inner = shape.ffn_hidden_size
    # Norms, rotations, gated activation and residuals, forward and backward, in 2 bytes.
    passes = 54.0 * width + 18.0 * inner
    if fp8:
        # Largest value, cast and transposed cast of inputs and gradients of each product.
        passes += 6 * (8 * width + 3 * inner)
    micro_batches = training.step_tokens / training.micro_tokens
    per_step = training.parameters * (UPDATE_BYTES + SUM_BYTES * (micro_batches - 1))
    moved = shape.num_layers * passes + HEAD_BYTES * shape.padded_vocab_size
    moved += per_step / training.step_tokens
    # The gradient of the table in float32, and its scaling at the end of a micro batch.
    moved += 8 * table / COMPILED_CHUNK_TOKENS + 6 * table / training.micro_tokens
    time = products / blocks + head / bf16 + attention / (1e12 * gpu.bf16 * ATTENTION)
    return time + moved / bandwidth


def state_gigabytes(training: Training, bytes_per_parameter: float) -> float:
    """Weights, gradients and optimizer states."""
    return training.parameters * bytes_per_parameter / 1e9


def activation_gigabytes(training: Training) -> float:
    """What a micro batch keeps for its backward pass, a chunk of logits, and their gradient."""
    shape = training.shape
    kv = shape.num_query_groups * shape.kv_channels
    # Input of each norm and linear layer, queries, keys, values and the gate, in 2 bytes.
    kept = 2 * (4 * shape.hidden_size + 2 * kv + 2 * shape.ffn_hidden_size)
    blocks = training.micro_tokens * shape.num_layers * kept
    logits = 2 * min(training.micro_tokens, COMPILED_CHUNK_TOKENS) * shape.padded_vocab_size
    # The gradient of the table is summed in float32.
    return (blocks + logits + 4 * shape.padded_vocab_size * shape.hidden_size) / 1e9


STATES = (16, 10, 8)
"""Bytes of a parameter in weights, gradients and states: float32 states, bf16 moments with exact
main weights, bf16 weights alone with bf16 moments."""

RESERVE = 6
"""GB for CUDA, libraries and what is lost between tensors."""


def fitting(training: Training, gpu: Gpu) -> str:
    """Bytes per parameter of the most exact states with which it fits, :data:`RESERVE` left over;
    "-" if none does."""
    usable = gpu.memory * 2**30 / 1e9 - RESERVE
    for size in STATES:
        if state_gigabytes(training, size) + activation_gigabytes(training) <= usable:
            return str(size)
    return "-"


def rows() -> Iterator[list[str]]:
    """The table of the page "GPUs": its head, and a line for each training and GPU."""
    yield ["model", "GPU", "bytes", "bf16: tokens/s", "MFU", "fp8: tokens/s", "TFLOP/s", ""]
    for training in TRAININGS:
        flops = training.shape.flops_per_token(causal=True)
        for gpu in GPUS:
            cells = [training.name, gpu.name, fitting(training, gpu)]
            if cells[-1] == "-":
                yield [*cells, "-", "-", "-", "-", "estimated"]
                continue
            rate = 1 / seconds_per_token(training, gpu)
            cells += [f"{rate:,.0f}", f"{rate * flops / gpu.bf16 / 1e12:.0%}"]
            if gpu.fp8 is None:
                cells += ["-", "-"]
            else:
                fast = 1 / seconds_per_token(training, gpu, fp8=True)
                cells += [f"{fast:,.0f}", f"{fast * flops / 1e12:,.0f}"]
            yield [*cells, "estimated"]


def markdown() -> str:
    """The table as Markdown."""
    head, *lines = rows()
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    print(markdown())
