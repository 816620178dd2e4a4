"""Feature for settings that a run takes from its checkpoint: ``--use-checkpoint-args`` and
``--use-checkpoint-opt_param-scheduler``. The folder's name sorts after those of other features that
complete settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings
from megatron.features.use_checkpoint_args.flags import CheckpointArgsFlags

_FLAGS = {"use_checkpoint_args", "use_checkpoint_opt_param_scheduler"}


class CheckpointArgs(Feature):
    flag_parts = {"checkpoint": CheckpointArgsFlags}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if _FLAGS.isdisjoint(settings):
            return settings
        from megatron.features.use_checkpoint_args.settings import with_checkpoint

        return with_checkpoint(settings)


FEATURE = CheckpointArgs()
