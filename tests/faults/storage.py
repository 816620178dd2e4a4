"""Folders of checkpoints whose disk can be filled, frozen, or made read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.fault import Place


def _run(*words: object) -> str:
    return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout


@dataclass
class Disk:
    """A file system of its own."""

    folder: Path
    image: Path | None = None
    """A file with ext4 in it, if that is what it is."""
    failed: bool = False

    def fill(self) -> None:
        """Leaves no space."""
        free = os.statvfs(self.folder)
        with open(self.folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(free.f_bavail + 1):
                file.write(bytes(free.f_bsize))

    def clear(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def fail(self) -> None:
        """An error of the disk, after which the system only reads from it."""
        source = _run("findmnt", "-no", "SOURCE", self.folder).strip()
        Path(f"/sys/fs/ext4/{Path(source).name}/trigger_fs_error").write_text("1")
        self.failed = True

    def repair(self) -> None:
        """Once nobody has files open there."""
        if self.failed:
            _run("umount", self.folder)
            subprocess.run(["e2fsck", "-fy", str(self.image)], check=False, capture_output=True)
            self.attach()
            self.failed = False

    def attach(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self.image, self.folder)

    def freeze(self) -> None:
        """Everything that writes waits, and does not end."""
        _run("fsfreeze", "-f", self.folder)

    def thaw(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("fsfreeze", "-u", self.folder)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Place]:
    """16 MB of memory."""
    mount = folder.with_name(f"{folder.name}-disk")
    mount.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount)
    try:
        yield Place(save=mount / "save", tools=Disk(mount))
    finally:
        _run("umount", "-l", mount)


@contextlib.contextmanager
def freezable_disk(folder: Path) -> Iterator[Place]:
    """A file with ext4 in it."""
    mount, image = folder.with_name(f"{folder.name}-disk"), folder.with_name(f"{folder.name}.ext4")
    mount.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    _run("mkfs.ext4", "-q", image)
    disk = Disk(mount, image)
    disk.attach()
    try:
        yield Place(save=mount / "save", tools=disk)
    finally:
        disk.thaw()
        _run("umount", "-l", mount)
