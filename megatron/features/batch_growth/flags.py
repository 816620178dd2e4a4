"""Flag for batch sizes that grow at the beginning of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import option


@dataclass(frozen=True, kw_only=True)
class BatchGrowthFlags(FlagPart):
    """Options for smaller batches at the beginning of a run."""

    before: ClassVar[str] = "train_iters"

    rampup_batch_size: tuple[int, int, int] | None = option(None)
    """START INCREMENT SAMPLES: increase the global batch size from START in steps of INCREMENT to
    --global-batch-size, over the first SAMPLES samples."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the run, in order. A START or INCREMENT that is not positive is ignored
        here, because the schedule refuses it with an error."""
        whole: int = super().batch_sizes[-1]  # type: ignore[misc]
        start, increment, _ = self.rampup_batch_size or (whole, 1, 0)
        if start <= 0 or increment <= 0:
            return (whole,)
        return (*range(start, whole, increment), whole)
