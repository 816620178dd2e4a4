"""Flags of the checkpoints before the newest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, needs_value, option


@dataclass(frozen=True, kw_only=True)
class OlderCheckpointFlags(FlagPart):
    """Checkpoints that are kept, and those that a run may fall back to."""

    before: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("keep_last", "keep_every"), "save_universal"),
        "on_damaged_checkpoint": "max_failed_saves",
    }

    keep_last: int | None = option(None, bounds=POSITIVE)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: int | None = option(None, bounds=POSITIVE)
    """Keep checkpoints of every N-th iteration permanently, regardless of --keep-last."""
    on_damaged_checkpoint: str = option(
        "stop", choices=("stop", "previous"), needs=needs_value("load")
    )
    """What to do if the checkpoint that --load would continue from is damaged: stop, naming the
    newest older one that is whole, or continue from that one and set the damaged ones aside."""

    @property
    def falls_back(self) -> bool:
        """True if a run continues from another checkpoint where that of ``--load`` is damaged."""
        return self.on_damaged_checkpoint == "previous"


def check_retention(options: Any, resolver: ConfigResolver) -> None:
    """Refuses flags of a ``CheckpointConfig`` about checkpoints that nothing saves or deletes."""
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
