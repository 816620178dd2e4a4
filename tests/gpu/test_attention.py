"""Every attention kernel that is installed against plain products in float64, and its gradient.

On the CPU FlexAttention has no gradient of generated code and runs operator by operator.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from gpt_forward import forward
from gpu_runs import CPU, DEVICE, ON_GPU, needs_gpu, no_waiting
from small_gpts import KINDS, VOCAB, small_config, small_gpt
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, flex_attention

from megatron.config import ConfigError
from megatron.config.engine import FastPathsConfig
from megatron.engine.compilation import compile_blocks
from megatron.features.context.attention import block_rule, scoring_of
from megatron.features.context.blocks import block_attention
from megatron.features.context.exchange import KeyBlock
from megatron.features.gpu_attention.kernels import cudnn, describe_attention
from megatron.model import attention_flex
from megatron.model.attention_backends import attention_backend, eager
from megatron.model.attention_flex import block_mask
from megatron.model.attention_masks import AttentionMasks, AttentionScoring, alibi_slopes
from megatron.model.layer_list import initialise
from megatron.parallel.loss_head import Targets

BATCH, HEADS, KV_HEADS = 2, 4, 2
BACKENDS = ("sdpa", "cudnn", "flash2", "flash3", "flash4")
SCORES = {
    "plain": AttentionScoring(), "scale": AttentionScoring(scale=0.2),
    "window": AttentionScoring(window=100), "softcap": AttentionScoring(softcap=5.0),
    "alibi": AttentionScoring(slopes=alibi_slopes(HEADS)),
    "all": AttentionScoring(window=100, softcap=5.0, slopes=alibi_slopes(HEADS)),
    "full": AttentionScoring(causal=False),
    "full-window": AttentionScoring(causal=False, window=100),
}  # fmt: skip
LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-3}
"""Largest error of an output or gradient, as a share of its norm."""


@pytest.fixture(autouse=True)
def flex_without_generated_code(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
        attend = torch.compile(flex_attention.flex_attention, backend="aot_eager", dynamic=False)
        monkeypatch.setattr(attention_flex, "_compiled", lambda: attend)
        monkeypatch.setattr(attention_flex, "DEVICES", ("cpu",))
        monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: None)


def kernel(name: str):
    """Skips what is not installed, or not for this GPU."""
    try:
        return attention_backend(name)
    except ConfigError as error:
        pytest.skip(str(error))


def drawn(length: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, keys, values and the gradient of the output: here, and in float64 on the CPU."""
    draw = torch.Generator().manual_seed(length + width)
    # As a block has them: heads side by side in memory.
    shapes = [(BATCH, length, heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    made = [torch.randn(shape, generator=draw).to(dtype).transpose(1, 2) for shape in shapes]
    here = [x.to(DEVICE).requires_grad_() for x in made]
    return here, [x.double().requires_grad_() for x in made]


def documents(length: int) -> Tensor:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(4, (BATCH, length), generator=draw).sort().values


def compare(attend, scores, dtype, length=256, width=64, ids=None, blocks=False) -> None:
    (*inputs, grad), (*reference, grad64) = drawn(length, width, dtype)
    here = None if ids is None else ids.to(DEVICE)
    window, causal, made = scores.window, scores.causal, None
    if blocks:
        made = {window: block_mask(length, window, here, DEVICE, causal)}
    found = attend(*inputs, scores, AttentionMasks(here, blocks=made, causal=causal), 0.0)
    expected = eager(*reference, scores, AttentionMasks(ids, causal=causal), 0.0)
    gradients = torch.autograd.grad(found, inputs, grad)
    others = torch.autograd.grad(expected, reference, grad64)
    pairs = zip(("y", "q", "k", "v"), (found, *gradients), (expected, *others), strict=True)
    for name, ours, theirs in pairs:
        theirs = theirs.detach()
        error = float((ours.detach().double().cpu() - theirs).norm() / theirs.norm())
        assert error <= LIMITS[dtype], (name, error)


@pytest.mark.parametrize("scores", ["plain", "scale", "window"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("length", [256, 320, 1000])
@pytest.mark.parametrize("name", BACKENDS)
def test_kernels(name, length, width, scores):
    """A window is a dense mask here; lengths are multiples of cuDNN's blocks, halves, and none."""
    if width == 256 and name == "flash4":
        pytest.skip("version 4 has no gradient for this width")
    if name != "sdpa" and not ON_GPU:
        pytest.skip("only a GPU has this")
    compare(kernel(name), SCORES[scores], torch.bfloat16, length, width)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_flex_attention(dtype, packed, scores):
    ids = documents(300) if packed else None
    compare(attention_backend("sdpa"), SCORES[scores], dtype, 300, 64, ids, blocks=True)


@pytest.mark.parametrize("width", [16, 80, 96, 128, 256])
def test_flex_attention_of_many_widths(width):
    ids = documents(256)
    compare(attention_backend("sdpa"), SCORES["window"], torch.bfloat16, 256, width, ids, True)


class Chunks(NamedTuple):
    """Keys in blocks of so many, as if they came from other ranks."""

    size: int

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[KeyBlock]:
        parts = zip(k.split(self.size, 2), v.split(self.size, 2), strict=True)
        for number, (keys, values) in enumerate(parts):
            first = number * self.size
            yield KeyBlock(keys, values, ((first, first + keys.shape[2]),))

    def forward(self, k: Tensor, v: Tensor, visit: Any) -> None:
        for block in self.blocks(k, v):
            visit(block)

    def backward(self, k: Tensor, v: Tensor, visit: Any) -> tuple[Tensor, Tensor]:
        grads = zip(*(visit(block) for block in self.blocks(k, v)), strict=True)
        k_grad, v_grad = (torch.cat(parts, 2) for parts in grads)
        return k_grad.to(k.dtype), v_grad.to(v.dtype)


def in_blocks(q, k, v, scores, masks, dropout):
    rule = block_rule(scores, scoring_of(scores, q.shape[-1], dropout), masks)
    return block_attention(q, k, v, Chunks(96), rule, ((0, q.shape[2]),))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_attention_in_blocks(dtype, packed, scores):
    """torch's flash, memory-efficient and products, merged; the last block is a smaller one."""
    ids = documents(300) if packed else None
    compare(in_blocks, SCORES[scores], dtype, 300, 64, ids)


@pytest.mark.parametrize("width", [16, 20, 80, 256])
def test_attention_in_blocks_of_many_widths(width):
    compare(in_blocks, SCORES["plain"], torch.bfloat16, 256, width)
    compare(in_blocks, SCORES["window"], torch.float32, 256, width, documents(256))


def forward_and_backward(inputs: list[Tensor], length: int) -> None:
    ids = torch.zeros(len(inputs[0]), length, dtype=torch.int64, device=DEVICE)
    masks = AttentionMasks(ids, blocks={None: block_mask(length, None, ids, DEVICE)})
    found = attention_backend("sdpa")(*inputs[:3], SCORES["softcap"], masks, 0.0)
    found.backward(inputs[3])


@needs_gpu
def test_flex_attention_of_many_lengths_writes_out_no_scores():
    """More lengths than torch compiles of one function by itself, and then a long one."""
    for length in range(64, 64 * 13, 64):
        forward_and_backward(drawn(length, 64, torch.bfloat16)[0], length)
    heads, length = 16, 8192
    shape = (1, heads, length, 64)
    inputs = [
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    ]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward_and_backward(inputs, length)
    assert torch.cuda.max_memory_allocated() - before < heads * length * length * 2 / 4


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom"])
def test_documents_of_a_model(kind, compiled, recompute):
    """Loss and gradients of three micro batches, each with other documents."""
    shape = KINDS[kind] | {"seq_length": 256, "max_position_embeddings": 256}
    outcomes = []
    for device, dtype in ((DEVICE, torch.bfloat16), (CPU, torch.float64)):
        stack = small_gpt(device, dtype, recompute=recompute, **shape)
        for name, param in stack.canonical_parameters():
            initialise(name, param, 1)
        here = dtype == torch.bfloat16
        if compiled and here:
            if not ON_GPU:
                pytest.skip("only a GPU has this")
            compile_blocks([stack.sequence], FastPathsConfig(), DEVICE)
        losses = []
        for number in range(3):
            draw = torch.Generator().manual_seed(number)
            tokens, labels = torch.randint(VOCAB, (2, BATCH, 256), generator=draw).to(device)
            ids = torch.randint(4, (BATCH, 256), generator=draw).sort().values.to(device)
            targets = Targets(labels, torch.ones(BATCH, 256, device=device))
            loss = forward(
                stack, tokens, None, ids,
                model=small_config(**shape) if here else None, targets=targets,
            )  # fmt: skip
            loss.backward()
            losses.append(loss.detach().double().cpu())
        outcomes.append((losses, [param.grad.double().cpu() for param in stack.parameters()]))
    (losses, grads), (expected, others) = outcomes
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0.01, atol=0)
    least = 1e-2 * max(float(grad.norm()) for grad in others)
    for grad, other in zip(grads, others, strict=True):
        assert float((grad - other).norm()) <= 0.05 * max(float(other.norm()), least)


def test_block_masks_wait_for_nothing():
    ids = documents(1000).to(DEVICE)
    block_mask(1000, 100, ids, DEVICE)
    with no_waiting():
        block_mask(1000, 100, ids, DEVICE)


@needs_gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_the_line_names_the_kernel_that_runs(name):
    """By the operators that the profiler sees."""
    attend = kernel(name)
    model = small_config(
        attention_backend=name, kv_channels=64, seq_length=256, max_position_embeddings=256
    )
    line = describe_attention(model, torch.bfloat16, DEVICE, 1, False)
    inputs, _ = drawn(256, 64, torch.bfloat16)
    with torch.profiler.profile() as profile:
        attend(*inputs[:3], AttentionScoring(), AttentionMasks(), 0.0)
    seen = " ".join(event.key for event in profile.key_averages())
    operators = {
        "cuDNN": "_scaled_dot_product_cudnn_attention", "flash-attention": "flash_att",
        "memory-efficient": "_scaled_dot_product_efficient_attention",
    }  # fmt: skip
    (operator,) = (op for word, op in operators.items() if f"attention: {word}" in line)
    assert operator in seen, line
    if name == "cudnn":
        assert "cuDNN" in line


@needs_gpu
def test_a_machine_with_cudnn_takes_it_when_asked():
    with torch.profiler.profile() as profile:
        (q, k, v, _), _ = drawn(256, 64, torch.bfloat16)
        cudnn(q, k, v, AttentionScoring(), AttentionMasks(), 0.0)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert any("cudnn_attention" in event.key for event in profile.key_averages())
    assert SDPBackend.MATH in attention._cur_sdpa_kernel_backends()
