"""Load balancing of experts: auxiliary losses, counts of each expert's tokens, and the bias that
balances experts without a loss.

Each loss belongs to one layer and excludes its coefficient. A balancing loss is 1 if every expert
is chosen equally often. Every rank that shares a micro batch computes the loss of the whole micro
batch, with the gradient of its own tokens.

Shapes: T tokens that a rank routes, B samples of the micro batch, E experts, N layers of experts on
this rank, K choices of a token, L losses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import LOSSES, Z_LOSS, ExpertsConfig
from megatron.features.experts.gates import blended_bias, quantile_bias
from megatron.features.experts.router import Routing, widened
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import SINGLE, Group, Mesh
from megatron.parallel.shard import Buffer

MICRO_BATCH, SAMPLES, GLOBAL_BATCH = (
    LOSSES[kind] for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
)


class GlobalCounts:
    """Number of choices of each expert of a layer, summed over the data-parallel ranks and the
    micro batches of a step so far."""

    def __init__(self, samples: Group = SINGLE) -> None:
        self.over(samples)
        self.reset()

    def over(self, samples: Group) -> None:
        """Set the group of ranks with different micro batches. If the group has several ranks, each
        micro batch costs an all-reduce."""
        self._samples = samples

    def reset(self) -> None:
        """Reset the counts at the start of a step."""
        self._total_E: Tensor | None = None
        self._to_recompute = defaultdict[int, list[Tensor]](list)

    def with_micro_batch(self, micro_batch: object, counts_E: Tensor) -> Tensor:
        """Add a micro batch's choices by expert, int64 [E], and return the sums so far. Where the
        backward pass recomputes a layer, return what the forward pass returned for the object
        ``micro_batch``, last use of the layer first. Without gradients, as in evaluation, return
        only the sums of this micro batch."""
        if torch._C._current_graph_task_id() != -1:
            return self._to_recompute[id(micro_batch)].pop()
        counts_E = counts_E.clone()
        if self._samples.size > 1:
            dist.all_reduce(counts_E, group=self._samples.handle)
        if not torch.is_grad_enabled():
            return counts_E
        self._total_E = counts_E if self._total_E is None else self._total_E + counts_E
        self._to_recompute[id(micro_batch)].append(self._total_E)
        return self._total_E


def losses(
    routing: Routing,
    logits_TE: Tensor,
    config: ExpertsConfig,
    experts: int,
    tokens: SharedTokens,
    with_others: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Compute the losses of a layer that have a nonzero weight, by name.

    A balancing loss is E x sum over experts of f_i P_i (Fedus et al. 2022, arXiv:2101.03961). P_i
    is the mean probability of expert i, and f_i its share of the choices. As in Megatron-LM, the
    counted choices are the largest probabilities, ignoring groups, expert bias and capacity. Shares
    are those of the micro batch, of each sample with the mean over samples (``seq_``), or of all
    micro batches of a step so far (``global_``, Qiu et al. 2025, arXiv:2501.11873), whose choices
    [E] ``with_others`` adds. transformers' ``load_balancing_loss_func`` is K times the first one,
    because its shares add up to K.

    The z-loss is the mean of logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906).
    """
    names = {name for name, weight in config.loss_weights.items() if weight}
    terms_T = {}
    if Z_LOSS in names:
        terms_T[Z_LOSS] = widened(logits_TE).logsumexp(-1).square()
    if names - {Z_LOSS}:
        scores_TE = routing.scores_TE
        counts_BE = _counts(_choices(routing, config), experts, tokens)
        counts = {MICRO_BATCH: counts_BE.sum(0), SAMPLES: counts_BE}
        if GLOBAL_BATCH in names:
            counts[GLOBAL_BATCH] = counts[MICRO_BATCH]
            if with_others is not None:
                counts[GLOBAL_BATCH] = with_others(counts[MICRO_BATCH])
        for name in names & counts.keys():
            shares = counts[name].to(scores_TE.dtype)
            shares = shares / shares.sum(-1, keepdim=True)
            shares_TE = shares[tokens.samples_T] if name == SAMPLES else shares
            terms_T[name] = experts * (scores_TE * shares_TE).sum(-1)
    if not terms_T:
        return {}
    ordered = sorted(terms_T)
    terms_LT = torch.stack([terms_T[name] for name in ordered])
    # Samples have equal lengths, so the mean over tokens equals the mean over samples.
    sums_L = tokens.total(terms_LT.masked_fill(tokens.samples_T < 0, 0.0).sum(-1))
    return dict(zip(ordered, (sums_L / tokens.count).unbind(), strict=True))


