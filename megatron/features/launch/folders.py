"""Folders that every node must see, checked before a run has worked for hours towards a save that
cannot succeed: rank 0 writes a file in them, and a rank of each of the other nodes looks for it."""

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
"""File systems local to a node, which show new files immediately."""
MOUNTS = Path("/proc/self/mountinfo")
PATIENCE = 75.0
"""Seconds until a network file system must show a new file: NFS may believe for a minute that a
folder has not changed (``acdirmax``)."""
LOCAL_PATIENCE = 1.0
_PAUSE = 0.1


def check_folders(config: RunConfig) -> None:
    """Raises ConfigError on a node that does not see a folder of the run as rank 0 does; on the
    other ranks DisagreementError, which says so. Every rank must call it."""
    folders = {"--save": config.checkpoint.save}
    for feature in features().values():
        folders |= feature.folders(config)
    named = {flag: Path(path) for flag, path in folders.items() if path}
    if not named or not agreement.met():
        return
    # Rank 0 must not give up before this node has found out.
    most = config.parallel.distributed_timeout_minutes * 60 / 2
    with _probes(named) as probes:
        agreement.compare(dict)  # rank 0 has written
        if not is_main_process() and os.environ.get("LOCAL_RANK", "0") == "0":
            for flag, probe in probes.items():
                look_for(probe, flag, most)
        agreement.compare(dict)  # all have looked


@contextlib.contextmanager
def _probes(folders: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """A file in each folder, by flag, which rank 0 writes and removes. No node has asked for its
    name before, and so none can remember that it is missing."""
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
    """Waits until a file is there, ``most`` seconds or less. Raises ConfigError, which names its
    folder, where it does not come in a time that suits the file system."""
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
    """Network file systems ask for what a folder has when it is opened."""
    try:
        with os.scandir(probe.parent) as entries:
            return any(entry.name == probe.name for entry in entries) or probe.exists()
    except OSError:
        return False


def file_system(folder: str | Path) -> tuple[str, str]:
    """Kind and source of the file system of a folder, or of the one in which it would be."""
    kind_and_name, longest = ("an unknown file system", "unknown"), -1
    real = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            place = fields.split()[4].replace("\\040", " ")
            inside = real == place or real.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= longest:  # a later mount hides an earlier one
                kind_and_name, longest = (kind.split()[0], kind.split()[1]), len(place)
    return kind_and_name
