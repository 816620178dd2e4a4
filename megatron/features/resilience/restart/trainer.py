"""Restarts from the trainer's side: progress for the guardian that started it, the checkpoint to
resume from, and messages about the restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.source import locate_checkpoint
from megatron.config import ConfigError, RunConfig, Setting, Settings
from megatron.features.resilience.restart.peers import RunGeneration, current_generation
from megatron.training.checkpoints import CheckpointManager
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint
from megatron.training.stopping import ASKED_ELSEWHERE, STOP_SIGNALS, launcher_chain
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.errors import FaultError

_BEGINNINGS = (
    *("load_tag", "finetune", "reset_iteration", "load_lr_state", "load_optim", "load_rng"),
    "universal_checkpoint",
)
"""Settings that apply only at the beginning of a run, and are therefore dropped after a restart."""


def from_own_checkpoint(settings: Settings) -> Settings:
    """Return the settings with which a restarted trainer resumes from the run's own checkpoint."""
    generation, save = current_generation(), settings.get("save")
    # A known batch size means that a trainer was built, so any checkpoint in --save is this run's.
    built = generation is not None and generation.batch > 0
    if not built or save is None or save.value is None:
        return settings
    own = {"load": Setting(save.value, "--save of this run, which starts again")}
    if locate_checkpoint(save.value, others=True) is None:
        # There may be a checkpoint in memory. A run with its own --load starts from --load again.
        in_memory = "non_persistent_save_interval" in settings
        return own | settings if in_memory else settings
    kept = {name: setting for name, setting in settings.items() if name not in _BEGINNINGS}
    return kept | own


def restarted(
    config: RunConfig, checkpoints: CheckpointManager, report: Reporter, begin: ResumePoint
) -> list[Callback]:
    """Return the restart callback of a trainer with a guardian, or an empty list without one.
    Raises ConfigError if the global batch size differs from that of the first trainer."""
    generation = current_generation()
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
    # Set last: the guardian reads the other fields as soon as ``replica`` is not 0.
    progress.replica = layout.world_size // layout.data_parallel_size
    return [Restarted(generation, checkpoints, report, begin.iteration)]


class Restarted(Callback):
    """Callback that counts steps and checkpoints for the guardian, and reports the cost of a
    restart after the first step."""

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
        """Record the step. After the first step, report the restart."""
        self._progress.saves = self._checkpoints.completed
        self._progress.iteration = step.iteration
        if not self._told:
            self._tell(step)

    def between_steps(self, trainer: Trainer) -> None:
        """Record the number of checkpoints."""
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


_SIGNALS = frozenset(signal.Signals(number).name for number in STOP_SIGNALS)


class NodeLeftError(FaultError):
    """Another node has left the run, and the launcher should restart this process."""


def is_elastic() -> bool:
    """Return whether torchrun was started with ``--nnodes MIN:MAX`` (or ``PET_NNODES``), so that
    nodes may leave the run."""
    try:
        line = Path(f"/proc/{launcher_chain()[0]}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return is_range(given_nodes(line.split("\0")) or os.environ.get("PET_NNODES", ""))


def given_nodes(words: Sequence[str]) -> str | None:
    """Return the value of torchrun's ``--nnodes`` in a command line, or None."""
    nodes = None
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):  # arguments after the script belong to the script
            break
        if word == "--nnodes":
            nodes = value
        elif word.startswith("--nnodes="):
            nodes = word.partition("=")[2]
    return nodes


def is_range(nodes: str) -> bool:
    """Return whether a value of ``--nnodes`` has the form ``MIN:MAX``."""
    least, _, most = nodes.partition(":")
    return least.isdecimal() and most.isdecimal()


class ElasticNodes(Callback):
    """Callback of elastic runs. When some ranks must leave, the others exit as after a fault, so
    that their launchers restart them without the leaving ranks."""

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        """If only some ranks leave, raise SystemExit on them and NodeLeftError on the others.
        Collective: every rank must call this."""
        reasons: list[str | None] = [reason] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        leaving = [n for n, why in enumerate(reasons) if why is not None and _is_leaving(why)]
        if len(leaving) in (0, len(reasons)) or not all(map(_of_nodes, reasons)):
            return
        if dist.get_rank() in leaving:
            raise SystemExit(0)
        ranks = f"rank{'s'[: len(leaving) > 1]} {', '.join(map(str, leaving))}"
        raise NodeLeftError(
            f"{ranks} left the run after iteration {trainer.iteration} ({reasons[leaving[0]]}); "
            "the others start again"
        )


def _of_nodes(reason: str | None) -> bool:
    """Return whether a rank stops because a node leaves, rather than because the run is complete or
    has reached its time limit."""
    return reason is not None and (_is_leaving(reason) or reason == ASKED_ELSEWHERE)


def _is_leaving(reason: str) -> bool:
    return reason in _SIGNALS or reason.startswith("end of the launcher")
