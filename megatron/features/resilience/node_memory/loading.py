"""Loading of in-memory checkpoints: find those that the remaining nodes still have completely, and
send each node the files that it lacks."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from megatron.checkpoint.files import CheckpointError, Facts
from megatron.checkpoint.folder import (
    MEGATRON_TRACKER,
    TRACKER,
    complete_tags,
    incomplete_folder,
    iteration_of,
    replace_folder,
    tag,
)
from megatron.checkpoint.manifest import (
    BASE,
    MANIFEST,
    MORE_STATES,
    IndexEntry,
    check_file,
    file_facts,
    manifest,
    read_index,
)
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint
from megatron.engine.deepspeed_patches import partition_range
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.node_memory.folders import (
    FileTransfer,
    NodeFolders,
    free_bytes,
    remove_unreceived,
)
from megatron.parallel.shard import shard_of
from megatron.util.digests import digest

_TENSORS = ".safetensors"


class ComparedCheckpoint(FoundCheckpoint):
    """Checkpoint whose files have already been verified by checksum on this node."""

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Verify only the base checkpoint, if this checkpoint has one."""
        if self.form.on_base:
            check = self.form.verify_base  # type: ignore[attr-defined]
            check(self.folder, share, shares, **self._options)


@dataclass(frozen=True)
class NodeCheckpoint:
    """Checkpoint in the host memory of the nodes.

    Attributes:
        files: size and checksum of each tensor file of the whole checkpoint, by file name.
        held: size and checksum of each file that a node has, by the lowest rank of the node.
    """

    iteration: int
    files: Mapping[str, Facts]
    held: Mapping[int, Mapping[str, Facts]]

    @property
    def missing(self) -> list[str]:
        """Tensor files of the checkpoint that no node has."""
        return sorted(self.files.keys() - {name for names in self.held.values() for name in names})


class _Held(NamedTuple):
    """Files of one checkpoint that a node has. ``digest`` identifies the tensor files, because two
    saves of the same iteration may differ."""

    iteration: int
    digest: str
    listed: Mapping[str, Facts]
    files: Mapping[str, Facts]


def checkpoints_in(folders: NodeFolders) -> list[NodeCheckpoint]:
    """Return the checkpoints of which any node has files, newest first. Collective: every rank must
    call this."""
    checkpoints: dict[tuple[int, str], NodeCheckpoint] = {}
    for rank, several in enumerate(folders.gather(_held(folders) if folders.leads else [])):
        for one in several:
            known = checkpoints.setdefault(
                (one.iteration, one.digest), NodeCheckpoint(one.iteration, one.listed, {})
            )
            known.held[rank] = one.files  # type: ignore[index]
    return [checkpoints[key] for key in sorted(checkpoints, reverse=True)]


def _held(folders: NodeFolders) -> list[_Held]:
    checkpoints = []
    for name in complete_tags(folders.folder):
        folder, iteration = folders.folder / name, iteration_of(name)
        with contextlib.suppress(CheckpointError, OSError):  # skip damaged checkpoints
            listed = manifest(folder)
            remove_unreceived(folder)
            tensors = {file: facts for file, facts in listed.items() if file.endswith(_TENSORS)}
            small = {file: facts for file, facts in listed.items() if file not in tensors}
            for file, facts in small.items():
                check_file(folder / file, facts)
            have = {
                file: facts
                for file, facts in tensors.items()
                if (folder / file).is_file() and (folder / file).stat().st_size == facts["bytes"]
            }
            files = {**have, **small, MANIFEST: file_facts(folder / MANIFEST)}
            of = digest(json.dumps(sorted(tensors.items()), sort_keys=True))
            checkpoints.append(_Held(iteration or 0, of, tensors, files))
    return checkpoints


def fetch(engine: TrainEngine, folders: NodeFolders, wanted: NodeCheckpoint) -> FoundCheckpoint:
    """Send every node the files of a checkpoint that its ranks read. Collective: every rank must
    call this. A damaged copy is deleted and replaced with another node's. Raises CheckpointError on
    every rank if the checkpoint cannot be completed."""
    if wanted.missing:
        raise CheckpointError(
            f"no node has {wanted.missing[0]}"
            + (f" and {len(wanted.missing) - 1} more of its files" if wanted.missing[1:] else "")
        )
    folder = folders.folder / tag(wanted.iteration)
    fetching = _Fetch(folders, folder, wanted)
    fetching.copy_small_files()
    reason, needed = None, set[str]()
    try:
        needed = needed_files(engine, folder, wanted.files)
    except CheckpointError as error:
        reason = str(error)
    folders.require(reason)
    fetching.copy_tensors(needed)
    checkpoint = locate_checkpoint(folder)
    assert checkpoint is not None, "its manifest has been read"
    base = engine.config.checkpoint.pretrained_checkpoint
    return ComparedCheckpoint(checkpoint.form, folder, base)


def needed_files(engine: TrainEngine, folder: Path, files: Mapping[str, Facts]) -> set[str]:
    """Return the names of the tensor files that this rank reads when it loads a checkpoint."""
    if (folder / BASE).is_file() or engine.quantised:
        # Adapters and other additions to a base are small, and are always read completely.
        return set(files)
    index = read_index(folder, manifest(folder))
    rank = f"-{engine.mesh.world.rank:05d}"
    needed = {name for name in files if name.startswith(("float8-", f"{MORE_STATES}-"))}
    needed |= {name for name in files if name.startswith("random") and rank in name}
    for param, name in engine.names.items():
        start, end = _working_range(engine, param)
        wanted = Slice.of(shard_of(param), engine.mesh.coordinates, start, end)
        for entry in index.get(name, ()):
            needed |= {entry.files["weight"]} if _overlap(wanted, entry) else set()
    for name in engine.buffers:
        for entry in index.get(name, ()):
            needed |= set(entry.files.values())
    for own in owned_slices(engine):
        for entry in index.get(own.name, ()):
            needed |= set(entry.files.values()) if _overlap(own.slice, entry) else set()
    return needed


