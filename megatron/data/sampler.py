"""Which samples a data-parallel rank reads, as a function of the samples consumed so far.

The order is Megatron's default: a micro step takes the next micro_batch_size * data_size samples,
rank r the r-th micro_batch_size of them. Nothing else is remembered, so the stream of the whole job
does not depend on how many ranks share it, on restarts, or on the number of micro steps in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def micro_batch_samples(
    consumed_samples: int, micro_batch_size: int, data_rank: int, data_size: int
) -> range:
    """Sample numbers of one rank's micro batch when `consumed_samples` were read by the job.

    Raises:
        ValueError: a number is out of its range.
    """
    if consumed_samples < 0 or micro_batch_size < 1 or not 0 <= data_rank < data_size:
        raise ValueError(
            f"no samples for consumed samples {consumed_samples}, micro batch size "
            f"{micro_batch_size}, data rank {data_rank} of {data_size}"
        )
    start = consumed_samples + data_rank * micro_batch_size
    return range(start, start + micro_batch_size)


@dataclass(frozen=True)
class MicroBatchSampler:
    """The micro batches of one rank from `consumed_samples` on, while all ranks have full ones."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def __iter__(self) -> Iterator[range]:
        together = self.micro_batch_size * self.data_size
        last_start = self.total_samples - together
        for consumed in range(self.consumed_samples, last_start + 1, together):
            yield micro_batch_samples(
                consumed, self.micro_batch_size, self.data_rank, self.data_size
            )
