"""Client side of the keeper processes, which compute the rewards of a rank."""

from __future__ import annotations

import json
import os
import queue
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards import keeper
from megatron.apps.reinforcement.rewards.box import remove
from megatron.apps.reinforcement.rewards.confinement import Limits

Item = TypeVar("Item")
Answer = dict[str, Any]

_ROOT = Path(__file__).parents[4]
_SECONDS_TO_END = 30.0
_MARGIN = 150.0
"""Additional seconds to wait for an answer, for starting processes and for the imports of a
function's file."""


class KeeperProcess:
    """Keeper process that is started when needed, and restarted if it does not answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def ask(self, request: Mapping[str, Any], seconds: float) -> Answer:
        """Send a request, whose own limits allow ``seconds``, and return its answer. If the process
        does not answer, retry once with a new one, then return a failure."""
        content = json.dumps(request).encode()
        for _ in range(2):
            process = self._process or self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(struct.pack("<Q", len(content)) + content)
                process.stdin.flush()
                answer = self._read(process, time.monotonic() + seconds + _MARGIN)
            except OSError:
                answer = None
            if answer is not None:
                return answer
            self.stop()
        return {"failure": "was lost with the process that computes it"}

    def _start(self) -> subprocess.Popen[bytes]:
        # The temporary folders of the keeper's boxes are inside this folder, so that they can be
        # removed even if the keeper is killed.
        self._folder = tempfile.mkdtemp(prefix=keeper.FOLDER)
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "TMPDIR": self._folder,
            },
        )
        weakref.finalize(self, _stop, self._process, self._folder, os.getpid())
        return self._process

    @staticmethod
    def _read(process: subprocess.Popen[bytes], until: float) -> Answer | None:
        """Read an answer. Return None if the process ends or the deadline ``until`` passes."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        data, length = bytearray(), 8
        while len(data) < length:
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            part = os.read(descriptor, 1 << 20)
            if not part:
                return None
            data += part
            if length == 8 and len(data) >= 8:
                length += struct.unpack("<Q", data[:8])[0]
        answer: Answer = json.loads(data[8:])
        return answer

    def stop(self) -> None:
        """End the process, if it runs, and all processes that it has started."""
        if self._process is not None:
            _stop(self._process, self._folder, os.getpid())
            self._process = None


def _stop(process: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:  # this is a fork, and the parent still uses the process
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(_SECONDS_TO_END)  # the process ends its own children
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    remove(folder)


def limits_of(options: ReinforcementConfig) -> Limits:
    """Return the limits of a run's reward processes."""
    memory, allowed = options.reward_memory_mib << 20, tuple(options.reward_allow)
    return Limits(options.reward_timeout, memory, allowed=allowed)


class Keepers:
    """Pool of keeper processes that answer requests concurrently. Thread-safe."""

    def __init__(self, count: int, limits: Limits) -> None:
        self.limits = limits
        self._all = [KeeperProcess() for _ in range(count)]
        self._free: queue.SimpleQueue[KeeperProcess] = queue.SimpleQueue()
        for each in self._all:
            self._free.put(each)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], texts: int = 1) -> Answer:
        """Send a request about ``texts`` completions to a free process, and return its answer.
        Blocks until a process is free."""
        free = self._free.get()
        try:
            request = {**request, "limits": asdict(self.limits)}
            return free.ask(request, texts * self.limits.seconds)
        finally:
            self._free.put(free)

    def map(self, ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """Call ``ask`` concurrently for all items, and return the answers in order. The callable is
        expected to use :meth:`Keepers.ask`."""
        if len(items) < 2 or len(self._all) < 2:
            return [ask(item) for item in items]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._all))
        return list(self._threads.map(ask, items))

    def close(self) -> None:
        """End all processes."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for each in self._all:
            each.stop()
