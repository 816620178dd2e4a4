"""Flags for unattended runs: hangs, replicas, anomalies, spikes, stragglers and restarts."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from megatron.config.features import FlagSection
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, ConfigResolver, option

SECONDS = Bounds(
    lambda value: value == 0 or 1 <= value < math.inf, "must be 0 or at least one second"
)
FACTOR = Bounds(lambda value: value == 0 or 1 < value < math.inf, "must be 0 or more than 1")
SHORTEST_WINDOW = Bounds(
    lambda value: value >= 20, "must be at least 20: the rule learns from a half of it"
)


@dataclass(frozen=True)
class ResilienceConfig(FlagSection):
    """Unattended runs: watchdog, replicas, spikes, stragglers, restarts."""

    after = "engine"

    hang_seconds: float | None = option(
        None, derived="nine tenths of --distributed-timeout-minutes", bounds=SECONDS
    )
    """Seconds without progress after which the run ends. Every rank first writes its current phase
    and its Python stacks, and the rank that blocks the others is named. 0 sets no limit."""
    hang_limits: tuple[str, ...] = option(())
    """Limits for single phases that differ from --hang-seconds, as PHASE=SECONDS ... Phases: start,
    data, step, evaluation, save and end."""
    check_replicas_interval: int | None = option(
        None,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
        derived="at every save",
        bounds=NOT_NEGATIVE,
    )
    """Number of iterations between checksum comparisons of the weights and optimizer state that are
    replicated across ranks. 0 disables the comparisons."""
    rerun_on_anomaly: str = option(
        "disabled",
        aliases=("--rerun-mode",),
        choices=("disabled", "validate_results", "report_stats"),
        bare="validate_results",
    )
    """Recompute a step whose loss or gradient norm is out of bounds, from the same state and
    before its update, to distinguish faulty hardware, bad data and divergence. A rank that
    computes incorrectly ends the run, or is only reported (report_stats). Every step
    synchronizes the CPU."""
    on_spike: str = option("warn", choices=("warn", "rollback", "stop"))
    """Action when the loss or gradient norm leaves the range of the preceding steps: warn and keep
    the last checkpoint before the spike (warn); return to that checkpoint and skip the samples of
    the spike (rollback); or stop."""
    spike_sigma: float = option(10.0, bounds=NOT_NEGATIVE)
    """Distance from the median of the last few steps that counts as a spike, in standard deviations
    measured over --spike-window steps. 0 disables spike detection."""
    spike_window: int = option(100, bounds=SHORTEST_WINDOW)
    """Number of preceding steps over which --spike-sigma measures the standard deviation. No step
    is judged until half of the window is filled."""
    spike_rollbacks: int = option(5, bounds=POSITIVE)
    """Maximum number of rollbacks to the same checkpoint with --on-spike rollback. The next spike
    ends the run."""
    straggler_factor: float = option(1.5, aliases=("--log-straggler",), bare=1.5, bounds=FACTOR)
    """Report a rank as a straggler if its own time in a step, for computing and reading data, is
    this many times the median of its pipeline stage. 0 disables straggler detection."""
    straggler_window: int = option(50, bounds=POSITIVE)
    """Number of steps over which --straggler-factor compares ranks. A window always lasts at least
    60 seconds."""
    inprocess_restart: bool = option(False)
    """Run a guardian process next to each rank. When a rank is lost, the guardians restart all
    ranks from the newest checkpoint, without the launcher."""
    inprocess_max_iterations: int | None = option(None, bounds=POSITIVE)
    """Maximum number of restarts by --inprocess-restart. No limit by default."""
    inprocess_min_world_size: int | None = option(None, bounds=POSITIVE)
    """With --inprocess-restart, continue without ranks that cannot be restarted, as long as at
    least this many ranks are left."""
    non_persistent_save_interval: int | None = option(None, bounds=POSITIVE)
    """Number of iterations between checkpoints in the host memory of the nodes, which are written
    in the background. If --load is the --save folder, a run resumes from the newest one that is
    complete across its nodes, unless one on disk is newer. They are deleted when the run ends."""
    non_persistent_local_ckpt_dir: str | None = option(
        None, derived="a folder of the user's in /dev/shm"
    )
    """In-memory folder on each node for the checkpoints of --non-persistent-save-interval."""
    replication_factor: int = option(2, bounds=POSITIVE)
    """Number of nodes that keep each rank's shard of a checkpoint in memory, including the rank's
    own node. A run with fewer nodes uses all of them."""

    def check(self, save: str | None, processes: int, resolver: ConfigResolver) -> None:
        """Raise ConfigError if values contradict each other. ``save`` is the checkpoint folder."""
        resolver.check(
            self.non_persistent_save_interval is None or save is not None,
            f"{resolver.show('non_persistent_save_interval')} saves between the checkpoints in "
            "--save, and needs that folder: they are found again by what is in it",
        )
        if self.non_persistent_save_interval is None:
            for name in ("non_persistent_local_ckpt_dir", "replication_factor"):
                resolver.check_unused(name, "--non-persistent-save-interval")
        timeout = 60 * resolver.values["distributed_timeout_minutes"]
        limits = {resolver.show("hang_seconds"): self.hang_seconds or 0}
        for item in self.hang_limits:  # the watchdog refuses malformed items when it parses them
            with contextlib.suppress(ValueError):
                limits[f"--hang-limits {item}"] = float(item.partition("=")[2])
        for shown, seconds in limits.items():
            if processes > 1 and seconds > timeout:
                resolver.notes.append(
                    f"{shown} is longer than {resolver.show('distributed_timeout_minutes')}: "
                    "collectives end first, and name no rank; give more minutes"
                )
        if self.on_spike == "rollback":
            resolver.check(
                save is not None,
                f"{resolver.show('on_spike')} returns to a checkpoint in --save, and needs that "
                "folder",
            )
        else:
            resolver.check_unused("spike_rollbacks", "--on-spike rollback")
        resolver.check(
            self.spike_sigma > 0 or self.on_spike == "warn",
            f"{resolver.show('spike_sigma')} turns the rule for spikes off, and "
            f"{resolver.show('on_spike')} needs it: leave one of them out",
        )
        if not self.inprocess_restart:
            for name in ("inprocess_max_iterations", "inprocess_min_world_size"):
                resolver.check_unused(name, "--inprocess-restart")