def _choices(routing: Routing, config: ExpertsConfig) -> Tensor:
    """Return the choices [T, K] that balancing losses count."""
    limited = (
        config.moe_gate != "megatron"
        or config.moe_router_enable_expert_bias
        or config.moe_router_num_groups is not None
        or config.moe_expert_capacity_factor is not None
        or config.moe_eval_capacity_factor is not None
        or not {"sinkhorn", "quantile_balancing"}.isdisjoint(config.moe_router_load_balancing_type)
    )
    if not limited:
        return routing.experts_TK
    k = config.moe_router_topk
    # DeepSpeed's top-2 gate counts only the first choice.
    k = 1 if config.moe_gate == "deepspeed" and k == 2 else k
    return routing.scores_TE.detach().topk(k).indices


def _counts(chosen_TK: Tensor, experts: int, tokens: SharedTokens) -> Tensor:
    """Count the choices of each expert in each sample of the micro batch, int64 [B, E]."""
    samples_T1 = tokens.samples_T[:, None]
    # The last, extra bin counts the choices of padding and is dropped.
    last = tokens.samples * experts
    places_TK = torch.where(samples_T1 < 0, last, samples_T1 * experts + chosen_TK)
    counts = places_TK.new_zeros(last + 1)
    counts.scatter_add_(0, places_TK.flatten(), torch.ones_like(places_TK).flatten())
    return tokens.sum(counts[:-1]).view(tokens.samples, experts)


class Balance:
    """Routing counts of one layer's experts since the last step.

    Attributes:
        counts_E: number of choices of this rank's tokens by expert, int64, followed by one element
            for dropped choices; None before the first micro batch.
        apart: True if tensor-parallel ranks count different tokens.
        biases_E: with quantile balancing, the sum of the micro batches' biases, float32.
        frozen: True if the router is not trained and its bias is not updated.
        global_counts: choices in the micro batches of the step, for the global balancing loss.
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
        """Reset the counts at the start of a step."""
        self.counts_E: Tensor | None = None
        self.biases_E: Tensor | None = None
        self.micro_batches = 0
        self.global_counts.reset()

    @torch.no_grad()
    def count(self, experts_TK: Tensor, logits_TE: Tensor, tokens: SharedTokens) -> None:
        """Count the router's choices. The recomputation of a layer is not counted."""
        if torch._C._current_graph_task_id() != -1:
            return
        # Padding has no expert, but must not be counted as dropped.
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
        """Update the bias after a step. ``counts_E`` is the sum of the choices over all ranks."""
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
    """Return the experts' bias after a step. It increases by ``rate`` for experts with fewer tokens
    than the mean, and decreases by ``rate`` for experts with more (Wang et al. 2024,
    arXiv:2408.15664, algorithm 1)."""
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)


class Balances(KernelStates):
    """Balances of this rank's layers of experts, updated between steps.

    Attributes:
        layers: balances by the number of their layer.
        total_NE: choices by layer and expert, summed over all ranks and the steps since the counts
            were last collected. The last column counts dropped choices. Layers with fewer experts
            than others are padded with zeros before it. None before the first step.
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
    """Return the balances of the layers of experts in these blocks, or None without experts."""
    layers: dict[int, Balance] = {}
    for block in blocks:
        mlp: Any = getattr(block, "mlp", None)
        if hasattr(mlp, "balance"):
            mlp.balance.frozen = not mlp.router.weight.requires_grad
            layers[block.layer] = mlp.balance  # type: ignore[index]
    return Balances(layers, mesh) if layers else None
