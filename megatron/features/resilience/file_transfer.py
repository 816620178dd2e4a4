"""Files that ranks send to each other, over gloo, each rank one out and one in at a time."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

_CHUNK_BYTES = 2**23
"""Sent at a time. A rank needs two such buffers, whatever the size of the files."""


class FileTransfer(NamedTuple):
    """A file that the rank ``source`` sends to the rank ``target``, with its size and SHA-256."""

    source: int
    target: int
    name: str
    bytes: int
    sha256: str


def exchange(
    transfers: Sequence[FileTransfer],
    rank: int,
    group: dist.ProcessGroup | None,
    sent: Callable[[FileTransfer], Path],
    received: Callable[[FileTransfer], Path],
) -> list[tuple[FileTransfer, str]]:
    """Sends and receives files; every rank of the group must call it with the same list.

    A file appears under its name when it is complete and has its SHA-256. What cannot be read or
    written ends no exchange, since other ranks would wait: this rank sends zeros, or throws away
    what it receives, and the files that did not arrive whole are returned on their targets, each
    with the reason. Raises RuntimeError if a rank has ended.

    Args:
        sent: where this rank has a file that it sends.
        received: where a file is to appear.
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
    """Transfers that can run at the same time: each rank sends at most one file and receives at
    most one. The same on every rank."""
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
    """Deletes what a killed process had received of files in a folder."""
    for path in folder.glob(".*.incoming"):
        path.unlink(missing_ok=True)


class _Outgoing(contextlib.ExitStack):
    """A file that is sent; zeros where it cannot be read, whose digest the receiver finds wrong."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = self.enter_context(path.open("rb", buffering=0))

    def fill(self, chunk: torch.Tensor) -> None:
        """Reads the next bytes of the file."""
        place = chunk.numpy().data
        with contextlib.suppress(OSError):
            while self._file is not None and place:
                count = self._file.readinto(place)  # type: ignore[attr-defined]
                if not count:
                    break
                place = place[count:]
        place[:] = bytes(len(place))


class _Incoming(contextlib.ExitStack):
    """A file that is received under a hidden name until it is whole."""

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
        """Writes the next bytes."""
        block = chunk.numpy().data
        self._digest.update(block)
        with self._noting_errors():
            while self._file is not None and not self._error and block:
                block = block[self._file.write(block) :]

    def finish(self) -> str:
        """Gives the file its name, if it is what the sender was to send; else returns why not."""
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
