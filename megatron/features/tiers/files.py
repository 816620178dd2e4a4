"""Tensors in files: memory of the system that it may write to a disk whenever it needs the room.

A tensor is mapped from a file (mmap, shared), so that every operation reads and writes it as it
does others, with the same bits; nothing has to be compiled, and nothing knows of it. The pages are
not anonymous memory: the system drops those that it has written, and reads them again.

Files have no name: they are gone when the process ends, however it ends, so that a killed run
leaves nothing, and any number of runs share a folder. Their room is reserved when they are made: a
disk that is full is an error at the start, not in a step.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron.config import ConfigError

_MEASURED = 2**28
"""Bytes of the first file of which the writing is measured."""


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
            self._mapped = mmap.mmap(file.fileno(), size)
        self.bytes += size
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

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
                self._mapped.flush(0, size)
                self.speed = size / max(time.perf_counter() - began, 1e-9)
            for view in views:
                place = view.storage_offset(), view.size(), view.stride()
                moved = torch.empty(0, dtype=view.dtype)
                view.data = moved.set_(mapped.untyped_storage(), *place)
