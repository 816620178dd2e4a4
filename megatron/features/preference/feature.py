"""Training on preferences: DPO and its kin, KTO, reward models."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.preference.flags import PreferenceConfig


class Preference(Feature):
    after = ("instruction",)
    sections = {"preference": PreferenceConfig}

    def data_kind(self, section: str) -> Any:
        from megatron.features.preference.kind import KIND

        return KIND

    def model(self, spec: Any, config: Any) -> Any:
        if config.kind(PreferenceConfig).preference is None:
            return spec
        from megatron.features.preference.objective import with_preference

        return with_preference(spec, config)

    def before_engine(self, context: Any) -> None:
        if context.config.kind(PreferenceConfig).needs_reference:
            from megatron.features.preference.reference import add_reference

            add_reference(context.run, context.mesh, context.data)

    def ready(self, context: Any) -> None:
        if context.config.kind(PreferenceConfig).preference == "kto":
            from megatron.features.preference.comparisons import compare_ahead

            compare_ahead(context.engine)


FEATURE = Preference()
