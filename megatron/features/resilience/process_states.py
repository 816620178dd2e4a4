"""What the system knows of processes and threads: whether they run, and what they wait for."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from pathlib import Path

_WORDS = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for storage or a device (state D)",
    "T": "is stopped (state T: SIGSTOP, Ctrl-Z or a debugger)",
    "t": "is stopped by a debugger (state t)",
    "Z": "has ended",
    "X": "has ended",
    "I": "sleeps",
}
GONE = "has ended"

_FILE_FIRST = {
    "x86_64": {0: "read", 1: "write", 3: "close", 17: "pread", 18: "pwrite", 74: "fsync",
               75: "fdatasync", 77: "ftruncate", 78: "getdents", 217: "getdents", 5: "fstat",
               295: "preadv", 296: "pwritev", 285: "fallocate", 40: "sendfile"},
    "aarch64": {63: "read", 64: "write", 57: "close", 67: "pread", 68: "pwrite", 82: "fsync",
                83: "fdatasync", 46: "ftruncate", 61: "getdents", 80: "fstat", 69: "preadv",
                70: "pwritev", 47: "fallocate"},
}  # fmt: skip
"""Calls of the system whose first argument is an open file, by their numbers."""
_PATH_FIRST = {
    "x86_64": {2: "open", 4: "stat", 6: "lstat", 82: "rename", 83: "mkdir", 84: "rmdir",
               87: "unlink", 21: "access", 76: "truncate", 89: "readlink"},
    "aarch64": {},
}  # fmt: skip
_PATH_SECOND = {
    "x86_64": {257: "open", 262: "stat", 263: "unlink", 264: "rename", 316: "rename", 332: "stat",
               258: "mkdir", 269: "access", 439: "access", 267: "readlink"},
    "aarch64": {56: "open", 79: "stat", 35: "unlink", 38: "rename", 276: "rename", 291: "stat",
                34: "mkdir", 48: "access", 439: "access", 78: "readlink"},
}  # fmt: skip
_LONGEST = 4096


def process_space() -> str:
    """Where this process's ids mean something: its host, which may have the name of another, since
    it was started, and its namespace, as containers on one machine have their own."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def state_letter(pid: int, thread: int | None = None) -> str | None:
    """The system's letter for the state of a process, or of one of its threads; None where there
    is no such process, or the system does not say."""
    file = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        # The name is in brackets and may contain anything; the state follows.
        return Path(file).read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def state_of(pid: int) -> str:
    """What a process of this machine does, in words: it runs, is stopped, has ended."""
    letter = state_letter(pid)
    if letter is None:
        if sys.platform == "linux":
            return GONE
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return GONE
        except OSError:
            pass
        return "runs"
    words = _WORDS.get(letter, f"is in state {letter}")
    return f"{words} in {file}" if letter == "D" and (file := awaited_file(pid)) else words


def awaited_file(pid: int, thread: int | None = None) -> str | None:
    """The call and the path of the file for which a thread waits inside the system, such as
    ``fsync of /data/x.safetensors``; None where it waits for something else, or it cannot be
    told. Nothing here touches the file."""
    task = f"/proc/{pid}/task/{pid if thread is None else thread}"
    try:
        words = Path(f"{task}/syscall").read_text().split()
        number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):  # it runs, or belongs to somebody else
        return None
    machine = platform.machine()
    if (call := _FILE_FIRST.get(machine, {}).get(number)) is not None:
        try:
            path = os.readlink(f"{task}/fd/{arguments[0]}")
        except OSError:
            return None
        return f"{call} of {path}" if path.startswith("/") and _is_file(path) else None
    for calls, place in ((_PATH_FIRST, 0), (_PATH_SECOND, 1)):
        if (call := calls.get(machine, {}).get(number)) is not None:
            named = _text_at(arguments[place], pid)
            return f"{call} of {named}" if named else None
    return None


def _is_file(path: str) -> bool:
    """Not a terminal or another device, which a process may wait for as long as it likes."""
    return not path.startswith(("/dev/pts/", "/dev/tty", "/dev/null", "/dev/nvidia", "/proc/"))


def _text_at(address: int, pid: int) -> str | None:
    """The text, with its end, at an address of this process."""
    if pid != os.getpid() or not address:
        return None
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            found = memory.read(_LONGEST)
    except (OSError, ValueError):
        return ctypes.string_at(address).decode(errors="replace")
    return found.partition(b"\0")[0].decode(errors="replace")
