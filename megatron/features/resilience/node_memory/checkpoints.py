"""Checkpoints in the memory of the nodes (``--non-persistent-save-interval``).

A node has the files of its own ranks, and copies of other nodes' files; index, manifest and the
other JSON files are complete on each.
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
from megatron.engine.saving import CheckpointWriter, SaveJob, SaveResult
from megatron.engine.train_engine import TrainEngine
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

_SMALL_FILES_BYTES = 2**24  # for index, configuration and tokenizer of a checkpoint, roughly


class NodeWriter(CheckpointWriter):
    """Writes checkpoints to the folders of the nodes; ``factor`` nodes keep what each rank saves.
    The one before is deleted when the new one is whole on all."""

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
            async_save=True,
            save_universal=False,
            **retention,
        )
        super().__init__(engine, content, save_tokenizer, data, options, main=folders.leads)
        self.folders, self.factor = folders, factor
        # The background thread's; training and startup have others.
        self._in_thread = replace(folders, group=self._group)

    def check(self, job: SaveJob) -> None:
        """Raises CheckpointError if the node has no room for its files and the copies."""
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
        """True if this rank's node keeps what another node saves, or it is its own."""
        own = self.folders.node
        return node == own or own in self.folders.copies_of(node, self.factor)

    def _copy_to_others(self, job: SaveJob) -> None:
        """Gives every node the lists of all ranks, and the files that it keeps copies of."""
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
    """The rank of a node that receives what a rank of another sends, so that all have a share."""
    place = folders.nodes[folders.node_of(source)].index(source)
    targets = folders.nodes[node]
    return targets[place % len(targets)]


class NodeCheckpoints(Callback):
    """The checkpoints in memory between those in ``--save``; every rank calls the same methods in
    the same order. ``check`` raises an error, on every rank, if the state must not be saved."""

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
        self._last = 0  # the iteration of the newest one

    def newest(self, origin: ResumeSource | None) -> ResumeSource | None:
        """Return the newest checkpoint that is whole over the nodes, if it is newer than
        ``origin``. Later checkpoints in memory are deleted, and all of them if the run does not
        continue ``--save``."""
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
        """Deletes checkpoints that are later than this one; every rank must call it."""
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
        # A run that only evaluates leaves existing checkpoints untouched.
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
    """True if a run continues the newest checkpoint of the folder that it saves in."""
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
