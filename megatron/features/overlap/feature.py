"""The flags of collectives that run behind computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import Feature, FlagSection
from megatron.config.flags import ConfigResolver, needs_value, option


@dataclass(frozen=True)
class OverlapConfig(FlagSection):
    """Overlap of collectives."""

    after: ClassVar[str] = "parallel"

    overlap_param_gather: bool = option(
        True,
        flag="--overlap-param-gather",
        off="--no-overlap-param-gather",
        role="layout",
        needs=needs_value("zero_stage", 1, 2, refused=False),
    )
    """ZeRO 1 and 2: gather updated weights while the next forward pass runs, in which each layer
    waits for its own."""
    tp_comm_overlap: bool = option(False, role="layout")
    """With --sequence-parallel and --torch-compile on GPUs that reach each other's memory: gather
    and scatter sequences piece by piece, while the products next to them compute (asynchronous
    tensor parallelism by torch's symmetric memory). Elsewhere a line says why not."""


class OverlapFeature(Feature):
    sections = {"overlap": OverlapConfig}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        if config.section(OverlapConfig).tp_comm_overlap:
            resolver.check(
                config.parallel.sequence_parallel,
                "--tp-comm-overlap gathers and scatters sequences: add --sequence-parallel, with "
                "--tensor-model-parallel-size of 2 or more, or leave it out",
            )

    def built(self, engine: Any) -> None:
        flags = engine.config.section(OverlapConfig)
        if flags.overlap_param_gather:
            from megatron.features.overlap.gathers import gather_late

            gather_late(engine)
        if flags.tp_comm_overlap:
            from megatron.features.overlap.pieces import overlap_products

            overlap_products(engine)


FEATURE = OverlapFeature()
