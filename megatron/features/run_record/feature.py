"""Feature that records every start of a run."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class StartRecords(Feature):
    needs = ("agreement",)

    def ready(self, context: Any) -> None:
        """Log the places of a run's ranks, and record the start if the run saves checkpoints."""
        several, saves = context.mesh.world.size > 1, bool(context.config.checkpoint.save)
        if not several and not saves:
            return
        from megatron.features.run_record.surroundings import own_place, rank_map

        places = context.mesh.world.gathered(own_place(context.device))
        for line in rank_map(places) if several else ():
            context.report.say(line)
        if saves:
            from megatron.features.run_record.callback import RunRecorder
            from megatron.training.context import Order

            recorder = RunRecorder(context.run, context.mesh, context.origin, context.files, places)
            context.add(Order.RECORD, recorder)


FEATURE = StartRecords()
