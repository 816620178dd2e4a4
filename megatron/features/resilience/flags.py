"""An unattended run: hangs, replicas, anomalies, spikes, stragglers and restarts."""

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
    """Seconds without progress after which every rank writes what it does and its Python stacks,
    the rank that the others wait for is named, and the run ends; 0 for no limit."""
    hang_limits: tuple[str, ...] = option(())
    """PHASE=SECONDS ...: other limits than --hang-seconds for phases: start, data, step,
    evaluation, save, end."""
    check_replicas_interval: int | None = option(
        None,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
        derived="at every save",
        bounds=NOT_NEGATIVE,
    )
    """Number of iterations between comparisons of what several ranks have copies of, weights and
    optimizer state, by checksum; 0 turns them off."""
    rerun_on_anomaly: str = option(
        "disabled",
        aliases=("--rerun-mode",),
        choices=("disabled", "validate_results", "report_stats"),
        bare="validate_results",
    )
    """Compute a step whose loss or gradient norm is out of bounds again, from the same state and
    before its update, to tell faulty hardware, bad data and divergence apart. A rank that computes
    wrongly ends the run, with report_stats it is only named. The CPU waits for every step."""
    on_spike: str = option("warn", choices=("warn", "rollback", "stop"))
    """What happens when loss or gradient norm leave the range of the steps before: warn and keep
    the checkpoint before; go back to that checkpoint and skip the samples; or stop."""
    spike_sigma: float = option(10.0, bounds=NOT_NEGATIVE)
    """Distance from the median of the last steps, in standard deviations over --spike-window, that
    is a spike; 0 turns the rule off."""
    spike_window: int = option(100, bounds=SHORTEST_WINDOW)
    """Number of steps that --spike-sigma compares with; the first half of them is not judged."""
    spike_rollbacks: int = option(5, bounds=POSITIVE)
    """With --on-spike rollback: how often the run goes back to the same checkpoint; after further
    spikes it ends."""
    straggler_factor: float = option(1.5, aliases=("--log-straggler",), bare=1.5, bounds=FACTOR)
    """A rank that needs this many times as long for its own part of a step, what it computes and
    reads, as the median rank of its pipeline stage is named; 0 turns that off."""
    straggler_window: int = option(50, bounds=POSITIVE)
    """Number of steps over which --straggler-factor compares ranks, and 60 seconds of steps at
    least."""
    inprocess_restart: bool = option(False)
    """Keep a process next to each rank that starts it again when a rank is lost, without the
    launcher: the ranks continue from the newest checkpoint."""
    inprocess_max_iterations: int | None = option(None, bounds=POSITIVE)
    """How often --inprocess-restart starts the ranks again; no limit by default."""
    inprocess_min_world_size: int | None = option(None, bounds=POSITIVE)
    """With --inprocess-restart: continue without ranks that cannot be started again, as long as
    this many are left."""
    non_persistent_save_interval: int | None = option(None, bounds=POSITIVE)
    """Number of iterations between checkpoints in the memory of the nodes, in the background. With
    --load of the folder in --save a run continues from the newest that is whole over its nodes, if
    that is newer; they are deleted at the end of the run."""
    non_persistent_local_ckpt_dir: str | None = option(
        None, derived="a folder of the user's in /dev/shm"
    )
    """Folder of each node for --non-persistent-save-interval, in memory."""
    replication_factor: int = option(2, bounds=POSITIVE)
    """Number of nodes that keep what a rank saves by --non-persistent-save-interval, its own
    included, as far as there are so many."""

    def check(self, save: str | None, processes: int, resolver: ConfigResolver) -> None:
        """Refuses values that contradict each other; ``save`` is the folder of checkpoints."""
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
        for item in self.hang_limits:  # whoever makes limits of them refuses other values
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
