"""Messages between the guardians of a run: one JSON object per line, over TCP."""

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
"""TCP keep-alive settings. A host that does not answer for 15 seconds counts as lost. A suspended
process does not, because its kernel still answers."""
UNANSWERED_MILLISECONDS = 15_000
LONGEST_MESSAGE = 2**20  # bytes; guardians never send longer messages
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "size", "port", "process", "trainer", "generation"), (int,)),
    **dict.fromkeys(("iteration", "saves", "replica", "micro_batch", "global_batch"), (int,)),
    **dict.fromkeys(("status", "signal", "batch"), (int,)),
    **dict.fromkeys(("host", "folder", "kind", "address", "state", "why"), (str,)),
    **{"flags": (dict,), "killed": (bool,), "grace": (int, float), "failure": (str, type(None))},
}
"""Expected types of message fields, by name. They are checked because any process on the machine
can connect to the port."""
_RETRY_SECONDS = 0.2


class Peer:
    """Non-blocking TCP connection, for a process that polls several connections."""

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
        """Return the file descriptor, for ``select``."""
        return self.connection.fileno()

    @property
    def address(self) -> str:
        """Address of the host at the other end."""
        return str(self.connection.getpeername()[0])

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the peer is gone or has stopped reading."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without blocking. Raises OSError if the peer is
        gone, and ValueError if the data is not a guardian's message."""
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
        """Close the connection. The peer detects this."""
        self.connection.close()


def _message(line: bytes) -> dict[str, Any]:
    """Parse a line into a message. Raises ValueError if it is not a valid message."""
    message = parse_json(line, "a message")
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    for name, value in message.items():
        if name in _TYPES and type(value) not in _TYPES[name]:
            raise ValueError(f"{name} of a message is {str(value)[:100]!r}")
    return message


def listen(address: str, port: int) -> socket.socket:
    """Return a non-blocking socket that accepts guardians. Raises OSError if the port is in use."""
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
    """Connect to a guardian, retrying for ``seconds``. Raises OSError if no attempt succeeds."""
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
    """Return the first message of a guardian. Digests of the flags identify the run."""
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
    """Return the names of the flags that differ between two ``hello`` messages. The path of --save
    is compared only on the same host, because hosts may mount one folder at different paths."""
    ours, theirs = one["flags"], other["flags"]
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if not names and one["host"] == other["host"] and one["folder"] != other["folder"]:
        return ["folder of --save"]
    return names


class TrainerProgress(ctypes.Structure):
    """Progress counters in memory that a trainer shares with its guardian.

    Attributes:
        iteration: last completed step.
        saves: number of checkpoints that this trainer has completed.
        replica: number of ranks in a model replica.
        micro_batch: micro batch size.
        global_batch: global batch size.
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
        """Return counters, initially 0, in memory that forked processes share."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))


@dataclass(frozen=True)
class RunGeneration:
    """Trainers of a run between one failure and the next, as seen by one of them.

    Attributes:
        number: index of the generation, starting at 0.
        progress: progress reported by this trainer.
        started: time at which the guardian started, from ``time.monotonic``.
        failure: reason why the previous trainers ended; None for the first generation.
        failed_at: time at which the previous trainers ended, from ``time.monotonic``.
        lost_iteration: last step that the previous trainers completed.
        batch: global batch size of the first trainers; 0 if it is not known.
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
    """Return the generation of this process, or None if it was not started by a guardian."""
    return _Own.generation


def begin_generation(generation: RunGeneration) -> None:
    """Set the generation of this process. Called once, when the trainer starts."""
    _Own.generation = generation
