"""Feature that keeps averages of the weights in addition to the trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import Feature, FlagSection
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    ConfigResolver,
    Need,
    option,
)

EXPONENTIAL, UNIFORM = "exponential_average", "uniform_average"
"""Names of the averages' states in checkpoints."""

_EMA = Need("--ema-decay", lambda values: values["ema_decay"] is not None)
_SWA = Need("--swa-start-iter", lambda values: values["swa_start_iter"] is not None)


@dataclass(frozen=True)
class AveragesConfig(FlagSection):
    """Averages of the weights."""

    after: ClassVar[str] = "optimizer"

    ema_decay: float | None = option(None, bounds=FRACTION)
    """Keep an exponential moving average of the weights with this decay, such as 0.999: average =
    decay x average + (1 - decay) x weights. Evaluations also report its losses."""
    ema_start_iter: int = option(1, bounds=POSITIVE, needs=_EMA)
    """Iteration after which the exponential average starts, as a copy of the weights."""
    swa_start_iter: int | None = option(None, bounds=NOT_NEGATIVE)
    """Keep the mean of the weights after this iteration and later ones (stochastic weight
    averaging). Evaluations also report its losses."""
    swa_interval: int = option(1, bounds=POSITIVE, needs=_SWA)
    """Number of iterations between two weights that enter the mean."""

    @property
    def names(self) -> Mapping[str, str]:
        """State name and flag of each average of the run."""
        asked = {
            EXPONENTIAL: ("--ema-decay", self.ema_decay),
            UNIFORM: ("--swa-start-iter", self.swa_start_iter),
        }
        return {kind: flag for kind, (flag, value) in asked.items() if value is not None}

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Check that the run can keep its averages. Raises ConfigError if not."""
        for flag in self.names.values():
            check_kept(flag, "the average", config, resolver)

    def check_start(self, last: int) -> None:
        """Check when the averages start. Raises ConfigError if that is after the last iteration."""
        for flag, first in (
            ("--ema-start-iter", self.ema_start_iter if self.ema_decay is not None else 0),
            ("--swa-start-iter", self.swa_start_iter or 0),
        ):
            if first > last:
                raise ConfigError(
                    f"{flag} {first} is after the last iteration, {last}: the average would have "
                    "no term; give an earlier one"
                )


def check_kept(flag: str, what: str, config: Any, resolver: ConfigResolver) -> None:
    """Check that a run can keep ``what``, which ``flag`` asks for, in addition to the weights.
    Raises ConfigError if the run cannot keep it, or would lose it when it resumes."""
    checkpoint = config.checkpoint
    for wrong, why, instead in (
        (
            config.optimizer.optimizer == "schedule_free",
            "--optimizer schedule_free, whose weights are an average",
            "leave it out",
        ),
        (
            not checkpoint.save_optim,
            f"--no-save-optim: checkpoints have {what} with the optimizer's states",
            "leave one of them out",
        ),
        (
            checkpoint.checkpoint_format != "safetensors",
            f"--checkpoint-format {checkpoint.checkpoint_format}, which has no place for {what}",
            "leave one of them out",
        ),
    ):
        resolver.check(not wrong, f"{flag} contradicts {why}; {instead}")


class AveragesFeature(Feature):
    after = ("qk_clip",)  # QK-Clip changes the weights after an update
    sections = {"averages": AveragesConfig}
    training_flags = (AveragesConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        flags = config.section(AveragesConfig)
        if not config.training.skip_train:
            flags.check(config, resolver)
            return
        resolver.notes += (
            f"{flag} changes nothing with --skip-train, which evaluates the weights: "
            "tools/convert_checkpoint.py --average makes a model of an average"
            for flag in flags.names.values()
        )

    def built(self, engine: Any) -> None:
        from megatron.engine.update.adam import KeptState

        if not engine.config.training.skip_train:
            engine.kept |= {
                kind: KeptState() for kind in engine.config.section(AveragesConfig).names
            }

    def ready(self, context: Any) -> None:
        flags = context.config.section(AveragesConfig)
        if context.config.training.skip_train or not flags.names:
            return
        flags.check_start(context.plan.train_iters)
        from megatron.features.averages.callback import Averages, AverageTerms
        from megatron.training.context import Order

        terms = {
            EXPONENTIAL: AverageTerms(flags.ema_decay, flags.ema_start_iter),
            UNIFORM: AverageTerms(None, flags.swa_start_iter or 0, flags.swa_interval),
        }
        context.add(Order.TEACH, Averages({kind: terms[kind] for kind in flags.names}))


FEATURE = AveragesFeature()
