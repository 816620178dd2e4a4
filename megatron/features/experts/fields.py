"""Flags of experts: layers, router, balancing and capacity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.config.features import ModelPart
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Need,
    needs_value,
    option,
)

LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Values of ``--moe-router-load-balancing-type`` that are losses, mapped to their names in the
log."""

_EXPERTS = needs_value("num_experts", refused=False)
_SHARED = needs_value("moe_shared_expert_intermediate_size")
_GROUPS = needs_value("moe_router_num_groups")
_BIAS = needs_value("moe_router_enable_expert_bias")
_DROPPING = Need(
    "--num-experts, or with --disable-moe-token-dropping",
    lambda values: (
        bool(values["num_experts"])
        and (values["moe_gate"] != "deepspeed" or values["moe_token_dropping"])
    ),
    refused=False,
)
_CAPACITY = Need(
    "--num-experts and --moe-expert-capacity-factor, or with --disable-moe-token-dropping",
    lambda values: _DROPPING.met(values) and bool(values["moe_expert_capacity_factor"]),
    refused=False,
)
_POLICY = Need(
    "--num-experts, --moe-expert-capacity-factor and --moe-gate megatron",
    lambda values: _CAPACITY.met(values) and values["moe_gate"] == "megatron",
    refused=False,
)
_DEEPSPEED = Need(
    "--num-experts and --moe-gate deepspeed",
    lambda values: bool(values["num_experts"]) and values["moe_gate"] == "deepspeed",
    refused=False,
)
_weights = partial(option, role="weights", needs=_EXPERTS, megatron=True)
_results = partial(option, role="results", needs=_EXPERTS, megatron=True)
_COUNTS = Bounds(lambda counts: min(counts, default=0) >= 0, "must not be negative")
_WEIGHTS = Bounds(lambda weights: min(weights, default=0) >= 0, "must not be negative")
_JITTER = Bounds(lambda value: 0 <= value < 1, "must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ExpertsFlags(ModelPart):
    """Mixture of experts: layers whose MLP consists of several experts, some of which a router
    chooses for each token.

    ``layer_experts`` is empty in a model without experts. The defaults are Megatron-LM's. If a flag
    is given that only Megatron-DeepSpeed has, they are Megatron-DeepSpeed's. See
    :mod:`megatron.features.experts.resolve`.
    """

    num_experts: tuple[int, ...] = option((), bounds=_COUNTS)
    """Number of experts per layer: one number for all layers with experts, or one for each of them.
    A layer with 0 or 1 is dense."""
    moe_layer_freq: str | None = option(None, needs=_EXPERTS, derived="1")
    """Layers with experts: N for layers 0, N, 2N and so on, counted from 0; or a list such as
    ([0]*3+[1]*9), with a 1 for each layer with experts and a 0 for each dense layer."""
    expert_interval: int | None = option(
        None,
        bounds=POSITIVE,
        needs=_EXPERTS,
        derived="2 with flags of Megatron-DeepSpeed and without --moe-layer-freq",
    )
    """Layers with experts: N for layers N, 2N and so on, counted from 1."""
    layer_experts: tuple[int, ...] = option((), internal=True, role="weights")
    """Number of experts of each layer, 0 for a dense layer."""
    moe_ffn_hidden_size: int | None = _weights(None, bounds=POSITIVE, derived="ffn-hidden-size")
    """Inner width of an expert."""
    moe_shared_expert_intermediate_size: int | None = _weights(None, bounds=POSITIVE)
    """Total inner width of the shared experts, which process every token."""
    moe_shared_expert_gate: bool = _weights(False, needs=_SHARED)
    """Multiply the shared experts' output by a gate: the sigmoid of a projection of the token."""
    mlp_type: str = option(
        "standard", choices=("standard", "residual"), role="weights", needs=_EXPERTS
    )
    """With residual, add an MLP next to the experts. The layer's output is a weighted mean of the
    MLP and the experts, with weights computed for each token (PR-MoE)."""
    moe_latent_size: int | None = _weights(None, bounds=POSITIVE)
    """Hidden size of the experts. Linear layers project tokens to this size and back."""
    moe_apply_probs_on_input: bool = _results(False)
    """Apply the routing weight to an expert's input instead of its output, as in Llama 4. Needs one
    expert per token."""
    moe_gate: str = option(
        "megatron",
        choices=("megatron", "deepspeed", "sparsemixer"),
        role="results",
        needs=_EXPERTS,
    )
    """Routing rule. megatron is Megatron-LM's, configured by the router flags. deepspeed selects
    DeepSpeed's gates for one, two or more experts per token; flags that only Megatron-DeepSpeed has
    imply it. sparsemixer is Phi-MoE's SparseMixer."""
    moe_router_topk: int = _results(
        2, bounds=POSITIVE, aliases=("--topk",), derived="2; 1 with flags of Megatron-DeepSpeed"
    )
    """Number of experts per token."""
    moe_router_score_function: str = _results(
        "softmax", choices=("softmax", "sigmoid", "sqrtsoftplus")
    )
    """Function that computes the scores of experts from the logits of the router."""
    moe_router_pre_softmax: bool = _results(False)
    """Compute the softmax over all experts before choosing, instead of over the chosen experts."""
    moe_router_normalize: bool | None = option(
        None,
        flag="--moe-router-normalize",
        off="--no-moe-router-normalize",
        derived="on but with --moe-router-pre-softmax",
        role="results",
        needs=_EXPERTS,
    )
    """Divide the weights of a token's experts by their sum."""
    moe_router_bias: bool = option(False, role="weights", needs=_EXPERTS)
    """Add a learned bias to the logits of the router."""
    moe_router_num_groups: int | None = _results(None, bounds=POSITIVE)
    """Number of groups of consecutive experts, of which each token uses --moe-router-group-topk."""
    moe_router_group_topk: int | None = _results(None, bounds=POSITIVE, needs=_GROUPS)
    """Number of groups of experts that a token uses."""
    moe_router_group_score: str = option(
        "top", choices=("top", "max"), role="results", needs=_GROUPS
    )
    """Score of a group: top is the sum of its best --moe-router-topk / --moe-router-group-topk
    scores (DeepSeek-V3), max is the best score (DeepSeek-V2)."""
    moe_router_topk_scaling_factor: float | None = _results(None, bounds=POSITIVE)
    """Factor by which the weights of a token's experts are multiplied."""
    moe_router_dtype: str | None = _results(None, choices=("fp32", "fp64"))
    """Dtype of the router's matrix product and scores. The default is that of the hidden states."""
    moe_router_enable_expert_bias: bool = _weights(False)
    """Add a bias to the experts' scores when choosing, but not to their weights. Every step shifts
    the bias towards experts with few tokens (DeepSeek-V3). Needs sigmoid or sqrtsoftplus scores."""
    moe_router_bias_update_rate: float = option(
        1e-3, bounds=NOT_NEGATIVE, needs=_BIAS, megatron=True
    )
    """Amount by which a step changes the bias of --moe-router-enable-expert-bias."""
    moe_router_quantile_balancing_ema: float = option(
        0.0,
        bounds=FRACTION,
        needs=needs_value("moe_router_load_balancing_type", ("quantile_balancing",)),
    )
    """Decay of quantile_balancing's moving average: the fraction of the old bias to keep."""
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        choices=(*LOSSES, "sinkhorn", "quantile_balancing", "none"),
        needs=_EXPERTS,
        megatron=True,
    )
    """Load balancing of experts: one or several losses, over a micro batch (aux_loss), each sample
    (seq_aux_loss) or the global batch (global_aux_loss); balanced routing by Sinkhorn normalisation
    (sinkhorn) or by quantiles (quantile_balancing); or none."""
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (),
        bounds=_WEIGHTS,
        aliases=("--moe-loss-coeff",),
        derived="0; 0.1 with flags of Megatron-DeepSpeed",
        needs=_EXPERTS,
        megatron=True,
    )
    """Weight of each --moe-router-load-balancing-type in the loss, per layer; 0.01 is usual. The
    log shows a loss as the mean over layers, which is 1 if experts are balanced."""
    moe_z_loss_coeff: float | None = option(
        None, bounds=NOT_NEGATIVE, needs=_EXPERTS, megatron=True
    )
    """Weight of the router's z-loss, the mean of logsumexp(logits)^2; 0.001 is usual."""
    moe_input_jitter_eps: float | None = _results(None, bounds=_JITTER)
    """Multiply the router's input during training by random numbers from [1 - eps, 1 + eps]."""
    moe_expert_capacity_factor: float | None = _results(
        None,
        aliases=("--moe-train-capacity-factor",),
        derived="no limit; 1.0 with --moe-gate deepspeed",
        needs=_DROPPING,
    )
    """Capacity factor: an expert accepts at most this multiple of its even share of a micro batch's
    tokens. Tokens above the limit skip the expert. A negative number sets no limit."""
    moe_eval_capacity_factor: float | None = option(
        None,
        bounds=POSITIVE,
        role="results",
        needs=_DROPPING,
        derived="moe-expert-capacity-factor; 1.0 with flags of Megatron-DeepSpeed",
    )
    """Capacity factor during evaluation."""
    moe_min_capacity: int = option(
        0,
        bounds=NOT_NEGATIVE,
        role="results",
        derived="0; 4 with flags of Megatron-DeepSpeed",
        needs=_CAPACITY,
    )
    """Number of tokens that an expert always accepts, even if its capacity is lower."""
    moe_token_drop_policy: str = _results("probs", choices=("probs", "position"), needs=_POLICY)
    """Tokens that an expert at its capacity keeps: the tokens with the largest weights (probs), or
    the first tokens (position)."""
    moe_token_dropping: bool = option(
        True, off="--disable-moe-token-dropping", role="results", needs=_DEEPSPEED
    )
    """Disable the capacity limit of DeepSpeed's gates, so that experts accept all tokens."""
    moe_top2_2nd_expert_sampling: bool = option(
        True, off="--disable-moe-top2-2nd-expert-sampling", role="results", needs=_DEEPSPEED
    )
    """Choose the second-best expert in DeepSpeed's top-2 gate, instead of sampling."""

    @property
    def counts(self) -> list[int]:
        """Distinct expert counts of the layers with experts, ascending."""
        return sorted({*self.layer_experts} - {0})
