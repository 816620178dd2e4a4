"""Older checkpoints: which of them are kept, and which one a run falls back to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.older_checkpoints.flags import OlderCheckpointFlags, check_retention


class OlderCheckpoints(Feature):
    flag_parts = {"checkpoint": OlderCheckpointFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        check_retention(config.checkpoint, resolver)

    def checkpoint_instead(self, options: Any, found: Any, error: Any) -> Any:
        from megatron.features.older_checkpoints.fallback import newest_older

        return newest_older(options, found, error)

    def load_instead(self, engine: Any, origin: Any, error: Any) -> Any:
        from megatron.features.older_checkpoints.fallback import load_older

        return load_older(engine, origin, error)

    def loaded(self, engine: Any, origin: Any, source: Any) -> Sequence[str]:
        if not origin.damaged:
            return ()
        from megatron.features.older_checkpoints.fallback import set_damaged_aside

        return set_damaged_aside(engine, origin)

    def saved(self, options: Any, iteration: int) -> Sequence[str]:
        from megatron.features.older_checkpoints.retention import apply_retention

        return apply_retention(Path(options.save), iteration, options.keep_last, options.keep_every)


FEATURE = OlderCheckpoints()
