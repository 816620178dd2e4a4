"""Rules of maximal update parametrisation for each parameter (Yang et al. 2022, arXiv:2203.03466,
table 8; for depth CompleteP, Dey et al. 2025, arXiv:2505.01618, table 1).

For a linear layer whose input is r times as wide as in the base model, initial weights are
multiplied by 1 / sqrt(r). Adam and Lion change each weight by about the learning rate, so their
learning rate is divided by r. Muon's updates already have the right size. SGD's updates scale with
the gradient, so its learning rate is multiplied by the outputs' ratio divided by the inputs' ratio.
The network divides the logits by r, and the output layer is initialised as in the base model.
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
    # Latent attention, whose latent sizes do not grow with the model.
    "q": ("heads", "hidden"),
    "q_down": ("fixed", "hidden"),
    "q_up": ("heads", "fixed"),
    "kv_down": ("fixed", "hidden"),
    "kv_up": ("heads", "fixed"),
    "q_norm": ("fixed", "fixed"),
    "k_norm": ("fixed", "fixed"),
    "kv_norm": ("fixed", "fixed"),
}
"""Names of the (output, input) widths by which a layer is scaled, by its last name component."""
_TO_RESIDUAL = ("proj", "down")
_OUTPUT = "output_layer"


@dataclass(frozen=True)
class Role:
    """Properties of a parameter that determine how it is scaled.

    Attributes:
        layer: last component of the layer's name.
        matrix: True if it multiplies the layer's inputs; False for biases, norms and other vectors.
        outputs, inputs: ratios of the layer's widths to the base model's.
    """

    layer: str
    matrix: bool
    outputs: float
    inputs: float

    @classmethod
    def of(cls, name: str, param: nn.Parameter, ratios: Mapping[str, float]) -> Role:
        """Return the role of a parameter by canonical name. Raises ConfigError if no rule covers
        it."""
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
        """Return the factors for learning rate, weight decay and epsilon under an update rule.
        ``depth`` is the ratio of the numbers of layers."""
        if rule == "sgd":
            if self.layer == _OUTPUT and self.matrix:
                # the gradient already contains the divisor of the logits
                return Factors(self.inputs)
            return Factors(self.outputs / (self.inputs if self.matrix else 1.0))
        if rule == "muon" or not self.matrix or self.layer == _OUTPUT:
            return Factors()
        epsilon = self.inputs * (1.0 if self.layer.endswith("_embeddings") else depth)
        return Factors(1 / self.inputs, self.inputs if keep_decay else 1.0, 1 / epsilon)

    def std_factor(self, depth: float) -> float:
        """Return the factor for the standard deviation of the initial weights. In output
        projections of residual branches, the core has already divided by the root of the network's
        depth; the factor changes that to the root of the base model's depth."""
        width = 1.0 if self.layer == _OUTPUT else self.inputs**-0.5
        return width * (depth**0.5 if self.layer in _TO_RESIDUAL else 1.0)


def update_factors(
    config: RunConfig, names: Mapping[nn.Parameter, str], rules: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, Factors]:
    """Return the factors of every parameter; empty if the model has the base model's size."""
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
    """Return the specification with initial weights scaled for its width. Raises ConfigError, when
    a layer is built, if no rule covers one of its parameters."""
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
