"""Flag of files that are compared with their checksums."""

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
    """Compare every file of --data-path and the like with its checksum (PREFIX.sha256 next to
    PREFIX.bin and PREFIX.idx, FILE.sha256 next to other files) before training. The processes share
    the work."""
