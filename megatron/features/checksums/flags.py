"""Flag that enables the verification of data files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import option


@dataclass(frozen=True, kw_only=True)
class ChecksumFlags(FlagPart):
    """Checksums of data files."""

    before: ClassVar[str] = "mock_data"

    verify_data: bool = option(False)
    """Compare every file of --data-path and similar flags with its checksum before training.
    Checksums are in PREFIX.sha256 next to PREFIX.bin and PREFIX.idx, and in FILE.sha256 next to
    other files. The processes share the work."""
