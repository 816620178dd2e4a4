"""Flag for writing checkpoints in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class AsyncSaveFlags(FlagPart):
    """Asynchronous checkpointing."""

    before: ClassVar[Mapping[str, str]] = {"async_save": "save_universal"}

    async_save: bool = option(False)
    """Copy the state to host memory and write it while training continues."""


def check_async_save(options: Any, resolver: ConfigResolver) -> None:
    """Raise ConfigError if ``--async-save`` is given, but the run saves no checkpoints, or saves
    them in a format that cannot be written in the background."""
    if not options.async_save:
        return
    shown = resolver.show("async_save")
    resolver.check(options.save is not None, f"{shown} needs --save, the folder to save in")
    resolver.check(
        options.checkpoint_format == "safetensors",
        f"{shown} contradicts {resolver.show('checkpoint_format')}: training stops while DeepSpeed "
        "writes its folders",
    )
