"""z-loss: the squared logarithm of the softmax's denominator, computed in the fused head (Chowdhery
et al. 2022, arXiv:2204.02311, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import PACKED, Feature, FlagSection
from megatron.config.flags import NOT_NEGATIVE, ConfigResolver, option


@dataclass(frozen=True)
class ZLossConfig(FlagSection):
    """z-loss."""

    after: ClassVar[str] = "training"

    z_loss_coeff: float = option(0.0, bounds=NOT_NEGATIVE)
    """Add this value times the mean of log(Z)^2 over the tokens to the loss, where Z is the
    denominator of the softmax. This keeps logits from drifting (1e-4 in PaLM, 1e-5 in OLMo 2)."""

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError for models and runs that define their own losses."""
        shown = resolver.show("z_loss_coeff")
        model = config.model
        resolver.check(
            model.family == "gpt" and model.head == "lm",
            f"{shown} is for the token losses of a GPT, not for the family {model.family} with "
            f"{model.head_shown}; leave it out",
        )
        for section in config.sections:
            packed = getattr(section, "samples", None) == PACKED and section.acts
            flag = section.replaces_losses or (packed and "data of examples")
            resolver.check(
                not flag, f"{shown} contradicts {flag}, whose losses are computed in another way"
            )


class ZLossFeature(Feature):
    sections = {"z_loss": ZLossConfig}
    training_flags = (ZLossConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        flags = config.section(ZLossConfig)
        if flags.z_loss_coeff:
            flags.check(config, resolver)

    def model(self, spec: Any, config: Any) -> Any:
        coeff = config.section(ZLossConfig).z_loss_coeff
        if not coeff:
            return spec
        from megatron.features.z_loss.objective import with_z_loss

        return with_z_loss(spec, coeff)


FEATURE = ZLossFeature()
