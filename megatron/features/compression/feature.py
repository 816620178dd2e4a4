"""Feature for compression during training, configured by a JSON section of older DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.compression.settings import SECTION, CompressionConfig


def _clean() -> Any:
    from megatron.features.compression.clean import clean

    return clean


class CompressionFeature(Feature):
    needs = ("optimizers",)
    after = ("adapters", "distillation")
    sections = {"compression": CompressionConfig}
    training_flags = (CompressionConfig,)
    json_sections = (SECTION,)

    def check_json(self, sections: Mapping[str, str]) -> None:
        CompressionConfig(**sections)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        compression = config.section(CompressionConfig).chosen
        if compression is not None:
            from megatron.features.compression.model import check

            check(config, compression)

    def conversions(self) -> Mapping[str, Callable[[], Any]]:
        return {"clean": _clean}

    def model(self, spec: Any, config: Any) -> Any:
        compression = config.section(CompressionConfig).chosen
        if compression is None:
            return spec
        from megatron.features.compression.model import with_compression

        return with_compression(spec, config, compression)

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        compression = config.section(CompressionConfig).chosen
        if compression is None or not compression.in_layers:
            return None
        return "compression_training changes weights and inputs inside of layers"

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        compression = config.section(CompressionConfig).chosen
        if compression is None or not compression.techniques:
            return None
        from megatron.features.compression.state import CompressionState

        return CompressionState(compression, mesh, config.training.seed)

    def built(self, engine: Any) -> None:
        if engine.config.section(CompressionConfig).chosen is not None:
            from megatron.features.compression.state import state_of

            state = state_of(engine)
            if state is not None:
                state.attach(engine)

    def before_load(self, context: Any) -> None:
        compression = context.config.section(CompressionConfig).chosen
        if compression is not None and compression.layers is not None:
            from megatron.features.compression.reduction import student_source

            context.source = student_source(context.config, compression.layers, context.source)

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        if engine.config.section(CompressionConfig).chosen is None:
            return None
        from megatron.features.compression.reduction import load_compressed

        return load_compressed(engine, source, fresh)

    def ready(self, context: Any) -> None:
        if context.config.section(CompressionConfig).chosen is not None:
            from megatron.features.compression.state import CompressionSteps, state_of
            from megatron.training.context import Order

            state = state_of(context.engine)
            if state is not None:
                context.add(Order.TEACH, CompressionSteps(state))


FEATURE = CompressionFeature()
