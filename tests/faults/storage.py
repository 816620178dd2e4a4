"""Folders whose disk can be filled, frozen, slowed down, or made read-only."""

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


THROTTLE = "/sys/fs/cgroup/blkio/blkio.throttle.{}_bps_device"


@dataclass
class Disk:
    """A file system of its own."""

    folder: Path
    image: Path | None = None
    """A file with ext4 in it, if that is what it is."""
    failed: bool = False
    below: Disk | None = None
    """The disk of ``image``, where that has holes: once it is full, writes to them fail."""

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

    @property
    def device(self) -> Path:
        """The folder of sysfs about its loop device."""
        return Path("/sys/block", Path(_run("findmnt", "-no", "SOURCE", self.folder).strip()).name)

    def slow_down(self, rate: int) -> None:
        """Lets so many bytes a second through, in each direction."""
        for direction in ("read", "write"):
            number = (self.device / "dev").read_text().strip()
            Path(THROTTLE.format(direction)).write_text(f"{number} {rate}")

    def traffic(self) -> tuple[int, int]:
        """Bytes that the device has read and written."""
        fields = (self.device / "stat").read_text().split()
        return 512 * int(fields[2]), 512 * int(fields[6])

    def attach(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self.image, self.folder)

    def freeze(self) -> None:
        """Everything that writes waits, and does not end."""
        _run("fsfreeze", "-f", self.folder)

    def thaw(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("fsfreeze", "-u", self.folder)


@contextlib.contextmanager
def memory_disk(mount: Path, mebibytes: int) -> Iterator[Disk]:
    """A file system in memory."""
    mount.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", mount)
    try:
        yield Disk(mount)
    finally:
        _run("umount", "-l", mount)


@contextlib.contextmanager
def ext4_disk(mount: Path, below: Disk | None = None) -> Iterator[Disk]:
    """A file of 64 MiB with ext4 in it, next to the folder or on the disk ``below``."""
    mount.mkdir(parents=True)
    image = (mount.parent if below is None else below.folder) / f"{mount.name}.ext4"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    _run("mkfs.ext4", "-q", image)
    disk = Disk(mount, image, below=below)
    disk.attach()
    try:
        yield disk
    finally:
        disk.thaw()
        _run("umount", "-l", mount)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Place]:
    """16 MB of memory."""
    with memory_disk(folder.with_name(f"{folder.name}-disk"), 16) as disk:
        yield Place(save=disk.folder / "save", tools=disk)


@contextlib.contextmanager
def freezable_disk(folder: Path) -> Iterator[Place]:
    """A file with ext4 in it."""
    with ext4_disk(folder.with_name(f"{folder.name}-disk")) as disk:
        yield Place(save=disk.folder / "save", tools=disk)
