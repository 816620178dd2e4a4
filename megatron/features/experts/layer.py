"""Mixture-of-experts layer: a router sends each token to a few of many MLPs.

Shapes: B batch, S sequence (a rank's slice of it in a sequence-parallel region), T tokens that a
rank routes, E experts, K choices of a token, R rows (copies of tokens), H hidden, F inner width of
an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.features.experts.balance import Balance, losses
from megatron.features.experts.compute import (
    RowOrder,
    combine,
    dispatch,
    expert_mlp,
    order,
    padded_places,
)
from megatron.features.experts.exchange import ExpertRanks, RowExchange, SharedTokens
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.linear import ExpertLinear, Sizes
from megatron.features.experts.router import Routing, logits, route
from megatron.model.activations import activation_of
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.mlp import MLP
from megatron.model.spec import ModelSpec
from megatron.parallel.layers import WholeLinear
from megatron.parallel.shard import Buffer, Init, Shard, initial, parameter
from megatron.parallel.tensor_parallel import TensorParallel

_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Linear layer that scores each expert for each of the tokens that this rank routes."""

    def __init__(self, config: ModelConfig, experts: int, ranks: ExpertRanks) -> None:
        super().__init__()
        part, coordinates = config.part(ExpertsConfig), ranks.tp.coordinates
        self.ranks, self.dtype = ranks, _DTYPES[part.moe_router_dtype]
        self.jitter = part.moe_input_jitter_eps
        shape, apart = (experts, config.hidden_size), ranks.apart
        self.weight = parameter(Shard(shape), initial(config), coordinates, apart)
        self.bias = None
        if part.moe_router_bias:
            self.bias = parameter(Shard((experts,)), Init(), coordinates, apart)
        by_quantile = "quantile_balancing" in part.moe_router_load_balancing_type
        biased = part.moe_router_enable_expert_bias or by_quantile
        self.expert_bias = Buffer(experts) if biased else None

    def forward(self, x_TH: Tensor) -> Tensor:
        """Compute logits [T, E] from tokens [T, H]."""
        if self.training and self.jitter:
            with self.ranks.tp.random():
                noise_TH = torch.empty_like(x_TH).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
            x_TH = x_TH * noise_TH
        weight, *bias = self.ranks.shared(*self.parameters())
        return logits(x_TH, weight, bias[0] if bias else None, self.dtype)


class Experts(nn.Module):
    """MLPs of the experts on this rank: some of the experts, or a shard of each."""

    def __init__(self, config: ModelConfig, experts: int, ranks: ExpertRanks) -> None:
        super().__init__()
        part, mlp = config.part(ExpertsConfig), config.mlp
        width = part.moe_latent_size or config.hidden_size
        inner = part.moe_ffn_hidden_size or mlp.ffn_hidden_size
        self.activation = activation_of(mlp)
        both = partial(
            ExpertLinear,
            experts,
            bias=mlp.bias,
            tp=ranks.tp,
            cut_over=ranks.axes,
            shared=ranks.shared_experts,
            summed=ranks.tp.experts == "whole",
            share=part.moe_router_topk / experts,
        )
        self.up = both(
            (inner, inner) if mlp.gated else (inner,),
            width,
            init=initial(config),
            cut_outputs=ranks.cut,
        )
        self.down = both((width,), inner, init=initial(config, scaled=True), cut_inputs=ranks.cut)

    def forward(
        self, x_RH: Tensor, sizes: Sizes, padded: Callable[[int], int] | None = None
    ) -> Tensor:
        """Map rows [R, H], sorted by this rank's experts, to outputs [R, H], which are partial sums
        if experts are sharded across ranks. ``padded`` is the method of :class:`LayerCache`."""
        if padded is None or isinstance(sizes, Tensor):
            return self.down(self.activation(self.up(x_RH, sizes)), sizes)
        places_R, sizes = padded_places(sizes, padded)
        places_R = places_R.to(x_RH.device)
        rows_RH = x_RH.new_zeros(sum(sizes), x_RH.shape[1])
        rows_RH[places_R] = x_RH
        # Elementwise kernels process the end of a tensor with different code. The spare last row
        # keeps the real rows away from the end.
        h_RG = F.pad(self.up(rows_RH, sizes), (0, 0, 0, 1))
        return self.down(self.activation(h_RG)[:-1], sizes)[places_R]


