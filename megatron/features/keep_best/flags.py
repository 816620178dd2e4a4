"""Flags of the best evaluation of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class KeepBestFlags(FlagPart):
    """The best checkpoint."""

    before: ClassVar[str] = "save_universal"

    keep_best: bool = option(False)
    """Keep the checkpoint with the lowest validation loss, regardless of --keep-last; an evaluation
    that is the best so far is followed by a checkpoint. best_epoch.json names it."""


@dataclass(frozen=True, kw_only=True)
class PatienceFlags(FlagPart):
    """The end of a run that does not get better."""

    before: ClassVar[str] = "skip_train"

    early_stopping_patience: int | None = option(None, bounds=POSITIVE, role="course")
    """Save and stop after this many evaluations in a row without a lower validation loss."""


def check_evaluations(config: Any, resolver: ConfigResolver) -> None:
    """Refuses flags that compare evaluations in a run without them, or without a folder."""
    resolver.check(
        config.checkpoint.save is not None or not config.checkpoint.keep_best,
        f"{resolver.show('keep_best')} needs --save, the folder to save in",
    )
    training = config.training
    for name, wanted in (
        ("keep_best", config.checkpoint.keep_best),
        ("early_stopping_patience", training.early_stopping_patience is not None),
    ):
        resolver.check(
            not wanted or training.eval_iters > 0,
            f"{resolver.show(name)} compares evaluations, and {resolver.show('eval_iters')} turns "
            "them off: give a larger number",
        )
