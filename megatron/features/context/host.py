"""Attention of whole sequences chunk by chunk, with keys and values in host memory.

The queries of one chunk attend to one chunk of keys after another (FPDT, Yao et al. 2024,
arXiv:2408.16978, section 3.2), so that outputs and gradients exist in float32 for only one chunk
of queries at a time. With offloading, queries, keys, values and outputs are in host memory
between the passes. In the backward pass, the next chunk is copied to the device during
computation.

Shapes: B batch, N query heads, K key heads, S queries, T keys, C tokens of a chunk, D head
width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.features.context.attention import ContextAttention, block_rule, scoring_of
from megatron.features.context.blocks import Accumulator, BlockRule, Gradients
from megatron.features.context.exchange import KeyBlock, Span
from megatron.features.context.offload import side_stream
from megatron.kernels.compiler import untraced
from megatron.model.attention_backends import AttentionBackend
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.parallel.softmax_loss import slices
from megatron.parallel.tensor_parallel import autocast_dtype


class ChunkedAttention:
    """:data:`~megatron.model.attention_backends.AttentionBackend` that computes in chunks of
    ``chunk`` tokens.

    Args:
        attend: backend for sequences of a single chunk, and for scores with a bias.
        on_host: whether tensors saved for the backward pass are kept in host memory.
    """

    def __init__(self, attend: AttentionBackend, chunk: int, on_host: bool) -> None:
        self.attend, self.chunk, self.on_host = attend, chunk, on_host

    @untraced
    def __call__(
        self,
        q_BNSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        scores: AttentionScoring,
        masks: AttentionMasks,
        dropout: float,
        bias: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        longest = max(q_BNSD.shape[2], k_BKTD.shape[2])
        if bias is not None or longest <= self.chunk:
            return self.attend(q_BNSD, k_BKTD, v_BKTD, scores, masks, dropout, bias, sinks_N)
        dtype = autocast_dtype(q_BNSD)
        q, k, v = (x.to(dtype) for x in (q_BNSD, k_BKTD, v_BKTD))
        scoring = scoring_of(scores, q.shape[-1], dropout)
        rule = masks.once(("chunks", scores, scoring), lambda: block_rule(scores, scoring, masks))
        if dropout:
            rule = replace(rule, seed=int(torch.randint(2**62, (), dtype=torch.int64)))
        return _ChunkedAttention.apply(q, k, v, sinks_N, rule, self.chunk, self.on_host)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: BlockRule,
        chunk: int,
        on_host: bool,
    ) -> Tensor:
        batch, heads, length, width = q.shape
        # Use the memory layout that the output projection reads.
        y = q.new_empty(batch, length, heads, width).transpose(1, 2)
        kind = torch.promote_types(q.dtype, torch.float32)
        sums = q.new_empty(batch, heads, length, dtype=kind)
        for rows in slices(length, chunk):
            q_BNCD, spans = q[:, :, rows], (_span(rows),)
            total = Accumulator(q_BNCD)
            for keys in _seen(rule, _span(rows), k.shape[2], chunk):
                block = KeyBlock(k[:, :, keys], v[:, :, keys], (_span(keys),))
                total.add(q_BNCD, block, rule, spans)
            y[:, :, rows], sums[:, :, rows] = total.result(q.dtype, sinks)
        ctx.rule, ctx.chunk, ctx.on_host = rule, chunk, on_host
        saved = (_to_host((q, k, v, y)) if on_host else (q, k, v, y)) if _trained(ctx) else ()
        ctx.save_for_backward(*saved, sums, sinks)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums, sinks = ctx.saved_tensors
        rule, chunk = ctx.rule, ctx.chunk
        like = {"dtype": sums.dtype, "device": grad.device}
        q_grad = torch.empty_like(q, device=grad.device)
        k_grad, v_grad = (torch.zeros_like(x, **like) for x in (k, v))
        sink_grad = None if sinks is None else torch.zeros_like(sinks, dtype=sums.dtype)
        pairs = [
            (rows, list(_seen(rule, _span(rows), k.shape[2], chunk)))
            for rows in slices(q.shape[2], chunk)
        ]
        loads = [
            load
            for rows, blocks in pairs
            for load in ((q[:, :, rows], y[:, :, rows]),
                         *((k[:, :, keys], v[:, :, keys]) for keys in blocks))
        ]  # fmt: skip
        arriving = _arriving(loads, grad.device)
        for rows, blocks in pairs:
            q_BNCD, y_BNCD = next(arriving)
            of_queries = Gradients(grad[:, :, rows], q_BNCD, y_BNCD, sums[:, :, rows])
            for keys in blocks:
                k_BKCD, v_BKCD = next(arriving)
                block = KeyBlock(k_BKCD, v_BKCD, (_span(keys),))
                k_part, v_part = of_queries.add(block, rule, (_span(rows),))
                k_grad[:, :, keys] += k_part
                v_grad[:, :, keys] += v_part
            q_grad[:, :, rows] = of_queries.q_grad
            if sink_grad is not None:
                sink_grad += of_queries.of_sinks(sinks)
        of_sinks = None if sink_grad is None else sink_grad.to(sinks.dtype)
        return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype), of_sinks, None, None, None


def _trained(ctx: Any) -> bool:
    return any(ctx.needs_input_grad[:4])


def _span(indices: slice) -> Span:
    return indices.start, indices.stop


def _seen(rule: BlockRule, queries: Span, length: int, chunk: int) -> Iterator[slice]:
    """Return the chunks of keys that are visible to any of the queries."""
    return (keys for keys in slices(length, chunk) if rule.sees((queries,), _span(keys)))


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors [B, N, S, D] to host memory, with the heads of a token adjacent, so that a chunk
    of tokens is contiguous. For a GPU the memory is pinned, and the copies run on a side stream."""
    copies = []
    for x in tensors:
        batch, heads, length, width = x.shape
        cuda = x.device.type == "cuda"
        whole_SBND = torch.empty(length, batch, heads, width, dtype=x.dtype, pin_memory=cuda)
        copy = whole_SBND.permute(1, 2, 0, 3)
        with side_stream(x.device) as stream:
            copy.copy_(x, non_blocking=True)
        if stream is not None:
            x.record_stream(stream)
        copies.append(copy)
    return copies


