"""Memory of long sequences on a GPU: streams that copy, chunks that travel, tiles; against the same
training without them, and against plans."""

import numpy as np
import pytest
import torch
from gpu_runs import DEVICE, RUN, SHAPE, TINY, needs_gpu, no_waiting, train, trainer

from megatron.apps.planning.memory import peak_memory
from megatron.features.context.flags import LongContextConfig
from megatron.features.context.host import ChunkedAttention
from megatron.features.context.offload import Offload
from megatron.model.attention_backends import attention_backend
from megatron.model.attention_masks import AttentionMasks, AttentionScoring

FULL = ["--recompute-granularity", "full"]
FPDT = [
    "--ds-sequence-parallel-fpdt", "--ds-sequence-parallel-fpdt-chunk-size", "16",
]  # fmt: skip
SAME = {
    "inputs": (["--checkpoint-in-cpu", *FULL], FULL),
    "blocks": (["--cpu-offloading"], []),
    "first block": (["--cpu-offloading-num-layers", "1"], []),
    "selective": (["--cpu-offloading"], ["--recompute-granularity", "selective"]),
    "chunks": ([*FPDT, "--ds-sequence-parallel-fpdt-offloading", *FULL], [*FPDT, *FULL]),
}
"""Flags that leave every bit, and those of the run that they are compared with."""


@pytest.mark.parametrize("form", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SAME)
def test_host_memory_leaves_every_bit(monkeypatch, name, form):
    """A copy that comes too early or too late, or memory that is used again before it was copied,
    changes bits: every tensor is copied, however small."""
    monkeypatch.setattr("megatron.features.context.offload.SMALLEST", 1)
    flags, plain = SAME[name]
    plain = [*TINY, *plain, *form, "--zero-stage", "1", "--deterministic-mode"]
    found, expected = train([*plain, *flags]), train(plain)
    assert found.losses == expected.losses and found.norms == expected.norms
    for key, values in expected.state.items():
        np.testing.assert_array_equal(found.state[key], values, err_msg=key)


@pytest.mark.parametrize(
    "flags", [["--mlp-chunks-for-training", "4"], FPDT], ids=["tiles", "chunks"]
)
def test_parts_of_a_sequence_train_as_the_whole(flags):
    """Up to the order of sums."""
    found, expected = train([*TINY, *flags]), train(TINY)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-3)


def attention(on_host: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients of chunked causal attention in 4 chunks, and its output."""
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, heads, 1024, 64, generator=draw) for heads in (4, 2, 2, 4)]
    *inputs, grad = (x.to(DEVICE, torch.bfloat16) for x in drawn)
    for x in inputs:
        x.requires_grad_()
    attend = ChunkedAttention(attention_backend("sdpa"), 256, on_host)
    y = attend(*inputs, AttentionScoring(), AttentionMasks(), 0.0)
    return list(torch.autograd.grad(y, inputs, grad)), y


def test_chunks_travel_as_they_are():
    for ours, theirs in zip(attention(on_host=True)[0], attention(on_host=False)[0], strict=True):
        assert torch.equal(ours, theirs)


@needs_gpu
def test_copies_are_pinned_and_wait_for_nothing():
    """Neither pass makes the host wait for the device; the copy is in pinned memory."""
    offload = Offload(DEVICE)
    with no_waiting(), offload.saving((), first=True):
        x = torch.randn(1 << 20, device=DEVICE, requires_grad=True)
        y = (x * x).exp()
    copies = list(offload.copies.values())
    assert copies and all(copy.host.is_pinned() for copy in copies)
    with no_waiting():
        y.sum().backward()
        attention(on_host=True)


LONG = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 32768 "
    "--micro-batch-size 1 --global-batch-size 1 --vocab-size 8192 --train-iters 3 --bf16"
).split()
SAVED = {
    "tiles": [*FULL, "--mlp-chunks-for-training", "0"],
    "host": [*FULL, "--mlp-chunks-for-training", "0", "--checkpoint-in-cpu"],
    "chunks": [
        *FULL, "--mlp-chunks-for-training", "0", "--checkpoint-in-cpu", *FPDT[:2], "4096",
        "--ds-sequence-parallel-fpdt-offloading",
    ],
}  # fmt: skip


@needs_gpu  # of a CPU's memory nobody counts the peak
def test_long_sequences_need_no_more_than_planned():
    """Each way less than the one before, and no more than its plan."""
    peaks = []
    for name, flags in SAVED.items():
        before = torch.cuda.memory_allocated(DEVICE)
        with trainer([*SHAPE, *RUN, *LONG, *flags]) as built:
            config = built.engine.config
            torch.cuda.reset_peak_memory_stats(DEVICE)
            built.fit()
            saving = config.section(LongContextConfig)
            planned = peak_memory(config.model, config.layout(), 1, 1, saving=saving)
            peaks.append(torch.cuda.max_memory_allocated(DEVICE) - before)
        print(f"{name}: {peaks[-1] / 2**20:.0f} MiB, planned {planned.total / 2**20:.0f}")
        assert peaks[-1] <= 1.1 * planned.total, name
    assert peaks == sorted(peaks, reverse=True)
