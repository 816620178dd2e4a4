"""Relative positions of T5: a learned bias of attention scores for every range of distances.

Distances are divided into buckets (Raffel et al. 2020, arXiv:1910.10683, section 2.1): the short
ones have a bucket each, longer ones share buckets whose widths grow with the distance.

Shapes: B batch, N query heads of this rank, S sequence, D = 2S - 1 distances.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.shard import Cut, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel, autocast_dtype


class RelativeBias(nn.Module):
    """Computes ``bias`` of the state, which the blocks of one stack add to their scores; of
    ``weight`` [buckets, heads] a rank has the columns of its heads. ``causal`` is whether a token
    sees earlier ones only, whose distances then have all the buckets."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, causal: bool) -> None:
        super().__init__()
        positions, heads = config.positions, config.attention.num_attention_heads
        self.buckets = positions.relative_attention_num_buckets
        self.furthest = positions.relative_attention_max_distance
        self.tp, self.causal = tp, causal
        self.weight = parameter(
            Shard((self.buckets, heads), (Cut(1),)), initial(config), tp.coordinates
        )

    def forward(self, state: LayerState) -> LayerState:
        """Leaves the hidden states alone."""
        if state.cache is not None:
            return state.changed(bias=self._by_distance(state.cache.positions))
        x_BSH = state.hidden
        length, device = x_BSH.shape[1] * self.tp.slices, x_BSH.device
        places_D = distance_buckets(length, self.buckets, self.furthest, self.causal, device)
        of_distances_ND = self.weight[places_D].t()
        # Query i sees key j at distance j - i: a window over the distances, one to the left for
        # every query. Its gradient is one of D distances and not of S x S scores.
        bias_NSS = of_distances_ND.unfold(-1, length, 1).flip(-2).to(autocast_dtype(x_BSH))
        masks = state.masks or AttentionMasks()
        unseen = masks.bias(length, length, None, (), bias_NSS, self.causal)
        return state.changed(bias=bias_NSS.unsqueeze(0) + unseen)

    def _by_distance(self, positions: int) -> Tensor:
        """[N, T], the bias of keys that are 0, 1, ... places before the query."""
        device = self.weight.device
        places_D = distance_buckets(positions, self.buckets, self.furthest, self.causal, device)
        return self.weight[places_D[:positions].flip(0)].t()


def relative_bucket(distance: Tensor, buckets: int, furthest: int, causal: bool) -> Tensor:
    """The bucket, int64, of distances from a query to its keys (key position - query position).

    Args:
        buckets: how many there are; half of them are for later keys unless ``causal``, where these
            are in bucket 0.
        furthest: the distance from which on all share a bucket; more than ``buckets`` / 2.
    """
    offset = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    alone = buckets // 2
    # In float32, as everywhere: the ends of the ranges depend on its rounding.
    share = torch.log(distance.clamp(min=1).float() / alone) / math.log(furthest / alone)
    shared = (alone + (share * (buckets - alone)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < alone, distance, shared)


@functools.lru_cache(maxsize=64)
def distance_buckets(
    length: int, buckets: int, furthest: int, causal: bool, device: torch.device
) -> Tensor:
    """The buckets [D] of the distances 1 - S to S - 1, made once for a device."""
    # The cache outlives the call, which may run under inference mode. The logarithm is the CPU's.
    with torch.inference_mode(False):
        distances = torch.arange(1 - length, length)
        return relative_bucket(distances, buckets, furthest, causal).to(device)
