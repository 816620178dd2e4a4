"""QK-clip (Kimi Team 2025, arXiv:2507.20534, section 2.1.2), per head and after the update.

A head whose largest logit S exceeds the threshold t has the factor eta = t / S. Its queries are
scaled by eta^alpha, and its keys by eta^(1 - alpha). Query heads that share a key head use the
smallest of their factors. In latent attention, all heads share the rotated key, which stays
unchanged, so that the rotated queries are scaled by eta. Biases are scaled with their matrices.
The optimizer's moments stay unchanged.

Shapes: L layers of this process with attention, A heads of a whole layer, R rows of a whole
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import ConfigError
from megatron.engine.state import OwnedSlice, owned_slices, set_trained_weights
from megatron.engine.train_engine import TrainEngine
from megatron.features.latent.attention import LatentAttention
from megatron.features.qk_clip.logits import MeasuredAttention
from megatron.model.attention import Attention
from megatron.parallel.shard import Shard, shard_of
from megatron.training.trainer import Callback, Step, Trainer

LARGEST = "max_attention_logit"
"""Name of the metric in log lines."""


class Projection(NamedTuple):
    """A parameter of a layer, with the exponent of the head's factor for each row of the unsharded
    weight.

    Attributes:
        heads_R: head of each row. If heads share a key, the number of the key head.
        exponents_R: exponent of each row; 0 for rows that are not scaled.
    """

    param: nn.Parameter
    heads_R: Tensor
    exponents_R: Tensor


class MeasuredLayer(NamedTuple):
    """An attention layer, and its projections that can be scaled. Each key head is used by
    ``shared`` query heads."""

    attention: MeasuredAttention
    projections: list[Projection]
    shared: int


def _rows(parts: list[tuple[int, list[tuple[int, float]]]]) -> tuple[Tensor, Tensor]:
    """Return the head and the exponent of each row of a weight. Each fused matrix is described by
    its number of heads, and (rows, exponent) pairs for the rows of one head."""
    heads, exponents = [], []
    for count, of_head in parts:
        each = torch.cat([torch.full((rows,), power) for rows, power in of_head])
        exponents.append(each.repeat(count))
        heads.append(torch.arange(count).repeat_interleave(len(each)))
    return torch.cat(heads), torch.cat(exponents)


def _of_attention(layer: Attention, heads: int, alpha: float) -> tuple[list[Projection], int]:
    qkv, width = layer.qkv, layer.head_dim
    (_, keys, _) = next(cut.parts for cut in shard_of(qkv.weight).cuts)
    groups = keys // width
    shared = heads // groups
    queries = [(width, alpha), (width, 0.0)] if layer.gated else [(width, alpha)]
    parts = [(groups, queries * shared), (groups, [(width, 1 - alpha)]), (groups, [(width, 0.0)])]
    rows = _rows(parts)
    params = [p for p in (qkv.weight, qkv.bias, qkv.kv_weight, qkv.kv_bias) if p is not None]
    return [Projection(p, *rows) for p in params], shared


def _of_latent(layer: LatentAttention, heads: int, alpha: float) -> list[Projection]:
    up, part = layer.q_up if layer.q is None else layer.q, layer.part
    queries = _rows([(heads, [(part.qk_head_dim, alpha), (part.qk_pos_emb_head_dim, 1.0)])])
    keys = _rows([(heads, [(part.qk_head_dim, 1 - alpha), (part.v_head_dim, 0.0)])])
    return [Projection(up.weight, *queries), Projection(layer.kv_up.weight, *keys)]


def factors_of(largest_LA: Tensor, threshold: float) -> Tensor:
    """Return the factor of each head, at most 1. Logits that are not finite give a factor of 1."""
    above_LA = (largest_LA > threshold) & largest_LA.isfinite()
    return torch.where(above_LA, threshold / largest_LA, 1.0)


class QKClip(Callback):
    """Callback that measures and logs the largest logits of every step, and scales the projections
    after the update. If a step was skipped, nothing is scaled.

    Args:
        alpha: exponent of the factor for queries.
        threshold: largest allowed logit; None to scale nothing.
        record: adds a value to the next log line.
    """

    def __init__(
        self,
        engine: TrainEngine,
        alpha: float,
        threshold: float | None,
        record: Callable[..., None],
    ) -> None:
        self._engine, self._alpha, self._threshold = engine, alpha, threshold
        self._record = record
        self._heads = engine.config.model.attention.num_attention_heads
        self._layers = list(self._measured_layers())
        params = [p.param for layer in self._layers for p in layer.projections]
        if any(param not in engine.trained for param in params):
            raise ConfigError(
                "--qk-clip scales the projections of queries and keys, which this run does not "
                "train (--lora and other frozen weights): leave it out"
            )

    def _measured_layers(self) -> Iterator[MeasuredLayer]:
        heads, alpha = self._heads, self._alpha
        for module in self._engine.model.modules():
            if not isinstance(module, Attention | LatentAttention):
                continue
            if isinstance(module, Attention) and not hasattr(module, "qkv"):
                continue  # attention to another sequence
            measured = MeasuredAttention(module.attend, module.tp.context)
            module.attend = measured
            if self._threshold is None:
                yield MeasuredLayer(measured, [], 1)
            elif isinstance(module, LatentAttention):
                yield MeasuredLayer(measured, _of_latent(module, heads, alpha), 1)
            else:
                yield MeasuredLayer(measured, *_of_attention(module, heads, alpha))

    def after_step(self, trainer: Trainer, step: Step) -> None:
        largest_LA = self._of_all()
        for layer in self._layers:
            layer.attention.largest_N = None
        most = largest_LA.amax() if len(self._layers) else torch.tensor(-math.inf)
        self._record(LARGEST, most, "max", over_ranks=True)
        if self._threshold is None:
            return
        factors_LA = factors_of(largest_LA, self._threshold)
        if bool((factors_LA < 1).any()) and not bool(step.result.skipped):
            self._scale(factors_LA)

    def _of_all(self) -> Tensor:
        """Return the largest logit of every head in this stage over all micro batches and ranks,
        [L, A]."""
        engine = self._engine
        largest_LA = torch.full((len(self._layers), self._heads), -math.inf, device=engine.device)
        own = self._heads // engine.mesh.tensor.size
        first = engine.mesh.tensor.rank * own
        for row, layer in zip(largest_LA, self._layers, strict=True):
            if layer.attention.largest_N is not None:
                row[first : first + own] = layer.attention.largest_N
        for ranks in (engine.mesh.dense, engine.mesh.tensor) if len(self._layers) else ():
            if ranks.size > 1:
                dist.all_reduce(largest_LA, op=dist.ReduceOp.MAX, group=ranks.handle)
        return largest_LA

    @torch.no_grad()
    def _scale(self, factors_LA: Tensor) -> None:
        """Scale the main weights, then update the model's weights from them."""
        factors: dict[nn.Parameter, Tensor] = {}
        for of_layer_A, layer in zip(factors_LA, self._layers, strict=True):
            of_keys = of_layer_A.view(-1, layer.shared).amin(1).cpu()
            if bool((of_keys < 1).any()):
                for param, heads_R, exponents_R in layer.projections:
                    factors[param] = of_keys.double()[heads_R] ** exponents_R
        for own in owned_slices(self._engine):
            if own.param in factors:
                whole = own.get("weight").clone()
                factor = self._of_slice(own, factors[own.param])
                whole[: own.slice.numel] *= factor.to(whole.device, whole.dtype)
                own.set("weight", whole)
        set_trained_weights(self._engine, lambda own: own.get("weight"), only=factors)

    def _of_slice(self, own: OwnedSlice, factors_R: Tensor) -> Tensor:
        """Return the scaling factor of each element in a slice of a parameter."""
        shard, places = shard_of(own.param), self._engine.mesh.coordinates
        rows = Shard((shard.full_shape[0], 1), shard.cuts).cut(factors_R[:, None], places)
        share = rows.flatten().repeat_interleave(math.prod(shard.full_shape[1:]))
        return share[own.slice.start : own.slice.start + own.slice.numel]
