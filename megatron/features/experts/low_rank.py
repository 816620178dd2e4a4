"""Low-rank additions to the matrices of experts: y = x W^T + s (x A^T) B^T with matrices W, A and B
of each expert (Hu et al. 2021, arXiv:2106.09685, equation 3).

A and B are ``lora_a`` [E, r, I] and ``lora_b`` [E, O, r], parameters of the layer that are divided
over ranks as its weight is. Each expert starts as a linear layer does: A drawn uniformly between
-1/sqrt(I) and 1/sqrt(I), B zero.

Shapes: R rows sorted by expert, E experts, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.parallel.shard import Init, Shard, parameter
from megatron.parallel.tensor_parallel import TensorParallel, sum_gradients


class LowRankExperts:
    """The additions to a layer of experts, whose parameters are the layer's own.

    Args:
        layer: an ``ExpertLinear``.
        weight: the shard of its weight.
        tp: over whose ranks the layer may be cut.
        scale: s.
        dropout: probability for each input of A.
        multiply: ``multiply(x, weight_EOI, sizes)`` is the product of rows with the matrices of
            their experts.
    """

    def __init__(
        self,
        layer: nn.Module,
        weight: Shard,
        tp: TensorParallel,
        rank: int,
        scale: float,
        dropout: float,
        multiply: Callable[..., Tensor],
    ) -> None:
        experts, outputs, inputs = weight.full_shape
        self.scale, self.dropout, self._multiply = scale, dropout, multiply
        by_expert, *inside = weight.cuts
        # The matrix that is not cut meets a rank's part of the inner width on each: its gradient
        # is summed over them.
        self._group, self._cut = tp.group, inside[0].dim if inside else None
        of_a = tuple(cut for cut in inside if cut.dim == 2)
        of_b = tuple(cut for cut in inside if cut.dim == 1)
        a = replace(weight, full_shape=(experts, rank, inputs), cuts=(by_expert, *of_a))
        b = replace(weight, full_shape=(experts, outputs, rank), cuts=(by_expert, *of_b))
        layer.register_parameter("lora_a", parameter(a, Init(bound=inputs**-0.5), tp.coordinates))
        layer.register_parameter("lora_b", parameter(b, Init(), tp.coordinates))

    def added(
        self,
        y_RO: Tensor,
        x_RI: Tensor,
        sizes: Any,
        a_ErI: Tensor,
        b_EOr: Tensor,
        training: bool,
    ) -> Tensor:
        """The outputs [R, O] with the addition."""
        x_RI = F.dropout(x_RI, self.dropout, training)
        if self._cut == 1:
            (a_ErI,) = sum_gradients(self._group, a_ErI)
        elif self._cut == 2:
            (b_EOr,) = sum_gradients(self._group, b_EOr)
        z_Rr = self._multiply(x_RI, a_ErI, sizes)
        return y_RO + self.scale * self._multiply(z_Rr, b_EOr, sizes)
