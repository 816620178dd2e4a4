"""Attention for training, computed in the same order as in generation.

The forward pass is that of :class:`~megatron.apps.generation.execution.paged_attention.PagedCache`:
the same functions on the same pages, with bitwise equal results. The backward pass differentiates
the ordinary attention kernel on the same queries, keys and values, which is mathematically the same
function.

Shapes: T tokens of the row, B texts, S positions of a text, N query heads, K key and value heads, D
head width, W width of a latent vector, X pages, P positions of a page.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.apps.generation.execution.paged_attention import PagedCache
from megatron.apps.generation.execution.runner import PAGE_SIZE
from megatron.apps.reinforcement.exact.layout import RowLayout
from megatron.model.attention_backends import AttentionBackend, eager, sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring


class ScratchPages:
    """KV pages of one block at a time, in place of a
    :class:`~megatron.apps.generation.memory.PageMemory`. All blocks can use the same pages, since
    each block writes whatever it reads."""

    shape = SimpleNamespace(positions=PAGE_SIZE)

    def __init__(self, pages: int, device: torch.device) -> None:
        self._pages, self.device = pages, device
        self._pools: dict[Any, Tensor] = {}
        self._current: tuple[Tensor, ...] = ()

    def fit(self, *kept_BSKD: Tensor) -> None:
        """Select the pages [X, K, P, D] for a block whose keys and values have these shapes. New
        pages are zeros; reused pages keep their contents."""
        self._current = tuple(self._pool(n, kept) for n, kept in enumerate(kept_BSKD))

    def _pool(self, number: int, kept: Tensor) -> Tensor:
        heads = kept.shape[2] if kept.dim() == 4 else 1
        shape = (self._pages, heads, self.shape.positions, kept.shape[-1])
        key = number, shape, kept.dtype
        if key not in self._pools:
            self._pools[key] = kept.new_zeros(shape)
        return self._pools[key]

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """Return the pages of the current block."""
        return self._current


class EpisodeCache(PagedCache):
    """KV cache of a micro batch of texts, with differentiable attention."""

    def __init__(self, layout: RowLayout, rows: int, device: torch.device) -> None:
        self.pages, self.layout = ScratchPages(layout.pages, device), layout
        super().__init__(
            self.pages,  # type: ignore[arg-type]  # has what is read of it
            layout.parts,
            rows,
            layout.positions,
            encoded={},
            padded=layout.padded,
        )

    def attended(
        self,
        layer: int,
        scores: AttentionScoring,
        width: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        bias_NT: Tensor | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """See :class:`PagedCache`."""
        assert bias_NT is None, "relative positions are those of encoders and decoders"
        return _Attention.apply(self, layer, scores, width, q, k, v, sinks_N)

    def paged(
        self,
        layer: int,
        scores: AttentionScoring,
        width: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention as in generation, without gradients."""
        self.pages.fit(*(each for each in (k, v) if each is not None))
        return super().attended(layer, scores, width, q, k, v, None, sinks)

    def ordinary(
        self,
        scores: AttentionScoring,
        width: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention [B, S, N, D] separately for each text with an ordinary kernel, which
        has gradients."""
        places, shape = self.layout.rows_BS.flatten(), self.layout.rows_BS.shape
        q_BNSD = q[0].index_select(0, places).unflatten(0, shape).transpose(1, 2)
        k_BKSD = k[0].index_select(0, places).unflatten(0, shape)
        attend: AttentionBackend = sdpa
        if v is None:
            k_BKSD, attend = k_BKSD.unsqueeze(2), eager
            v_BKSD = k_BKSD[..., :width]
        else:
            v_BKSD = v[0].index_select(0, places).unflatten(0, shape)
        k_BKSD, v_BKSD = k_BKSD.transpose(1, 2), v_BKSD.transpose(1, 2)
        y_BNSD = attend(q_BNSD, k_BKSD, v_BKSD, scores, AttentionMasks(), 0.0, None, sinks)
        return y_BNSD.transpose(1, 2)

    def _write(self, pool_XKPD: Tensor, new_BS: Tensor) -> None:
        # A prompt's keys and values are copied to separate pages for each text that continues it.
        K, P, width = pool_XKPD.shape[1:]
        if K not in self._written:
            places_W = self.layout.places_W
            firsts_W = places_W // P * (K * P) + places_W % P
            heads_K = torch.arange(K, device=self.device) * P
            self._written[K] = (firsts_W[:, None] + heads_K).flatten()
        rows = new_BS[0].index_select(0, self.layout.rows_W)
        pool_XKPD.view(-1, width).index_copy_(0, self._written[K], rows.reshape(-1, width))

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.pages.device


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        cache: EpisodeCache,
        layer: int,
        scores: AttentionScoring,
        width: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.cache, ctx.scores, ctx.width = cache, scores, width
        ctx.save_for_backward(q, k, v, sinks)
        return cache.paged(layer, scores, width, q, k, v, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1TND: Tensor) -> tuple[Tensor | None, ...]:
        cache, needed = ctx.cache, ctx.needs_input_grad[4:]
        inputs = [
            None if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            y_BSND = cache.ordinary(ctx.scores, ctx.width, *inputs)
        layout = cache.layout
        grad_BSND = grad_1TND[0].index_select(0, layout.rows_BS.flatten())
        grad_BSND = grad_BSND.unflatten(0, layout.rows_BS.shape)
        grad_BSND = grad_BSND * layout.first_BS[..., None, None]
        trained = [x for x in inputs if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(y_BSND, trained, grad_BSND))
        of_inputs = (next(grads) if x is not None and x.requires_grad else None for x in inputs)
        return *(None,) * 4, *of_inputs
