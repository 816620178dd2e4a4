"""Feature for fill-in-the-middle, in which the middle of a sample is moved to its end."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.fill_in_the_middle.flags import FimConfig


class FillInTheMiddleFeature(Feature):
    needs = ("raw_text",)
    sections = {"fill_in_the_middle": FimConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.fill_in_the_middle.kind import KIND

        return KIND


FEATURE = FillInTheMiddleFeature()
