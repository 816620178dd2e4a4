"""Flag of a cooldown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, needs_value, option


@dataclass(frozen=True)
class CooldownConfig(FlagSection):
    """Cooldown."""

    after: ClassVar[str] = "optimizer"

    cooldown_iters: int | None = option(None, bounds=POSITIVE, needs=needs_value("load"))
    """Continue --load for this number of iterations, during which the learning rate decays from its
    value at the checkpoint to --min-lr, whatever the run's schedule was. --lr-wsd-decay-style sets
    the shape of the decay (default minus_sqrt). Use another folder for --save: this is a branch of
    the run."""
