"""Feature that logs the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import Feature, FlagSection
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True)
class NoiseScaleConfig(FlagSection):
    """Gradient noise scale."""

    after: ClassVar[str] = "logging"

    gradient_noise_interval: int | None = option(None, bounds=POSITIVE)
    """Number of steps between measurements of the gradient noise scale, which is logged in samples.
    It is about the batch size beyond which more samples save few steps. A measured step reads each
    micro batch's gradients once more and waits for the device."""

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError if a rank does not have the gradients of whole micro batches."""
        shown, parallel = resolver.show("gradient_noise_interval"), config.parallel
        training = config.training
        resolver.check(
            training.global_batch_size > training.micro_batch_size,
            f"{shown} compares the gradients of micro batches with those of a step: give a "
            "--global-batch-size of two or more micro batches",
        )
        pipelined = parallel.pipeline_model_parallel_size > 1
        for wrong, what, instead in (
            (config.precision.fp16, "--fp16, which scales gradients", "use --bf16"),
            (parallel.context_parallel_size > 1, "--context-parallel-size", "use data parallelism"),
            (parallel.expert_model_parallel_size > 1, "--expert-model-parallel-size", "use 1"),
            (
                pipelined and config.model.embedding.tied,
                "a pipeline with one weight on two stages",
                "give --untie-embeddings-and-output-weights",
            ),
        ):
            resolver.check(not wrong, f"{shown} contradicts {what}: {instead}, or leave it out")


class NoiseScaleFeature(Feature):
    sections = {"noise_scale": NoiseScaleConfig}
    training_flags = (NoiseScaleConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        flags = config.section(NoiseScaleConfig)
        if flags.gradient_noise_interval is not None:
            flags.check(config, resolver)

    def ready(self, context: Any) -> None:
        interval = context.config.section(NoiseScaleConfig).gradient_noise_interval
        if interval is None or context.config.training.skip_train:
            return
        from megatron.features.noise_scale.callback import NoiseScale
        from megatron.training.context import Order

        if context.engine.backend.shared is not None:
            context.engine.backend.shared.sum_at_once()
        noise = NoiseScale(interval)
        context.report.at_line.append(noise.numbers)
        context.add(Order.COMPARE, noise)


FEATURE = NoiseScaleFeature()
