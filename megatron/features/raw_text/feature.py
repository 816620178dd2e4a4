"""Training on text files that are tokenized during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
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

    def training_texts(self, config: Any) -> Callable[[], Iterator[str]] | None:
        from megatron.data.sources import parts_of

        train = parts_of(config).train
        sources = [s for s in (train.sources if train else ()) if s.kind == RawTextConfig.files]
        if not sources:
            return None
        from megatron.features.raw_text.documents import texts_of

        return partial(texts_of, config, sources)

    def data_kind(self, section: str) -> Any:
        from megatron.features.raw_text.documents import KIND

        return KIND


FEATURE = RawTextFeature()
