"""Which checkpoints in memory are whole over the nodes that are left, and what each node needs of
the files of others."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    """A checkpoint of which a node has what its ranks read, already compared with the checksums."""

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compares what it is based on."""
        if self.form.on_base:
            check = self.form.verify_base  # type: ignore[attr-defined]
            check(self.folder, share, shares, **self._options)


@dataclass(frozen=True)
class NodeCheckpoint:
    """A checkpoint in the memory of the nodes.

    Attributes:
        files: those with tensors, by name.
        held: names and facts of the files that nodes have, by the first rank of the node.
    """

    iteration: int
    files: Mapping[str, Facts]
    held: Mapping[int, Mapping[str, Facts]]

    @property
    def missing(self) -> list[str]:
        """Files that no node has."""
        return sorted(self.files.keys() - {name for names in self.held.values() for name in names})


class _Held(NamedTuple):
    """What a node has of one checkpoint; the ``digest`` of its tensors tells saves of one step
    apart."""

    iteration: int
    digest: str
    listed: Mapping[str, Facts]
    files: Mapping[str, Facts]


def checkpoints_in(folders: NodeFolders) -> list[NodeCheckpoint]:
    """The checkpoints of which the nodes have something, newest first; every rank must call it."""
    found: dict[tuple[int, str], NodeCheckpoint] = {}
    for rank, several in enumerate(folders.gather(_held(folders) if folders.leads else [])):
        for one in several:
            known = found.setdefault(
                (one.iteration, one.digest), NodeCheckpoint(one.iteration, one.listed, {})
            )
            known.held[rank] = one.files  # type: ignore[index]
    return [found[key] for key in sorted(found, reverse=True)]


def _held(folders: NodeFolders) -> list[_Held]:
    found = []
    for name in complete_tags(folders.folder):
        folder, iteration = folders.folder / name, iteration_of(name)
        with contextlib.suppress(CheckpointError, OSError):  # else as if it were not there
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
            found.append(_Held(iteration or 0, of, tensors, files))
    return found


def fetch(engine: TrainEngine, folders: NodeFolders, wanted: NodeCheckpoint) -> FoundCheckpoint:
    """Gives every node what its ranks read of a checkpoint; every rank must call it. A damaged copy
    is deleted, and another node's is used. Raises CheckpointError on every rank if that is not
    possible."""
    folder = folders.folder / tag(wanted.iteration)
    if wanted.missing:
        raise CheckpointError(
            f"no node has {wanted.missing[0]}"
            + (f" and {len(wanted.missing) - 1} more of its files" if wanted.missing[1:] else "")
        )
    held = {rank: dict(files) for rank, files in wanted.held.items()}
    _copy_small_files(folders, folder, held)
    reason, needed = None, set[str]()
    try:
        needed = needed_files(engine, folder, wanted.files)
    except CheckpointError as error:
        reason = str(error)
    folders.require(reason)
    while True:
        needs = folders.gather(sorted(needed))
        bad = _damaged_here(folders, folder, wanted, needs, held)
        for rank, names in enumerate(folders.gather(bad)):
            for name in names:
                held[_leader(folders, rank)].pop(name, None)
        transfers = _plan(folders, wanted, needs, held)
        if not transfers:
            break
        _require_room(folders, transfers)
        failed = _exchange(folders, folder, transfers)
        for source, name in failed:
            held[_leader(folders, source)].pop(name, None)
        for each in transfers:
            if (each.source, each.name) not in failed:
                held[_leader(folders, each.target)][each.name] = wanted.files[each.name]
    found = locate_checkpoint(folder)
    assert found is not None, "its manifest has been read"
    base = engine.config.checkpoint.pretrained_checkpoint
    return ComparedCheckpoint(found.form, folder, base)


def needed_files(engine: TrainEngine, folder: Path, files: Mapping[str, Facts]) -> set[str]:
    """Return the files with tensors that this rank reads when it loads a checkpoint."""
    if (folder / BASE).is_file() or engine.quantised:
        return set(files)  # additions are small, and read whole
    index = read_index(folder, manifest(folder))
    rank = f"-{engine.mesh.world.rank:05d}"
    found = {name for name in files if name.startswith("float8-")}
    found |= {name for name in files if name.startswith("random") and rank in name}
    for param, name in engine.names.items():
        start, end = _working_range(engine, param)
        wanted = Slice.of(shard_of(param), engine.mesh.coordinates, start, end)
        for entry in index.get(name, ()):
            found |= {entry.files["weight"]} if _overlap(wanted, entry) else set()
    for own in owned_slices(engine):
        for entry in index.get(own.name, ()):
            found |= set(entry.files.values()) if _overlap(own.slice, entry) else set()
    return found


