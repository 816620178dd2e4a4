"""Flags of recurrent layers: Mamba-2, and Gated DeltaNet with its delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config.features import ModelPart
from megatron.config.flags import POSITIVE, Bounds, ConfigResolver, Need, option
from megatron.config.sections import LayerMemory, States
from megatron.features.recurrent.pattern import DELTA, MAMBA, PatternConfig

if TYPE_CHECKING:
    from megatron.config.parallel import ParallelConfig


_MAMBA_LAYERS = Need(
    "M in --hybrid-layer-pattern, or --experimental-attention-variant mamba2",
    lambda values: MAMBA in values["mixers"],
    refused=False,
)


def shortest_limits(least: float, most: float) -> tuple[float, ...]:
    """Return the shortest value of ``--mamba-step-limits`` that expresses these bounds."""
    if most < math.inf:
        return least, most
    return (least,) if least else ()


_LIMITS = Bounds(
    lambda limits: (
        len(limits) <= 2
        and [*limits] == sorted({*limits})
        and sum(limits[:1]) >= 0
        and math.isfinite(sum(limits))
    ),
    "must be one number or two, the smaller one first, 0 or more",
)
_weights = partial(option, bounds=POSITIVE, role="weights", needs=_MAMBA_LAYERS)
_results = partial(option, role="results", needs=_MAMBA_LAYERS)


@dataclass(frozen=True, kw_only=True)
class MambaConfig(ModelPart):
    """Mamba-2 layers of a network. ``mamba_num_heads`` is None if the model has none."""

    mamba_state_dim: int = _weights(128)
    """State size of a Mamba-2 head, per channel of the head."""
    mamba_head_dim: int = _weights(64)
    """Number of channels of a Mamba-2 head."""
    mamba_num_groups: int = _weights(8)
    """Number of groups of Mamba-2 heads. The heads of a group share the vectors by which tokens
    write to and read from the states (B and C), and each group is normalised separately."""
    mamba_num_heads: int | None = _weights(None, derived="2 x hidden-size / mamba-head-dim")
    """Number of heads of a Mamba-2 layer."""
    mamba_conv_kernel_dim: int = _weights(4)
    """Kernel width of the convolution in a Mamba-2 layer, in tokens, including the current
    token."""
    mamba_conv_bias: bool = option(
        True, off="--no-mamba-conv-bias", role="weights", needs=_MAMBA_LAYERS
    )
    """Do not add a bias to the convolution of Mamba-2 layers."""
    mamba_proj_bias: bool = option(False, role="weights", needs=_MAMBA_LAYERS)
    """Add biases to the projections of Mamba-2 layers."""
    mamba_norm_before_gate: bool = _results(False)
    """Normalise the output of a Mamba-2 layer's states before the gate instead of after it."""
    mamba_step_limits: tuple[float, ...] = _results((), bounds=_LIMITS)
    """Minimum and, optionally, maximum to which the steps (dt) of Mamba-2 layers are clamped."""

    @property
    def idle(self) -> bool:
        return self.mamba_num_heads is None

    @property
    def step_limits(self) -> tuple[float, float]:
        """Minimum and maximum step; 0 and infinity if there are no limits."""
        least, most, *_ = (*(self.mamba_step_limits or (0.0,)), math.inf)
        return least, most

    @property
    def width(self) -> int:
        """Number of channels of all heads."""
        return (self.mamba_num_heads or 0) * self.mamba_head_dim

    @property
    def group_width(self) -> int:
        """Total width, over all groups, of the vectors by which a token writes to or reads from
        states."""
        return self.mamba_num_groups * self.mamba_state_dim

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> MambaConfig:
        if MAMBA not in resolver.values["mixers"]:
            return type(self)()
        heads, hidden = self.mamba_num_heads, resolver.values["hidden_size"]
        if heads is None:
            resolver.check(
                2 * hidden % self.mamba_head_dim == 0,
                f"{resolver.show('mamba_head_dim')} must divide 2 x {resolver.show('hidden_size')}"
                ", the channels of all heads; or give --mamba-num-heads",
            )
            heads = 2 * hidden // self.mamba_head_dim
            resolver.put("mamba_num_heads", heads, "2 x --hidden-size / --mamba-head-dim")
        resolver.check_divides("mamba_num_groups", "mamba_num_heads")
        return replace(self, mamba_num_heads=heads)

    def check_run(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError if the family is not GPT, or if tensor-parallel ranks cannot divide the
        heads or groups evenly."""
        if self.idle:
            return
        resolver.check(
            config.model.family == "gpt",
            f"models of the family {config.model.family} have attention in all blocks; leave "
            "--hybrid-layer-pattern and --experimental-attention-variant out, or train a GPT",
        )
        resolver.check_divides("tensor_model_parallel_size", "mamba_num_heads")
        size, groups = config.parallel.tensor_model_parallel_size, self.mamba_num_groups
        resolver.check(
            groups % size == 0 or size % groups == 0,
            f"{resolver.show('tensor_model_parallel_size')} must divide "
            f"{resolver.show('mamba_num_groups')}, or be a multiple of it",
        )

    def memory(self, layer: int, model: Any, tensor_size: int) -> LayerMemory | None:
        if self.idle or model.part(PatternConfig).mixer(layer) != MAMBA:
            return None
        groups = max(1, self.mamba_num_groups // tensor_size)
        heads = (self.mamba_num_heads or 0) // tensor_size
        channels = heads * self.mamba_head_dim + 2 * groups * self.mamba_state_dim
        state = groups, self.mamba_state_dim, heads // groups, self.mamba_head_dim
        return States(((self.mamba_conv_kernel_dim - 1, channels), state))


CHUNK = 64
"""Number of tokens in a chunk of the delta rule. Larger chunks cost less between chunks, and more
within them."""

_DELTA_LAYERS = Need(
    "G in --hybrid-layer-pattern, or --experimental-attention-variant gated_delta_net",
    lambda values: DELTA in values["mixers"],
    refused=False,
)
_TAPS = Bounds(lambda value: value > 1, "must be 2 or more")
_size = partial(option, bounds=POSITIVE, role="weights", needs=_DELTA_LAYERS, megatron=True)


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(ModelPart):
    """Gated DeltaNet layers of a network. ``delta_layers`` is empty if the model has none."""

    delta_layers: tuple[int, ...] = option((), internal=True, role="weights")
    """Indices of the layers with the delta rule, counted from 0."""
    linear_conv_kernel_dim: int = _size(4, bounds=_TAPS)
    """Width in tokens of the convolution before the delta rule, including the current token."""
    linear_key_head_dim: int = _size(128)
    """Size of a query and key head of the delta rule."""
    linear_value_head_dim: int = _size(128)
    """Size of a value head of the delta rule."""
    linear_num_key_heads: int = _size(16)
    """Number of query and key heads of the delta rule."""
    linear_num_value_heads: int = _size(32)
    """Number of value heads of the delta rule, a multiple of --linear-num-key-heads."""

    @property
    def idle(self) -> bool:
        return not self.delta_layers

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    def memory(self, layer: int, model: Any, tensor_size: int) -> LayerMemory | None:
        if layer not in self.delta_layers:
            return None
        channels = (2 * self.key_width + self.value_width) // tensor_size
        heads = self.linear_num_value_heads // tensor_size
        state = heads, self.linear_key_head_dim, self.linear_value_head_dim
        return States(((self.linear_conv_kernel_dim - 1, channels), state))

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> DeltaConfig:
        delta = tuple(n for n, mixer in enumerate(resolver.values["mixers"]) if mixer == DELTA)
        if not delta:
            return type(self)()
        resolver.check_divides("linear_num_key_heads", "linear_num_value_heads")
        return replace(self, delta_layers=delta)

    def check_run(self, family: str, parallel: ParallelConfig, resolver: ConfigResolver) -> None:
        """Raise ConfigError if the family is not GPT, or if tensor-parallel ranks cannot divide the
        heads."""
        if self.idle:
            return
        resolver.check(
            family == "gpt",
            f"models of the family {family} have attention in all blocks; leave "
            "--hybrid-layer-pattern and --experimental-attention-variant out, or train a GPT",
        )
        resolver.check_divides("tensor_model_parallel_size", "linear_num_key_heads")
