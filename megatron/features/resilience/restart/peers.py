"""Messages between the guardians of a run: a JSON object a line, over TCP."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.util.digests import digest
from megatron.util.json_text import parse_json

Message = Mapping[str, Any]

KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))
"""A host that does not answer for 15 s is gone; a process that is stopped is not."""
UNANSWERED_MILLISECONDS = 15_000
LONGEST_MESSAGE = 2**20  # bytes; no guardian sends a longer one
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "size", "port", "process", "trainer", "generation"), (int,)),
    **dict.fromkeys(("iteration", "saves", "replica", "micro_batch", "global_batch"), (int,)),
    **dict.fromkeys(("status", "signal", "batch"), (int,)),
    **dict.fromkeys(("host", "folder", "kind", "address", "state", "why"), (str,)),
    **{"flags": (dict,), "killed": (bool,), "grace": (int, float), "failure": (str, type(None))},
}
"""Types of the values in a message, by name: any process of the machine can write to the port."""
_RETRY_SECONDS = 0.2


class Peer:
    """One end of a connection, which never waits: for a process that watches several."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (*KEEP_ALIVE, ("TCP_USER_TIMEOUT", UNANSWERED_MILLISECONDS)):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self._rest = connection, b""

    def fileno(self) -> int:
        """For ``select``."""
        return self.connection.fileno()

    @property
    def address(self) -> str:
        """Address of the host at the other end."""
        return str(self.connection.getpeername()[0])

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is gone, or has not read for very long."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come. Raises OSError if the other end is gone, and
        ValueError if it is not a guardian."""
        try:
            data = self.connection.recv(2**16)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > LONGEST_MESSAGE:
            raise ValueError(f"a message of more than {LONGEST_MESSAGE:,} bytes")
        return [_message(line) for line in lines]

    def close(self) -> None:
        """Ends the connection; the other end learns it."""
        self.connection.close()


def _message(line: bytes) -> dict[str, Any]:
    """The message in a line. Raises ValueError if no guardian writes such a one."""
    message = parse_json(line, "a message")
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    for name, value in message.items():
        if name in _TYPES and type(value) not in _TYPES[name]:
            raise ValueError(f"{name} of a message is {str(value)[:100]!r}")
    return message


def listen(address: str, port: int) -> socket.socket:
    """A socket at which guardians are accepted. Raises OSError if the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, port: int, seconds: float) -> Peer:
    """Return a connection, retrying until it succeeds. Raises OSError after this many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            return Peer(socket.create_connection((address, port), timeout=max(1.0, seconds)))
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_RETRY_SECONDS)


def hello(
    rank: int, size: int, port: int, process: int, flags: Mapping[str, str]
) -> dict[str, Any]:
    """Return the first message of a guardian, which tells runs apart by digests of their flags."""
    save = flags.get("--save")
    return {
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "process": process,
        "port": port,
        "flags": {name: digest(value) for name, value in flags.items()},
        "folder": "" if save is None else digest(os.path.abspath(save)),
    }


def differences(one: Message, other: Message) -> list[str]:
    """Return the names of flags that differ between two hellos; hosts may have different paths of
    one folder."""
    ours, theirs = one["flags"], other["flags"]
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if not names and one["host"] == other["host"] and one["folder"] != other["folder"]:
        return ["folder of --save"]
    return names


class TrainerProgress(ctypes.Structure):
    """Numbers in memory that a trainer shares with its guardian.

    Attributes:
        iteration: the last completed step.
        saves: number of checkpoints that this trainer has completed.
        replica: processes of one replica of the model.
        micro_batch: samples that a replica computes at a time.
        global_batch: samples of a step.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("iteration", "saves", "replica", "micro_batch", "global_batch")
    )
    iteration: int
    saves: int
    replica: int
    micro_batch: int
    global_batch: int

    @classmethod
    def shared(cls) -> TrainerProgress:
        """Zeros that forked processes share."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))


@dataclass(frozen=True)
class RunGeneration:
    """The trainers of a run between one failure and the next.

    Attributes:
        number: counts from 0.
        progress: progress reported by this trainer.
        started: when the guardian began, by ``time.monotonic``.
        failure: reason why the previous trainers ended; None for the first.
        failed_at: when that was, by ``time.monotonic``.
        lost_iteration: the last step that they had done.
        batch: the global batch size of the first trainers; 0 where it is not known.
    """

    number: int
    progress: TrainerProgress
    started: float
    failure: str | None = None
    failed_at: float = 0.0
    lost_iteration: int = 0
    batch: int = 0


class _Own:
    generation: RunGeneration | None = None


def current_generation() -> RunGeneration | None:
    """Return the generation of this process; None where no guardian has started it."""
    return _Own.generation


def begin_generation(generation: RunGeneration) -> None:
    """Says what this process is, once, when it begins."""
    _Own.generation = generation
