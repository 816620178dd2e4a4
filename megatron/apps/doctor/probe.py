"""Probe program that runs on every node. It answers requests, one line of JSON each, until its
input ends.

Its source code is sent to the node and needs only Python there, so that it can report what is
missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.util.digests import digest, digest_of_sample

_GPU_FIELDS = (
    *("index", "name", "driver_version", "temperature.gpu"),
    *("ecc.errors.uncorrected.volatile.total", "retired_pages.pending"),
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
_XIDS_OF_PROGRAMS = ("13", "31", "43", "45", "68", "69")
"""NVIDIA's numbers for Xid errors that are caused by programs rather than hardware."""
_CHUNK = bytes(2**18)
_PINGS = 20
_MESSAGES = 10
_MEETING = timedelta(seconds=20)
_held: dict[str, Any] = {}  # objects kept open between requests: sockets, the locked file


def report(
    folder: str, packages: list[str], data: list[str], places: list[str], interface: str = ""
) -> dict[str, Any]:
    """Return a description of this node. Sizes are in bytes.

    Args:
        folder: folder of this project.
        data: files that training reads.
        places: folders to which training writes. They need not exist yet.
        interface: GLOO_SOCKET_IFNAME, if it is set where the run is launched.
    """
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "code": _code(Path(folder)),
        "data": {path: _file(Path(path)) for path in data},
        "places": {path: _place(path) for path in [*places, tempfile.gettempdir()]},
        "shm": os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
        if os.path.isdir("/dev/shm")
        else None,
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir("/dev/infiniband"),
        "own_address": _own_address(),
        "interface": interface or os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code(folder: Path) -> dict[str, str]:
    """Return a digest of each source file of the trainer, by its path."""
    # without setup.py, the folder also has files of other packages
    programs = folder.glob("*.py") if (folder / "setup.py").is_file() else ()
    files = [*programs, *folder.glob("megatron/**/*.py")]
    return {str(file.relative_to(folder)): digest(file.read_bytes())[:12] for file in files}


def _file(path: Path) -> str | None:
    try:
        return f"{path.stat().st_size:,} bytes, {digest_of_sample(path)[:12]}"
    except OSError:
        return None


def _place(path: str) -> dict[str, Any]:
    """Return the nearest existing parent folder, its free space, and why writing fails, if so."""
    existing = os.path.abspath(path)
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    room = os.statvfs(existing)
    answer = {"folder": existing, "free": room.f_bavail * room.f_frsize, "refused": ""}
    answer["inodes"] = room.f_favail / room.f_files if room.f_files else 1.0
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        answer["refused"] = error.strerror
    return answer


def _own_address() -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _gpus() -> dict[str, Any]:
    """Return the GPUs (one row each, none without a driver), other output or errors, and Xids."""
    output = _nvidia_smi()
    return {**output, "xids": _xids() if output["rows"] or output["error"] else []}


def _nvidia_smi() -> dict[str, Any]:
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return {"rows": [], "error": ""}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"rows": [], "error": str(error)}
    if said.returncode:
        return {"rows": [], "error": (said.stderr or said.stdout).strip()}
    rows, others = [], []
    for line in filter(str.strip, said.stdout.splitlines()):
        values = line.split(", ")
        if len(values) == len(_GPU_FIELDS):
            rows.append(dict(zip(_GPU_FIELDS, values, strict=True)))
        else:
            others.append(line.strip())  # warnings and the like
    return {"rows": rows, "error": "\n".join(others)}


def _xids() -> list[str]:
    """Return the last Xid error of each GPU in the kernel log, if this user may read it."""
    try:
        said = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    errors = re.findall(r"NVRM: (Xid \(([^()]*)\): (\d+).*)", said)
    return list(
        {gpu: line for line, gpu, number in errors if number not in _XIDS_OF_PROGRAMS}.values()
    )


def clock() -> float:
    """Return the time on this node's clock, in seconds since 1970."""
    return time.time()


def mark(folder: str, name: str) -> str:
    """Create a file in a folder, and lock it until :func:`unmark`. Return the reason if the file
    cannot be locked, otherwise "". Raises OSError, leaving nothing behind, if writing fails."""
    file = _held["mark"] = open(os.path.join(folder, name), "w")  # noqa: SIM115
    try:
        file.write(name)
        file.flush()
    except OSError:
        unmark()
        raise
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unmark() -> None:
    file = _held.pop("mark")
    os.unlink(file.name)
    with contextlib.suppress(OSError):  # unwritten data
        file.close()


