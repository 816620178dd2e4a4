"""Flags in scripts of 2019, of OneFlow and of Megatron-DeepSpeed that have other names today."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.early_scripts.flags import (
    EarlyBatchFlags,
    EarlyLayoutFlags,
    check_evaluation_sizes,
)


class EarlyScripts(Feature):
    flag_parts = {"batch": EarlyBatchFlags, "parallel": EarlyLayoutFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        check_evaluation_sizes(resolver)


FEATURE = EarlyScripts()
