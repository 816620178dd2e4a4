"""Verification of data files against the checksums stored next to them, for ``--verify-data``."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.checksums.flags import ChecksumFlags


class ChecksumsFeature(Feature):
    flag_parts = {"data": ChecksumFlags}

    def data_opened(self, context: Any) -> None:
        if not context.config.data.verify_data:
            return
        from megatron.features.checksums.verify import verify_checksums

        world = context.mesh.world
        verify_checksums([file.path for file in context.data.files()], world.rank, world.size)


FEATURE = ChecksumsFeature()
