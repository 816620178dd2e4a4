"""Flags of Gated DeltaNet: layers with a delta rule instead of softmax attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config.features import ModelPart
from megatron.config.flags import POSITIVE, Bounds, ConfigResolver, Need, option
from megatron.config.memory import LayerMemory, States
from megatron.features.recurrent.pattern import DELTA

if TYPE_CHECKING:
    from megatron.config.parallel import ParallelConfig

CHUNK = 64
"""Tokens of a chunk of the delta rule: the work between chunks is divided by it, that in them
multiplied."""

_LAYERS = Need(
    "G in --hybrid-layer-pattern, or --experimental-attention-variant gated_delta_net",
    lambda values: DELTA in values["mixers"],
    refused=False,
)
_TAPS = Bounds(lambda value: value > 1, "must be 2 or more")
_size = partial(option, bounds=POSITIVE, role="weights", needs=_LAYERS, megatron=True)


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
