"""Saves the engine's state in the project's own format."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import incomplete_folder, remove_incomplete, tag
from megatron.checkpoint.lock import lock_folder
from megatron.checkpoint.manifest import CONFIG, STATE
from megatron.checkpoint.registry import open_checkpoint, save_copy
from megatron.checkpoint.retention import apply_retention
from megatron.checkpoint.writer import SliceWriter, complete
from megatron.engine.json_keys import Json
from megatron.engine.snapshot import HostBuffers, own_slices
from megatron.engine.state import loss_scaler_state, optimizer_step
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import Group, first_reason
from megatron.util.locks import Lock


@dataclass(frozen=True)
class SaveResult:
    """How a save came out, alike on all ranks but for times, bytes and notes.

    Attributes:
        iteration: number of steps that it holds.
        error: why there is no such checkpoint; None when there is.
        stall_seconds: how long training stood still for it on this rank, the wait for an earlier
            save included.
        seconds: from its beginning until it was visible, or had failed.
        bytes: size of its files, on the main process; elsewhere 0.
        notes: what else the user should know.
    """

    iteration: int
    error: CheckpointError | None
    stall_seconds: float
    seconds: float
    bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveJob:
    """A save under way: nothing in it changes while training goes on.

    Attributes:
        folder: the incomplete folder that is written.
        iteration: number of steps taken.
        slices: what this rank writes; in the background, of copies.
        state: counters; see :class:`megatron.checkpoint.source.Source`.
    """

    folder: Path
    iteration: int
    slices: SliceWriter
    state: dict[str, Any]


class CheckpointWriter:
    """Writes checkpoints of one run.

    Every rank must make one, and call the methods in the same order. With ``--async-save`` a thread
    of each rank writes copies; those threads agree over a gloo group of their own, so that they
    never meet the collectives of training.

    Args:
        engine: whose state is saved.
        content: the completed DeepSpeed JSON.
        save_tokenizer: writes the tokenizer's files into a folder.
    """

    def __init__(
        self, engine: TrainEngine, content: Json, save_tokenizer: Callable[[Path], None]
    ) -> None:
        self.engine, self.content, self.save_tokenizer = engine, content, save_tokenizer
        self.options = engine.config.checkpoint
        self.folder = Path(self.options.save or "")
        self.main = engine.mesh.world.rank == 0
        self._device = engine.device
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[SaveResult] | None = None
        self._results: list[SaveResult] = []
        if self.options.save and self.options.async_save:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._buffers = HostBuffers(engine.device)
            self._device = torch.device("cpu")
            if engine.mesh.world.size > 1:
                minutes = engine.config.parallel.distributed_timeout_minutes
                timeout = timedelta(minutes=minutes)
                self._group = dist.new_group(backend="gloo", timeout=timeout)

    def save(self, iteration: int, counters: dict[str, Any]) -> None:
        """Saves a checkpoint, or begins to in the background; :meth:`finished` says how it went.

        It becomes visible only when every rank has written its part. On an error on any rank the
        part-written folder is removed, and earlier checkpoints stay as they are.

        Args:
            iteration: number of steps taken.
            counters: what the training loop needs to go on.
        """
        began = time.perf_counter()
        self._wait()
        try:
            job = self._begin(iteration, counters)
        except CheckpointError as error:
            if self.main:
                shutil.rmtree(incomplete_folder(self.folder, iteration), ignore_errors=True)
            seconds = time.perf_counter() - began
            self._results.append(SaveResult(iteration, error, seconds, seconds))
        else:
            if self._thread is None:
                result = self._write(job, began)
                stall = time.perf_counter() - began
                self._results.append(replace(result, stall_seconds=stall))
            else:
                stall = time.perf_counter() - began
                self._running = self._thread.submit(self._write, job, began, stall)

    def finished(self, wait: bool = False) -> list[SaveResult]:
        """Saves that have come to an end since this was last asked.

        Args:
            wait: until the one in the background has.
        """
        if self._running is not None and (wait or self._running.done()):
            self._wait()
        found, self._results = self._results, []
        return found

    def close(self) -> list[SaveResult]:
        """Waits for the save in the background, if there is one; the writer's last call.

        Returns:
            What :meth:`finished` would.
        """
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()
        return self.finished()

    def _wait(self) -> None:
        if self._running is not None:
            self._results.append(self._running.result())
            self._running = None

    def _begin(self, iteration: int, counters: dict[str, Any]) -> SaveJob:
        engine, folder = self.engine, incomplete_folder(self.folder, iteration)
        jobs = []

        def begin() -> None:
            if self.main:
                self.folder.mkdir(parents=True, exist_ok=True)
                remove_incomplete(self.folder)
                folder.mkdir()
            state = {
                "iteration": iteration,
                **counters,
                "optimizer_step": optimizer_step(engine),
                "loss_scaler": loss_scaler_state(engine),
                "world_size": engine.mesh.world.size,
            }
            slices = own_slices(engine, folder)
            if self._thread is not None:
                slices.tensors = self._buffers.copy(slices.tensors)
            jobs.append(SaveJob(folder, iteration, slices, state))

        self._together(begin)
        return jobs[0]

    def _write(self, job: SaveJob, began: float, stall: float = 0.0) -> SaveResult:
        """All of a save that needs nothing of the engine; the background thread's work."""
        error, size, notes = None, [0], list[str]()
        try:
            self._together(lambda: self.write_own(job))
            self._together(lambda: size.append(self.complete(job) if self.main else 0))
        except CheckpointError as caught:
            error = caught
            if self.main:
                shutil.rmtree(job.folder, ignore_errors=True)
        seconds = time.perf_counter() - began
        if error is None and self.main:
            notes = self._afterwards(job.iteration)
        return SaveResult(job.iteration, error, stall, seconds, size[-1], tuple(notes))

    def _together(self, step: Callable[[], object]) -> None:
        """Runs ``step`` on this rank and raises on all ranks if it failed on one."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            error = caught
        reason = None if error is None else str(error) or repr(error)
        try:
            found = first_reason(reason, self._device, self._group)
        except RuntimeError as caught:  # a rank is gone, or took longer than the time limit
            error, found = caught, reason or f"the ranks could not agree ({caught})"
        if found is not None:
            raise CheckpointError(
                f"saving to {self.folder} failed: {found}; earlier checkpoints are untouched"
            ) from error

    def write_own(self, job: SaveJob) -> None:
        """Writes what this rank holds; the formats' own part, as is :meth:`complete`."""
        job.slices.finish()

    def complete(self, job: SaveJob) -> int:
        """Makes the checkpoint visible once all ranks have written, on the first one; its bytes."""
        contents = {
            CONFIG: self.engine.config.to_dict(),
            "deepspeed.json": self.content,
            STATE: job.state,
        }
        world = self.engine.mesh.world.size
        return complete(self.folder, job.iteration, world, contents, self.save_tokenizer)

    def _afterwards(self, iteration: int) -> list[str]:
        """What follows a save and cannot undo it: the universal copy, and older ones' deletion."""
        notes, options = [], self.options
        if options.save_universal:
            try:
                source = open_checkpoint(self.folder / tag(iteration), verify=False)
                save_copy("universal", source, self.folder, 3 if self.engine.stage == 3 else 1)
            except Exception as error:  # the save itself has succeeded
                notes.append(f"--save-universal: no universal copy of it: {error}")
        return notes + apply_retention(
            self.folder, iteration, options.keep_last, options.keep_every
        )


