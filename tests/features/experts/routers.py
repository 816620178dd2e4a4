"""Routers of tests: their configurations, logits, and routing as dense tables.

Shapes: T tokens, E experts, K choices of a token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.router import Routing, route

FIELDS = dict(
    moe_router_topk=2,
    moe_router_score_function="softmax",
    moe_router_pre_softmax=False,
    moe_router_normalize=None,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
    moe_router_group_score="top",
    moe_router_topk_scaling_factor=None,
    moe_router_enable_expert_bias=False,
    moe_router_load_balancing_type=("aux_loss",),
    loss_weights={"load_balancing_loss": 0.01},
    moe_expert_capacity_factor=None,
    moe_eval_capacity_factor=None,
    moe_min_capacity=0,
    moe_token_drop_policy="probs",
    moe_gate="megatron",
    moe_top2_2nd_expert_sampling=True,
    moe_token_dropping=True,
)
"""The fields that routing reads, with the defaults of the flags."""


def router(k: int = 2, **fields: object) -> SimpleNamespace:
    """``router(2, score_function="sigmoid")``: names without ``moe_router_`` or ``moe_``."""
    changed: dict[str, object] = {"moe_router_topk": k}
    for name, value in fields.items():
        full = next(n for n in (f"moe_router_{name}", f"moe_{name}", name) if n in FIELDS)
        changed[full] = value
    return SimpleNamespace(**FIELDS | changed)


def random_logits(
    tokens: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float64, step: float = 0.0
) -> Tensor:
    """Logits [T, E] that prefer some experts; multiples of ``step``, of which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    noise_TE = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    logits_TE = 1.5 * noise_TE + torch.linspace(1.0, -1.0, experts, dtype=torch.float64)
    return ((logits_TE / step).round() * step if step else logits_TE).to(dtype)


def routed(logits_TE: Tensor, config: SimpleNamespace, training: bool = True, **more) -> Routing:
    """The routing of one rank, whose tokens are one sample."""
    tokens, experts = SharedTokens(1, len(logits_TE)), logits_TE.shape[1]
    return route(logits_TE, config, experts, tokens, training, **more)


def chosen_map(experts_TK: Tensor, experts: int) -> Tensor:
    """Number of times that a token chose an expert, [T, E]; choices of E are of none."""
    counts_TE = torch.zeros(len(experts_TK), experts + 1, dtype=torch.int64)
    return counts_TE.scatter_add(1, experts_TK, torch.ones_like(experts_TK))[:, :-1]


def weight_map(experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Tensor:
    """Weight of each expert, [T, E], with gradient."""
    weights_TE = weights_TK.new_zeros(len(weights_TK), experts + 1)
    return weights_TE.scatter_add(1, experts_TK, weights_TK)[:, :-1]


class _Float64Torch:
    """The module torch as a model sees it that asks for float32 and gets float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def in_float64(module: ModuleType) -> Iterator[None]:
    """Code of a module that asks for float32 computes in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Float64Torch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
