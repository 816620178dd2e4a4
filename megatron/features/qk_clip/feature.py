"""QK-clip, which bounds attention logits (MuonClip), and logging of the largest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import Feature, FlagSection
from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, Need, option
from megatron.features.latent.flags import LatentConfig

_CLIP = Need("--qk-clip", lambda values: values["qk_clip"])


@dataclass(frozen=True)
class QKClipConfig(FlagSection):
    """QK-clip."""

    after: ClassVar[str] = "optimizer"

    qk_clip: bool = option(False)
    """After each update, scale down the query and key projections of heads whose largest attention
    logit in the step exceeds --qk-clip-threshold, so that it falls to the threshold (Kimi K2)."""
    qk_clip_alpha: float = option(0.5, bounds=FRACTION, needs=_CLIP)
    """Exponent of the scaling factor for queries; keys get 1 minus this value."""
    qk_clip_threshold: float = option(100.0, bounds=POSITIVE, needs=_CLIP)
    """Largest attention logit that is not scaled down (of scaled scores, before the softmax)."""
    log_max_attention_logit: bool = option(False)
    """Log the largest attention logit of the steps of each log line. It is computed in addition to
    the attention kernel, by a float32 GEMM of all queries and keys."""

    @property
    def measures(self) -> bool:
        """True if a run has to measure the largest attention logits."""
        return self.qk_clip or self.log_max_attention_logit

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError if logits are not measured, or do not scale with the projections."""
        model = config.model
        flag = "--qk-clip" if self.qk_clip else "--log-max-attention-logit"
        resolver.check(
            model.family == "gpt",
            f"{flag} is for the causal attention of a GPT, not for the family {model.family}; "
            "leave it out",
        )
        norm, latent = model.norm, not model.part(LatentConfig).idle
        for wrong, what in (
            (norm.qk_layernorm and not latent, "--qk-layernorm, which bounds logits by itself"),
            (norm.qk_l2_norm, "--qk-l2-norm, which bounds logits by itself"),
            (
                model.attention.attn_logit_softcapping is not None,
                "--attn-logit-softcapping, which bounds logits by itself",
            ),
            (model.attention.clip_qkv is not None, "--clip-qkv, after which logits do not scale"),
            (
                any(getattr(part, "global_keys_as_values", False) for part in model.parts),
                "--global-keys-as-values, by which values would be scaled with the keys",
            ),
            (
                config.optimizer.optimizer == "schedule_free",
                "--optimizer schedule_free, whose weights are a mean that would not be scaled",
            ),
        ):
            resolver.check(
                not (wrong and self.qk_clip), f"--qk-clip contradicts {what}; leave one of them out"
            )


class QKClipFeature(Feature):
    needs = ("latent",)
    sections = {"qk_clip": QKClipConfig}
    training_flags = (QKClipConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        if config.section(QKClipConfig).measures and not config.training.skip_train:
            config.section(QKClipConfig).check(config, resolver)

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if not config.section(QKClipConfig).measures or config.training.skip_train:
            return None
        return "the largest attention logits (--qk-clip) are kept outside of graphs"

    def ready(self, context: Any) -> None:
        flags = context.config.section(QKClipConfig)
        if not flags.measures or context.config.training.skip_train:
            return
        from megatron.features.qk_clip.callback import QKClip
        from megatron.training.context import Order

        threshold = flags.qk_clip_threshold if flags.qk_clip else None
        record = context.report.record
        clip = QKClip(context.engine, flags.qk_clip_alpha, threshold, record)
        context.add(Order.TEACH, clip)


FEATURE = QKClipFeature()
