"""Rules of the maximal update parametrisation for each parameter (Yang et al. 2022,
arXiv:2203.03466, table 8; in depth CompleteP, Dey et al. 2025, arXiv:2505.01618, table 1).

A linear layer whose inputs are r times as wide as the base's starts with weights 1 / sqrt(r) as
large. Adam and Lion change each by about the learning rate, so that it is divided by r; Muon's
updates have the right size by themselves. SGD's follow the gradient: outputs / inputs. The logits
are divided by r in the network, and their weights keep the base's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from megatron.config import ConfigError, ModelConfig, RunConfig
from megatron.engine.update.optimizer import Factors
from megatron.features.width.flags import WidthConfig, base_ratios
from megatron.model.layer_list import LayerSpec
from megatron.model.spec import ModelSpec
from megatron.parallel.shard import init_of, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

LAYERS = {
    "word_embeddings": ("hidden", "fixed"),
    "position_embeddings": ("hidden", "fixed"),
    "output_layer": ("fixed", "hidden"),
    "qkv": ("heads", "hidden"),
    "proj": ("hidden", "heads"),
    "up": ("ffn", "hidden"),
    "down": ("hidden", "ffn"),
    "router": ("fixed", "hidden"),
    "shared_gate": ("fixed", "hidden"),
    "coefficient": ("fixed", "hidden"),
    "merge": ("hidden", "hidden"),
    # Latent attention, whose ranks do not grow with the model.
    "q": ("heads", "hidden"),
    "q_down": ("fixed", "hidden"),
    "q_up": ("heads", "fixed"),
    "kv_down": ("fixed", "hidden"),
    "kv_up": ("heads", "fixed"),
    "q_norm": ("fixed", "fixed"),
    "k_norm": ("fixed", "fixed"),
    "kv_norm": ("fixed", "fixed"),
}
"""Widths of outputs and inputs that a layer's weights depend on, by the layer's last name."""
_TO_RESIDUAL = ("proj", "down")
_OUTPUT = "output_layer"


@dataclass(frozen=True)
class Role:
    """A parameter's place in the parametrisation.

    Attributes:
        layer: last name of its layer.
        matrix: whether it multiplies the layer's inputs; vectors are biases, norms and the like.
        outputs, inputs: ratios of the widths to the base's.
    """

    layer: str
    matrix: bool
    outputs: float
    inputs: float

    @classmethod
    def of(cls, name: str, param: nn.Parameter, ratios: Mapping[str, float]) -> Role:
        """Return the role of a parameter with a canonical name. Raises ConfigError if there is no
        rule for it."""
        *_, layer, _kind = name.split(".")
        matrix = shard_of(param).decays
        if layer not in LAYERS and matrix:
            raise ConfigError(
                f"--use-mup has no rule for {name}: leave it out, or train a model of attention, "
                "MLPs and experts"
            )
        outputs, inputs = LAYERS.get(layer, ("hidden", "fixed"))
        return cls(layer, matrix, ratios[outputs], ratios[inputs])

    def factors(self, rule: str, depth: float, keep_decay: bool) -> Factors:
        """Return the factors of its learning rate, decay and epsilon under an update rule."""
        if rule == "sgd":
            if self.layer == _OUTPUT and self.matrix:
                return Factors(self.inputs)  # the logits' divisor is in the gradient, too
            return Factors(self.outputs / (self.inputs if self.matrix else 1.0))
        if rule == "muon" or not self.matrix or self.layer == _OUTPUT:
            return Factors()
        epsilon = self.inputs * (1.0 if self.layer.endswith("_embeddings") else depth)
        return Factors(1 / self.inputs, self.inputs if keep_decay else 1.0, 1 / epsilon)

    def std_factor(self, depth: float) -> float:
        """Return the factor of the standard deviation of its initial weights, which the core has
        divided by the root of the network's depth for outputs of residual branches."""
        width = 1.0 if self.layer == _OUTPUT else self.inputs**-0.5
        return width * (depth**0.5 if self.layer in _TO_RESIDUAL else 1.0)


def update_factors(
    config: RunConfig, names: Mapping[nn.Parameter, str], rules: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, Factors]:
    """Return the factors of every parameter; empty at the size of the base."""
    flags, model = config.section(WidthConfig), config.model
    if not _differs(flags, model):
        return {}
    ratios, depth = base_ratios(flags, model), flags.depth(model)
    return {
        param: Role.of(name, param, ratios).factors(
            rules.get(param, config.optimizer.optimizer), depth, flags.mup_scale_weight_decay
        )
        for param, name in names.items()
    }


def with_initial_weights(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the model with the initial weights of its width. Raises ConfigError if a layer has no
    rule."""
    flags, model = config.section(WidthConfig), config.model
    if not _differs(flags, model):
        return spec
    ratios, depth = base_ratios(flags, model), flags.depth(model)

    def build(each: LayerSpec) -> nn.Module:
        module = each.build()
        for name, param in module.named_parameters():
            init = init_of(param)
            role = Role.of(f"{each.name}.{name}", param, ratios)
            if init.std:
                init = replace(init, std=init.std * role.std_factor(depth))
                param.init = init  # type: ignore[attr-defined]
        return module

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        return [replace(each, build=partial(build, each)) for each in spec.layers(tp)]

    return replace(spec, layers=layers)


def _differs(flags: WidthConfig, model: ModelConfig) -> bool:
    values = (*base_ratios(flags, model).values(), flags.depth(model))
    return any(value != 1.0 for value in values)
