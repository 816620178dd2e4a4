"""Usage of experts in logs, and a warning if a layer leaves some of them unused.

Shapes: N layers of the model, E experts of a layer. The last column counts dropped choices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.features.experts.balance import Balances
from megatron.features.experts.flags import ExpertsConfig
from megatron.training.trainer import Callback, Step, Trainer
from megatron.training.writers import RunWriter

ROWS, LOADS = "experts", "expert_loads"
"""Kinds of metric rows: statistics of all layers, and each expert's share of a layer's choices."""
_ENOUGH = 32
"""Mean number of tokens per expert above which an unused expert is not due to chance."""

logger = logging.getLogger(__name__)


class LayerUse(NamedTuple):
    """Usage of a layer's experts.

    Attributes:
        max_over_mean: largest number of choices of an expert, divided by the mean; 1 at perfect
            balance.
        entropy: entropy of the experts' shares, divided by the logarithm of the number of experts;
            1 at perfect balance, 0 if one expert receives everything.
        dropped_share: fraction of all choices that exceeded a capacity.
        idle: number of experts without a token.
    """

    max_over_mean: float
    entropy: float
    dropped_share: float
    idle: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> LayerUse:
        """Compute the usage from the choices of each expert, followed by the dropped choices."""
        *chosen, dropped = counts
        total = sum(chosen)
        if not total:
            return cls(1.0, 1.0, float(dropped > 0), len(chosen))
        shares = [count / total for count in chosen if count]
        entropy = -sum(share * math.log(share) for share in shares) / math.log(len(chosen))
        idle = len(chosen) - len(shares)
        return cls(max(shares) * len(chosen), entropy, dropped / (total + dropped), idle)


class ExpertsReport(Callback):
    """Callback that adds the statistics of the worst layer to log lines, and writes metric rows for
    every layer. They cover the steps since the last log line, and stay on the device until then."""

    def __init__(self, part: ExpertsConfig, context: Any) -> None:
        self._part, self._mesh, self._device = part, context.mesh, context.device
        # Multi-token prediction blocks have as many experts as the last layer.
        ahead = part.layer_experts[-1:] * context.config.model.blocks_ahead
        self._layer_experts = part.layer_experts + ahead
        members = context.engine.kernels.members
        self._balances = [member for member in members if isinstance(member, Balances)]
        self._plan, self._report = context.plan, context.report
        self._at = (0, 0)
        self._lines: dict[int, list[int]] = {}
        self._suspected: dict[int, str] = {}
        self._warned: set[int] = set()
        context.report.at_line.append(self._numbers)
        context.report.after_line.append(self._write)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self._at = step.iteration, trainer.consumed_samples

    def went_back(self, trainer: Trainer) -> None:
        for balances in self._balances:
            balances.total_NE = None
        self._lines = {}

    def _numbers(self, seconds_left: float) -> Mapping[str, float | None]:
        """Return the numbers for the log line. Collective: every rank must call this."""
        self._lines = {n: c for n, c in self._counts().items() if any(c)}
        uses = [LayerUse.of(counts) for counts in self._lines.values()]
        if not uses:
            return {}
        self._warn()
        numbers = {
            "experts_max_over_mean": max(use.max_over_mean for use in uses),
            "experts_entropy": min(use.entropy for use in uses),
            "experts_idle": sum(use.idle for use in uses),
        }
        dropped = max(use.dropped_share for use in uses)
        limited = self._part.moe_expert_capacity_factor is not None
        return numbers | ({"experts_dropped_share": dropped} if limited or dropped else {})

    def _counts(self) -> dict[int, list[int]]:
        """Return the choices by layer, summed over all ranks, and reset the counts."""
        experts = self._layer_experts
        counts_NE = torch.zeros(len(experts), max(experts) + 1, dtype=torch.int64)
        counts_NE = counts_NE.to(self._device)
        for balances in self._balances:
            total_NE, balances.total_NE = balances.total_NE, None
            if total_NE is not None:
                width = total_NE.shape[1] - 1
                counts_NE[list(balances.layers), :width] = total_NE[:, :-1]
                counts_NE[list(balances.layers), -1] = total_NE[:, -1]
        if self._mesh.pipeline.size > 1:  # Other pipeline stages have other layers.
            dist.all_reduce(counts_NE, group=self._mesh.pipeline.handle)
        rows = counts_NE.tolist()
        return {n: [*rows[n][:count], rows[n][-1]] for n, count in enumerate(experts) if count}

    def _write(self, writer: RunWriter) -> None:
        lines, self._lines = self._lines, {}
        if not lines:
            return
        iteration, samples = self._at
        at: Any = {"samples": samples, "tokens": self._plan.lengths.tokens(samples)}
        values = {
            f"{name}_layer_{layer}": float(value)
            for layer, counts in lines.items()
            for name, value in LayerUse.of(counts)._asdict().items()
        }
        writer.scalars(ROWS, iteration, values, **at)
        for layer, (*chosen, dropped) in lines.items():
            total = sum(chosen) + dropped
            shares = {f"expert_{n}": count / total for n, count in enumerate(chosen)}
            writer.scalars(LOADS, iteration, {"layer": layer, **shares}, **at)

    def _warn(self) -> None:
        """Warn of layers that use experts unevenly at two consecutive log lines, once per layer."""
        uneven = {
            layer: text
            for layer, counts in self._lines.items()
            if (text := collapse(counts, self._part.moe_router_topk)) and layer not in self._warned
        }
        again = {layer: text for layer, text in uneven.items() if layer in self._suspected}
        self._suspected = uneven
        if again and self._mesh.world.rank == 0:
            (layer, text), *others = again.items()
            more = f", and {len(others)} other layers likewise" if others else ""
            logger.warning(
                "the router of layer %d does not use its experts evenly: %s%s; %s",
                layer, text, more, remedy(self._part),
            )  # fmt: skip
        self._warned |= again.keys()


def collapse(counts: Sequence[int], k: int) -> str | None:
    """Describe how unevenly a layer uses its experts, or return None if it is even enough or there
    are too few tokens to judge. Each token has ``k`` experts. A layer is uneven if some experts
    receive no tokens, or if one receives more than half of all tokens and more than four times the
    mean."""
    *chosen, dropped = counts
    tokens = (sum(chosen) + dropped) // k
    if sum(chosen) < _ENOUGH * len(chosen):
        return None
    fullest, idle = max(chosen), sum(not count for count in chosen)
    if idle:
        return f"{idle} of {len(chosen)} experts got none of the last {tokens:,} tokens"
    if 2 * fullest > tokens and fullest * len(chosen) > 4 * sum(chosen):
        share = fullest / tokens
        return f"one of {len(chosen)} experts got {share:.0%} of the last {tokens:,} tokens"
    return None


def remedy(part: ExpertsConfig) -> str:
    """Return advice for balancing the experts of a run with these flags."""
    weights = [f"{weight:g}" for weight in part.moe_aux_loss_coeff if weight]
    if weights:
        return f"raise --moe-aux-loss-coeff {' '.join(weights)}, or lower the learning rate"
    if part.moe_router_enable_expert_bias:
        return f"raise --moe-router-bias-update-rate {part.moe_router_bias_update_rate:g}"
    return "give --moe-aux-loss-coeff, for example 0.01"
