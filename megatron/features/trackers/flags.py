"""Flags for experiment trackers, and for values that are computed for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from megatron.config.features import FlagPart
from megatron.config.flags import ConfigResolver, Need, needs_value, option

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names of the experiment trackers, as in ``--report-to``."""


def _reports_to(*names: str) -> Need:
    """Return a flag's condition that the run reports to at least one of these trackers."""

    def met(values: Mapping[str, Any]) -> bool:
        flags = ("report_to", "tensorboard_dir", "wandb_project")
        trackers = TrackerFlags(**{name: values[name] for name in flags}).trackers
        return any(name in trackers for name in names)

    return Need(f"--report-to {' or '.join(names)}", met, refused=False)


_TENSORBOARD, _WANDB, _MLFLOW = map(_reports_to, ("tensorboard", "wandb", "mlflow"))
_TIMERS = needs_value("log_timers_to_tensorboard", refused=False)
_TRACKER = _reports_to("wandb", "mlflow", "trackio")


@dataclass(frozen=True, kw_only=True)
class TrackerFlags(FlagPart):
    """Options for experiment trackers, to which metrics are reported in addition to the log."""

    report_to: tuple[str, ...] = option(())
    """Experiment trackers that metrics are also reported to, separated by commas: tensorboard,
    wandb, mlflow, trackio. none disables all, even with --tensorboard-dir or --wandb-project."""
    tracker_project: str = option("megatron", needs=_TRACKER)
    """Project of the run in Weights & Biases and Trackio, or its experiment in MLflow."""
    run_name: str | None = option(None, needs=_TRACKER)
    """Name of the run in the trackers. A resumed run appears as another run with the same name."""
    tensorboard_dir: str | None = option(
        None, derived="tensorboard in --save, with --report-to tensorboard"
    )
    """Folder for TensorBoard files. Setting it enables TensorBoard."""
    tensorboard_log_interval: int = option(1, needs=_TENSORBOARD)
    """Number of iterations between TensorBoard points."""
    tensorboard_queue_size: int = option(1000, needs=_TENSORBOARD)
    """Number of TensorBoard events that are buffered in memory before they are written."""
    log_timers_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write iteration times, and the times that --timing-log-level measures, to TensorBoard."""
    timing_log_level: int = option(0, choices=(0, 1, 2), needs=_TIMERS)
    """Level of additional timing. 1 and 2 are the same: write the duration, in seconds, of forward
    and backward passes and of the optimizer, measured on the first process."""
    log_batch_size_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = option(
        True,
        off="--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard",
        flag="--log-learning-rate-to-tensorboard",
        needs=_TENSORBOARD,
    )
    """Write the learning rate to TensorBoard ("learnig" in the off flag is Megatron's spelling)."""
    log_loss_scale_to_tensorboard: bool = option(
        True,
        off="--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
        flag="--log-loss-scale-to-tensorboard",
        needs=_TENSORBOARD,
    )
    """Write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write memory use to TensorBoard: torch's allocations on a GPU, the process's memory on a
    CPU."""
    log_world_size_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write the number of processes to TensorBoard."""
    log_optimizer_states_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write the L2 norm, L1 norm and largest magnitude of the momentum, the variance, its square
    root and the weights to TensorBoard."""
    log_params_norm: bool = option(False)
    """Log the L2 norm of all trained weights, computed in float32."""
    log_num_zeros_in_grad: bool = option(False)
    """Log the number of zeros in the gradients, averaged over data-parallel ranks."""
    wandb_project: str | None = option(None)
    """Weights & Biases project. Setting it enables Weights & Biases."""
    wandb_exp_name: str | None = option(None, needs=_WANDB)
    """Name of the run in Weights & Biases."""
    wandb_save_dir: str | None = option(None, needs=_WANDB)
    """Folder for the local files of Weights & Biases."""
    wandb_entity: str | None = option(None, needs=_WANDB)
    """Team or user in Weights & Biases."""
    mlflow_tracking_uri: str | None = option(
        None,
        derived="mlflow.db in --save, or MLFLOW_TRACKING_URI in the environment",
        needs=_MLFLOW,
    )
    """MLflow tracking store or server, such as sqlite:////folder/mlflow.db or https://host:5000."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers to report to."""
        names = _names(self.report_to)
        named = {"tensorboard": self.tensorboard_dir, "wandb": self.wandb_project}
        if "none" in names:
            return ()
        return tuple(name for name in TRACKERS if name in names or named.get(name) is not None)


def _names(values: Sequence[str]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]


def resolve_trackers(flags: Any, save: str | None, resolver: ConfigResolver) -> Any:
    """Return the flags with the trackers' default folders filled in. ``save`` is the run's
    checkpoint folder. Problems are reported to ``resolver``."""
    names = _names(flags.report_to)
    unknown = [name for name in names if name not in (*TRACKERS, "none")]
    near = [*(get_close_matches(name, TRACKERS, 1) for name in unknown), []][0]
    meant = f" (did you mean {near[0]}?)" if near else ""
    resolver.check(
        not unknown,
        f"--report-to {','.join(names)}: {', '.join(unknown)} is not known{meant}; known are "
        f"{', '.join(TRACKERS)}, none",
    )
    resolver.check(
        "none" not in names or len(names) == 1,
        f"--report-to {','.join(names)}: none contradicts the others; leave one out",
    )
    inside = "" if save is None else save.rstrip("/")
    if "tensorboard" in names and flags.tensorboard_dir is None:
        resolver.check(
            save is not None,
            "--report-to tensorboard needs a folder: --tensorboard-dir, or --save, in which it is "
            "tensorboard",
        )
        folder = resolver.put("tensorboard_dir", f"{inside}/tensorboard", "in --save")
        flags = replace(flags, tensorboard_dir=folder)
    resolver.check(
        "@" not in (flags.mlflow_tracking_uri or ""),
        "--mlflow-tracking-uri has a name or password in it, which checkpoints would have too: set "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
    )
    if "mlflow" in names and flags.mlflow_tracking_uri is None:
        resolver.check(
            save is not None or "MLFLOW_TRACKING_URI" in os.environ,
            "--report-to mlflow needs a store: --mlflow-tracking-uri, or --save, in which it is "
            "mlflow.db",
        )
        if "MLFLOW_TRACKING_URI" not in os.environ:
            database = f"sqlite:///{os.path.abspath(inside)}/mlflow.db"
            uri = resolver.put("mlflow_tracking_uri", database, "in --save")
            flags = replace(flags, mlflow_tracking_uri=uri)
    return flags
