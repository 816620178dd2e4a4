"""In-memory folders of a run on its nodes, and the exchange of files between the nodes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError, Facts, write_text
from megatron.checkpoint.folder import complete_tags, discard, iteration_of, remove_incomplete
from megatron.parallel.mesh import Group

RUN_ID = ".run-id"
"""File in ``--save`` that contains the name of the run's in-memory folders. A run whose ``--save``
folder lacks this file is a new run and gets new folders."""

_SHARED_MEMORY = Path("/dev/shm")
_FLAG = "--non-persistent-local-ckpt-dir"
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class NodeFolders:
    """In-memory folder of this node, and the ranks of every node. Nodes are sorted by lowest
    rank."""

    folder: Path
    nodes: tuple[tuple[int, ...], ...]
    rank: int
    group: dist.ProcessGroup | None  # gloo group of all ranks, None for a single rank

    @cached_property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.node_of(self.rank)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this node."""
        return self.nodes[self.node]

    @property
    def leads(self) -> bool:
        """True on one rank per node, which does the work that is needed once per node."""
        return self.rank == self.members[0]

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)

    def copies_of(self, node: int, factor: int) -> list[int]:
        """Return the other nodes with copies of a node's files. ``factor`` includes the node
        itself."""
        count = len(self.nodes)
        return [(node + further) % count for further in range(1, min(factor, count))]

    def gather(self, own: object) -> list:
        """Return the values of all ranks, by rank. Collective: every rank must call this."""
        parts = [own] * sum(map(len, self.nodes))
        if len(parts) > 1:
            dist.all_gather_object(parts, own, group=self.group)
        return parts

    def require(self, reason: str | None) -> None:
        """Raise CheckpointError on every rank if ``reason`` is not None on any rank. Collective:
        every rank must call this."""
        for rank, reason_of_rank in enumerate(self.gather(reason)):
            if reason_of_rank is not None:
                raise CheckpointError(f"rank {rank}: {reason_of_rank}")

    def exchange(
        self, transfers: Sequence[FileTransfer], sent: Path, received: Path
    ) -> list[tuple[FileTransfer, str]]:
        """Run :func:`exchange` from the folder ``sent`` to the folder ``received``."""
        return exchange(
            transfers,
            self.rank,
            self.group,
            sent=lambda each: sent / each.name,
            received=lambda each: received / each.name,
        )

    def discard_after(self, iteration: int) -> None:
        """Delete checkpoints of iterations after ``iteration``, and the remains of interrupted
        saves. Every rank must call this method."""
        if not self.leads or not self.folder.is_dir():
            return
        remove_incomplete(self.folder)
        for name in complete_tags(self.folder):
            if (iteration_of(name) or 0) > iteration:
                with contextlib.suppress(OSError):
                    discard(self.folder / name)

    def remove(self) -> None:
        """Delete this node's folder at the end of the run."""
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_folders(
    given: str | None, save: Path, world: Group, group: dist.ProcessGroup | None
) -> NodeFolders:
    """Create the folder of the run on every node, inside ``given`` or in shared memory. Collective:
    every rank must call this.

    Ranks that see each other's files in the folder form a node. Raises CheckpointError on every
    rank if a rank cannot write to the folder, or if another user owns it."""
    alone = NodeFolders(Path(), (tuple(range(world.size)),), world.rank, group)
    reason, run = None, ""
    try:
        run = _run_id(save) if world.rank == 0 else ""
    except OSError as error:
        reason = f"{save / RUN_ID} cannot be written: {error.strerror}"
    alone.require(reason)
    run = alone.gather(run)[0]
    base, mark = base_folder(given), f".rank-{world.rank}-{uuid.uuid4().hex}"
    folder = base / run
    try:
        if given:
            base.mkdir(parents=True, exist_ok=True)
        else:
            _make_own(base)
        _make_own(folder)
        (folder / mark).touch()
    except OSError as error:
        reason = f"{_FLAG} {base}: {error.strerror}; name a folder in memory, on every node"
    except CheckpointError as error:
        reason = str(error)
    alone.require(reason)
    marks = alone.gather(mark)
    seen = tuple(rank for rank, name in enumerate(marks) if (folder / name).exists())
    nodes = tuple(dict.fromkeys(alone.gather(seen)))
    (folder / mark).unlink(missing_ok=True)
    return NodeFolders(folder, nodes, world.rank, group)


def base_folder(given: str | None) -> Path:
    """Return the folder that contains all of a user's runs on a node."""
    return Path(given) if given else _SHARED_MEMORY / f"megatron-{os.getuid()}"


def _run_id(save: Path) -> str:
    """Return the identifier of the run that saves in ``save``, created at the run's first start."""
    path = save / RUN_ID
    with contextlib.suppress(FileNotFoundError):
        run_id = path.read_text(errors="replace").strip()
        if run_id.isalnum():
            return run_id
    write_text(path, uuid.uuid4().hex)
    return _run_id(save)


def _make_own(folder: Path) -> None:
    """Create a folder that only this user can write to. Raises CheckpointError if the folder
    belongs to another user or is a link."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise CheckpointError(
            f"{folder} belongs to user {status.st_uid}, or is a link: nothing is read from it or "
            f"written to it; name another folder by {_FLAG}"
        )


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that can be written to a folder of this node. For an in-memory
    folder this is limited by the free memory of the node and of this process's control groups."""
    free = shutil.disk_usage(folder).free
    if _type_of_file_system(folder) in _IN_MEMORY:
        free = min(free, *_memory_left())
    return free


def _memory_left() -> Sequence[int]:
    """Return the free memory of the node and of each control group of this process, in bytes."""
    left = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        own = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(line for line in own if line.startswith("0::"))[3:].lstrip("/")
        for group in (Path(name), *Path(name).parents):
            limits = Path("/sys/fs/cgroup") / group
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                most = int((limits / "memory.max").read_text())
                left.append(most - int((limits / "memory.current").read_text()))
    return left


