"""Saves the engine's state in the project's own format."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, LazyTensor, NotFiniteError, not_finite
from megatron.checkpoint.folder import incomplete_folder, lock_folder, remove_incomplete, tag
from megatron.checkpoint.manifest import BASE, CONFIG, MORE_STATES, STATE, tensor_key
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import open_checkpoint, save_copy
from megatron.checkpoint.writer import SliceWriter, finish_checkpoint
from megatron.config import CheckpointConfig
from megatron.config.features import taking_part
from megatron.engine.deepspeed_json import Json
from megatron.engine.state import (
    OwnedSlice,
    kept_counts,
    loss_scaler_state,
    more_states,
    optimizer_step,
    owned_slices,
)
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.adam import StateStore
from megatron.engine.update.optimizer import owned
from megatron.parallel.mesh import AXES, MODEL, Group, any_rank, first_reason
from megatron.parallel.random import random_state
from megatron.parallel.shard import shard_of
from megatron.util.files import Lock
from megatron.util.phases import phase
from megatron.util.secrets import without_secrets


class LostRanksError(CheckpointError):
    """Error when the ranks cannot agree on a save because one has ended or exceeded the timeout."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a save. Times, bytes and notes differ between ranks.

    Attributes:
        stall_seconds: time that training waited on this rank, including for earlier saves.
        error: reason why the save failed, or None. It is :class:`NotFiniteError` on all ranks if
            any rank's weights or moments are not finite.
        bytes: size of the checkpoint in bytes on the main process; 0 elsewhere.
        published: on the main process, whether the checkpoint is complete and has its final name.
            This is possible in spite of an ``error``, if that occurred afterwards.
    """

    iteration: int
    error: CheckpointError | None
    stall_seconds: float
    seconds: float
    bytes: int = 0
    notes: tuple[str, ...] = ()
    published: bool = False


@dataclass(frozen=True)
class SaveJob:
    """Save in progress. Training does not change the contents."""

    folder: Path
    """Temporary folder that the save writes to."""
    iteration: int
    slices: SliceWriter
    """This rank's shards of the checkpoint."""
    state: dict[str, Any]
    """Counters of the run; see :class:`megatron.checkpoint.source.Source`."""


