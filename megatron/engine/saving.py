"""Saves the engine's state in the project's own format, at once or in the background."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
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
from megatron.util.phases import background_groups, phase


class LostRanksError(CheckpointError):
    """The ranks could not agree on a save: one has ended, or took longer than the time limit."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a save; times, bytes and notes differ between ranks.

    Attributes:
        stall_seconds: how long training was interrupted on this rank, including the wait for an
            earlier save.
        error: why there is no checkpoint; :class:`NotFiniteError` on all ranks if the weights or
            moments of one are not finite.
        bytes: size of the files, on the main process; elsewhere 0.
        published: on the main process, whether the checkpoint is whole under its name; so it can be
            in spite of an ``error`` that came after that.
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
    """A save in progress, which training does not change."""

    folder: Path
    """The incomplete folder that is written."""
    iteration: int
    slices: SliceWriter
    """This rank's part; copies when in the background."""
    state: dict[str, Any]
    """Counters; see :class:`megatron.checkpoint.source.Source`."""


class CheckpointWriter:
    """Writes checkpoints of one run. Every rank must create one and call the methods in the same
    order. With ``--async-save`` a thread of each rank writes copies, with a gloo group of its own.

    Args:
        content: the completed DeepSpeed JSON.
        data: the JSON values of the data's files.
        options: where and how to save, by default as the run's flags say.
        main: whether this rank does what one of them does, by default the first.
    """

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
                background_groups.add(self._group)

    def save(self, iteration: int, counters: dict[str, Any]) -> None:
        """Saves a checkpoint, or begins to in the background; :meth:`finished` has the result. It
        becomes visible only when every rank has written its part; on an error the part-written
        folder is removed. ``counters`` are those that the training loop needs to continue."""
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
        """Results of the saves that have ended since the last call; with ``wait`` also that of the
        save in the background."""
        if self._running is not None and (wait or self._running.done()):
            self._wait()
        results, self._results = self._results, []
        return results

    def close(self) -> list[SaveResult]:
        """Waits for the save in the background, if any, and returns what :meth:`finished` would;
        the last call."""
        self._wait()
        if self._thread is not None:
            self._thread.shutdown()
        return self.finished()

    def _wait(self) -> None:
        if self._running is not None:
            with phase("save", str(self.folder)):
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
                **kept_counts(engine),
                "world_size": engine.mesh.world.size,
                "data": self.data,
            }
            slices = own_slices(engine, folder)
            if self._thread is not None:
                slices.tensors = self._buffers.copy(slices.tensors)
            jobs.append(SaveJob(folder, iteration, slices, state))

        self._together(begin)
        return jobs[0]

    def _write(self, job: SaveJob, began: float, stall: float = 0.0) -> SaveResult:
        with phase("save", str(job.folder)):
            return self._written(job, began, stall)

    def _written(self, job: SaveJob, began: float, stall: float) -> SaveResult:
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
        return SaveResult(job.iteration, error, stall, seconds, size[-1], tuple(notes), published)

    def _together(self, step: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            step()
        except Exception as caught:  # of any kind: other ranks must not wait for this one
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
        """Write the files of all ranks, before one makes the checkpoint visible, in steps that end
        on all of them or fail on all of them."""
        self._together(lambda: self.check(job))
        self._together(lambda: self.write_own(job))

    def check(self, job: SaveJob) -> None:
        """Raises NotFiniteError if what a rank will write is not finite, for formats that do not
        find that while they write."""

    def write_own(self, job: SaveJob) -> None:
        """Writes this rank's part; formats override this and :meth:`complete`."""
        job.slices.finish()

    def complete(self, job: SaveJob) -> int:
        """Makes the checkpoint visible, on the first rank after all have written; returns bytes."""
        contents = self.descriptions(job)
        if self.engine.base is not None:
            contents[BASE] = self.engine.base.to_json()
        world = self.engine.mesh.world.size
        return finish_checkpoint(self.folder, job.iteration, world, contents, self.save_tokenizer)

    def descriptions(self, job: SaveJob) -> dict[str, Any]:
        """The JSON files of a checkpoint, by name, without passwords in the addresses of data."""
        contents = {
            CONFIG: self.engine.config.to_dict(),
            "deepspeed.json": self.content,
            STATE: job.state,
        }
        return {name: shareable(content) for name, content in contents.items()}

    def _follow_up(self, iteration: int) -> list[str]:
        """The universal copy, and what features do after a save; returns notes on failures."""
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


def shareable(content: Any) -> Any:
    """A JSON value as checkpoints keep it: without passwords in addresses and the like."""
    from megatron.util.secrets import without_secrets

    return without_secrets(content)


def own_slices(engine: TrainEngine, folder: Path) -> SliceWriter:
    """Return this rank's part of a checkpoint's folder: views of the engine's state where that is
    float32, otherwise what it takes to decode it a slice at a time. At stage 0 all replicas are
    equal and the first one writes."""
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
    """The dtype in which the model has the weights that are trained."""
    return next(iter(engine.trained)).dtype


def ruined(engine: TrainEngine) -> str | None:
    """Return the names of this rank's weights and moments that are not finite, in words; None if
    all are."""
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
    """A state of a slice without padding, flat, float32."""

    def values() -> Tensor:
        return own.get(kind)[: own.slice.numel].detach().to(torch.float32)

    return values() if stored is None else LazyTensor((own.slice.numel,), values)


def kernel_state(engine: TrainEngine) -> dict[str, Tensor]:
    """The state of linear kernels that this rank writes, by name; ranks that share layers have the
    same, and the first of them writes it."""
    mesh, options = engine.mesh, engine.config.checkpoint
    if mesh.dense.rank or mesh.tensor.rank or not options.save_optim:
        return {}
    return engine.kernels.state()


class HostBuffers:
    """CPU memory for a rank's tensors, kept from one save to the next: only the first copy pays for
    new pages. For GPUs it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(
        self, files: Mapping[str, Mapping[str, Tensor | LazyTensor]]
    ) -> dict[str, dict[str, Tensor | LazyTensor]]:
        """Copies tensors by file and key; afterwards the engine's state may change. Copies from a
        GPU are queued and awaited together."""
        copied: dict[str, dict[str, Tensor | LazyTensor]] = {
            file: {key: self._copy((file, key), values) for key, values in tensors.items()}
            for file, tensors in files.items()
        }
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied

    def _copy(self, place: tuple[str, str], values: Tensor | LazyTensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            self._buffers[place] = buffer
        made = values.made() if isinstance(values, LazyTensor) else values
        return buffer.copy_(made, non_blocking=True)


def hold_folder(
    save: str | None, world: Group, device: torch.device, say: Callable[[str], None]
) -> Lock | None:
    """Locks a folder for the saves of this run, and removes what killed runs left half written or
    half deleted there; every rank must call it. The first rank gets the lock. Raises
    CheckpointError if another run is saving there, or the folder cannot be written to."""
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
    """Checks before training that checkpoints can be written. Raises CheckpointError if the folder
    of ``flag`` cannot be created or written to."""
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise cannot_write(save, error, flag) from None


def cannot_write(save: str, error: OSError, flag: str = "--save") -> CheckpointError:
    """Return the error of a folder, or of a file in it, that a flag names."""
    return CheckpointError(
        f"{flag} {save}: cannot write to it ({error.strerror}); choose a folder with write access"
    )
