#!/usr/bin/env python
"""Time of attention kernels, forward and backward, by shape.

    python benchmarks/attention.py
    python benchmarks/attention.py --lengths 1024,8192 --head-dims 64,128 --heads 16 --json out.json
    python benchmarks/attention.py --lengths 4096 --documents 8

On a GPU: torch's scaled_dot_product_attention with the kernel that it chooses, and with each of its
kernels alone (flash, cuDNN, efficient, math); the flash-attn packages 2, 3 and 4 and FlexAttention
where they are installed and compile. On a CPU: torch's fused kernel and plain matrix products. All
causal. With --documents samples consist of as many documents of equal lengths, between which there
is no attention: FlexAttention with block masks, and torch's kernel and plain products with a dense
mask; the time is that of one layer, without that of the masks. Kernels take turns within every
round; shown is the median over the rounds, in milliseconds of CUDA events or of CPU time, and
TFLOP/s of causal attention counted once (3.5 x 2 B N S^2 D: two products forward, five backward;
divided by the number of documents). What a kernel cannot do is a line with its reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.features.gpu_attention.kernels import FLASH
from megatron.model.attention_backends import AttentionBackend, eager, sdpa
from megatron.model.attention_flex import block_mask
from megatron.model.attention_masks import PLAIN, AttentionMasks

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BSND, k_BSKD, v_BSKD) -> [B, S, N, D]."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(f"{name or device}, torch {torch.__version__}, bfloat16, causal, median of rounds")
    if options.documents > 1:
        print(f"{options.documents} documents in each sample")
    results = []
    for head_dim in options.head_dims:
        for length in options.lengths:
            batch = max(1, options.tokens // length)
            shape = (batch, length, options.heads, options.kv_heads or options.heads, head_dim)
            results.append(measure(shape, device, options.rounds, options.documents))
            show(results[-1])
    if options.json:
        found = {"options": vars(options), "device": name, "torch": torch.__version__}
        with open(options.json, "w") as file:
            json.dump({**found, "shapes": results}, file, indent=1)


def parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    found = argparse.ArgumentParser(description="Measures attention kernels.")
    add, numbers = found.add_argument, lambda text: [int(part) for part in text.split(",")]
    add("--lengths", type=numbers, default=[1024, 2048, 4096, 8192] if on_gpu else [256, 512])
    add("--head-dims", type=numbers, default=[64, 128] if on_gpu else [64])
    add("--heads", type=int, default=16 if on_gpu else 4)
    add("--kv-heads", type=int, help="key and value heads (default: --heads)")
    add("--tokens", type=int, default=16_384 if on_gpu else 1024, help="tokens of a batch")
    add("--documents", type=int, default=1, help="documents of a sample")
    add("--rounds", type=int, default=20 if on_gpu else 9)
    add("--threads", type=int, default=1, help="threads on a CPU")
    add("--json", help="file for the results")
    return found


def heads_first(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def document_kernels(
    device: torch.device, batch: int, length: int, documents: int
) -> dict[str, Kernel]:
    """Kernels for several documents that can be tried here, by name."""
    places = torch.arange(length, device=device)
    ids_BS = (places * documents // length).expand(batch, length)
    dense = AttentionMasks(ids_BS)

    def ours(attend: AttentionBackend, masks: AttentionMasks) -> Kernel:
        return partial(heads_first, lambda q, k, v: attend(q, k, v, PLAIN, masks, 0.0))

    found = {"sdpa": ours(sdpa, dense), "eager": ours(eager, dense)}
    if device.type == "cuda":
        blocks = {None: block_mask(length, None, ids_BS, device)}
        found["flex"] = ours(sdpa, AttentionMasks(ids_BS, blocks=blocks))
    return found


def kernels(device: torch.device, grouped: bool) -> dict[str, Kernel]:
    """Kernels that can be tried here, by name."""

    def torch_kernel(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
        if backend is None:
            return attend(q, k, v)
        with sdpa_kernel(backend):
            return attend(q, k, v)

    def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, k, v, PLAIN, AttentionMasks(), 0.0)

    found: dict[str, Kernel] = {
        "sdpa": partial(heads_first, partial(torch_kernel, None)),
        "eager": partial(heads_first, products),
    }
    if device.type == "cpu":
        return found
    for name in ("FLASH", "CUDNN", "EFFICIENT"):
        backend = getattr(SDPBackend, f"{name}_ATTENTION")
        found[f"sdpa {name.lower()}"] = partial(heads_first, partial(torch_kernel, backend))
    found["sdpa math"] = partial(heads_first, partial(torch_kernel, SDPBackend.MATH))
    found["flex"] = partial(heads_first, _flex_attention(grouped))
    for version, flash in FLASH.items():
        if flash.installed:
            found[f"flash-attn {version}"] = _flash_attention(flash.module)
        else:
            print(f"flash-attn {version}: not installed")
    return found


def _flash_attention(package: str) -> Kernel:
    function = importlib.import_module(package).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = function(q, k, v, causal=True)
        return y[0] if isinstance(y, tuple) else y

    return attend


def _flex_attention(grouped: bool) -> Kernel:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, h, at, seen: at >= seen, None, None, length, length, device=q.device
            )
        return compiled(q, k, v, block_mask=masks[length], enable_gqa=grouped)

    return attend


def measure(
    shape: tuple[int, int, int, int, int], device: torch.device, rounds: int, documents: int = 1
) -> dict[str, Any]:
    """Milliseconds of every kernel for B, S, N, K, D; a string says why a kernel has none."""
    batch, length, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    # Laid out as the trainer has them: heads side by side in one product of B x S rows.
    qkv = torch.randn(
        batch, length, heads + 2 * kv_heads, head_dim, device=device, dtype=torch.bfloat16
    ).requires_grad_()
    grad = torch.randn(batch, length, heads, head_dim, device=device, dtype=torch.bfloat16)
    times: dict[str, dict[str, list[float]]] = {}
    failed: dict[str, str] = {}
    if documents > 1:
        tried = document_kernels(device, batch, length, documents)
    else:
        tried = kernels(device, heads != kv_heads)
    for number in range(rounds + 2):
        for name, kernel in tried.items():
            if name in failed:
                continue
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
            try:
                y, forward = _timed(lambda: kernel(q, k, v), device)  # noqa: B023
                _, backward = _timed(lambda: torch.autograd.grad(y, qkv, grad), device)  # noqa: B023
            except (RuntimeError, ImportError) as error:  # out of memory is a RuntimeError
                failed[name] = str(error).splitlines()[0][:90]
                continue
            if number > 1:  # the first rounds compile and choose
                each = times.setdefault(name, {"forward": [], "backward": []})
                each["forward"].append(forward)
                each["backward"].append(backward)
    names = ("batch", "length", "heads", "kv_heads", "head_dim")
    medians = {
        name: {part: statistics.median(values) for part, values in parts.items()}
        for name, parts in times.items()
    }
    found = dict(zip(names, shape, strict=True))
    return {**found, "documents": documents, "ms": medians, "failed": failed}


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result and milliseconds."""
    if device.type == "cpu":
        start = time.process_time()
        found = function()
        return found, (time.process_time() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    found = function()
    end.record()
    torch.cuda.synchronize()
    return found, begin.elapsed_time(end)


def show(result: dict[str, Any]) -> None:
    """A table, the fastest kernel first."""
    batch, length, heads, head_dim = (result[n] for n in ("batch", "length", "heads", "head_dim"))
    flop = 3.5 * 2 * batch * heads * length**2 * head_dim / result["documents"]
    title = f"\nbatch {batch}, length {length}, heads {heads} ({result['kv_heads']} for keys)"
    print(f"{title}, head width {head_dim}")
    print(f"{'kernel':<16}{'forward ms':>12}{'backward ms':>13}{'TFLOP/s':>10}")
    for name, ms in sorted(result["ms"].items(), key=lambda item: sum(item[1].values())):
        rate = flop / sum(ms.values()) / 1e9
        print(f"{name:<16}{ms['forward']:>12.2f}{ms['backward']:>13.2f}{rate:>10.2f}")
    for name, reason in result["failed"].items():
        print(f"{name:<16}{reason:>12}")


if __name__ == "__main__":
    main()
