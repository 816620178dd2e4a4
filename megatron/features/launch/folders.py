"""Check that every node sees the run's folders, so that a run does not fail at its first save. Rank
0 writes a file to each folder, and one rank of every other node looks for it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.config import ConfigError, RunConfig
from megatron.config.features import features
from megatron.engine.saving import check_writable
from megatron.features.agreement import agreement
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)

_LOCAL = frozenset(
    "bcachefs btrfs ext2 ext3 ext4 f2fs jfs overlay ramfs squashfs tmpfs vfat xfs zfs".split()
)
"""Local file systems, which show new files immediately."""
MOUNTS = Path("/proc/self/mountinfo")
PATIENCE = 75.0
"""Seconds within which a network file system must show a new file. NFS may cache the attributes of
a folder for a minute (``acdirmax``)."""
LOCAL_PATIENCE = 1.0
_PAUSE = 0.1


def check_folders(config: RunConfig) -> None:
    """Raise ConfigError on a node that does not see a folder as rank 0 does, and DisagreementError
    with the same message on all other ranks. Every rank must call this function."""
    folders = {"--save": config.checkpoint.save}
    for feature in features().values():
        folders |= feature.folders(config)
    named = {flag: Path(path) for flag, path in folders.items() if path}
    if not named or not agreement.met():
        return
    # Rank 0 must wait at least as long as the other nodes search.
    most = config.parallel.distributed_timeout_minutes * 60 / 2
    with _probes(named) as probes:
        agreement.compare(dict)  # returns once rank 0 has written
        if not is_main_process() and os.environ.get("LOCAL_RANK", "0") == "0":
            for flag, probe in probes.items():
                look_for(probe, flag, most)
        agreement.compare(dict)  # returns once all have looked


@contextlib.contextmanager
def _probes(folders: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Yield the path of a file in each folder, by flag, which rank 0 writes and removes. No node
    has looked up these names before, so no node can have cached that they do not exist."""
    probes = {flag: path / f".probe-{agreement.start_name()}" for flag, path in folders.items()}
    if not is_main_process():
        yield probes
        return
    try:
        for flag, probe in probes.items():
            check_writable(str(probe.parent), flag)
            probe.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield probes
    finally:
        for probe in probes.values():
            with contextlib.suppress(OSError):
                probe.unlink()


def look_for(probe: Path, flag: str, most: float = PATIENCE) -> None:
    """Wait until a file appears, at most ``most`` seconds. Raises ConfigError, which names the
    folder, if it does not appear within a time that depends on the file system."""
    folder = probe.parent
    kind, source = file_system(folder)
    patience = min(most, LOCAL_PATIENCE if kind in _LOCAL else PATIENCE)
    began = time.monotonic()
    told = False
    while not _is_there(probe):
        waited = time.monotonic() - began
        if waited > patience:
            state = "has no such folder" if not folder.is_dir() else f"has it on {kind} ({source})"
            raise ConfigError(
                f"{flag} {folder}: node {socket.gethostname()} does not see what rank 0 has "
                f"written there, and {state}; name a folder of a file system that all nodes mount"
            )
        if waited > 5 and not told:
            logger.warning(f"{flag} {folder}: waiting until {kind} shows what rank 0 has written")
            told = True
        time.sleep(_PAUSE)


def _is_there(probe: Path) -> bool:
    """Return whether a file exists. Opening its folder makes network file systems refresh it."""
    try:
        with os.scandir(probe.parent) as entries:
            return any(entry.name == probe.name for entry in entries) or probe.exists()
    except OSError:
        return False


def file_system(folder: str | Path) -> tuple[str, str]:
    """Return the type and source of the file system that contains a folder, or would contain it."""
    kind_and_name, longest = ("an unknown file system", "unknown"), -1
    real = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            place = fields.split()[4].replace("\\040", " ")
            inside = real == place or real.startswith(place.rstrip("/") + "/")
            # a later mount hides an earlier one at the same path
            if inside and len(place) >= longest:
                kind_and_name, longest = (kind.split()[0], kind.split()[1]), len(place)
    return kind_and_name
