"""Flags for checkpoints older than the newest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, needs_value, option


@dataclass(frozen=True, kw_only=True)
class OlderCheckpointFlags(FlagPart):
    """Options for checkpoints to keep, and to fall back to."""

    before: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("keep_last", "keep_every"), "save_universal"),
        "on_damaged_checkpoint": "max_failed_saves",
    }

    keep_last: int | None = option(None, bounds=POSITIVE)
    """Number of newest checkpoints to keep. Older ones are deleted."""
    keep_every: int | None = option(None, bounds=POSITIVE)
    """Keep checkpoints of every N-th iteration permanently, regardless of --keep-last."""
    on_damaged_checkpoint: str = option(
        "stop", choices=("stop", "previous"), needs=needs_value("load")
    )
    """Reaction to a damaged checkpoint. stop ends the run and reports the newest older checkpoint
    that is intact. previous continues from that one and renames the damaged ones."""

    @property
    def falls_back(self) -> bool:
        """True if a run continues from an older checkpoint when that of ``--load`` is damaged."""
        return self.on_damaged_checkpoint == "previous"


def check_retention(options: Any, resolver: ConfigResolver) -> None:
    """Refuse retention flags if the run saves no checkpoints, or if they would have no effect."""
    for name in ("keep_last", "keep_every"):
        resolver.check(
            options.save is not None or not getattr(options, name),
            f"{resolver.show(name)} needs --save, the folder to save in",
        )
    resolver.check(
        options.keep_every is None or options.keep_last is not None,
        f"{resolver.show('keep_every')} exempts checkpoints from --keep-last and needs it; "
        "without both, all are kept",
    )
