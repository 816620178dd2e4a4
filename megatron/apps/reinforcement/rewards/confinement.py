"""Limits that isolate reward functions and untrusted code from the node, enforced by Linux.

This module needs only the standard library, because the processes that use it import no other
module of the trainer.

    files       Landlock: writing only below one folder; RLIMIT_FSIZE
    network     seccomp: no sockets; a network namespace if the kernel allows it
    processes   RLIMIT_NPROC, for a user or user namespace that no other process has; root in a
                process namespace is monitored, and killed at once
    signals     a process namespace, or Landlock's scope, or seccomp
    memory      RLIMIT_AS; seccomp: no memory outside of the address space

Sources: landlock(7), seccomp(2), namespaces(7), setrlimit(2); the filter has the format of
linux/filter.h, and the system call numbers are those of asm/unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMITS = ("files", "network", "processes", "signals")
"""Limits whose enforcement depends on the kernel. ``--reward-allow`` lifts them."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW = {"pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000, "user": 0x10000000}
_ANY_NEW = 0x7E020000
_PR_DUMPABLE, _PR_SECCOMP, _PR_DROP, _PR_SECUREBITS, _PR_NO_PRIVILEGES = 4, 22, 24, 28, 38
_NO_ROOT = 0b1111
"""Secure bits, locked, that deny special privileges to user id 0."""
_PRIVATE_USERS = 1 << 30
"""First of the user ids that the kernel uses to count root's confined processes."""
_CALLS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (
        0xC000003E,
        dict(
            socket=41, memfd_create=319, ptrace=101, process_vm_readv=310, process_vm_writev=311,
            io_uring_setup=425, unshare=272, setns=308, mount=165, umount2=166, pivot_root=155,
            setuid=105, setgid=106, setreuid=113, setregid=114, setresuid=117, setresgid=119,
            setfsuid=122, setfsgid=123, bpf=321, perf_event_open=298, keyctl=250, add_key=248,
            request_key=249, pidfd_getfd=438, userfaultfd=323, shmget=29, semget=64, msgget=68,
            mq_open=240, setpriority=141, clone=56, clone3=435, prlimit64=302, kill=62, tkill=200,
            tgkill=234, rt_sigqueueinfo=129, rt_tgsigqueueinfo=297, pidfd_send_signal=424,
        ),
    ),
    "aarch64": (
        0xC00000B7,
        dict(
            socket=198, memfd_create=279, ptrace=117, process_vm_readv=270, process_vm_writev=271,
            io_uring_setup=425, unshare=97, setns=268, mount=40, umount2=39, pivot_root=41,
            setuid=146, setgid=144, setreuid=145, setregid=143, setresuid=147, setresgid=149,
            setfsuid=151, setfsgid=152, bpf=280, perf_event_open=241, keyctl=219, add_key=217,
            request_key=218, pidfd_getfd=438, userfaultfd=282, shmget=194, semget=190, msgget=186,
            mq_open=180, setpriority=140, clone=220, clone3=435, prlimit64=261, kill=129,
            tkill=130, tgkill=131, rt_sigqueueinfo=138, rt_tgsigqueueinfo=240,
            pidfd_send_signal=424,
        ),
    ),
}  # fmt: skip
_SIGNALS = (
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal",
)  # fmt: skip
_WITH_ARGUMENTS = ("clone", "clone3", "prlimit64", *_SIGNALS)


