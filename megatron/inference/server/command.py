"""A server for a checkpoint, from a command line."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import ConfigError, Settings
from megatron.inference.chat import ChatTemplate
from megatron.inference.engine import GenerationEngine
from megatron.inference.engine_thread import EngineThread
from megatron.inference.runner import opened_runner
from megatron.inference.schedule import EngineLimits
from megatron.inference.server.config import ServerConfig
from megatron.training.launch import start_processes
from megatron.training.run import RunToolParser
from megatron.util.processes import is_main_process
from megatron.util.progress import say

if TYPE_CHECKING:
    from megatron.inference.server.service import Service

EXTRA = "serve"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
_CHANGES_NOTHING = {
    "out_seq_length": "requests say how many tokens they want",
    "inference_batch_times_seqlen_threshold": (
        "it says from which size a batch is cut for a pipeline, and here batches are made anew for "
        "every step"
    ),
}
_TWICE_SECONDS = 1.0
"""Ctrl-C reaches a process from its terminal and again from its launcher; what comes later than
this is another one."""
_LOOK_SECONDS = 0.2
_TELLING_SECONDS = 1.0
"""How long a failed server says so before it ends."""


def run_server(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Serves the checkpoint of a command line until a signal ends it. Raises ValueError or OSError
    if a flag, a file or a checkpoint cannot be used; the message names it."""
    config, settings = RunToolParser(ServerConfig, description).parse(argv)
    _require_packages()
    if "load" not in settings:
        raise ConfigError("--load is missing: the checkpoint to serve")
    processes = start_processes(settings, argv)
    stop = StopSignals()
    if is_main_process():
        _serve(config, settings, processes, stop)
    else:
        with opened_runner(settings, processes) as opened:
            stop.ignored = True
            opened.runner.follow()


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not installed: pip install 'megatron-deepspeed[{EXTRA}]', or "
            f"from a source tree pip install -e '.[{EXTRA}]'"
        )


class StopSignals:
    """SIGTERM and Ctrl-C: the first asks this process to end, a second one ends it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.ignored = False
        self._first = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.ignored or (self.event.is_set() and now - self._first < _TWICE_SECONDS):
            return
        if self.event.is_set():
            os._exit(128 + number)
        self._first = now
        self.event.set()
