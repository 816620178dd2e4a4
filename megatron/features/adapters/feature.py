"""Adapters: low-rank additions to the linear layers of a frozen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.adapters.flags import AdapterConfig


class AdaptersFeature(Feature):
    sections = {"adapters": AdapterConfig}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        in_8_bits = config.fast_paths.fp8_format is not None
        config.section(AdapterConfig).check(in_8_bits, resolver)

    def checkpoints(self, config: Any) -> dict[str, str | None]:
        return {"--load-adapter": config.checkpoint.load_adapter}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        from megatron.run.inputs import located_model

        return located_model("adapter that it began from", config.checkpoint.load_adapter)


FEATURE = AdaptersFeature()