@dataclass(frozen=True)
class Limits:
    """Limits on a process and its descendants.

    Attributes:
        seconds: wall-clock time for one completion.
        memory: bytes of address space of each process, and of the total resident memory of all.
        file_bytes: maximum bytes of one file. All files in the folder may have four times as many.
        processes: maximum number of concurrent processes, including threads.
        allowed: names from :data:`LIMITS` that are not enforced.
        unshares: use namespaces if the kernel allows them; limits hold without them, too.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    file_bytes: int = 1 << 26
    processes: int = 64
    allowed: Sequence[str] = ()
    unshares: bool = True


def unshared(limits: Limits) -> list[str]:
    """Move this process into new namespaces, as far as the kernel allows: a user namespace unless
    it is root, a process namespace for its future children, an IPC namespace, and a network
    namespace unless network access is allowed. Return their names."""
    own: list[str] = []
    if not limits.unshares:
        return own
    user, group = os.geteuid(), os.getegid()
    if user and not _LIBC.unshare(_NEW["user"]):
        own.append("user")
        for name, text in (("setgroups", "deny"), ("gid_map", group), ("uid_map", user)):
            line = text if name == "setgroups" else f"{text} {text} 1"
            with open(f"/proc/self/{name}", "w") as file:
                file.write(str(line))
    names = ["pid", "ipc", *(["net"] if "network" not in limits.allowed else [])]
    own += [name for name in names if not _LIBC.unshare(_NEW[name])]
    return own


def confine(limits: Limits, folder: str, namespaces: Sequence[str]) -> None:
    """Apply all limits to this process, irrevocably. It may write only below ``folder``.
    ``namespaces`` contains the names of its namespaces."""
    _LIBC.prctl(_PR_NO_PRIVILEGES, 1, 0, 0, 0)
    for name, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))
    if "processes" not in limits.allowed:
        _limit_processes(limits.processes, folder, namespaces)
    _drop_privileges()
    if "files" not in limits.allowed:
        _landlock(folder, "signals" not in limits.allowed)
    _filter(limits, namespaces)
    _LIBC.prctl(_PR_DUMPABLE, 1, 0, 0, 0)


def _limit_processes(most: int, folder: str, namespaces: Sequence[str]) -> None:
    """Limit the number of processes. RLIMIT_NPROC counts the processes of an ordinary user, but not
    root's. In a process namespace, which can be killed at once, root is monitored instead. Without
    one, root gets a separate real user id, while files that it creates still belong to root."""
    is_root = os.geteuid() == 0 and "user" not in namespaces
    if is_root and "pid" not in namespaces:
        user = _PRIVATE_USERS + os.getpid() % 1_000_000
        os.chmod(folder, 0o777)  # shells replace the effective user by the real one
        with contextlib.suppress(OSError):
            os.setresuid(user, 0, 0)
    elif not is_root and "user" not in namespaces:
        most += _processes_of(os.getuid())
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _drop_privileges() -> None:
    for capability in range(64):
        _LIBC.prctl(_PR_DROP, capability, 0, 0, 0)
    _LIBC.prctl(_PR_SECUREBITS, _NO_ROOT, 0, 0, 0)
    _LIBC.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24))


def _processes_of(user: int) -> int:
    """Return the number of a user's threads on this node."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def landlock_version() -> int:
    """Return the kernel's Landlock version, or 0 without Landlock."""
    return max(0, int(_LIBC.syscall(444, None, ctypes.c_size_t(0), 1)))


def _landlock(folder: str, scoped: bool) -> None:
    known = landlock_version()
    if not known:
        return
    # All rights to modify files that this Landlock version supports. Reading remains allowed.
    write, remove, make, refer, truncate = 1 << 1, 0b11 << 4, 0x1FC0, 1 << 13, 1 << 14
    files = write | remove | make | (refer if known >= 2 else 0) | (truncate if known >= 3 else 0)
    scope = 0b11 if known >= 6 and scoped else 0  # abstract sockets, signals
    attributes = struct.pack("<QQQ", files, 0, scope)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    rules = int(_LIBC.syscall(444, attributes, ctypes.c_size_t(size), 0))
    for path, rights in ((folder, files), ("/dev/null", write | (files & truncate))):
        place = os.open(path, os.O_PATH)
        _LIBC.syscall(445, rules, 1, struct.pack("<Qi", rights, place), 0)
        os.close(place)
    _LIBC.syscall(446, rules, 0)
    os.close(rules)


def _filter(limits: Limits, namespaces: Sequence[str]) -> None:
    """Install a seccomp filter for system calls. Only processors listed in ``_CALLS`` are
    supported; others get no filter."""
    if platform.machine() not in _CALLS:
        return
    architecture, calls = _CALLS[platform.machine()]
    refused = [number for name, number in calls.items() if name not in _WITH_ARGUMENTS]
    if "network" in limits.allowed:
        refused.remove(calls["socket"])
    own_processes = "pid" in namespaces
    if not own_processes and "signals" not in limits.allowed:
        refused += [calls[name] for name in ("rt_sigqueueinfo", "pidfd_send_signal", "tkill")]
    load, equal, set_bits, end = 0x20, 0x15, 0x45, 0x06
    allow, kill_process = 0x7FFF0000, 0x80000000
    fail = 0x00050000 | errno.EPERM

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    program = [step(load, 4), step(equal, architecture, 1), step(end, kill_process), step(load, 0)]
    if platform.machine() == "x86_64":
        program += [step(0x35, 0x40000000, 0, 1), step(end, kill_process)]
    for number in refused:
        program += [step(equal, number, 0, 1), step(end, fail)]
    program += [step(equal, calls["clone3"], 0, 1), step(end, 0x00050000 | errno.ENOSYS)]
    # New user namespaces would grant privileges, and prlimit could change other processes' limits.
    program += [step(equal, calls["clone"], 0, 4), step(load, 16), step(set_bits, _ANY_NEW, 0, 1)]
    program += [step(end, fail), step(end, allow)]
    program += [step(equal, calls["prlimit64"], 0, 4), step(load, 16), step(equal, 0, 1)]
    program += [step(end, fail), step(end, allow)]
    if not own_processes and "signals" not in limits.allowed:
        for name in ("kill", "tgkill", "rt_tgsigqueueinfo"):
            program += [step(equal, calls[name], 0, 4), step(load, 16)]
            program += [step(equal, os.getpid(), 1), step(end, fail), step(end, allow)]
    program.append(step(end, allow))
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    _LIBC.prctl(_PR_SECCOMP, 2, header, 0, 0)
