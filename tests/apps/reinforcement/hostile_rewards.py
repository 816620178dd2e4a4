"""Reward functions that do harm, or try to, for the text "bad"; others get 1."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

OUTSIDE = Path("/tmp/megatron-hostile")
SLEEP = ["sleep", "4242"]
HOSTILE = {}
"""Message of the run about each; None where no harm is done."""


def hostile(expected):
    def add(do):
        def reward(completions, **_):
            if "bad" in completions:
                result = do()
                if result is not None:
                    return result
            return [1.0] * len(completions)

        HOSTILE[do.__name__] = expected
        globals()[f"reward_{do.__name__}"] = reward
        return do

    return add


TIME = r"took more than .* s \(--reward-timeout\)"
MEMORY = r"needed more .*--reward-memory-mib"
REFUSED = "raised (PermissionError|OSError|BlockingIOError)"
PROCESSES = f"started more than 64 processes|{MEMORY}|{REFUSED}"


@hostile(TIME)
def infinite_loop():
    while True:
        pass


@hostile(TIME)
def sleeping():
    time.sleep(3600)


@hostile(TIME)
def ignoring_signals():
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@hostile(TIME)
def catching_all():
    while True:
        try:
            while True:
                time.sleep(0.1)
        except BaseException:
            pass


@hostile(PROCESSES)
def fork_bomb():
    while True:
        os.fork()


@hostile(f"{PROCESSES}|{TIME}")
def shell_fork_bomb():
    subprocess.run(["bash", "-c", "f() { f | f & f; }; f; sleep 4242"], stderr=subprocess.DEVNULL)


@hostile(f"started more than 64 processes|{MEMORY}|raised RuntimeError: can't start new thread")
def thread_bomb():
    while True:
        threading.Thread(target=time.sleep, args=(4242,), daemon=True).start()


@hostile(MEMORY)
def memory():
    return [len(bytearray(1 << 40))]


@hostile(MEMORY)
def memory_by_and_by():
    held = []
    while True:
        held.append(bytearray(1 << 20))


@hostile(MEMORY)
def memory_of_children():
    for _ in range(12):
        if not os.fork():
            held = [os.urandom(1 << 20) for _ in range(60)]
            time.sleep(4242 + len(held))
    time.sleep(4242)


@hostile(REFUSED)
def memory_without_address():
    os.memfd_create("x")


@hostile(REFUSED)
def shared_memory():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.shmget(0, 1 << 30, 0o1600) < 0:
        raise OSError(ctypes.get_errno(), "shmget")


@hostile(f"raised OSError|{TIME}")
def large_file():
    with open("x", "wb") as file:
        while True:
            file.write(bytes(1 << 20))


@hostile("wrote more than .* MiB, or 4096 files")
def many_files():
    for number in range(10**9):
        Path(f"f{number}").touch()


@hostile("wrote more than .* MiB, or 4096 files")
def many_large_files():
    for number in range(10**9):
        Path(f"f{number}").write_bytes(bytes(1 << 22))


@hostile(None)
def deep_folders():
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")


@hostile(None)
def locked_folder():
    os.makedirs("a/b/c")
    os.chmod("a/b", 0)
    os.chmod("a", 0)


@hostile(r"printed more than|took more than")
def huge_output():
    while True:
        os.write(1, b"x" * (1 << 16))


@hostile(None)
def binary_output():
    os.write(1, bytes(range(256)) * 64)
    os.write(2, bytes(range(256)) * 64)
    print("\ud800")


@hostile(REFUSED)
def network():
    socket.create_connection(("127.0.0.1", 9), timeout=5)


@hostile(REFUSED)
def datagrams():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))


@hostile(REFUSED)
def local_sockets():
    socket.socket(socket.AF_UNIX)


@hostile("raised (gaierror|PermissionError)")
def names_of_hosts():
    socket.getaddrinfo("example.com", 80)


@hostile("raised ValueError: no reward today")
def exception():
    raise ValueError("no reward today")


@hostile("raised Long: x{40}")
def long_exception():
    raise type("Long", (Exception,), {})("x" * 10**7)


@hostile("raised Silent")
def exception_without_text():
    def text(self):
        raise RuntimeError

    raise type("Silent", (Exception,), {"__str__": text})()


@hostile("raised SystemExit")
def leaving():
    sys.exit(0)


@hostile("raised KeyboardInterrupt")
def interrupting():
    raise KeyboardInterrupt


@hostile("ended without an answer")
def leaving_at_once():
    os._exit(0)


@hostile("ended with status 7")
def exit_status():
    os._exit(7)


@hostile("was killed by SIGSEGV")
def invalid_memory():
    ctypes.string_at(0)


@hostile("was killed by (SIGKILL|SIGABRT)|ended with status")
def aborting():
    os.abort()


@hostile("raised RecursionError")
def deep_recursion():
    def again():
        return again()

    again()


@hostile("was killed by SIGSEGV|raised RecursionError|ended with|MemoryError|needed more")
def deep_recursion_without_limit():
    sys.setrecursionlimit(1 << 30)

    def again(function):
        return max([1], key=lambda _: function(function))

    again(again)


@hostile("returned nan instead of a number")
def not_a_number():
    return [float("nan")]


@hostile("returned inf instead of a number")
def infinity():
    return [float("inf")]


@hostile("returned inf instead of a number|OverflowError")
def huge_integer():
    return [10**400]


@hostile(r"returned 'good' \(str\) instead of a number")
def text():
    return ["good"]


@hostile(r"returned \[1.0\] \(list\) instead of a number")
def nested():
    return [[1.0]]


@hostile("returned 3 rewards for 1 texts")
def wrong_length():
    return [1.0, 1.0, 1.0]


@hostile(r"returned \{'reward': 1.0\} \(dict\) instead of a list")
def mapping():
    return {"reward": 1.0}


@hostile("returned <generator .* instead of a list")
def generator():
    return (1.0 for _ in range(1))


@hostile("raised ZeroDivisionError")
def hostile_number():
    class Number:
        def item(self):
            return 1 / 0

    return [Number()]


@hostile(REFUSED)
def writing_outside():
    OUTSIDE.write_text("x")


@hostile(REFUSED)
def writing_outside_by_a_link():
    if not os.path.islink("link"):
        os.symlink("/tmp", "link")
    Path("link/megatron-hostile").write_text("x")


@hostile(REFUSED)
def removing_the_package():
    os.unlink(__file__)


@hostile("raised (ProcessLookupError|PermissionError)")
def signal_to_the_trainer():
    os.kill(TRAINER, signal.SIGKILL)


@hostile("ended|was killed|raised|took more")
def signal_to_all():
    os.kill(-1, signal.SIGKILL)
    time.sleep(4242)


@hostile(None)
def daemon():
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execvp(SLEEP[0], SLEEP)
        os._exit(0)
    os.wait()


@hostile(None)
def thread_left_behind():
    threading.Thread(target=time.sleep, args=(4242,), daemon=True).start()


@hostile("ended|took more|was killed|something else")
def closing_everything():
    os.closerange(0, 256)


@hostile("something else|ended|took more|printed more|was killed")
def writing_everywhere():
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(number, b"\0" * 64)


@hostile(None)
def reading_input():
    sys.stdin.read()


@hostile(REFUSED)
def new_namespaces():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")


@hostile("raised ValueError|raised PermissionError")
def more_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))


@hostile(REFUSED)
def limits_of_the_trainer():
    resource.prlimit(TRAINER, resource.RLIMIT_NOFILE, (8, 8))


@hostile(REFUSED)
def memory_of_the_trainer():
    with open(f"/proc/{TRAINER}/mem", "r+b"):
        pass


@hostile("raised (ModuleNotFoundError|ImportError)")
def missing_module():
    import no_such_module_anywhere  # noqa: F401


TRAINER = int(os.environ.get("LANG", "x-1").rpartition("-")[2] or 1)
"""The environment is not passed on, except for some variables."""
