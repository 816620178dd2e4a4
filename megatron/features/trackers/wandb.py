"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.output import LoggingConfig
from megatron.features.trackers import package
from megatron.features.trackers.background import BackgroundWriter
from megatron.features.trackers.tags import tagged
from megatron.training.metrics import WrittenText, WrittenTexts
from megatron.training.writers import Values


def open_writer(
    logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int, samples: int
) -> BackgroundWriter:
    """The writer of a run of its own. That of a new training waits for W&B and raises its errors; a
    training that was resumed continues meanwhile."""
    return BackgroundWriter(lambda: WandbWriter(logging, configuration), wait=iteration == 0)


class WandbWriter:
    """Weights & Biases, under the tags of TensorBoard and, of log lines, under Megatron-DeepSpeed's
    keys ``loss/...`` and ``throughput/...``; a ValueError if it is not installed. A
    resumed process is a new run in the same group, so that no curve has a step twice. Weights &
    Biases' environment variables apply, such as ``WANDB_MODE=offline``."""

    def __init__(
        self, logging: LoggingConfig, configuration: Mapping[str, Any] | None = None
    ) -> None:
        project = logging.wandb_project
        asked = f"--wandb-project {project}" if project else "--report-to wandb"
        remedy = "leave out wandb, --wandb-project and the other --wandb-* flags"
        self._wandb = package("wandb", asked, remedy)
        if logging.wandb_save_dir is not None:
            # Without the folder wandb would only warn and use a temporary one.
            Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        self._layout = (configuration or {}).get("parallel", {})
        name = logging.wandb_exp_name or logging.run_name
        try:
            self._run: Any = self._wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or logging.tracker_project,
                entity=logging.wandb_entity,
                name=name,
                group=name,
                dir=logging.wandb_save_dir,
                config=dict(configuration or {}),
            )
        except Exception as error:  # it has many classes
            raise ValueError(
                f"{asked}: Weights & Biases does not start ({' '.join(str(error).split())}); run "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        shown = dict(tagged(kind, values))
        if kind == "train":
            shown |= _with_groups(values, self._layout)
        if shown:
            self._run.log(shown | {"samples": samples, "tokens": tokens}, step=step)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        rows = [list(text) for text in written.texts]
        table = self._wandb.Table(columns=list(WrittenText._fields), data=rows)
        self._run.log({"samples of text": table}, step=written.iteration)

    def close(self) -> None:
        self._run.finish()


def _with_groups(values: Values, layout: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The losses and rates of a log line by Megatron-DeepSpeed's keys."""
    several = [name for name in values if name.endswith(" loss")]
    losses = {name: name for name in several} or {"loss": "lm loss"}
    keys = {f"loss/{shown}": values.get(name) for name, shown in losses.items()}
    replicas, devices = layout.get("data_parallel_size", 1), layout.get("world_size", 1)
    per_device = values.get("tokens_per_second_per_device")
    rates = {
        "samples_per_sec": values.get("samples_per_second"),
        "tokens_per_sec": None if per_device is None else per_device * devices,
        "tokens_per_gpu_per_sec": per_device,
    }
    for name, rate in rates.items():
        keys[f"throughput/{name}"] = rate
        keys[f"throughput/{name}_per_replica"] = None if rate is None else rate / replicas
    seconds = values.get("seconds_per_iteration")
    keys["throughput/iteration-time"] = seconds
    keys["throughput/elapsed_ms_per_iteration"] = None if seconds is None else 1000 * seconds
    keys["throughput/tflops"] = values.get("tflops_per_device")
    return ((key, value) for key, value in keys.items() if value is not None)
