"""Feature that checks whether a run fits into memory and reports its size at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.features import Feature


class PlanningFeature(Feature):
    needs = (
        "adapters", "averages", "context", "experts", "float8", "global_heads", "latent",
        "low_bit_states", "optimizers", "recurrent", "tiers",
    )  # fmt: skip

    def check_run(self, run: Any, mesh: Any, device: Any) -> None:
        from megatron.apps.planning.fit import check_fits

        check_fits(run.config, run.content, mesh, device)

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        if plan.skip_train:
            return ()
        from megatron.apps.planning.extent import extent

        return extent(config, plan, sizes())


FEATURE = PlanningFeature()
