"""Command-line program that serves a checkpoint over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.apps.generation.decoding.chat import ChatFormat
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.engine_thread import EngineThread
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.generation.server.config import ServerConfig
from megatron.checkpoint.source import tokenizer_in
from megatron.config import ConfigError, Settings
from megatron.run.run import RunToolParser, start_processes
from megatron.util.processes import is_main_process
from megatron.util.progress import say

if TYPE_CHECKING:
    from megatron.apps.generation.server.listening import HTTPThread
    from megatron.apps.generation.server.service import Service

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Ctrl-C arrives from the terminal and, within this time, again from the launcher.
_TWICE_SECONDS = 1.0
_POLL_SECONDS = 0.2
_NOTICE_SECONDS = 1.0  # time for clients to receive the error before a failed server exits


def run_server(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Serve the checkpoint that the command-line arguments select, until a signal ends the server.
    Raises ValueError or OSError, naming the cause, if a flag, a file or a checkpoint cannot be
    used."""
    config, settings = RunToolParser(ServerConfig, description).parse(argv)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"not installed: {', '.join(missing)}; run pip install -e '.[serve]' in the checkout"
        )
    if "load" not in settings:
        raise ConfigError("--load is missing: the checkpoint to serve")
    processes = start_processes(settings, argv)
    if is_main_process():
        _serve(config, settings, processes)
        return
    for number in _SIGNALS:  # until this rank follows the main rank, a signal ends it immediately
        signal.signal(number, signal.SIG_DFL)
    with opened_runner(settings, processes, config, config.adapter):
        pass


class StopSignals:
    """Handlers of SIGTERM and Ctrl-C. The first signal requests a clean shutdown. Another one after
    ``_TWICE_SECONDS``, or any signal before the server is ready, ends the process immediately."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.serving = False
        self._first = 0.0
        for number in _SIGNALS:
            signal.signal(number, self._received)

    def _received(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.serving and not self.event.is_set():
            self._first = now
            self.event.set()
        elif not self.serving or now - self._first > _TWICE_SECONDS:
            os._exit(128 + number)


def _serve(config: ServerConfig, settings: Settings, processes: int) -> None:
    from megatron.apps.generation.server.app import Access, build_app
    from megatron.apps.generation.server.config import RequestDefaults
    from megatron.apps.generation.server.listening import (
        ConnectionLimits,
        HTTPThread,
        listening_socket,
    )
    from megatron.apps.generation.server.service import ServedModel, Service

    template = config.template
    for note in config.notes:
        say(note)
    listening = listening_socket(config.host, config.port)
    service = Service(
        config.served_model_name or Path(settings["load"].value).resolve().name,
        config.limits,
        RequestDefaults(config.temperature, config.top_k, config.top_p),
        _log,
        config.log_prompts,
    )
    access = Access(config.key, config.host, config.allow_origin)
    http = HTTPThread(
        build_app(service, access),
        listening,
        ConnectionLimits(config.max_connections, config.read_timeout, config.write_timeout),
        _log,
    )
    stop = StopSignals()
    http.start()
    with opened_runner(settings, processes, config, config.adapter) as opened:
        assert opened is not None
        limits = EngineLimits(
            config.max_batch_size,
            config.max_num_batched_tokens,
            config.max_waiting,
            config.num_speculative_tokens,
        )
        thread = EngineThread(GenerationEngine(opened.runner, opened.tokenizer, limits))
        files = tokenizer_in(opened.folder) or opened.folder
        chat = ChatFormat.of(opened.tokenizer, files, template)
        thread.start()
        service.open(ServedModel(thread, opened.tokenizer, chat, opened.ends))
        stop.serving = True
        host, port, *_ = listening.getsockname()
        shown = f"[{host}]" if ":" in host else host
        _log(f"{service.name} is served at http://{shown}:{port}")
        while not stop.event.wait(_POLL_SECONDS):
            _check(service, thread, http)
        _drain(service, thread, http, config.drain_seconds)


def _drain(service: Service, thread: EngineThread, http: HTTPThread, seconds: float) -> None:
    """Refuse new requests, let admitted ones finish within ``seconds``, and close the server."""
    service.drain()
    _log(f"ending: {service.active} requests have {seconds:g} s; a second signal ends it now")
    _wait_until(lambda: not service.active or thread.failed is not None, seconds)
    ended = not service.active
    http.submit(lambda: thread.drain(0)).result()
    http.submit(service.end).result()
    if thread.failed is not None:
        _check(service, thread, http)
    _wait_until(lambda: not service.active, _NOTICE_SECONDS)
    http.close()
    _log("all requests have ended" if ended else "the requests that remained were cancelled")


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS / 10)


def _check(service: Service, thread: EngineThread, http: HTTPThread) -> None:
    """Exit with code 1, without waiting for other ranks, if the engine or HTTP server failed."""
    if thread.failed is None and http.alive:
        return
    failed = thread.failed
    reason = "the HTTP server has ended" if failed is None else f"{type(failed).__name__}: {failed}"
    service.fail(reason)
    if failed is not None:
        traceback.print_exception(failed)
    time.sleep(_NOTICE_SECONDS)
    print(f"error: generation has failed, and the server ends: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _log(line: str) -> None:
    # Keep answering requests even if the output pipe is closed.
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
