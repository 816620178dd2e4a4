"""Training data by names of corpora: ``--train-data``, ``--valid-data`` and ``--test-data``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings
from megatron.features.corpora.flags import CorporaFlags

_NAMED = ("train_data", "valid_data", "test_data")


class CorporaFeature(Feature):
    flag_parts = {"data": CorporaFlags}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        if not any(name in settings and settings[name].value for name in _NAMED):
            return settings
        from megatron.features.corpora.corpora import with_corpora

        return with_corpora(settings)

    def named_sources(self, config: Any, kind_of: Callable[[str], str]) -> Any:
        if not any(getattr(config.data, name) for name in _NAMED):
            return None
        from megatron.features.corpora.corpora import named_sources

        return named_sources(config, kind_of)


FEATURE = CorporaFeature()
