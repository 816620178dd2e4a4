"""Flags for the JSON file that defines corpora."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import option


@dataclass(frozen=True, kw_only=True)
class CorporaFlags(FlagPart):
    """JSON file that defines corpora."""

    before: ClassVar[str] = "split"

    corpora_file: str = option("corpora.json")
    """JSON file that maps the names of --train-data to files."""
    corpora_outside: bool = option(False)
    """Accept paths in --corpora-file that lead out of its folder. Without this flag, a file written
    by another user cannot make a run read anything outside of that folder."""
