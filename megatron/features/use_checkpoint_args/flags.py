"""Flags that select settings to take from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import needs_value, option


@dataclass(frozen=True, kw_only=True)
class CheckpointArgsFlags(FlagPart):
    """Settings to take from the checkpoint."""

    before: ClassVar[Mapping[str, str]] = {"use_checkpoint_opt_param_scheduler": "finetune"}

    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
        needs=needs_value("load"),
    )
    """Use the learning rate, weight decay and their schedules of the loaded checkpoint's run,
    instead of those of the flags."""
    use_checkpoint_args: bool = option(False)
    """Use the checkpoint's model and tokenizer settings (--load) for flags that are not given."""