def hold_folder(
    save: str | None, world: Group, device: torch.device, say: Callable[[str], None]
) -> Lock | None:
    """Takes the right to save into a folder, for the run, and clears what killed runs left half
    written or half deleted there; every rank must call it.

    Args:
        save: the folder; None for a run that does not save.
        world: all ranks; the first takes it.
        device: where their collectives work.
        say: called with a line for the user.

    Returns:
        What keeps other runs out, on the first rank; None on others.

    Raises:
        CheckpointError: another run is saving there, or the folder cannot be written to.
    """
    if save is None:
        return None
    lock, reason = None, None
    if world.rank == 0:
        try:
            lock = lock_folder(Path(save), say)
            remove_incomplete(Path(save))
        except CheckpointError as error:
            reason = str(error)
        except OSError as error:
            reason = str(_cannot_write(save, error))
    if first_reason(reason, device) is not None:
        raise CheckpointError(reason or f"--save {save}: the main process says what is wrong")
    return lock


def check_writable(save: str) -> None:
    """Finds out before training whether checkpoints can be written.

    Raises:
        CheckpointError: ``--save`` cannot be made or written to.
    """
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise _cannot_write(save, error) from None


def _cannot_write(save: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"--save {save}: cannot write there ({error.strerror}); name a folder that you can write to"
    )
