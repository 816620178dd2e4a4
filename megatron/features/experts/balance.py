"""Balance of experts: counts of their tokens, and the bias that evens them out without a loss.

Shapes: E experts, N layers of experts on this rank, K choices of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.gates import blended_bias, quantile_bias
from megatron.features.experts.losses import GlobalCounts
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.shard import Buffer


class Balance:
    """The choices of one layer since the last step.

    Attributes:
        counts_E: for each expert, and last for no expert, the number of choices of this rank's
            tokens, int64; None before the first.
        apart: True if tensor-parallel ranks count different tokens.
        biases_E: with quantile balancing the sum of the biases of micro batches, float32.
        frozen: True if the router is not trained, and keeps its bias.
        global_counts: choices of the micro batches of the step, for a loss over them.
    """

    def __init__(self, part: ExpertsConfig, experts: int, bias: Buffer | None) -> None:
        self.experts, self.bias, self.k = experts, bias, part.moe_router_topk
        self.rate, self.ema = (
            part.moe_router_bias_update_rate,
            part.moe_router_quantile_balancing_ema,
        )
        self.by_quantile = "quantile_balancing" in part.moe_router_load_balancing_type
        self.global_counts = GlobalCounts()
        self.apart = self.frozen = False
        self.forget()

    def forget(self) -> None:
        """Begin a step."""
        self.counts_E: Tensor | None = None
        self.biases_E: Tensor | None = None
        self.micro_batches = 0
        self.global_counts.reset()

    @torch.no_grad()
    def count(self, experts_TK: Tensor, logits_TE: Tensor, tokens: SharedTokens) -> None:
        """Count choices, once where the layer is recomputed in the backward pass."""
        if torch._C._current_graph_task_id() != -1:
            return
        # Padding chooses no expert, and is not a token whose choices were dropped.
        ones_TK = (tokens.samples_T >= 0)[:, None].expand_as(experts_TK).to(torch.int64)
        counts_E = ones_TK.new_zeros(self.experts + 1)
        counts_E.scatter_add_(0, experts_TK.flatten(), ones_TK.flatten())
        self.counts_E = counts_E if self.counts_E is None else self.counts_E + counts_E
        self.apart = tokens.group.size > 1
        if self.by_quantile:
            assert self.bias is not None
            bias_E = quantile_bias(logits_TE, self.bias.values, self.k, tokens)
            self.biases_E = bias_E if self.biases_E is None else self.biases_E + bias_E
            self.micro_batches += 1

    def end_step(self, counts_E: Tensor, samples: Group) -> None:
        """Change the bias by the choices of a step, of all ranks."""
        if self.bias is None or self.frozen:
            return
        values_E = self.bias.values
        if self.biases_E is None:
            values_E.copy_(updated_bias(values_E, counts_E, self.rate))
            return
        mean_E = self.biases_E / (self.micro_batches * samples.size)
        if samples.size > 1:
            dist.all_reduce(mean_E, group=samples.handle)
        values_E.copy_(blended_bias(values_E, mean_E, self.ema))


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The bias of each expert's score after a step: larger by ``rate`` for experts with fewer
    tokens than the mean, smaller for those with more (Wang et al. 2024, arXiv:2408.15664,
    algorithm 1)."""
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)


class Balances(KernelStates):
    """The layers of experts of this rank, between steps.

    Attributes:
        layers: number of each layer, by its balance.
        total_NE: choices by layer and expert, the last column of none, of all ranks in the steps
            since they were last taken; None before the first step. Of fewer experts than another
            layer's, columns before the last are zero.
    """

    def __init__(self, layers: dict[int, Balance], mesh: Mesh) -> None:
        self.layers, self._mesh = layers, mesh
        for balance in layers.values():
            balance.global_counts.over(mesh.samples)
        self.total_NE: Tensor | None = None

    def forget_step(self) -> None:
        for balance in self.layers.values():
            balance.forget()

    @torch.no_grad()
    def end_step(self) -> None:
        balances = [each for each in self.layers.values() if each.counts_E is not None]
        if not balances:
            return
        widest = max(balance.experts for balance in balances)
        counts_NE = torch.stack([_widened(b.counts_E, widest) for b in balances])
        groups = [self._mesh.dense, *([self._mesh.tensor] if balances[0].apart else [])]
        for group in groups:
            if group.size > 1:
                dist.all_reduce(counts_NE, group=group.handle)
        for balance, counts_E in zip(balances, counts_NE, strict=True):
            balance.end_step(counts_E[: balance.experts], self._mesh.samples)
        self.total_NE = counts_NE if self.total_NE is None else self.total_NE + counts_NE
        self.forget_step()


def _widened(counts_E: Tensor | None, experts: int) -> Tensor:
    assert counts_E is not None
    zeros = counts_E.new_zeros(experts + 1 - len(counts_E))
    return torch.cat([counts_E[:-1], zeros, counts_E[-1:]])


def balances_of(blocks: Sequence[nn.Module], mesh: Mesh) -> Balances | None:
    """The balances of the layers of experts among these blocks; None without any."""
    layers: dict[int, Balance] = {}
    for block in blocks:
        mlp: Any = getattr(block, "mlp", None)
        if hasattr(mlp, "balance"):
            mlp.balance.frozen = not mlp.router.weight.requires_grad
            layers[block.layer] = mlp.balance  # type: ignore[index]
    return Balances(layers, mesh) if layers else None
