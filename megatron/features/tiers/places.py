"""Relocation of DeepSpeed's tensors from host memory to files, or back to the device.

Only the storage of tensors changes: DeepSpeed's optimizer, torch's AdamW and checkpoints use them
as before. Files can hold the main weights, moments and gradients of ``offload_optimizer``, and the
partitioned weights of ``offload_param``. With a ratio, the main weights, gradients and moments of
the first sub-groups are on the device (Twin-Flow, with DeepSpeed's rule). A single optimizer
updates each group where it is, with the step's learning rates.

Tensors in files are memory that the operating system may write to disk whenever it needs room. A
tensor is mapped from a file (mmap, shared), so that every operation reads and writes it like any
other tensor, with the same bits. No code needs to be compiled or adapted. The pages are not
anonymous memory: the system drops pages that it has written, and reads them again when needed.

Files have no name. They disappear when the process ends, however it ends, so that a killed run
leaves nothing behind, and any number of runs can share a folder. Their space is reserved when they
are created, so that a full disk is an error at the start instead of in a step.

A program that writes to memory does not notice a disk that fails later: the system discards pages
that it could not write, and reads old ones again. Therefore the files are synchronized before a
checkpoint is saved, which reports all pages lost since the last time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron.config import ConfigError
from megatron.config.optimizer import STATES
from megatron.engine.state import holders
from megatron.engine.train_engine import TrainEngine
from megatron.features.tiers.rules import OFFLOADS, ZERO, on_disk, section_of
from megatron.parallel.mesh import first_reason
from megatron.util.errors import FaultError
from megatron.util.processes import is_main_process, return_freed_memory

_MEASURED = 2**28
"""Maximum number of bytes whose writing is timed to estimate the disk's speed."""

_MS_SYNC = 4
"""Flag for Linux's msync: return only once the pages are on disk."""


