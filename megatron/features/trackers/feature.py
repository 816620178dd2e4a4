"""Feature that reports metrics to TensorBoard, Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.trackers.flags import TrackerFlags, resolve_trackers


class Trackers(Feature):
    flag_parts = {"logging": TrackerFlags}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        parts["logging"] = resolve_trackers(parts["logging"], parts["checkpoint"].save, resolver)

    def writers(
        self, logging: Any, configuration: Mapping[str, Any], iteration: int, samples: int
    ) -> Sequence[Any]:
        """Return writers for the trackers that the flags select. In a new run, errors on opening
        them are raised. If a tracker fails later, training continues without it."""
        if not logging.trackers:
            return ()
        from megatron.features.trackers.background import LastingWriter
        from megatron.features.trackers.services import opener
        from megatron.util.secrets import without_secrets

        project, folder = logging.wandb_project, logging.tensorboard_dir
        flags = {"tensorboard": f"--tensorboard-dir {folder}"}
        if project:
            flags["wandb"] = f"--wandb-project {project}"
        shown = without_secrets(configuration)
        return [
            LastingWriter(
                flags.get(name, f"--report-to {name}"),
                opener(name, logging, shown),
                iteration,
                samples,
                # No retries for Weights & Biases, which may wait for its server for minutes.
                pause=math.inf if name == "wandb" else 60.0,
            )
            for name in logging.trackers
        ]

    def ready(self, context: Any) -> None:
        logging = context.config.logging
        norms = logging.log_params_norm or logging.log_num_zeros_in_grad
        if not norms and "tensorboard" not in logging.trackers:
            return
        from megatron.features.trackers.tensorboard import StepPoints
        from megatron.training.context import Order

        context.add(Order.REPORT, StepPoints(context.config, context.plan, context.report))


FEATURE = Trackers()
