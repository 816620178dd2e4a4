"""The command line of a tool about a run: flags of its own, and all flags of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

from megatron.config import FLAG_CLASSES, FlagParser, Settings
from megatron.config.flags import build
from megatron.training.log import show_log

Config = TypeVar("Config")


class RunToolParser(FlagParser, Generic[Config]):
    """Knows a tool's flags and those of a training; --help shows the tool's.

    Args:
        config: the tool's config class.
        description: what it does.
        epilog: more at the end of --help.
    """

    def __init__(
        self, config: type[Config], description: str | None, epilog: str | None = None
    ) -> None:
        self._config = config
        super().__init__(config, *FLAG_CLASSES, description=description)
        self.epilog = epilog

    def format_help(self) -> str:
        """The text of --help."""
        own = FlagParser(self._config, description=self.description, prog=self.prog)
        own.usage, own.epilog = "%(prog)s [flags] [flags of pretrain_gpt.py]", self.epilog
        return own.format_help()

    def parse(self, argv: Sequence[str] | None = None) -> tuple[Config, Settings]:
        """The tool's options, and the settings of the run; what is logged is shown from now on."""
        show_log()
        settings = self.settings(argv)
        own = {field.name for field in dataclasses.fields(self._config)}  # type: ignore[arg-type]
        rest = {name: setting for name, setting in settings.items() if name not in own}
        return build(self._config, settings), rest
