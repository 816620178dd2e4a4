"""Tensors in files: memory of the system that it may write to a disk whenever it needs the room.

A tensor is mapped from a file (mmap, shared), so that every operation reads and writes it as it
does others, with the same bits; nothing has to be compiled, and nothing knows of it. The pages are
not anonymous memory: the system drops those that it has written, and reads them again.

Files have no name: they are gone when the process ends, however it ends, so that a killed run
leaves nothing, and any number of runs share a folder. Their room is reserved when they are made: a
disk that is full is an error at the start, not in a step.

A disk that fails later is not seen by the program that writes to memory: the system forgets the
pages that it could not write, and reads old ones again. So the files are synchronised before they
become a checkpoint, which tells of every such page since the last time.
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
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron.config import ConfigError

_MEASURED = 2**28
"""Bytes of the first file of which the writing is measured."""

_MS_SYNC = 4
"""Flag of Linux's msync: return when the disk has the pages."""


class MappedFiles:
    """Tensors in files without names of a folder.

    Args:
        path: an existing folder. Raises ConfigError, which names ``key`` of the DeepSpeed JSON,
            where it is not a folder that this process can write to.

    Attributes:
        bytes: size of the files.
        speed: bytes per second at which the disk took the first bytes; 0 before.
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
        """A uint8 tensor of so many bytes, zeros, in a file of its own. Raises ConfigError where
        the disk has no room for it."""
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
        """Wait until the disk has all pages. Raises OSError, once, where it has lost some since the
        last call; their numbers may be old ones by now."""
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
        """A tensor of zeros of that shape and dtype."""
        return self.empty(like.numel() * like.element_size()).view(like.dtype).view(like.shape)

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the memory of tensors to files, with all of the views of it that are among them;
        other views would not follow."""
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
    """Call msync without Python's lock, which ``mmap.flush`` keeps. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.msync(ctypes.c_void_p(address), ctypes.c_size_t(size), _MS_SYNC):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