def _type_of_file_system(folder: Path) -> str:
    """Return the file system type of a folder as in /proc/self/mounts, e.g. "tmpfs". Return an
    empty string on systems without that file."""
    kind_of_place = (0, "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, place, kind, *_ = line.split()
            if folder.resolve().is_relative_to(place):
                kind_of_place = max(kind_of_place, (len(place), kind), key=lambda each: each[0])
    return kind_of_place[1]


_CHUNK_BYTES = 2**23
"""Bytes sent at a time. A rank needs two buffers of this size, whatever the size of the files."""


class FileTransfer(NamedTuple):
    """File that rank ``source`` sends to rank ``target``, with its size and SHA-256."""

    source: int
    target: int
    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, source: int, target: int, name: str, facts: Facts) -> FileTransfer:
        """Return the transfer of a file whose size and SHA-256 a manifest lists in ``facts``."""
        return cls(source, target, name, facts["bytes"], facts["sha256"])


def exchange(
    transfers: Sequence[FileTransfer],
    rank: int,
    group: dist.ProcessGroup | None,
    sent: Callable[[FileTransfer], Path],
    received: Callable[[FileTransfer], Path],
) -> list[tuple[FileTransfer, str]]:
    """Send and receive files. Collective: all ranks of the group must call this with the same list.

    A file gets its final name only when it is complete and its SHA-256 matches. A rank that cannot
    read sends zeros, and one that cannot write drops the data, because the other ranks would wait
    otherwise. Return the files that this rank did not receive intact, each with the reason. Raises
    RuntimeError if another rank has ended.
    """
    out_buffer, in_buffer = (torch.empty(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
    failed = []
    for several in rounds(transfers):
        out = next((each for each in several if each.source == rank), None)
        into = next((each for each in several if each.target == rank), None)
        with contextlib.ExitStack() as stack:
            reading = stack.enter_context(_Outgoing(sent(out))) if out else None
            writing = stack.enter_context(_Incoming(received(into), into)) if into else None
            left_out, left_in = out.bytes if out else 0, into.bytes if into else 0
            while left_out or left_in:
                works = []
                chunk_out = out_buffer[: min(left_out, _CHUNK_BYTES)]
                chunk_in = in_buffer[: min(left_in, _CHUNK_BYTES)]
                if into and left_in:
                    works.append(dist.irecv(chunk_in, into.source, group=group))
                if out and reading and left_out:
                    reading.fill(chunk_out)
                    works.append(dist.isend(chunk_out, out.target, group=group))
                for work in works:
                    assert work is not None, "this rank is a member of the group"
                    work.wait()
                if writing and left_in:
                    writing.add(chunk_in)
                left_out, left_in = left_out - len(chunk_out), left_in - len(chunk_in)
            if writing and into:
                reason = writing.finish()
                failed += [(into, reason)] if reason else []
    return failed


def rounds(transfers: Iterable[FileTransfer]) -> Iterator[list[FileTransfer]]:
    """Yield lists of transfers that can run concurrently: in each list, a rank sends at most one
    file and receives at most one."""
    waiting = list(transfers)
    while waiting:
        now, later = list[FileTransfer](), list[FileTransfer]()
        sources, targets = set[int](), set[int]()
        for each in waiting:
            free = each.source not in sources and each.target not in targets
            (now if free else later).append(each)
            sources.add(each.source)
            targets.add(each.target)
        yield now
        waiting = later


def remove_unreceived(folder: Path) -> None:
    """Delete the partial files that a killed process left while receiving."""
    for path in folder.glob(".*.incoming"):
        path.unlink(missing_ok=True)


class _Outgoing(contextlib.ExitStack):
    """File being sent. If reading fails, zeros are sent, which fail the receiver's checksum."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = self.enter_context(path.open("rb", buffering=0))

    def fill(self, chunk: torch.Tensor) -> None:
        """Fill ``chunk`` with the next bytes of the file, or zeros if they cannot be read."""
        place = chunk.numpy().data
        with contextlib.suppress(OSError):
            while self._file is not None and place:
                count = self._file.readinto(place)  # type: ignore[attr-defined]
                if not count:
                    break
                place = place[count:]
        place[:] = bytes(len(place))


class _Incoming(contextlib.ExitStack):
    """File being received. It has a hidden name until it is complete."""

    def __init__(self, path: Path, expected: FileTransfer) -> None:
        super().__init__()
        self._path, self._expected, self._error = path, expected, ""
        self._part = path.with_name(f".{path.name}.incoming")
        self._digest, self._file = hashlib.sha256(), None
        with self._noting_errors():
            self._part.unlink(missing_ok=True)
            self._file = self.enter_context(self._part.open("xb", buffering=0))

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or f"{self._part}: {error.strerror}"

    def add(self, chunk: torch.Tensor) -> None:
        """Append the next bytes to the file. Write errors are kept for :meth:`finish`."""
        block = chunk.numpy().data
        self._digest.update(block)
        with self._noting_errors():
            while self._file is not None and not self._error and block:
                block = block[self._file.write(block) :]

    def finish(self) -> str:
        """Rename the file if its SHA-256 matches, else delete it. Return the error, if any, or
        ""."""
        if not self._error and self._digest.hexdigest() != self._expected.sha256:
            self._error = (
                f"{self._expected.name} of rank {self._expected.source} is damaged: its SHA-256 "
                "differs from the manifest's"
            )
        with self._noting_errors():
            if self._error:
                self._part.unlink(missing_ok=True)
            else:
                self._part.replace(self._path)
        return self._error