def _working_range(engine: TrainEngine, param: nn.Parameter) -> tuple[int, int]:
    if engine.stage == 3:
        return partition_range(param, engine.mesh.replicas(shard_of(param)))
    return 0, math.prod(shard_of(param).local_shape(engine.mesh.coordinates))


def _overlap(wanted: Slice, entry: IndexEntry) -> bool:
    # An entry with a different shape counts as overlapping, so that reading it reports the error.
    return wanted.shape != entry.slice.shape or wanted.overlap(entry.slice) is not None


class _Fetch:
    """File transfers of one checkpoint. All ranks plan the same transfers in the same order."""

    def __init__(self, folders: NodeFolders, folder: Path, wanted: NodeCheckpoint) -> None:
        self._folders, self._folder, self._wanted = folders, folder, wanted
        self._held = {rank: dict(files) for rank, files in wanted.held.items()}
        self._needs: list[list[str]] = []  # names of the files that each rank needs, by rank

    def copy_small_files(self) -> None:
        """Copy the index, configuration and manifest to nodes that lack this checkpoint."""
        folders, folder = self._folders, self._folder
        giver = next(iter(self._held))
        small = {
            name: facts for name, facts in self._held[giver].items() if not name.endswith(_TENSORS)
        }
        without = [ranks[0] for ranks in folders.nodes if ranks[0] not in self._held]
        written, reason = incomplete_folder(folders.folder, iteration_of(folder.name) or 0), None
        if folders.rank in without:
            try:
                for name in small:
                    (written / name).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"{written}: {error.strerror}"
        folders.require(reason)
        transfers = [
            FileTransfer.of(giver, target, name, facts)
            for target in without
            for name, facts in small.items()
        ]
        failed = folders.exchange(transfers, sent=folder, received=written)
        reason = failed[0][1] if failed else None
        if folders.rank in without and not failed:
            try:
                trackers = {MEGATRON_TRACKER: f"{iteration_of(folder.name)}", TRACKER: folder.name}
                replace_folder(written, folder, trackers)
            except OSError as error:
                reason = f"{folder}: {error.strerror}"
        folders.require(reason)
        self._held |= {rank: dict(small) for rank in without}

    def copy_tensors(self, needed: set[str]) -> None:
        """Copy the tensor files that ranks need to their nodes, until all copies are undamaged."""
        self._needs = self._folders.gather(sorted(needed))
        while True:
            for rank, names in enumerate(self._folders.gather(self._damaged_here())):
                for name in names:
                    self._of_node(rank).pop(name, None)
            transfers = self._plan()
            if not transfers:
                return
            self._require_room(transfers)
            damaged = self._exchange(transfers)
            for source, name in damaged:
                self._of_node(source).pop(name, None)
            for each in transfers:
                if (each.source, each.name) not in damaged:
                    self._of_node(each.target)[each.name] = self._wanted.files[each.name]

    def _of_node(self, rank: int) -> dict[str, Facts]:
        """Return the files that the node of a rank has."""
        folders = self._folders
        return self._held[folders.nodes[folders.node_of(rank)][0]]

    def _damaged_here(self) -> list[str]:
        """Delete damaged files that this node needs, and return their names. Each rank of the node
        checks some of the files."""
        members, rank = self._folders.members, self._folders.rank
        needed = {name for member in members for name in self._needs[member]}
        names, bad = sorted(needed & self._of_node(rank).keys()), []
        for name in names[members.index(rank) :: len(members)]:
            try:
                check_file(self._folder / name, self._wanted.files[name])
            except CheckpointError as error:
                print(f"WARNING: rank {rank}: {error}; it is deleted", flush=True)
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()
                bad.append(name)
        return bad

    def _plan(self) -> list[FileTransfer]:
        """Return the transfers that nodes still need from each other, identical on every rank.
        Raises CheckpointError if no node has an undamaged copy of a file."""
        planned, nodes = [], self._folders.nodes
        for target in nodes:
            needed = {name for rank in target for name in self._needs[rank]}
            for number, name in enumerate(sorted(needed - self._held[target[0]].keys())):
                givers = [ranks for ranks in nodes if name in self._held[ranks[0]]]
                if not givers:
                    raise CheckpointError(f"no node has an undamaged {name}")
                giver = givers[number % len(givers)]
                source, to = (ranks[number % len(ranks)] for ranks in (giver, target))
                planned.append(FileTransfer.of(source, to, name, self._wanted.files[name]))
        return planned

    def _require_room(self, transfers: list[FileTransfer]) -> None:
        reason, folders = None, self._folders
        if folders.leads:
            needed = sum(each.bytes for each in transfers if each.target in folders.members)
            free = free_bytes(folders.folder)
            if needed > free:
                reason = (
                    f"{folders.folder} needs {needed / 1e6:,.0f} MB of other nodes, and "
                    f"{free / 1e6:,.0f} MB are free"
                )
        folders.require(reason)

    def _exchange(self, transfers: list[FileTransfer]) -> set[tuple[int, str]]:
        """Run the transfers. Return the source rank and name of each file that arrived damaged on
        any rank. Raises CheckpointError on every rank if any rank cannot write."""
        folders = self._folders
        failed = folders.exchange(transfers, sent=self._folder, received=self._folder)
        damaged = {(each.source, each.name) for each, reason in failed if "damaged" in reason}
        written = [reason for each, reason in failed if (each.source, each.name) not in damaged]
        folders.require(written[0] if written else None)
        return {one for several in folders.gather(damaged) for one in several}
