"""The layer list on a device that is not the CPU (tests/unit/one_device.py).

What is made on the CPU by mistake, what the host reads from the device, and what it sends there in
the middle of a step, raises. torch takes a product of 8-bit matrices there only as a GPU does: rows
and columns as they are in memory, multiples of 16, shapes of the scales.
"""

import contextlib
import dataclasses
import importlib.machinery
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from gpt_forward import forward
from one_device import GPU, OneDevice
from small_gpts import BATCH, BIASED, KINDS, LENGTH, LLAMA, PADDED, small_config, small_gpt
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config import ModelConfig
from megatron.features.float8.linear import NOTHING_KEPT, Float8, Kept
from megatron.features.gpu_attention import kernels as gpu_kernels
from megatron.features.gpu_attention.kernels import CUDNN_FIRST
from megatron.model import attention_flex
from megatron.model.attention_backends import KernelOrder
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerStack
from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.layers import VocabParallelEmbedding
from megatron.parallel.linear import linear
from megatron.parallel.loss_head import Targets

KINDS = KINDS | {"dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """It knows no "meta"."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def build(dtype: torch.dtype = torch.bfloat16, **changes) -> LayerStack:
    return small_gpt(GPU, dtype, **changes)


def step(
    stack: LayerStack,
    documents: bool = False,
    positions: bool = False,
    model: ModelConfig | None = None,
    length: int = LENGTH,
) -> Tensor:
    """A training step's forward and backward pass."""
    tokens = torch.zeros(BATCH, length, dtype=torch.long, device=GPU)
    mask = torch.ones(BATCH, length, device=GPU)
    ids = torch.zeros_like(tokens)
    stack.zero_grad()
    loss = forward(
        stack,
        tokens,
        ids if positions else None,
        ids if documents else None,
        dropout_seed=7,
        model=model,
        targets=Targets(tokens, mask),
    )
    loss.backward()
    return loss


def walk(monkeypatch, stack: LayerStack, **kwargs) -> None:
    """A first step, which makes what is made once, and one in which the host only queues work."""
    step(stack, **kwargs)

    def send(*_, **__):
        raise AssertionError("the host sends numbers to the device, which waits for nothing else")

    monkeypatch.setattr(torch, "tensor", send)
    with OneDevice():
        loss = step(stack, **kwargs)
    assert loss.shape == () and loss.dtype == torch.float32
    for name, param in stack.named_parameters():
        assert param.grad is not None, name
        assert (param.grad.device, param.grad.dtype) == (GPU, param.dtype), name


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_stays_on_its_device(monkeypatch, kind, documents):
    walk(monkeypatch, build(**KINDS[kind]), documents=documents, positions=documents)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["dropout", "window", "bloom"])
