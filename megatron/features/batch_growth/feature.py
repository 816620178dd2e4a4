"""Batch sizes that grow at the beginning of a run: ``--rampup-batch-size``."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.batch_growth.flags import BatchGrowthFlags


class BatchGrowth(Feature):
    flag_parts = {"training": BatchGrowthFlags}

    def batch_sizes(self, config: Any) -> Any:
        training = config.training
        if training.rampup_batch_size is None:
            return None
        from megatron.features.batch_growth.schedule import RampUp

        return RampUp(
            training.global_batch_size,
            training.micro_batch_size,
            config.parallel.data_parallel_size,
            training.rampup_batch_size,
        )


FEATURE = BatchGrowth()
