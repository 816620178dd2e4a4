"""The MLP of a block: its width and activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags import POSITIVE, option
from megatron.config.resolver import ConfigResolver

GATES = ("swiglu", "geglu")
"""Activations that multiply an activated gate with what goes up."""


@dataclass(frozen=True, kw_only=True)
class MLPFlags:
    """MLP."""

    ffn_hidden_size: int | None = option(
        None,
        derived="4 x hidden-size; with a gate 8/3 x hidden-size, down to a multiple of 64",
        bounds=POSITIVE,
        role="weights",
        megatron=True,
    )
    """Inner width of the MLP."""
    glu_activation: str | None = option(None, choices=GATES, role="results")
    """Gated MLP with SiLU or with GELU by the tanh approximation."""
    swiglu: bool = option(False, megatron=True)
    """Same as --glu-activation swiglu."""
    relu: bool = option(False, role="results")
    """ReLU in the MLP instead of GELU."""
    squared_relu: bool = option(False, role="results", megatron=True)
    """Squared ReLU in the MLP instead of GELU."""
    openai_gelu: bool = option(False, megatron=True)
    """GELU by the tanh approximation (the default already)."""
    bias_gelu_fusion: bool = option(True, off="--no-bias-gelu-fusion", megatron=True)
    """GELU by the exact error function instead of the tanh approximation."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The MLP of a block.

    Attributes:
        ffn_hidden_size: inner width.
        activation: one of ``swiglu``, ``geglu``, ``relu``, ``squared_relu``, ``gelu_tanh``,
            ``gelu_erf``.
        bias: whether its linear layers have biases.
    """

    ffn_hidden_size: int
    activation: str
    bias: bool

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with what goes up."""
        return self.activation in GATES

    def flags(self) -> dict[str, Any]:
        """The flags that ask for it, by field of :class:`MLPFlags`."""
        return {
            "ffn_hidden_size": self.ffn_hidden_size,
            "glu_activation": self.activation if self.gated else None,
            "swiglu": self.activation == "swiglu",
            "relu": self.activation == "relu",
            "squared_relu": self.activation == "squared_relu",
            "bias_gelu_fusion": self.activation != "gelu_erf",
        }


def resolve_mlp(
    flags: MLPFlags, hidden_size: int, bias: bool, resolver: ConfigResolver
) -> MLPConfig:
    """The MLP that flags ask for, in a residual stream of width ``hidden_size``.

    Raises:
        ConfigError: they name several activations.
    """
    activation = _activation(flags, resolver)
    width, how = 4 * hidden_size, "4 x hidden-size"
    if activation in GATES:
        width = int(hidden_size * 8 / 3) // 64 * 64 or hidden_size
        how = "8/3 x hidden-size, down to a multiple of 64"
    return MLPConfig(
        ffn_hidden_size=resolver.fill("ffn_hidden_size", flags.ffn_hidden_size, width, how),
        activation=activation,
        bias=bias,
    )


def _activation(flags: MLPFlags, resolver: ConfigResolver) -> str:
    gate = flags.glu_activation
    if flags.swiglu:
        resolver.check(
            gate in (None, "swiglu"),
            f"--swiglu contradicts {resolver.show('glu_activation')}; give one of them",
        )
        gate = resolver.fill("glu_activation", gate, "swiglu", "--swiglu")
    elif gate == "swiglu":
        resolver.put("swiglu", True, "--glu-activation swiglu")
    asked = {
        "--swiglu" if gate == "swiglu" else f"--glu-activation {gate}": gate,
        "--relu": "relu" if flags.relu else None,
        "--squared-relu": "squared_relu" if flags.squared_relu else None,
    }
    given = {flag: activation for flag, activation in asked.items() if activation is not None}
    resolver.check(
        len(given) < 2,
        f"{' contradicts '.join(given)}: an MLP has one activation; give one",
    )
    gelu = "gelu_tanh" if flags.bias_gelu_fusion or flags.openai_gelu else "gelu_erf"
    return next(iter(given.values()), gelu)
