"""What a trainer tells the guardian that started it, and says of a restart."""

from __future__ import annotations

import time

from megatron.checkpoint.source import locate_checkpoint
from megatron.config import ConfigError, RunConfig, Setting, Settings
from megatron.features.resilience.generation import RunGeneration, current
from megatron.training.checkpoints import CheckpointManager
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback, Step, Trainer

_BEGINNINGS = (
    *("load_tag", "finetune", "reset_iteration", "load_lr_state", "load_optim", "load_rng"),
    "universal_checkpoint",
)
"""Settings of how a run begins, which does not begin again after a restart."""


def from_own_checkpoint(settings: Settings) -> Settings:
    """The settings of a trainer that takes the place of another one: once the run has saved, it
    continues from its newest checkpoint, whatever it began with."""
    generation, save = current(), settings.get("save")
    # Trainers that were built had found no checkpoint of another run in the folder.
    built = generation is not None and generation.batch > 0
    if not built or save is None or save.value is None:
        return settings
    own = {"load": Setting(save.value, "--save of this run, which starts again")}
    if locate_checkpoint(save.value, others=True) is None:
        # There may be one in memory. A run that begins with another checkpoint begins there again.
        in_memory = "non_persistent_save_interval" in settings
        return own | settings if in_memory else settings
    kept = {name: setting for name, setting in settings.items() if name not in _BEGINNINGS}
    return kept | own


def restarted(
    config: RunConfig, checkpoints: CheckpointManager, report: Reporter, begin: ResumePoint
) -> list[Callback]:
    """The callback of a trainer that a guardian has started. Raises ConfigError if it would train
    with another global batch size than the first one."""
    generation = current()
    if generation is None:
        return []
    batch = config.training.global_batch_size
    if generation.batch not in (0, batch):
        raise ConfigError(
            f"{config.parallel.world_size} ranks are left, and with them the global batch size is "
            f"{batch} instead of {generation.batch}: continuing with fewer ranks needs "
            "--global-batch-size, in --deepspeed_config train_batch_size"
        )
    progress, layout = generation.progress, config.parallel
    progress.iteration = begin.iteration
    progress.micro_batch, progress.global_batch = config.training.micro_batch_size, batch
    # The guardian reads the others once this one is not 0.
    progress.replica = layout.world_size // layout.data_parallel_size
    return [Restarted(generation, checkpoints, report, begin.iteration)]


class Restarted(Callback):
    """Counts steps and checkpoints for the guardian; after the first step it reports what the
    restart has cost."""

    def __init__(
        self,
        generation: RunGeneration,
        checkpoints: CheckpointManager,
        report: Reporter,
        begin: int,
    ) -> None:
        self._progress, self._generation = generation.progress, generation
        self._checkpoints, self._report, self._begin = checkpoints, report, begin
        self._told = generation.failure is None

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Counts the step."""
        self._progress.saves = self._checkpoints.completed
        self._progress.iteration = step.iteration
        if not self._told:
            self._tell(step)

    def between_steps(self, trainer: Trainer) -> None:
        """Counts checkpoints."""
        self._progress.saves = self._checkpoints.completed

    def _tell(self, step: Step) -> None:
        self._told = True
        seconds = time.monotonic() - self._generation.failed_at
        lost = max(0, self._generation.lost_iteration - self._begin)
        self._report.say(
            f"restart {self._generation.number}: continues after iteration {self._begin}, "
            f"{seconds:.1f} s after the failure; {lost} steps are computed again"
        )
        self._report.event(
            "restart",
            step.iteration,
            step.first_sample + step.samples,
            {"number": self._generation.number, "seconds": seconds, "lost_steps": lost},
        )
