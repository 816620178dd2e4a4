"""Checkpoints in the memory of the nodes (``--non-persistent-save-interval``): when a run saves
them, and when it continues from one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import step_of
from megatron.config import CheckpointConfig
from megatron.engine.saving import SaveResult
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.node_memory.node_folders import NodeFolders, open_folders
from megatron.features.resilience.node_memory.node_loading import checkpoints_in, fetch
from megatron.features.resilience.node_memory.node_saving import NodeWriter
from megatron.training.checkpoints import CheckpointManager
from megatron.training.report import say
from megatron.training.resume_source import ResumeSource
from megatron.training.trainer import Callback, Trainer
from megatron.util.phases import phase


class NodeCheckpoints(Callback):
    """The checkpoints of a run in the memory of its nodes, between those in ``--save``. Every rank
    must create one, and call the methods in the same order. They are deleted at the end of a run
    that ends without an error. ``check`` gets the iteration before every save, on every rank, and
    raises an error if the state must not be saved."""

    def __init__(
        self, engine: TrainEngine, check: Callable[[int], None] = lambda iteration: None
    ) -> None:
        self._check = check
        config, world = engine.config, engine.mesh.world
        self.options, self.engine = config.section(ResilienceConfig), engine
        group = None
        if world.size > 1:
            minutes = config.parallel.distributed_timeout_minutes
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
        self._save = Path(config.checkpoint.save or "")
        given = self.options.non_persistent_local_ckpt_dir
        self.folders: NodeFolders = open_folders(given, self._save, world, group)
        self._interval = self.options.non_persistent_save_interval or 0
        self._writer: NodeWriter | None = None
        self._samples: dict[int, int] = {}
        self._announced = self._failing = False
        self._last = 0
        """The iteration of the newest one."""

    def newest(self, origin: ResumeSource | None) -> ResumeSource | None:
        """What the run continues from: the newest checkpoint that is whole over the nodes, if it is
        newer than ``origin``, which the flags name. Later ones in memory, of which too much is
        lost, are deleted, and so are all if the run does not continue that of ``--save``."""
        options = self.engine.config.checkpoint
        begins = -1
        if continues(options):
            begins = 0 if origin is None or not origin.continues else _iteration(origin)
            for wanted in checkpoints_in(self.folders):
                if wanted.iteration <= begins:
                    break
                try:
                    found = fetch(self.engine, self.folders, wanted)
                except CheckpointError as error:
                    self._say(
                        f"WARNING: the checkpoint of iteration {wanted.iteration} in the memory of "
                        f"the nodes is not used: {error}"
                    )
                    continue
                self._say(
                    f"the memory of the nodes has iteration {wanted.iteration}, and --load "
                    + (f"iteration {begins}" if begins else "none")
                )
                origin = ResumeSource(found, "--non-persistent-save-interval", continues=True)
                begins = self._last = wanted.iteration
                break
        self.discard_after(begins)
        return origin

    def discard_after(self, iteration: int) -> None:
        """Deletes the checkpoints that are later than this one, which a run that was set back must
        not continue from; every rank must call it."""
        self._finished(wait=True)
        self._last = min(self._last, iteration)
        self.folders.discard_after(iteration)

    def begin(self, checkpoints: CheckpointManager) -> None:
        """Before the first step: the checkpoints in ``--save``, between which these are."""
        writer, factor = checkpoints.writer, self.options.replication_factor
        self._checkpoints = checkpoints
        self._writer = NodeWriter(
            self.engine, writer.content, writer.save_tokenizer, writer.data, self.folders, factor
        )

    def between_steps(self, trainer: Trainer) -> None:
        every, now = self.engine.config.checkpoint.save_interval, trainer.iteration
        if now % self._interval or trainer.at_end or (every is not None and now % every == 0):
            return
        trainer.settle()  # a step that was not finite is never saved
        self._check(now)
        with phase("save", str(self.folders.folder)):
            self._finished(wait=True)
            self._samples[now] = trainer.consumed_samples
            assert self._writer is not None, "begin() comes before the first step"
            self._writer.save(now, self._checkpoints.counters(trainer.consumed_samples))

    def went_back(self, trainer: Trainer) -> None:
        self.discard_after(trainer.iteration)

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        for result in [] if self._writer is None else self._writer.close():
            self._show(result)
        newest = None if self._writer is None else self._checkpoints.newest
        # A run that only evaluates leaves what it has found.
        on_disk = 0 if newest is None else step_of(newest.name) or 0
        if error_type is None and on_disk >= self._last:
            self.folders.remove()

    def _finished(self, wait: bool) -> None:
        for result in [] if self._writer is None else self._writer.finished(wait=wait):
            self._show(result)

    def _show(self, result: SaveResult) -> None:
        """Says when the first save succeeded, and when they begin to fail and succeed again."""
        report = self._checkpoints.report
        if result.error is not None:
            if not self._failing:
                report.say(
                    f"WARNING: no checkpoint in memory at iteration {result.iteration}: "
                    f"{result.error}"
                )
            self._failing = True
            return
        values: dict[str, float | None] = {
            "stall_seconds": result.stall_seconds,
            "seconds": result.seconds,
            "bytes": result.bytes,
        }
        samples = self._samples.pop(result.iteration)
        report.event("memory_save", result.iteration, samples, values)
        if self._failing or not self._announced:
            nodes = len(self.folders.nodes)
            kept = min(self.options.replication_factor, nodes)
            where = "its node" if kept == 1 else f"{kept} of {nodes} nodes"
            report.say(
                f"saved checkpoint in memory at iteration {result.iteration}, and every "
                f"{self._interval} from now on: each rank's part on {where}, "
                f"{self.folders.folder} | {result.bytes / 1e6:.1f} MB in {result.seconds:.2f} s | "
                f"save stall {1000 * result.stall_seconds:.0f} ms"
            )
        self._failing, self._announced = False, True
        self._last = max(self._last, result.iteration)
        self._checkpoints.completed += 1

    def _say(self, line: str) -> None:
        if self.folders.rank == 0:
            say(line)


def continues(options: CheckpointConfig) -> bool:
    """Whether a run continues the newest checkpoint of the folder that it saves in, so that one in
    memory may take its place."""
    other = (options.load_tag, options.finetune, options.reset_iteration)
    if options.load is None or options.save is None or any(other):
        return False
    load, save = Path(options.load), Path(options.save)
    return load.is_dir() and load.samefile(save) and not options.universal_checkpoint


def _iteration(origin: ResumeSource) -> int:
    iteration = step_of(origin.found.folder.name)
    if iteration is None:
        iteration = origin.found.open(verify=False).state.get("iteration", 0)
    return iteration
