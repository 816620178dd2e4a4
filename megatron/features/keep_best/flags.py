"""Flags for keeping the best checkpoint and for early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class KeepBestFlags(FlagPart):
    """Best checkpoint."""

    before: ClassVar[str] = "save_universal"

    keep_best: bool = option(False)
    """Keep the checkpoint with the lowest validation loss, regardless of --keep-last. A checkpoint
    is saved after every evaluation that is the best so far. best_epoch.json names the best one."""


@dataclass(frozen=True, kw_only=True)
class PatienceFlags(FlagPart):
    """Early stopping of a run whose validation loss no longer improves."""

    before: ClassVar[str] = "skip_train"

    early_stopping_patience: int | None = option(None, bounds=POSITIVE, role="course")
    """Save a checkpoint and stop after this number of consecutive evaluations without a lower
    validation loss."""


def check_evaluations(config: Any, resolver: ConfigResolver) -> None:
    """Raise ConfigError if the flags need evaluations or a folder that the run does not have."""
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