def look(folder: str, name: str, seconds: float) -> str:
    """Return the state of a file that another node has marked: ``locked``, ``not locked``,
    ``without locks: REASON``, or ``not seen`` if it does not appear within ``seconds``. Network
    file systems may be slow to show a file."""
    deadline = time.monotonic() + seconds
    while name not in (os.listdir(folder) if os.path.isdir(folder) else []):
        if time.monotonic() > deadline:
            return "not seen"
        time.sleep(0.1)
    with open(os.path.join(folder, name), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "locked"
        except OSError as error:
            return f"without locks: {error.strerror or error}"
    return "not locked"


def listen(port: int) -> int:
    """Accept connections on a port (0 means any free port) for measurements with :func:`send`.
    Return the port."""
    try:
        server = _held["server"] = _listener(port)
    except OSError as error:  # without the address that Python appends
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def _listener(port: int) -> socket.socket:
    """Return a server socket for IPv4 and IPv6: a node's name may resolve to only one of them."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))


def close() -> None:
    server = _held.pop("server")
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def _accept(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_receive, args=(server.accept()[0],), daemon=True).start()


def _receive(other: socket.socket) -> None:
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with other, contextlib.suppress(OSError):
        for _ in range(_PINGS):
            other.sendall(other.recv(1) or b"0")
        count, space = 0, bytearray(2**18)
        while got := other.recv_into(space):
            count += got
        other.sendall(count.to_bytes(8, "little"))


def connect(host: str, port: int, seconds: float) -> None:
    socket.create_connection((host, port), seconds).close()


def send(host: str, port: int, seconds: float) -> dict[str, float]:
    """Send data for ``seconds``. Return the rate at which it arrives, in bytes per second, and the
    shortest round trip in seconds."""
    with socket.create_connection((host, port), 5) as other:
        other.settimeout(30)
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            other.sendall(b"1")
            other.recv(1)
            trips.append(time.perf_counter() - start)
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            other.sendall(_CHUNK)
        other.shutdown(socket.SHUT_WR)
        count = int.from_bytes(other.recv(8), "little")
        return {"rate": count / (time.perf_counter() - start), "trip": min(trips)}


def store() -> int:
    """Open the rendezvous store of a pair of nodes for :func:`meet`. Return the store's port."""
    import torch.distributed as dist

    _held["store"] = dist.TCPStore(
        "0.0.0.0", 0, 2, is_master=True, wait_for_workers=False, timeout=_MEETING
    )
    return int(_held["store"].port)


def meet(backend: str, host: str, port: int, rank: int, seconds: float) -> dict[str, float] | None:
    """Send from rank 0 to rank 1 with torch.distributed for about ``seconds``. With nccl, the data
    are in the memory of the first GPU. Collective: both ranks must call this. Return the result as
    in :func:`send` on rank 0, and None on rank 1."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    meeting = _held.pop("store", None) or dist.TCPStore(host, port, 2, timeout=_MEETING)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=2, timeout=_MEETING)
    try:
        one, few = (torch.ones(size, device=device) for size in (1, 2**14))

        def round_trip(there: Any) -> float:
            start = time.perf_counter()
            if rank == 0:
                dist.send(there, 1)
                dist.recv(one, 1)
            else:
                dist.recv(there, 0)
                dist.send(one, 0)
            one.item()  # wait until it has arrived
            return time.perf_counter() - start

        trips = [round_trip(one) for _ in range(_PINGS)]
        round_trip(few)  # warm-up: allocates buffers
        length = torch.tensor([_length(few.nbytes / round_trip(few), seconds)], device=device)
        round_trip(length)
        many = torch.ones(int(length.item()), device=device)
        round_trip(many)
        taken = sum(round_trip(many) for _ in range(_MESSAGES))
        return {"rate": _MESSAGES * many.nbytes / taken, "trip": min(trips)} if rank == 0 else None
    finally:
        dist.destroy_process_group()


def _length(rate: float, seconds: float) -> int:
    """Return the number of elements per message with which all messages take about ``seconds``."""
    return max(2**14, min(2**24, int(rate * seconds / _MESSAGES / 4)))


REQUESTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (report, clock, mark, unmark, look, listen, close, connect, send, store, meet)
}


def serve() -> None:
    """Answer requests from standard input until it ends."""
    # Redirect stdout, because libraries print too, even from C.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        number, name, values = json.loads(line)
        answer: dict[str, Any] = {"number": number}
        try:
            answer["answer"] = REQUESTS[name](**values)
        except OSError as error:
            answer["error"] = error.strerror or str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(json.dumps(answer), file=answers, flush=True)
