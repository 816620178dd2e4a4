"""Flag of batches that grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import option


@dataclass(frozen=True, kw_only=True)
class BatchGrowthFlags(FlagPart):
    """Smaller batches at the beginning of a run."""

    before: ClassVar[str] = "train_iters"

    rampup_batch_size: tuple[int, int, int] | None = option(None)
    """START INCREMENT SAMPLES: increase the global batch size from START in steps of INCREMENT to
    --global-batch-size, over the first SAMPLES samples."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Numbers of samples of a step, in the order of the run; START and INCREMENT that lead
        nowhere are refused where the schedule is made."""
        whole: int = super().batch_sizes[-1]  # type: ignore[misc]
        start, increment, _ = self.rampup_batch_size or (whole, 1, 0)
        if start <= 0 or increment <= 0:
            return (whole,)
        return (*range(start, whole, increment), whole)
