"""The flag of a cooldown."""

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
    """Continue --load for this many iterations, in which the learning rate falls from its value
    there to --min-lr, by --lr-wsd-decay-style (minus_sqrt by default), whatever the schedule of the
    run was: a branch that --save keeps in another folder."""
