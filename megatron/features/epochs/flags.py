"""Flags for the length of a run in epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, option

FLAGS_OF_2019 = {
    f"flag --{name}"
    for name in (
        *("save-iters", "save-optim", "save-rng", "save-all-rng"),
        *("load-optim", "load-rng", "load-all-rng", "resume-dataloader", "shuffle", "deep-init"),
        *("eval-batch-size", "eval-seq-length", "fp32-embedding", "fp32-layernorm"),
        *("fp32-tokentypes", "model-parallel-size", "intermediate-size"),
    )
}
"""Origins of settings that occur only in scripts of 2019."""


@dataclass(frozen=True, kw_only=True)
class EpochsFlags(FlagPart):
    """Options for passes over the training data."""

    before: ClassVar[str] = "train_iters"

    epochs: int | None = option(None, bounds=POSITIVE)
    """Length of the run as a number of passes over the training data, instead of --train-iters. In
    scripts of 2019, recognised by flags such as --save-iters, it multiplies --train-iters."""

    def iterations(self, lengths: Sequence[str], resolver: ConfigResolver) -> int | None:
        """Return ``--train-iters``, times the epochs in scripts of 2019. ``lengths`` are the flags
        that set the run's length. Raises ConfigError if they contradict ``--epochs``."""
        iters: int | None = resolver.values["train_iters"]
        if self.epochs is None:
            return iters
        old = FLAGS_OF_2019 & set(resolver.origins.values())
        resolver.check(
            not lengths or (iters is not None and bool(old)),
            f"{resolver.show('epochs')} and {', '.join(lengths)} both say how long the run is; "
            "give one of them",
        )
        if iters is None:
            return None
        resolver.notes.append(
            f"--epochs {self.epochs} multiplies --train-iters {iters}, as in scripts of 2019, "
            f"where {min(old).removeprefix('flag ')} is from"
        )
        return resolver.put("train_iters", iters * self.epochs, "train-iters x epochs")
