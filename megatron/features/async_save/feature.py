"""``--async-save``: a background thread on each rank writes a copy of the state."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.async_save.flags import AsyncSaveFlags, check_async_save


class AsyncSave(Feature):
    flag_parts = {"checkpoint": AsyncSaveFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        check_async_save(config.checkpoint, resolver)

    def saver(self, options: Any) -> Any:
        if not options.async_save:
            return None
        from megatron.features.async_save.writer import AsyncCheckpointWriter

        return AsyncCheckpointWriter


FEATURE = AsyncSave()