class ExpertsMLP(nn.Module):
    """Mixture of experts in place of a block's MLP: a router and ``experts`` experts. Optionally it
    has shared experts for all tokens, or an MLP whose output is averaged with that of the experts
    (residual experts, Rajbhandari et al. 2022, arXiv:2201.05596)."""

    def __init__(self, config: ModelConfig, experts: int, tp: TensorParallel) -> None:
        super().__init__()
        self.part = part = config.part(ExpertsConfig)
        self.count, self.layers = experts, layers_of(config)
        self.dropless = replace(
            part,
            moe_expert_capacity_factor=None,
            moe_eval_capacity_factor=None,
            moe_token_dropping=False,
        )
        self.ranks = ranks = ExpertRanks(tp)
        self.router = Router(config, experts, ranks)
        self.experts = Experts(config, experts, ranks)
        self.balance = Balance(part, experts, self.router.expert_bias)
        self.shared = self.shared_gate = self.residual = self.coefficient = None
        self.latent_in = self.latent_out = None
        hidden, latent = config.hidden_size, part.moe_latent_size
        plain = partial(WholeLinear, bias=False, init=initial(config), tp=tp)
        if part.moe_shared_expert_intermediate_size:
            self.shared = MLP(config, tp, part.moe_shared_expert_intermediate_size)
        if part.moe_shared_expert_gate:
            self.shared_gate = plain(hidden, 1)
        if part.mlp_type == "residual":
            self.residual = MLP(config, tp)
            self.coefficient = plain(hidden, 2, bias=True)
        if latent:
            self.latent_in = plain(hidden, latent)
            self.latent_out = plain(latent, hidden, init=initial(config, scaled=True))

    def forward(self, x_BSH: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Map [B, S, H] to the output [B, S, H]. In the returned state, this layer's balancing
        losses are added to those of the same names in ``state.losses``."""
        ranks, samples = self.ranks, len(x_BSH)
        tokens = ranks.tokens(x_BSH)
        routed_TH = ranks.routed(x_BSH)
        cache = state.cache
        logits_TE = self._logits(routed_TH, cache)
        routing = self._route(
            logits_TE, tokens, cache is None and not state.apart, cache is not None
        )
        state = self._with_losses(state, routing, logits_TE, tokens)
        if self.training:
            self.balance.count(routing.experts_TK, logits_TE, tokens)
        if self.latent_in is not None:
            routed_TH = ranks.routed(self.latent_in(x_BSH))
        weights_TK = ranks.entering(routing.weights_TK, samples)
        rows = order(ranks.chosen(routing.experts_TK, samples), self.count)
        x_TH = ranks.entering(routed_TH, samples)
        if self.part.moe_apply_probs_on_input:
            x_TH = (x_TH * weights_TK).to(x_TH.dtype)
            weights_TK = torch.ones_like(weights_TK)
        y_TH, next_to_BSH = self._computed(x_TH, weights_TK, rows, x_BSH, cache)
        y_BSH = ranks.leaving(y_TH, x_BSH)
        if self.latent_out is not None:
            y_BSH = self.latent_out(y_BSH)
        if self.coefficient is not None and next_to_BSH is not None:
            shares_BS2 = self.coefficient(x_BSH).softmax(-1)
            return y_BSH * shares_BS2[..., :1] + next_to_BSH * shares_BS2[..., 1:], state
        return (y_BSH if next_to_BSH is None else y_BSH + next_to_BSH), state

    def _computed(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        rows: RowOrder,
        x_BSH: Tensor,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the experts for these tokens, and the output of the shared or
        residual MLP for all tokens (None without such an MLP), which is computed while rows are
        exchanged."""
        experts, group = self.experts, self.ranks.exchange
        padded = None if cache is None else cache.padded
        if group.size == 1 and padded is not None:
            sizes = rows.counts_E if rows.sizes is None else rows.sizes
            y_RH = experts(dispatch(x_TH, rows), sizes, padded)
            return combine(y_RH, weights_TK, rows), self._next_to(x_BSH)
        if group.size == 1:
            y_TH = expert_mlp(x_TH, weights_TK, rows, experts.up, experts.down, experts.activation)
            return y_TH, self._next_to(x_BSH)
        exchange = RowExchange(dispatch(x_TH, rows), rows.counts_E, group)
        next_to_BSH = self._next_to(x_BSH)
        y_RH = exchange.back(experts(exchange.arrive(), exchange.sizes, padded))
        return combine(y_RH, weights_TK, rows), next_to_BSH

    def _logits(self, x_TH: Tensor, cache: LayerCache | None) -> Tensor:
        if cache is None:
            return self.router(x_TH)
        rows = len(x_TH)  # A rank may have fewer tokens than the whole pass.
        missing = max(0, cache.padded(0) - rows)
        return self.router(F.pad(x_TH, (0, 0, 0, missing)))[:rows]

    def _route(
        self, logits_TE: Tensor, tokens: SharedTokens, limited: bool, apart: bool
    ) -> Routing:
        """Route the tokens. ``limited`` applies the capacity of experts. It is False in generation
        and scoring, where results must not depend on which tokens are computed together."""
        bias, seed = self.router.expert_bias, None
        if self.training and self.part.draws:
            # The CPU's default generator has the same state on all tensor-parallel ranks.
            seed = int(torch.randint(2**62, (), dtype=torch.int64))
        values = None if bias is None else bias.values
        part = self.part if limited else self.dropless
        return route(logits_TE, part, self.count, tokens, self.training, values, seed, apart)

    def _with_losses(
        self, state: LayerState, routing: Routing, logits_TE: Tensor, tokens: SharedTokens
    ) -> LayerState:
        if not state.losses:
            return state
        with_others = partial(self.balance.global_counts.with_micro_batch, state.targets)
        computed = losses(routing, logits_TE, self.part, self.count, tokens, with_others)
        for name, loss in computed.items():
            if name in state.losses:
                state = state.with_loss(name, loss / self.layers)
        return state

    def _next_to(self, x_BSH: Tensor) -> Tensor | None:
        """Return the output of the shared experts or residual MLP, or None if neither exists."""
        if self.residual is not None:
            return self.residual(x_BSH)
        if self.shared is None:
            return None
        y_BSH = self.shared(x_BSH)
        if self.shared_gate is None:
            return y_BSH
        return y_BSH * self.shared_gate(x_BSH).sigmoid()


def layers_of(model: ModelConfig) -> int:
    """Return the number of layers with experts, including multi-token prediction blocks, whose MLP
    is of the same kind as the last layer's."""
    part = model.part(ExpertsConfig)
    return part.layers + model.blocks_ahead * bool(part.experts_of(model.num_layers - 1))


def with_balancing(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Return the spec with the balancing losses of its expert layers added."""
    part, layers = model.part(ExpertsConfig), layers_of(model)
    weights = {name: weight * layers for name, weight in part.loss_weights.items() if weight}
    spec = replace(spec, draws=spec.draws or part.draws)
    if not weights:
        return spec

    def begin(batch: Any) -> LayerState:
        state = spec.begin(batch)
        zeros = {name: torch.zeros((), device=state.hidden.device) for name in weights}
        return state.changed(losses=zeros | dict(state.losses))

    def travels(state: LayerState, tp: TensorParallel, index: int) -> Mapping[str, Sequence[int]]:
        return {**spec.travels(state, tp, index), **{name: () for name in weights}}

    return replace(
        spec,
        begin=begin,
        travels=travels,
        losses={**spec.losses, **weights},
        no_perplexity=spec.no_perplexity | weights.keys(),
    )
