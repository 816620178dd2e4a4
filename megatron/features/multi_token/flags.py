"""Flags for multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron.config.features import ModelPart
from megatron.config.flags import NOT_NEGATIVE, ConfigError, ConfigResolver, needs_value, option

_PREDICTING = needs_value("mtp_num_layers", refused=False)


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig(ModelPart):
    """Multi-token prediction: blocks after the last layer.

    Each block predicts one token further ahead than the block before it."""

    # The role is not "weights", since these blocks may differ when only weights are loaded.
    mtp_num_layers: int | None = option(None, bounds=NOT_NEGATIVE, role="results", megatron=True)
    """Number of additional tokens that each position predicts. Each is predicted by its own block
    after the last layer, which shares the model's token embedding and output head (DeepSeek-V3). 0
    disables multi-token prediction."""
    mtp_loss_scaling_factor: float = option(
        0.1, bounds=NOT_NEGATIVE, needs=_PREDICTING, megatron=True
    )
    """Weight of the mean of the multi-token prediction losses in the total loss."""
    mtp_use_repeated_layer: bool = option(False, role="results", needs=_PREDICTING, megatron=True)
    """Use a single block, applied repeatedly to its own output, for all additional tokens."""
    mtp_detach_heads: bool = option(False, needs=_PREDICTING, megatron=True)
    """Let the losses of multi-token prediction train only its own blocks, and not the model's
    layers, token embedding and output head."""

    models: ClassVar[tuple[str, ...]] = ("gpt",)
    """Model families that can predict several tokens."""

    @property
    def idle(self) -> bool:
        return not self.mtp_num_layers

    @property
    def blocks_ahead(self) -> int:
        return self.mtp_num_layers or 0

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each additional token's loss in the total loss, by the loss's log name."""
        depths = range(self.blocks_ahead)
        return {loss_name(n): self.mtp_loss_scaling_factor / len(depths) for n in depths}

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> MultiTokenConfig:
        if self.idle:
            return type(self)()
        resolver.check(
            self.blocks_ahead < seq_length,
            f"{resolver.show('mtp_num_layers')}: {resolver.show('seq_length')} leaves no token to "
            f"predict so far ahead; give at most {seq_length - 1}",
        )
        # A single block is the same whether repeated or not.
        repeated = self.mtp_use_repeated_layer and self.blocks_ahead > 1
        return replace(self, mtp_use_repeated_layer=repeated)

    def check_run(self, config: Any, resolver: ConfigResolver) -> None:
        """Report models and losses for which multi-token prediction is not possible."""
        if self.idle:
            return
        shown, model = resolver.show("mtp_num_layers"), config.model
        resolver.check(
            model.family in self.models,
            f"{shown}: models of the family {model.family} predict no further tokens; leave it "
            "out, or train a GPT",
        )
        resolver.check(
            model.head == "lm",
            f"{shown}: a model with {model.head_shown} predicts no tokens; leave it out",
        )
        replaced = [section.replaces_losses for section in config.sections]
        replaced += [
            "--preference" for kind in config.kinds if kind.samples == "pairs" and kind.acts
        ]
        for flag in filter(None, replaced):
            raise ConfigError(
                f"{shown}: {flag} has a loss of its own, and multi-token prediction the cross "
                "entropy of the labels; leave one of them out"
            )


def loss_name(depth: int) -> str:
    """Return the log name of an additional token's loss. ``depth`` counts from 0."""
    return f"mtp_{depth}_loss"