def test_recomputation_stays_on_its_device(monkeypatch, kind, recompute):
    walk(monkeypatch, build(recompute=recompute, **KINDS[kind]), documents=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_on_their_device(monkeypatch, dtype):
    walk(monkeypatch, build(dtype, **LLAMA))


def test_chunks_of_logits_stay_on_their_device(monkeypatch):
    stack, tokens = build(**LLAMA), 16
    for module in stack.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.head = dataclasses.replace(module.head, chunk_bytes=tokens * PADDED * 2)
    rows, real = [], torch.mm

    def spy(left, right, **options):
        if "out" in options:  # not what the meta device makes of other products
            rows.append(len(left))
        return real(left, right, **options)

    monkeypatch.setattr(torch, "mm", spy)
    walk(monkeypatch, stack)
    assert set(rows) == {tokens}


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_compiled_loss_stays_on_its_device(monkeypatch, chunks):
    """What is compiled for a GPU, before the compiler has it."""
    asked = []
    monkeypatch.setattr(cross_entropy, "compiles_for", lambda kind: asked.append(kind) or True)
    monkeypatch.setattr(softmax_loss, "compiled", lambda function: function)
    monkeypatch.setattr(cross_entropy, "eager_loss", None)
    stack = build(**LLAMA)
    for module in stack.modules():
        if isinstance(module, VocabParallelEmbedding):
            bound = BATCH * LENGTH // chunks * PADDED * 2
            module.head = dataclasses.replace(module.head, chunk_bytes=bound, softcap=5.0)
    walk(monkeypatch, stack)
    assert set(asked) == {"meta"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
def test_8_bit_products_are_laid_out_as_gpus_take_them(monkeypatch, hybrid, recipe):
    """The conditions are those of torch's own shape function, which asks less of a CPU."""
    calls, real = [], torch._scaled_mm

    def spy(left, right, **options):
        # A GPU multiplies no two matrices of E5M2, and takes scales by row for bfloat16 only.
        assert right.dtype == torch.float8_e4m3fn
        assert recipe != "rowwise" or options["out_dtype"] == torch.bfloat16
        calls.append((left.dtype, options["use_fast_accum"]))
        return real(left, right, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    stack = build(float8=Float8(hybrid, recipe), **LLAMA | BIASED)
    walk(monkeypatch, stack)
    backward = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    # Two steps of two blocks with four linear layers, and three products of each.
    assert len(calls) == 2 * 2 * 4 * 3
    assert calls.count((torch.float8_e4m3fn, True)) == 16
    assert calls.count((backward, False)) == 32


@pytest.mark.parametrize("kept", [False, True])
def test_products_by_blocks_are_laid_out_as_gpus_take_them(monkeypatch, kept):
    """Three blocks along a side, where scales by square are padded to four."""
    calls, real = [], F.scaled_mm

    def spy(left, right, left_scale, left_kind, right_scale, right_kind, **options):
        assert right.dtype == torch.float8_e4m3fn and options["output_dtype"] == torch.bfloat16
        assert not options.get("use_fast_accum")  # cuBLAS has none for such scales
        calls.append((left.dtype, right_kind))
        return real(left, right, left_scale, left_kind, right_scale, right_kind, **options)

    monkeypatch.setattr(F, "scaled_mm", spy)
    float8 = Float8(True, "blockwise")
    x = torch.zeros(2, 128, 384, dtype=torch.bfloat16, device=GPU).requires_grad_()
    weight = torch.zeros(640, 384, dtype=torch.bfloat16, device=GPU).requires_grad_()
    with OneDevice():
        state = Kept(float8.weight_rows(weight, NOTHING_KEPT)) if kept else NOTHING_KEPT
        y = linear(x, weight, None, float8, state)
        y.backward(torch.zeros_like(y))
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    lines, squares = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    assert calls == [(forward, squares), (backward, squares), (backward, lines)]


@pytest.mark.parametrize("backend", ["eager", "cudnn", "flash"])
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_attention_kernels_stay_on_their_device(monkeypatch, kind, backend):
    def flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, deterministic):
        # As the package has it: 16 bits, heads behind the sequence, grouped keys.
        assert q.dtype == torch.bfloat16 and q.shape[1] == k.shape[1] == LENGTH
        assert q.shape[2] % k.shape[2] == 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return y.transpose(1, 2)

    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    order = KernelOrder(CUDNN_FIRST)
    monkeypatch.setattr(gpu_kernels, "kernel_order", lambda name: order)
    walk(monkeypatch, build(attention_backend=backend, **KINDS[kind]))


class Flex:
    """In the place of FlexAttention: what it is called with, as torch documents the arguments."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []
        self.scored: list[bool] = []

    def __call__(self, q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux=None):
        assert q.dtype == torch.bfloat16 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert block_mask.shape[2:] == (q.shape[2], k.shape[2])
        for name in block_mask._TENSOR_ATTRS[:8]:
            assert getattr(block_mask, name).device == GPU
        visible = block_mask.mask_mod
        names = visible.__code__.co_freevars
        self.windows.append(visible.__closure__[names.index("window")].cell_contents)
        self.scored.append(score_mod is not None)
        numbers = [torch.zeros(1, dtype=torch.int64, device=GPU) for _ in range(4)]
        if score_mod is not None:
            assert score_mod(torch.zeros(1, device=GPU), *numbers).dtype == torch.float32
        assert block_mask.mask_mod(*numbers).dtype == torch.bool
        y = q * (k.mean() + v.mean())  # no scores, and a gradient for each
        if return_aux is None:
            return y
        assert return_aux == AuxRequest(lse=True)
        return y, AuxOutput(lse=(q * k.mean()).float().sum(-1))


@pytest.fixture
def flex(monkeypatch) -> Flex:
    kernel = Flex()
    monkeypatch.setattr(attention_flex, "DEVICES", (GPU.type,))
    monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: None)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: kernel)
    return kernel


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize(
    ("kind", "documents", "windows", "scored"),
    [
        ("llama", True, [None, None], False), ("window", True, [8, 8], False),
        ("window", False, [8, 8], False), ("gemma2", True, [8, None], True),
        ("bloom", False, [None, None], True), ("llama", False, [], False),
        ("gpt-oss", False, [8, None], False),
    ],
)  # fmt: skip
def test_what_needs_masks_is_fused(monkeypatch, flex, kind, documents, windows, scored, recompute):
    model = small_config(**KINDS[kind])
    walk(monkeypatch, build(recompute=recompute, **KINDS[kind]), documents=documents, model=model)
    # Two steps; the backward pass calls the kernel again, in the order of blocks or in reverse.
    assert len(flex.windows) == len(windows) * (2 if recompute is None else 4)
    assert flex.windows[: len(windows)] == windows
    assert set(flex.scored) == ({scored} if windows else set())


@pytest.mark.parametrize("kind", ["llama", "window", "gemma2"])
def test_documents_of_8192_tokens_have_no_mask_of_their_square(flex, kind):
    """Whatever a step makes is smaller than [S, S]: 64 MiB as bool, for each sample."""
    length = 8192
    shape = KINDS[kind] | {"seq_length": length, "max_position_embeddings": length}
    stack = build(**shape)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
            largest = max(largest, *sizes, 0)
            return result

    with Watch():
        step(stack, documents=True, model=small_config(**shape), length=length)
    assert largest < length * length
    assert len(flex.windows) == 2
    masks = AttentionMasks(torch.zeros(1, length, dtype=torch.long, device=GPU))
    assert masks.documents.numel() == length * length  # which it would be


@pytest.mark.parametrize("kind", ["llama", "window"])
def test_a_mask_and_grouped_heads_do_not_meet_in_a_kernel(monkeypatch, kind):
    """Of torch's kernels for GPUs only cuDNN's takes both; without it all scores are written out
    (torch 2.13, can_use_flash_attention and can_use_mem_efficient_attention in sdp_utils.cpp)."""
    calls, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((options["attn_mask"] is not None, options["enable_gqa"]))
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    stack = build(**KINDS[kind])
    walk(monkeypatch, stack, documents=True)
    walk(monkeypatch, stack)
    masked, plain = (True, False), (kind == "window", kind != "window")
    assert calls == [masked] * 4 + [plain] * 4
