"""Training on text files that are tokenized on the fly."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.raw_text.flags import RawTextConfig


class RawTextFeature(Feature):
    sections = {"raw_text": RawTextConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.raw_text.kind import KIND

        return KIND


FEATURE = RawTextFeature()
