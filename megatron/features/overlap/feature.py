"""Flags for collectives that overlap with computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import Feature, FlagSection
from megatron.config.flags import ConfigResolver, needs_value, option


@dataclass(frozen=True)
class OverlapConfig(FlagSection):
    """Overlap of collectives with computation."""

    after: ClassVar[str] = "parallel"

    overlap_param_gather: bool = option(
        True,
        flag="--overlap-param-gather",
        off="--no-overlap-param-gather",
        role="layout",
        needs=needs_value("zero_stage", 1, 2, refused=False),
    )
    """ZeRO stages 1 and 2: gather updated weights during the next forward pass, in which each layer
    waits only for its own weights."""
    tp_comm_overlap: bool = option(False, role="layout")
    """Gather and scatter sequences in pieces, while the adjacent GEMMs compute (asynchronous tensor
    parallelism with torch's symmetric memory). Needs --sequence-parallel, --torch-compile, and GPUs
    that can access each other's memory. If it is not possible, a line explains why."""


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
