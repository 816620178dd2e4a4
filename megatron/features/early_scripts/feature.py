"""Flags of scripts of 2019 and of OneFlow, which say in other words what others say."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.early_scripts.flags import EarlyBatchFlags, check_evaluation_sizes


class EarlyScripts(Feature):
    flag_parts = {"batch": EarlyBatchFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        check_evaluation_sizes(resolver)


FEATURE = EarlyScripts()