def _working_range(engine: TrainEngine, param: object) -> tuple[int, int]:
    if engine.stage == 3:
        return partition_range(param, engine.mesh.data)  # type: ignore[arg-type]
    shape = shard_of(param).local_shape(engine.mesh.coordinates)  # type: ignore[arg-type]
    return 0, math.prod(shape)


def _overlap(wanted: Slice, entry: IndexEntry) -> bool:
    # One of another shape is refused when it is read.
    return wanted.shape != entry.slice.shape or wanted.overlap(entry.slice) is not None


def _copy_small_files(
    folders: NodeFolders, folder: Path, held: dict[int, dict[str, Facts]]
) -> None:
    """Gives nodes without this checkpoint its index, configuration and manifest."""
    giver = next(iter(held))
    small = {name: facts for name, facts in held[giver].items() if not name.endswith(_TENSORS)}
    without = [ranks[0] for ranks in folders.nodes if ranks[0] not in held]
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
    held |= {rank: dict(small) for rank in without}


def _damaged_here(
    folders: NodeFolders,
    folder: Path,
    wanted: NodeCheckpoint,
    needs: list[list[str]],
    held: dict[int, dict[str, Facts]],
) -> list[str]:
    """Delete and return damaged files that this node needs; the ranks of a node share the work."""
    members, have = folders.members, held[folders.members[0]]
    names = sorted({name for rank in members for name in needs[rank]} & have.keys())
    bad = []
    for name in names[members.index(folders.rank) :: len(members)]:
        try:
            check_file(folder / name, wanted.files[name])
        except CheckpointError as error:
            print(f"WARNING: rank {folders.rank}: {error}; it is deleted", flush=True)
            with contextlib.suppress(OSError):
                (folder / name).unlink()
            bad.append(name)
    return bad


def _plan(
    folders: NodeFolders,
    wanted: NodeCheckpoint,
    needs: list[list[str]],
    held: dict[int, dict[str, Facts]],
) -> list[FileTransfer]:
    """Return what nodes need of other nodes, the same on every rank. Raises CheckpointError if no
    node has a file."""
    found = []
    for target in folders.nodes:
        missing = {name for rank in target for name in needs[rank]} - held[target[0]].keys()
        for number, name in enumerate(sorted(missing)):
            givers = [ranks for ranks in folders.nodes if name in held[ranks[0]]]
            if not givers:
                raise CheckpointError(f"no node has an undamaged {name}")
            giver = givers[number % len(givers)]
            source, to = (ranks[number % len(ranks)] for ranks in (giver, target))
            found.append(FileTransfer.of(source, to, name, wanted.files[name]))
    return found


def _require_room(folders: NodeFolders, transfers: list[FileTransfer]) -> None:
    reason = None
    if folders.leads:
        needed = sum(each.bytes for each in transfers if each.target in folders.members)
        free = free_bytes(folders.folder)
        if needed > free:
            reason = (
                f"{folders.folder} needs {needed / 1e6:,.0f} MB of other nodes, and "
                f"{free / 1e6:,.0f} MB are free"
            )
    folders.require(reason)


def _exchange(
    folders: NodeFolders, folder: Path, transfers: list[FileTransfer]
) -> set[tuple[int, str]]:
    """Return sender and name of files that were damaged. Raises CheckpointError on every rank if
    one cannot write."""
    failed = folders.exchange(transfers, sent=folder, received=folder)
    damaged = {(each.source, each.name) for each, reason in failed if "damaged" in reason}
    written = [reason for each, reason in failed if (each.source, each.name) not in damaged]
    folders.require(written[0] if written else None)
    return {one for several in folders.gather(damaged) for one in several}


def _leader(folders: NodeFolders, rank: int) -> int:
    return folders.nodes[folders.node_of(rank)][0]