class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank must make the same calls in the same order.

    Args:
        content: the completed DeepSpeed JSON.
        data: descriptions of the data files, as JSON values.
        options: where and how to save; by default the run's flags.
        main: whether this rank does the work that only one rank does; by default rank 0.

    Attributes:
        in_background: whether a save may end after :meth:`save` has returned.
    """

    in_background = False

    def __init__(
        self,
        engine: TrainEngine,
        content: Json,
        save_tokenizer: Callable[[Path], None],
        data: Sequence[Json] = (),
        options: CheckpointConfig | None = None,
        main: bool | None = None,
    ) -> None:
        self.engine, self.content, self.save_tokenizer = engine, content, save_tokenizer
        self.data = list(data)
        self.options = options or engine.config.checkpoint
        self.folder = Path(self.options.save or "")
        self.main = engine.mesh.world.rank == 0 if main is None else main
        self._device = engine.device
        self._group: dist.ProcessGroup | None = None
        self._results: list[SaveResult] = []

    def save(self, iteration: int, counters: dict[str, Any]) -> None:
        """Save a checkpoint. Get the result from :meth:`finished`. The checkpoint becomes visible
        only after every rank has written its shards. On an error the incomplete folder is removed.
        ``counters`` are the values that the training loop needs to continue."""
        began = time.perf_counter()
        job = self._begun(iteration, counters, began)
        if job is not None:
            self._results.append(self._write(job, began))

    def finished(self, wait: bool = False) -> list[SaveResult]:
        """Return the results of the saves that have ended since the last call. With ``wait``, first
        wait until all saves have ended."""
        results, self._results = self._results, []
        return results

    def close(self) -> list[SaveResult]:
        """Wait for all saves and return their results. Must be the last call."""
        return self.finished(wait=True)

    def _begun(self, iteration: int, counters: dict[str, Any], began: float) -> SaveJob | None:
        """Begin a save. If that fails, record the failure as its result and return None."""
        try:
            return self._begin(iteration, counters)
        except CheckpointError as error:
            if self.main:
                shutil.rmtree(incomplete_folder(self.folder, iteration), ignore_errors=True)
            seconds = time.perf_counter() - began
            self._results.append(SaveResult(iteration, error, seconds, seconds))
            return None

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
                **kept_counts(engine),
                "world_size": engine.mesh.world.size,
                "data": self.data,
            }
            jobs.append(SaveJob(folder, iteration, self.slices(folder), state))

        self._together(begin)
        return jobs[0]

    def slices(self, folder: Path) -> SliceWriter:
        """Return a writer with this rank's shards of a checkpoint."""
        return own_slices(self.engine, folder)

    def _write(self, job: SaveJob, began: float, stall: float | None = None) -> SaveResult:
        """Write a save. ``stall`` is how long training waits, by default for the whole save."""
        with phase("save", str(job.folder)):
            return self._written(job, began, stall)

    def _written(self, job: SaveJob, began: float, stall: float | None) -> SaveResult:
        error, size, notes, completing = None, [0], list[str](), False
        try:
            self.write(job)
            completing = True
            self._together(lambda: size.append(self.complete(job) if self.main else 0))
        except CheckpointError as caught:
            error = caught
        published = self.main and completing and not job.folder.exists()
        if error is not None and self.main:
            shutil.rmtree(job.folder, ignore_errors=True)
        seconds = time.perf_counter() - began
        if error is None and self.main:
            notes = self._follow_up(job.iteration)
        if stall is None:
            stall = time.perf_counter() - began
        return SaveResult(job.iteration, error, stall, seconds, size[-1], tuple(notes), published)

    def _together(self, step: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # any error: other ranks must not wait for this one
            error = caught
        reason = None if error is None else str(error) or repr(error)
        ruined, lost = isinstance(error, NotFiniteError), False
        try:
            reason_of_any = first_reason(reason, self._device, self._group)
            ruined = reason_of_any is not None and any_rank(ruined, self._device, self._group)
        except RuntimeError as caught:  # a rank is gone, or took longer than the time limit
            error, reason_of_any = caught, reason or f"the ranks could not agree ({caught})"
            ruined, lost = False, True
        if reason_of_any is not None and ruined:
            raise NotFiniteError(reason_of_any) from error
        if reason_of_any is not None:
            kind = LostRanksError if lost else CheckpointError
            raise kind(
                f"saving to {self.folder} failed: {reason_of_any}; earlier checkpoints are "
                "untouched"
            ) from error

    def write(self, job: SaveJob) -> None:
        """Write the files of all ranks. The checkpoint is not visible yet. Each step either
        succeeds on all ranks or fails on all ranks."""
        self._together(lambda: self.check(job))
        self._together(lambda: self.write_own(job))

    def check(self, job: SaveJob) -> None:
        """Raise NotFiniteError if this rank would write non-finite values. Override this in formats
        that do not find such values while writing."""

    def write_own(self, job: SaveJob) -> None:
        """Write this rank's shards. Formats override this and :meth:`complete`."""
        job.slices.finish()

    def complete(self, job: SaveJob) -> int:
        """Publish the checkpoint. Called on one rank after all have written. Return its bytes."""
        contents = self.descriptions(job)
        if self.engine.base is not None:
            contents[BASE] = self.engine.base.to_json()
        world = self.engine.mesh.world.size
        return finish_checkpoint(self.folder, job.iteration, world, contents, self.save_tokenizer)

    def descriptions(self, job: SaveJob) -> dict[str, Any]:
        """Return a checkpoint's JSON files by name. Passwords in URLs are removed."""
        contents = {
            CONFIG: self.engine.config.to_dict(),
            "deepspeed.json": self.content,
            STATE: job.state,
        }
        return {name: without_secrets(content) for name, content in contents.items()}

    def _follow_up(self, iteration: int) -> list[str]:
        """Write the universal copy and run the features' hooks. Return notes about failures."""
        notes, options = [], self.options
        if options.save_universal:
            try:
                source = open_checkpoint(self.folder / tag(iteration), verify=False)
                stage = 3 if self.engine.config.engine.zero_stage == 3 else 1
                save_copy("universal", source, self.folder, stage)
            except Exception as error:  # the save itself has succeeded
                notes.append(f"--save-universal: the universal copy failed: {error}")
        for feature in taking_part():
            notes += feature.saved(options, iteration)
        return notes


def own_slices(engine: TrainEngine, folder: Path) -> SliceWriter:
    """Return a writer with this rank's shards of a checkpoint: views of the engine's state if that
    is float32, otherwise tensors that are decoded a slice at a time. At stage 0 all replicas are
    equal, and only the first one writes."""
    options = engine.config.checkpoint
    writer = SliceWriter(folder, engine.mesh.world.rank, weights_dtype=weights_dtype(engine))
    among = AXES if engine.stage == 0 else MODEL
    for own in owned_slices(engine):
        numel = own.slice.numel
        if numel and owned(own.param, engine.mesh, among):
            kinds = own.kinds if options.save_optim else ("weight",)
            tensors = [(kind, _canonical(own, kind, engine.stored_states)) for kind in kinds]
            writer.add(own.name, own.slice, tensors, shard_of(own.param).part)
    for key, values in more_states(engine).items() if options.save_optim else ():
        writer.put(MORE_STATES, key, values.detach().contiguous())
    for name, buffer in engine.buffers.items():
        # The buffers of a frozen base are in its own checkpoint.
        if engine.base is None and buffer.shard.counted(engine.mesh.coordinates):
            whole = Slice.of(buffer.shard, engine.mesh.coordinates, 0, buffer.values.numel())
            writer.add(name, whole, [("weight", buffer.values.view(-1))])
    if options.save_rng:
        for key, values in random_state().items():
            writer.put("random", key, values)
    for key, values in kernel_state(engine).items():
        writer.put(str(engine.kernels.file), key, values.contiguous())
    return writer


def weights_dtype(engine: TrainEngine) -> torch.dtype:
    """Return the dtype in which the model stores the trained weights."""
    return next(iter(engine.trained)).dtype


def ruined(engine: TrainEngine) -> str | None:
    """Return a message about this rank's non-finite weights or moments, or None."""
    stored = engine.stored_states
    for dtype, wanted in ((weights_dtype(engine), True), (torch.float32, False)):
        tensors = {
            tensor_key(own.name, kind, shard_of(own.param).part): _canonical(own, kind, stored)
            for own in owned_slices(engine)
            for kind in own.kinds
            if (kind == "weight") == wanted
        }
        if message := not_finite(tensors, dtype):
            return message
    return None


def _canonical(own: OwnedSlice, kind: str, stored: StateStore | None) -> Tensor | LazyTensor:
    """Return a state of a slice as a flat float32 tensor without padding."""

    def values() -> Tensor:
        return own.get(kind)[: own.slice.numel].detach().to(torch.float32)

    return values() if stored is None else LazyTensor((own.slice.numel,), values)


def kernel_state(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the states of linear kernels that this rank writes, by name. Ranks that share layers
    have the same states, which only the first of them writes."""
    mesh, options = engine.mesh, engine.config.checkpoint
    if mesh.dense.rank or mesh.tensor.rank or not options.save_optim:
        return {}
    return engine.kernels.state()


def hold_folder(
    save: str | None, world: Group, device: torch.device, say: Callable[[str], None]
) -> Lock | None:
    """Lock the run's save folder, and remove checkpoints that killed runs left incomplete or half
    deleted. Collective. Rank 0 gets the lock, other ranks None. Raises CheckpointError if another
    run is saving there, or if the folder is not writable."""
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
            reason = str(cannot_write(save, error))
    if first_reason(reason, device) is not None:
        raise CheckpointError(reason or f"--save {save}: see the main process's error")
    return lock


def check_writable(save: str, flag: str = "--save") -> None:
    """Create the folder given with ``flag`` and check that it is writable. Called before training.
    Raises CheckpointError if it cannot be created or written to."""
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise cannot_write(save, error, flag) from None


def cannot_write(save: str, error: OSError, flag: str = "--save") -> CheckpointError:
    """Return the error for a flag's folder that is not writable, or contains such a file."""
    return CheckpointError(
        f"{flag} {save}: cannot write to it ({error.strerror}); choose a folder with write access"
    )
