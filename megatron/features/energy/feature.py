"""Energy, cost and CO2 emissions of a run."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.energy.flags import EnergyFlags


class Energy(Feature):
    flag_parts = {"logging": EnergyFlags}
    after = ("measured_peak",)  # --help lists that feature's flag first

    def ready(self, context: Any) -> None:
        if context.config.training.skip_train:
            return
        from megatron.features.energy.callback import SpendingCounter
        from megatron.training.context import Order

        counter = SpendingCounter(
            context.config, context.mesh, context.device, context.report, context.origin
        )
        context.add(Order.SPEND, counter)


FEATURE = Energy()
