"""Parameters and FLOPs of layers of experts, of which each token uses only some.

The layer is assumed to be dropless: a capacity would reduce the work, and padding increase it. The
router is counted as a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.config import ModelConfig
from megatron.features.experts.flags import ExpertsConfig
from megatron.model.flops import TransformerShape


@dataclass(frozen=True)
class LayerCosts:
    """Parameter counts of one layer of experts. Only ``expert`` includes biases.

    Attributes:
        chosen: weights of the experts that one token uses.
        others: weights that every token uses: router, shared and residual experts, latent
            projections.
        expert: all parameters of one expert, including biases.
    """

    chosen: int
    others: int
    expert: int


def layer_costs(model: ModelConfig, experts: int) -> LayerCosts:
    """Return the parameter counts of a layer with this number of experts."""
    part, hidden, gates = model.part(ExpertsConfig), model.hidden_size, 1 + model.mlp.gated
    width, inner = part.moe_latent_size or hidden, part.moe_ffn_hidden_size or 0
    weights = (gates + 1) * width * inner
    others = experts * hidden + 2 * hidden * (part.moe_latent_size or 0)
    shared = part.moe_shared_expert_intermediate_size or 0
    others += (gates + 1) * hidden * shared + part.moe_shared_expert_gate * hidden
    if part.mlp_type == "residual":
        others += (gates + 1) * hidden * model.mlp.ffn_hidden_size + 2 * hidden
    biases = model.mlp.bias * (gates * inner + width)
    return LayerCosts(part.moe_router_topk * weights, others, weights + biases)


def _layers(model: ModelConfig) -> list[int]:
    """Return the number of experts of each layer with experts, including multi-token prediction."""
    counts = model.part(ExpertsConfig).layer_experts
    return [count for count in counts + counts[-1:] * model.blocks_ahead if count]


def active_parameters(model: ModelConfig, parameters: int) -> int:
    """Return how many of the model's ``parameters`` one token uses."""
    part = model.part(ExpertsConfig)
    layers = _layers(model)
    idle = sum((n - part.moe_router_topk) * layer_costs(model, n).expert for n in layers)
    return parameters - idle


def with_experts(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with layers of experts instead of dense MLPs. A capacity is ignored."""
    layers = _layers(model)
    dense = (2 + model.mlp.gated) * model.hidden_size * model.mlp.ffn_hidden_size
    costs = [layer_costs(model, count) for count in layers]
    more = sum(2.0 * (each.chosen + each.others - dense) for each in costs)
    matrices, scores = shape.within
    return replace(shape, within=(matrices + shape.seq_length * more, scores))