class MappedFiles:
    """Tensors stored in unnamed files in a folder.

    Args:
        path: an existing folder.
        key: key in the DeepSpeed JSON that names the folder, for messages.

    Attributes:
        bytes: total size of the files.
        speed: bytes per second at which the disk accepted the first bytes; 0 before that.

    Raises:
        ConfigError: the path is not a folder in which this process can write.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = Path(path), key
        self.bytes, self.speed = 0, 0.0
        self._mapped: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
        if not self.path.is_dir():
            raise ConfigError(
                f"{key} {path}: folder not found; make it on a local disk of each node, or name "
                "another one"
            )
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            reason = f"no file can be made there: {error.strerror}"
            raise ConfigError(f"{key} {path}: {reason}") from None

    def empty(self, size: int) -> Tensor:
        """Return a zeroed uint8 tensor of ``size`` bytes, stored in its own file. Raises
        ConfigError if the disk has too little space."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise ConfigError(self._refused(size, error)) from None
            mapped = mmap.mmap(file.fileno(), size)
        self.bytes += size
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self._mapped.append((weakref.ref(mapped), tensor.data_ptr(), size))
        return tensor

    def sync(self) -> None:
        """Wait until all pages are on disk. Raises OSError, once, if pages have been lost since the
        last call; tensors may then contain old values."""
        for mapped, address, size in self._mapped:
            if mapped() is not None:
                _sync(address, size)

    def _refused(self, size: int, error: OSError) -> str:
        missing = f"{self.key} {self.path}: "
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{missing}{size / 2**30:.2f} GiB cannot be reserved: {error.strerror}"
        free = shutil.disk_usage(self.path).free
        return (
            f"{missing}no room for {size / 2**30:.2f} GiB more next to {self.bytes / 2**30:.2f} "
            f"GiB of this process ({free / 2**30:.2f} GiB are free): choose a larger disk, more "
            "processes, or cpu"
        )

    def zeros_like(self, like: Tensor) -> Tensor:
        """Return a tensor of zeros with the same shape and dtype, stored in a file."""
        return self.empty(like.numel() * like.element_size()).view(like.dtype).view(like.shape)

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the storage of tensors to files, in place. ``tensors`` must include all views of a
        storage, because other views would keep the old memory."""
        sharing: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for views in sharing.values():
            memory = views[0].untyped_storage()
            mapped = self.empty(memory.nbytes())
            began = time.perf_counter()
            mapped.copy_(torch.empty(0, dtype=torch.uint8).set_(memory))
            if not self.speed:
                size = min(len(mapped), _MEASURED)
                _sync(mapped.data_ptr(), size)
                self.speed = size / max(time.perf_counter() - began, 1e-9)
            for view in views:
                place = view.storage_offset(), view.size(), view.stride()
                moved = torch.empty(0, dtype=view.dtype)
                view.data = moved.set_(mapped.untyped_storage(), *place)


def _sync(address: int, size: int) -> None:
    """Call msync without holding Python's GIL, unlike ``mmap.flush``. Raises OSError on failure."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.msync(ctypes.c_void_p(address), ctypes.c_size_t(size), _MS_SYNC):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_ACCUMULATED = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Attribute of DeepSpeed's stage 3 optimizer: views of its gradient buffer, by parameter."""

STEP_BYTES = 28
"""Bytes that a step reads and writes per float32 weight: the main weight and two moments are read
and written, and the gradient is only read."""


def move_to_files(engine: TrainEngine, zero: Mapping[str, Any]) -> None:
    """Move to files the states of the offload sections with device ``nvme``, and print a line for
    each section on the main process. Collective: every rank must call it. Raises ConfigError on all
    ranks if any rank has no such folder or too little space."""
    reason, moved = None, []
    try:
        for key in OFFLOADS:
            if on_disk(zero, key):
                folder = section_of(zero, key)["nvme_path"]
                files = MappedFiles(folder, f"{ZERO}.{key}.nvme_path")
                _move(engine, key, files)
                moved.append((key, files))
    except ConfigError as error:
        reason = str(error)
    reason = first_reason(reason, engine.device)
    if reason is not None:
        raise ConfigError(reason)
    return_freed_memory()
    _FILES[engine] = [files for _, files in moved]
    if is_main_process():
        for key, files in moved:
            print(_line(key, files), flush=True)


_FILES: WeakKeyDictionary[TrainEngine, list[MappedFiles]] = WeakKeyDictionary()


def check_of(engine: TrainEngine, newest: Callable[[], str]) -> Callable[[int], None]:
    """Return a function to call, on all ranks, before a state is saved. It raises FaultError on all
    ranks if a disk has lost pages. ``newest`` describes the newest checkpoint, for the message."""

    def check(iteration: int) -> None:
        lost = None
        for files in _FILES[engine]:
            try:
                files.sync()
            except OSError as error:
                lost = lost or f"{files.key} {files.path}: {error.strerror}"
        reason = first_reason(lost, engine.device)
        if reason is not None:
            raise FaultError(
                f"{reason}: the disk has not taken all weights and moments of iteration "
                f"{iteration}, so that this state is not saved; {newest()}; resume from it with "
                "another disk, or cpu"
            )

    return check


def _line(key: str, files: MappedFiles) -> str:
    size, speed = files.bytes / 2**30, files.speed / 2**20
    line = f"{key}: {size:,.2f} GiB of rank 0 in files in {files.path}, which takes {speed:,.0f}"
    line += " MiB/s"
    if key != OFFLOADS[0] or not files.speed:
        return line
    # Main weights, gradients and moments take about 16 bytes per weight.
    slowest = files.bytes / 16 * STEP_BYTES / files.speed
    return f"{line}: where main memory caches none of it, a step waits for {slowest:,.1f} s"


def _move(engine: TrainEngine, key: str, files: MappedFiles) -> None:
    if key == OFFLOADS[1]:
        files.move(_partitioned_weights(engine))
        return
    files.move(_main_weights_and_gradients(engine))
    if engine.stage < 3:  # renew DeepSpeed's views of main weights and gradients
        engine.optimizer_wrapper._link_all_hp_params()
    name = engine.config.optimizer.optimizer
    for holder in holders(engine):
        state = engine.optimizer.state[holder]
        state.update({moment: files.zeros_like(holder) for moment in STATES[name]})
        state["step"] = torch.zeros((), dtype=torch.float32)


def _main_weights_and_gradients(engine: TrainEngine) -> Iterator[Tensor]:
    wrapper = engine.optimizer_wrapper
    for holder in holders(engine):
        yield holder
        if holder.grad is not None:
            yield holder.grad
    if engine.stage == 3:
        yield wrapper.grad_partitions_flat_buffer
        yield from getattr(wrapper, _ACCUMULATED).values()
    else:
        yield from wrapper.param_buffer_of_bit16_for_cpu_offload_groups


def _partitioned_weights(engine: TrainEngine) -> Iterator[Tensor]:
    wrapper = engine.optimizer_wrapper
    yield from wrapper.param_groups_fp16_flat_cpu_memory
    yield from wrapper.fp16_partitioned_groups_flat
    for param in engine.names:
        yield param.ds_tensor  # type: ignore[attr-defined]


def groups_on_device(groups: int, share: float) -> int:
    """Return the number of leading sub-groups that are updated on the device, by DeepSpeed's rule.
    ``share`` is the fraction that is updated in host memory."""
    return int((1 - share) * groups)


def move_to_device(engine: TrainEngine, share: float) -> None:
    """Move the first sub-groups' main weights and gradients to the device. The optimizer creates
    their moments there."""
    mains = holders(engine)
    moved = mains[: groups_on_device(len(mains), share)]
    for main in moved:
        gradient = main.grad
        main.grad = None
        main.data = main.data.to(engine.device)
        main.grad = None if gradient is None else gradient.to(engine.device)
    if is_main_process():
        ours, every = (sum(main.numel() for main in part) for part in (moved, mains))
        print(
            f"offload_optimizer.ratio {share:g}: {len(moved)} of {len(mains)} sub-groups, "
            f"{ours:,} of {every:,} weights of rank 0, are updated on {engine.device.type}, the "
            "others in main memory",
            flush=True,
        )