def _arriving(
    loads: Sequence[tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors on the device, in order, while the next ones are being copied."""
    coming = [_start(loads[0], device)] if loads else []
    for number in range(len(loads)):
        arrived, event = coming.pop()
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
        if number + 1 < len(loads):
            coming.append(_start(loads[number + 1], device))
        yield arrived


def _start(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[tuple[Tensor, ...], Any]:
    if tensors[0].device == device:
        return tensors, None
    # The memory is allocated on the current stream, so the copies wait for its earlier users.
    arriving = tuple(torch.empty_like(x, device=device) for x in tensors)
    with side_stream(device) as stream:
        for to, x in zip(arriving, tensors, strict=True):
            to.copy_(x, non_blocking=True)
    assert stream is not None
    return arriving, stream.record_event()


def chunk_attention(blocks: Sequence[nn.Module], chunk: int, on_host: bool) -> None:
    """Make the attention of blocks compute whole sequences in chunks. If ranks exchange heads, this
    applies to a rank's heads. ``chunk`` and ``on_host`` are as in :class:`ChunkedAttention`."""
    for block in blocks:
        for name in ("attention", "cross_attention"):
            attention = getattr(block, name, None)
            place = getattr(attention, "attend", None)
            if isinstance(place, ContextAttention):
                place.attend = ChunkedAttention(place.attend, chunk, on_host)
            elif attention is not None and place is not None:
                attention.attend = ChunkedAttention(place, chunk, on_host)
