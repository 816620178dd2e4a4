"""Checkpoints in the host memory of the nodes (``--non-persistent-save-interval``).

Each node stores the files of its own ranks and copies of files of other nodes. The index, the
manifest and the other JSON files are complete on every node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import step_of
from megatron.checkpoint.writer import PROCESS
from megatron.config import CheckpointConfig
from megatron.engine.deepspeed_json import Json
from megatron.engine.saving import SaveJob, SaveResult
from megatron.engine.train_engine import TrainEngine
from megatron.features.async_save.writer import AsyncCheckpointWriter
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.node_memory.folders import (
    FileTransfer,
    NodeFolders,
    free_bytes,
    open_folders,
)
from megatron.features.resilience.node_memory.loading import checkpoints_in, fetch
from megatron.training.checkpoints import CheckpointManager
from megatron.training.report import say
from megatron.training.resume import ResumeSource
from megatron.training.trainer import Callback, Trainer
from megatron.util.phases import phase

_SMALL_FILES_BYTES = 2**24  # rough size of a checkpoint's index, configuration and tokenizer


class NodeWriter(AsyncCheckpointWriter):
    """Writer of checkpoints to the in-memory folders of the nodes. ``factor`` nodes keep each
    rank's files. The previous checkpoint is deleted once the new one is complete on all nodes."""

    def __init__(
        self,
        engine: TrainEngine,
        content: Json,
        save_tokenizer: Callable[[Path], None],
        data: Sequence[Json],
        folders: NodeFolders,
        factor: int,
    ) -> None:
        retention: dict[str, Any] = {"keep_last": 1, "keep_every": None}
        options = replace(
            engine.config.checkpoint,
            save=str(folders.folder),
            save_universal=False,
            **retention,
        )
        super().__init__(engine, content, save_tokenizer, data, options, main=folders.leads)
        self.folders, self.factor = folders, factor
        # This copy is used in the background thread, so it needs the writer's own process group.
        self._in_thread = replace(folders, group=self._group)

    def check(self, job: SaveJob) -> None:
        """Raise CheckpointError if the node lacks free memory for its own files and its copies of
        other nodes' files. Collective: every rank must call this."""
        own = sum(each.nbytes for part in job.slices.tensors.values() for each in part.values())
        sizes, nodes = self._in_thread.gather(own), self.folders
        kept = [n for n in range(len(nodes.nodes)) if self._keeps(n)]
        needed = _SMALL_FILES_BYTES + sum(sizes[rank] for n in kept for rank in nodes.nodes[n])
        free = free_bytes(self.folder)
        if needed > free:
            raise CheckpointError(
                f"{self.folder} needs {needed / 1e6:,.0f} MB for a checkpoint next to the one "
                f"before it, and {free / 1e6:,.0f} MB are free; see --replication-factor "
                f"{self.factor}, or leave out --non-persistent-save-interval"
            )

    def write(self, job: SaveJob) -> None:
        super().write(job)
        self._together(lambda: self._copy_to_others(job))

    def _keeps(self, node: int) -> bool:
        """Return whether this rank's node keeps the files of ``node``. Its own files count too."""
        own = self.folders.node
        return node == own or own in self.folders.copies_of(node, self.factor)

    def _copy_to_others(self, job: SaveJob) -> None:
        """Send every node the file lists of all ranks, and the files of which it keeps copies."""
        folders, rank = self._in_thread, self.folders.rank
        texts = folders.gather((job.folder / PROCESS.format(rank)).read_text())
        transfers = [
            FileTransfer.of(source, _counterpart(folders, source, node), name, facts)
            for source, text in enumerate(texts)
            for node in folders.copies_of(folders.node_of(source), self.factor)
            for name, facts in json.loads(text)["files"].items()
        ]
        failed = folders.exchange(transfers, sent=job.folder, received=job.folder)
        if failed:
            raise CheckpointError(failed[0][1])
        if folders.leads:
            for source, text in enumerate(texts):
                if source not in folders.members:
                    (job.folder / PROCESS.format(source)).write_text(text)


def _counterpart(folders: NodeFolders, source: int, node: int) -> int:
    """Return the rank on ``node`` that receives the files of rank ``source``, balancing the
    load."""
    place = folders.nodes[folders.node_of(source)].index(source)
    targets = folders.nodes[node]
    return targets[place % len(targets)]


class NodeCheckpoints(Callback):
    """Callback that saves checkpoints in memory between the checkpoints in ``--save``. Its methods
    are collective: every rank must call them in the same order. ``check`` is called with the
    iteration before a save, and raises an error on every rank if the state must not be saved."""

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
        self._last = 0  # iteration of the newest checkpoint in memory

    def newest(self, origin: ResumeSource | None) -> ResumeSource | None:
        """Return the newest in-memory checkpoint that is complete across the nodes if it is newer
        than ``origin``, else ``origin``. In-memory checkpoints of later iterations are deleted. If
        the run does not continue the one in ``--save``, all of them are."""
        options = self.engine.config.checkpoint
        begins = -1
        if continues(options):
            begins = 0 if origin is None or not origin.continues else _iteration(origin)
            for wanted in checkpoints_in(self.folders):
                if wanted.iteration <= begins:
                    break
                try:
                    files = fetch(self.engine, self.folders, wanted)
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
                origin = ResumeSource(files, "--non-persistent-save-interval", continues=True)
                begins = self._last = wanted.iteration
                break
        self.discard_after(begins)
        return origin

    def discard_after(self, iteration: int) -> None:
        """Delete in-memory checkpoints of later iterations. Collective: every rank must call
        this."""
        self._finished(wait=True)
        self._last = min(self._last, iteration)
        self.folders.discard_after(iteration)

    def begin(self, checkpoints: CheckpointManager) -> None:
        """Create the writer before the first step. ``checkpoints`` manages those in ``--save``."""
        writer, factor = checkpoints.writer, self.options.replication_factor
        self._checkpoints = checkpoints
        self._writer = NodeWriter(
            self.engine, writer.content, writer.save_tokenizer, writer.data, self.folders, factor
        )

    def between_steps(self, trainer: Trainer) -> None:
        every, now = self.engine.config.checkpoint.save_interval, trainer.iteration
        if now % self._interval or trainer.at_end or (every is not None and now % every == 0):
            return
        trainer.settle()  # so that the state after a non-finite step is never saved
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
        # A run that only evaluates has no writer and leaves existing checkpoints untouched.
        on_disk = 0 if newest is None else step_of(newest.name) or 0
        if error_type is None and on_disk >= self._last:
            self.folders.remove()

    def _finished(self, wait: bool) -> None:
        for result in [] if self._writer is None else self._writer.finished(wait=wait):
            self._show(result)

    def _show(self, result: SaveResult) -> None:
        """Report a save. Only the first success, the first failure, and a recovery are printed."""
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
    """Return whether a run resumes from the newest checkpoint of the folder in which it saves."""
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
