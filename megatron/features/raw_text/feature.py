"""Training on text files that are tokenized on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.features.raw_text.flags import RawTextConfig


class RawTextFeature(Feature):
    sections = {"raw_text": RawTextConfig}

    def corpora(self, config: Any) -> Mapping[str, Any]:
        from megatron.features.raw_text.named_corpora import NamedCorpora

        if config is None:
            return NamedCorpora(RawTextConfig())
        return NamedCorpora(config.section(RawTextConfig), config.data.data_cache_path)

    def data_kind(self, section: str) -> Any:
        from megatron.features.raw_text.documents import KIND

        return KIND


FEATURE = RawTextFeature()
