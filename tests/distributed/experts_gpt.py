"""A GPT whose MLPs are mixtures of small ones, cut over the axis ``expert`` as in a real
mixture are: every expert reads every token, so that no choice flips by rounding. The axis has the
size that :func:`expert_axis` says; ``expert_families/experts.py`` makes a family of the model.

Shapes: B samples of a rank, N of all ranks along ``expert``, S sequence, H hidden, E experts, F
inner width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import added_families
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.families.gpt import GPT
from megatron.model.block import Block
from megatron.model.layer_list import LayerSpec
from megatron.model.spec import ModelSpec
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Cut, Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel

EXPERTS, INNER = 4, 8
FOLDER = Path(__file__).parent / "expert_families"


class _Gather(torch.autograd.Function):
    """The rows of all ranks forward; this rank's of the summed gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        rows = [torch.empty_like(x) for _ in group.ranks]
        dist.all_gather(rows, x.contiguous(), group=group.handle)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total.chunk(ctx.group.size)[ctx.group.rank], None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum forward; the gradients of all rows backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group.handle)
        return total.chunk(group.size)[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = [torch.empty_like(grad) for _ in ctx.group.ranks]
        dist.all_gather(rows, grad.contiguous(), group=ctx.group.handle)
        return torch.cat(rows), None


class _Enter(torch.autograd.Function):
    """Identity forward; backward the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total, None


class Experts(nn.Module):
    """The mixture; ``joint``: the experts are cut over ``expert`` and ``tensor`` together, instead
    of each inside over ``tensor``."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, joint: bool) -> None:
        super().__init__()
        self.tp, self.joint, width = tp, joint, config.hidden_size
        assert width is not None
        first = Cut(0, ("expert", "tensor") if joint else "expert")
        inner = () if joint else (Cut(1),)
        outer = () if joint else (Cut(2),)
        make = partial(parameter, coordinates=tp.coordinates)
        self.router = make(Shard((EXPERTS, width)), Init(0.3))
        self.up = make(Shard((EXPERTS, INNER, width), (first, *inner)), Init(0.2))
        self.up_bias = make(Shard((EXPERTS, INNER), (first, *inner)), Init(0.2))
        self.down = make(Shard((EXPERTS, width, INNER), (first, *outer)), Init(0.2))
        self.down_bias = make(Shard((EXPERTS, width), (first,)), Init(0.2))

    def forward(self, x_BSH: Tensor, *_: Any) -> Tensor:
        tp = self.tp
        along = tp.over("expert")
        place = tp.over("expert", "tensor") if self.joint else along
        weights_BSE = F.linear(x_BSH, self.router).softmax(-1)
        x_NSH, weights_NSE = x_BSH, weights_BSE
        if along.size > 1:
            x_NSH, weights_NSE = _Gather.apply(x_BSH, along), _Gather.apply(weights_BSE, along)
        before_NSE = weights_NSE
        if tp.group.size > 1:
            x_NSH, weights_NSE = (_Enter.apply(each, tp.group) for each in (x_NSH, weights_NSE))
        mine, before = (w.chunk(place.size, -1)[place.rank] for w in (weights_NSE, before_NSE))
        inner = torch.einsum("nsh,efh->nsef", x_NSH, self.up) + self.up_bias
        out_NSEH = torch.einsum("nsef,ehf->nseh", F.gelu(inner), self.down)
        y_NSH = torch.einsum("nse,nseh->nsh", mine, out_NSEH)
        bias_NSH = torch.einsum("nse,eh->nsh", mine if self.joint else before, self.down_bias)
        y_NSH = y_NSH + bias_NSH if self.joint else y_NSH
        if tp.group.size > 1:
            y_NSH = tp.whole.leave(y_NSH.contiguous())
        y_NSH = y_NSH if self.joint else y_NSH + bias_NSH
        return _Scatter.apply(y_NSH, along) if along.size > 1 else y_NSH


def _block(model: ModelConfig, tp: TensorParallel, joint: bool, build: Any) -> Block:
    block = build()
    block.mlp = Experts(model, tp, joint)
    return block


class ExpertsGPT(GPT):
    """The family; only every second block is a mixture."""

    joint = False
    """Experts are cut over ``expert`` and ``tensor`` together."""

    name = "experts"

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        spec = super().spec(model, parallel)
        plain = spec.layers

        def layers(tp: TensorParallel) -> list[LayerSpec]:
            specs = plain(tp)
            for number, layer in enumerate(specs):
                if layer.block and int(layer.name.split(".")[1]) % 2:
                    build = partial(_block, model, tp, type(self).joint, layer.build)
                    specs[number] = replace(layer, build=build)
            return specs

        return replace(spec, layers=layers)


@contextlib.contextmanager
def expert_axis(size: int, joint: bool) -> Iterator[None]:
    """The family is known, and runs have this many ranks along ``expert``, within it."""
    axes = ParallelConfig.axes.fget  # type: ignore[attr-defined]
    patched = property(lambda self: {**axes(self), "expert": size})
    added = added_families.add(FOLDER)
    with (
        mock.patch.object(ParallelConfig, "axes", patched),
        mock.patch.object(ExpertsGPT, "joint", joint),
    ):
        try:
            yield
        finally:
            if added:
                added_families.remove(FOLDER)
