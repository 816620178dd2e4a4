"""Flags of layers whose state has the same size after any number of tokens: Mamba-2, and Gated
DeltaNet, which has a delta rule instead of softmax attention.
"""

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
    """Return the value of ``--mamba-step-limits`` for these bounds, without those that bound
    nothing."""
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
    """Mamba-2 of a network; ``mamba_num_heads`` is None in a model without."""

    mamba_state_dim: int = _weights(128)
    """Size of the state that a Mamba-2 head keeps of each of its channels."""
    mamba_head_dim: int = _weights(64)
    """Channels of a Mamba-2 head."""
    mamba_num_groups: int = _weights(8)
    """Groups of Mamba-2 heads, of which each shares what its tokens write to and read from the
    states, and is normalised by itself."""
    mamba_num_heads: int | None = _weights(None, derived="2 x hidden-size / mamba-head-dim")
    """Heads of a Mamba-2 layer."""
    mamba_conv_kernel_dim: int = _weights(4)
    """Tokens that the convolution of a Mamba-2 layer reads for each token, itself included."""
    mamba_conv_bias: bool = option(
        True, off="--no-mamba-conv-bias", role="weights", needs=_MAMBA_LAYERS
    )
    """Do not add a bias to the convolution of Mamba-2 layers."""
    mamba_proj_bias: bool = option(False, role="weights", needs=_MAMBA_LAYERS)
    """Add biases to the projections of Mamba-2 layers."""
    mamba_norm_before_gate: bool = _results(False)
    """Normalise the output of a Mamba-2 layer's states before it is multiplied by the gate, not
    after."""
    mamba_step_limits: tuple[float, ...] = _results((), bounds=_LIMITS)
    """Least and, if there are two numbers, largest step of a Mamba-2 layer, to which it clamps
    those of tokens."""

    @property
    def idle(self) -> bool:
        return self.mamba_num_heads is None

    @property
    def step_limits(self) -> tuple[float, float]:
        """Least and largest step; infinite without a bound."""
        least, most, *_ = (*(self.mamba_step_limits or (0.0,)), math.inf)
        return least, most

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return (self.mamba_num_heads or 0) * self.mamba_head_dim

    @property
    def group_width(self) -> int:
        """Numbers of a token that its groups write, or read."""
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
        """Refuse other families, and heads and groups that tensor-parallel ranks cannot share."""
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
"""Tokens of a chunk of the delta rule: the work between chunks is divided by it, that in them
multiplied."""

_DELTA_LAYERS = Need(
    "G in --hybrid-layer-pattern, or --experimental-attention-variant gated_delta_net",
    lambda values: DELTA in values["mixers"],
    refused=False,
)
_TAPS = Bounds(lambda value: value > 1, "must be 2 or more")
_size = partial(option, bounds=POSITIVE, role="weights", needs=_DELTA_LAYERS, megatron=True)


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(ModelPart):
    """Gated DeltaNet of a network; ``delta_layers`` is empty in a model without it."""

    delta_layers: tuple[int, ...] = option((), internal=True, role="weights")
    """Layers with the delta rule, counted from 0."""
    linear_conv_kernel_dim: int = _size(4, bounds=_TAPS)
    """Tokens that the convolution before the delta rule reads for each token, itself included."""
    linear_key_head_dim: int = _size(128)
    """Size of a query and key head of the delta rule."""
    linear_value_head_dim: int = _size(128)
    """Size of a value head of the delta rule."""
    linear_num_key_heads: int = _size(16)
    """Query and key heads of the delta rule."""
    linear_num_value_heads: int = _size(32)
    """Value heads of the delta rule, a multiple of --linear-num-key-heads."""

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
        """Refuse other families than GPT, and heads that tensor parallelism does not divide."""
        if self.idle:
            return
        resolver.check(
            family == "gpt",
            f"models of the family {family} have attention in all blocks; leave "
            "--hybrid-layer-pattern and --experimental-attention-variant out, or train a GPT",
        )
        resolver.check_divides("tensor_model_parallel_size", "linear_num_key_heads")
