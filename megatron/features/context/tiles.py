"""MLPs that compute a sequence in tiles.

The inner activations of only one tile exist at a time. The forward pass keeps only the input, and
the backward pass recomputes each tile (tiled MLP of Bekman et al. 2025, arXiv:2506.13996, section
3.1.2). Outputs equal those of the whole sequence. Gradients of weights are summed over tiles in at
least float32 and rounded once, so that an engine sees one gradient per parameter.

Shapes: B batch, S sequence (a rank's slice of it in a sequence-parallel region), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.model.layer_list import LayerState
from megatron.model.mlp import MLP
from megatron.parallel.layers import VocabParallelEmbedding
from megatron.parallel.loss_head import LossHead
from megatron.parallel.random import random_state, set_random_state
from megatron.parallel.softmax_loss import slices
from megatron.parallel.tensor_parallel import summed_as


class TiledMLP:
    """Forward pass of an MLP, tile by tile.

    A tile is a range of this rank's slice of the sequence. With sequence parallelism the layers
    gather the tiles of all ranks, so that collectives transfer as many bytes as without tiles.

    Args:
        tokens: function that returns the length of a tile, given the length of a rank's slice
            and the number of tokens after gathering.
    """

    def __init__(self, mlp: MLP, tokens: Callable[[int, int], int]) -> None:
        self.mlp, self._plain, self._tokens = mlp, mlp.forward, tokens
        layers = (mlp.up, mlp.down)
        self._draws = any(layer.adapters is not None for layer in layers)

    def __call__(self, x_BSH: Tensor, state: LayerState | None = None) -> Any:
        """Return the MLP's output and the unchanged state. Without a state, return only the output,
        computed without tiles."""
        if state is None:
            return self._plain(x_BSH)
        length = x_BSH.shape[1]
        tiles = list(slices(length, self._tokens(length, length * self.mlp.up.tp.slices)))
        if len(tiles) == 1:
            return self._plain(x_BSH), state
        if not torch.is_grad_enabled():
            return self.outputs(x_BSH, tiles), state
        params = dict(self.mlp.named_parameters())
        return _Tiles.apply(x_BSH, self, tiles, tuple(params), *params.values()), state

    def outputs(self, x_BSH: Tensor, tiles: Sequence[slice]) -> Tensor:
        """Compute the output [B, S, H] tile by tile, without gradients."""
        y_BSH: Tensor | None = None
        for tile in tiles:
            y_BTH = self._plain(x_BSH[:, tile])
            if y_BSH is None:
                y_BSH = y_BTH.new_empty(*x_BSH.shape[:2], y_BTH.shape[-1])
            y_BSH[:, tile] = y_BTH
        assert y_BSH is not None
        return y_BSH

    def random(self) -> dict[str, Tensor] | None:
        """Return the state of the generators that adapters draw from, or None if none draw."""
        return random_state() if self._draws and self.mlp.training else None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        tiled: TiledMLP,
        tiles: list[slice],
        names: tuple[str, ...],
        *params: Tensor,
    ) -> Tensor:
        ctx.tiled, ctx.tiles, ctx.names, ctx.random = tiled, tiles, names, tiled.random()
        kind = x_BSH.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(x_BSH, *params)
        return tiled.outputs(x_BSH, tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: Tensor) -> tuple[Tensor | None, ...]:
        x_BSH, *params = ctx.saved_tensors
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        leaves = [p.detach().requires_grad_(n) for p, n in zip(params, needs[1:], strict=True)]
        for name, leaf in zip(ctx.names, leaves, strict=True):
            summed_as(leaf, ctx.tiled.mlp.get_parameter(name))
        replaced = dict(zip(ctx.names, leaves, strict=True))
        kind, dtype, enabled = ctx.autocast
        x_grad_BSH = torch.empty_like(x_BSH) if needs[0] else None
        sums: list[Tensor | None] = [None] * len(params)
        with _drawing_again(ctx.random), torch.enable_grad(), torch.autocast(kind, dtype, enabled):
            for tile in ctx.tiles:
                x_BTH = x_BSH[:, tile].detach().requires_grad_(needs[0])
                y_BTH = torch.func.functional_call(ctx.tiled.mlp, replaced, (x_BTH,))
                inputs = [x for x, n in zip((x_BTH, *leaves), needs, strict=True) if n]
                grads = iter(torch.autograd.grad(y_BTH, inputs, grad_BSH[:, tile]))
                if x_grad_BSH is not None:
                    x_grad_BSH[:, tile] = next(grads)
                _add(sums, grads, needs[1:])
        rounded = (s if s is None else s.to(p.dtype) for s, p in zip(sums, params, strict=True))
        return x_grad_BSH, None, None, None, *rounded


def _add(sums: list[Tensor | None], grads: Iterator[Tensor], needs: Sequence[bool]) -> None:
    for place, needed in enumerate(needs):
        if needed:
            grad, total = next(grads), sums[place]
            if total is None:
                sums[place] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total += grad


class _drawing_again:
    """Context manager that repeats the random draws made from a saved generator state. Does nothing
    if ``state`` is None."""

    def __init__(self, state: dict[str, Tensor] | None) -> None:
        self._state = state

    def __enter__(self) -> None:
        if self._state is not None:
            self._now = random_state()
            set_random_state(self._state)

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            set_random_state(self._now)


def tile_mlps(blocks: Sequence[nn.Module], tokens: Callable[[int, int], int]) -> None:
    """Make the dense MLPs of blocks compute in tiles. Expert layers are left unchanged. ``tokens``
    is the function of :class:`TiledMLP`."""
    for block in blocks:
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, MLP) and getattr(block, "mlp_is_plain", False):
            mlp.forward = TiledMLP(mlp, tokens)  # type: ignore[method-assign, assignment]
            # Call the MLP like other modules, uncompiled, because tiles are not a single graph.
            block.mlp_is_plain = False  # type: ignore[assignment]


def chunk_losses(model: nn.Module, tokens: int) -> None:
    """Make output heads compute the logits of at most ``tokens`` tokens at a time."""
    for module in model.modules():
        head = getattr(module, "head", None)
        if isinstance(head, LossHead) and isinstance(module, VocabParallelEmbedding):
            weight = module.weight
            size = tokens * module.rows_local * weight.element_size()
            module.head = replace(head, chunk_bytes=size)
