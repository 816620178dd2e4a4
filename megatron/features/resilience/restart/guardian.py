"""Guardian process of a rank, which restarts the rank's trainer (``--inprocess-restart``).

The process that the launcher has started imports everything, and forks the trainer. When a rank is
lost, all guardians end their trainers and fork again. A new trainer thus has no broken
communicators, device memory or DeepSpeed globals from before, and repeats no imports. A process
that forks must not have threads or a CUDA context, so a guardian does no computation itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn

from megatron.config import ConfigError
from megatron.features.resilience.restart.coordinator import Coordinator, Member, Rules
from megatron.features.resilience.restart.peers import (
    Message,
    Peer,
    RunGeneration,
    TrainerProgress,
    begin_generation,
    connect,
    hello,
    listen,
)
from megatron.features.resilience.watch.processes import address_towards, state_of
from megatron.util.errors import RESTART_STATUS, one_line
from megatron.util.processes import die_with_parent

logger = logging.getLogger(__name__)

LOOP_SECONDS = 0.1  # maximum sleep of the guardian's loop, and thus the maximum delay of a signal
MOST_STRANGERS = 64  # unidentified connections allowed in addition to one per rank
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
FROM_TERMINAL = 0x80  # si_code SI_KERNEL: the terminal signalled its whole process group


def guard(rules: Rules, flags: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """Make this process a guardian, which exits when the run ends. Return only in the trainers that
    it forks, with their world size. ``prepare`` imports the modules that a trainer needs. Raises
    ConfigError if the guardians cannot connect to each other."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("--inprocess-restart needs Linux")
    # Otherwise torch initialises CUDA to count the GPUs, which breaks CUDA in forked processes.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    prepare()
    with _interrupted_at_once():
        gc.collect()
        gc.freeze()  # the collector then writes to no memory pages, which stay shared
        guardian = Guardian(rules, flags)
    begin_generation(guardian.run())
    return int(os.environ["WORLD_SIZE"])


class Guardian:
    """Guardian of one rank. The guardian of rank 0 also runs the coordinator."""

    def __init__(self, rules: Rules, flags: Mapping[str, str]) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._started = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._reserved = _reserve()
        greeting = hello(self._rank, self._size, self._port, os.getpid(), flags)
        self._launcher, self._launched = os.getppid(), "LOCAL_RANK" in os.environ
        self._coordinator: Coordinator | None = None
        self._listener: socket.socket | None = None
        self._strangers: list[Peer] = []
        self._peer = self._meet(rules, greeting)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._peer.send(greeting)
        self._selector.register(self._peer, selectors.EVENT_READ, self._heard)
        self._child, self._progress, self._generation = 0, TrainerProgress.shared(), -1
        self._start: Message | None = None
        self._kill_at: float | None = None
        self._killed = self._late = False
        self._state = ""  # state of the trainer when it was killed, for the log
        self._told, self._stopped_at = (0, 0), 0.0

    # Connecting ---------------------------------------------------------------------------------

    def _meet(self, rules: Rules, greeting: Message) -> Peer:
        """Connect to the guardian of rank 0. Rank 0 also creates the coordinator. Until this
        returns, signals end the process."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port, store = int(os.environ.get("MASTER_PORT", "0")), None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            import torch.distributed as dist

            store = dist.TCPStore(
                address, port, is_master=False, timeout=timedelta(seconds=rules.patience)
            )
        key = f"guardians/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        if self._rank == 0:
            local = address in ("127.0.0.1", "localhost", "::1")
            try:
                own = port if store is None else 0
                self._listener = listen("127.0.0.1" if local else "", own)
            except OSError as error:
                raise ConfigError(
                    f"MASTER_PORT {port}: the guardians of --inprocess-restart cannot meet there: "
                    f"{error.strerror}; choose another port"
                ) from error
            port = self._listener.getsockname()[1]
            if store is not None:
                address = _own_address(address)
                store.set(key, f"{address} {port}")
            self._coordinator = Coordinator(greeting, address, rules)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        end = time.monotonic() + rules.patience
        while True:
            if store is not None and self._rank:
                # The store may still contain the address of an earlier start.
                entry = store.get(key).decode()
                address, _, text = entry.rpartition(" ")
                port = int(text)
            wait = 1.0 if store is not None else rules.patience
            try:
                peer = connect(address, port, wait)
                self._place = f"{address}:{port}"
                return peer
            except OSError as error:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"rank {self._rank} could not reach the guardian of rank 0 at "
                        f"{address}:{port} within {rules.patience / 60:g} minutes "
                        "(--distributed-timeout-minutes); see what rank 0 prints"
                    ) from error

    @property
    def _port(self) -> int:
        port: int = self._reserved.getsockname()[1]
        return port

    def _accept(self) -> None:
        assert self._listener is not None and self._coordinator is not None
        with contextlib.suppress(BlockingIOError):
            peer = Peer(self._listener.accept()[0])
            self._selector.register(peer, selectors.EVENT_READ, lambda: self._introduced(peer))
            self._strangers.append(peer)
        while len(self._strangers) > self._size + MOST_STRANGERS:
            self._dismiss(self._strangers[0], "too many connections say nothing")

    def _introduced(self, peer: Peer) -> None:
        """Pass a new guardian's first message, and any that arrived with it, to the coordinator."""
        assert self._coordinator is not None
        if peer not in self._strangers:
            return  # dismissed after the selector returned it
        try:
            messages = peer.receive()
            if not messages:
                return
            member = self._coordinator.joined(peer, messages[0])
        except OSError:
            self._dismiss(peer)
            return
        except (ValueError, KeyError) as error:
            self._dismiss(peer, str(error) if isinstance(error, ValueError) else f"no {error}")
            return
        if member is None:
            self._dismiss(peer)
            return
        self._strangers.remove(peer)
        self._selector.modify(peer, selectors.EVENT_READ, lambda: self._told_by(member))
        self._hear(member, lambda: messages[1:])

    def _dismiss(self, peer: Peer, why: str = "") -> None:
        """Close the connection of a process that is not a guardian of this run."""
        if why:
            logger.warning(
                f"a connection to the guardians' port {self._place} is refused: {one_line(why)}; "
                "the run continues"
            )
        self._strangers.remove(peer)
        self._selector.unregister(peer)
        peer.close()

    def _told_by(self, member: Member) -> None:
        self._hear(member, member.peer.receive)

    def _hear(self, member: Member, said: Callable[[], list[dict[str, Any]]]) -> None:
        assert self._coordinator is not None
        try:
            for message in said():
                self._coordinator.received(member, message)
        except (OSError, ValueError, KeyError) as error:
            how = "has ended" if isinstance(error, ConnectionError) else "does not answer"
            if isinstance(error, ValueError | KeyError):
                how = f"says what no guardian does ({one_line(error)})"
            if member.peer.fileno() >= 0:
                self._selector.unregister(member.peer)
            self._coordinator.left(member, how)

    # Event loop ---------------------------------------------------------------------------------

    def run(self) -> RunGeneration:
        """Guard the trainer until the run ends. Returns only in a forked trainer."""
        before = time.monotonic()
        while True:
            for key, _ in self._selector.select(LOOP_SECONDS):
                if key.fileobj is not None and callable(key.data):
                    key.data()
            self._signals()
            self._reap()
            self._report_progress()
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill()
            if self._coordinator is not None:
                # Time during which the process was suspended does not count as waiting.
                self._coordinator.tick(min(now - before, 5 * LOOP_SECONDS))
                self._forget_closed()
            before = now
            if not self._child and self._launched and os.getppid() != self._launcher:
                self._end(RESTART_STATUS)
            if self._start is not None and not self._child:
                started = self._fork(self._start)
                if started is not None:
                    return started

    def _forget_closed(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Peer) and key.fileobj.fileno() < 0:
                self._selector.unregister(key.fileobj)

    def _heard(self) -> None:
        """Handle messages from the coordinator. If the connection is lost, end this guardian."""
        try:
            messages = self._peer.receive()
        except (OSError, ValueError) as error:
            logger.error(
                f"error: rank {self._rank}: the guardian of rank 0 has ended ({error}); this one "
                "ends, too"
            )
            self._end(RESTART_STATUS)
        for message in messages:
            if message["kind"] == "start":
                self._start = message
            elif message["kind"] == "stop":
                self._stop(message["generation"], message["grace"])
            elif message["kind"] == "finish":
                if why := message.get("why"):
                    logger.error(
                        f"error: rank {self._rank}: {self._place} is in use by another run "
                        f"({why}); choose another MASTER_PORT, or correct this process if it "
                        "belongs to that run"
                    )
                self._end(message["status"])

    def _stop(self, number: int, grace: float) -> None:
        """End the trainer of generation ``number`` after ``grace`` seconds, or cancel its start."""
        if self._start is not None and self._start["generation"] == number:
            self._begin(self._start)
            self._stopped_at = time.monotonic()
            self._say("ended", status=-signal.SIGKILL, killed=True, port=self._port)
        elif number == self._generation:
            self._stopped_at = time.monotonic()
            self._kill_at = self._stopped_at + grace
            self._late = grace > 0

    def _say(self, kind: str, **facts: Any) -> None:
        progress = self._progress
        with contextlib.suppress(OSError):
            self._peer.send(
                {
                    "kind": kind,
                    "generation": self._generation,
                    "trainer": self._child,
                    "iteration": progress.iteration,
                    "saves": progress.saves,
                    "replica": progress.replica,
                    "micro_batch": progress.micro_batch,
                    "global_batch": progress.global_batch,
                    **facts,
                }
            )

    def _signals(self) -> None:
        while (signal_info := signal.sigtimedwait(STOP_SIGNALS, 0)) is not None:
            self._say("stopping", signal=signal_info.si_signo)
            if self._child and signal_info.si_code != FROM_TERMINAL:
                os.kill(self._child, signal_info.si_signo)

    def _report_progress(self) -> None:
        now = self._progress.saves, self._progress.replica
        if self._child and now != self._told:
            self._say("saved" if now[0] != self._told[0] else "learnt")
            self._told = now

    # The trainer --------------------------------------------------------------------------------

    def _begin(self, start: Message) -> None:
        """Reset the state for a new generation."""
        self._start, self._kill_at, self._killed, self._late = None, None, False, False
        self._generation, self._told = start["generation"], (0, 0)
        self._progress = TrainerProgress.shared()

    def _fork(self, start: Message) -> RunGeneration | None:
        """Fork a trainer. Return its generation in the trainer, and None in the guardian."""
        self._begin(start)
        guardian = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns about forking a process that has threads, such as OpenBLAS's.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            self._child = child
            with contextlib.suppress(OSError, AttributeError):
                # Wakes the loop as soon as the trainer ends. Without it, the loop polls.
                handle = os.pidfd_open(child)
                self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(handle))
            return None
        die_with_parent()
        if os.getppid() != guardian:
            os._exit(RESTART_STATUS)
        self._close()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.environ.update(
            RANK=str(start["rank"]),
            WORLD_SIZE=str(start["size"]),
            MASTER_ADDR=start["address"],
            MASTER_PORT=str(start["port"]),
            MEGATRON_GUARDIAN=str(guardian),
        )
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
            os.environ.pop(name, None)
        return RunGeneration(
            start["generation"],
            self._progress,
            self._started,
            start["failure"],
            self._stopped_at,
            start["iteration"],
            start["batch"],
        )

    def _ended(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)

    def _reap(self) -> None:
        if not self._child:
            return
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            return
        if not self._killed:
            self._stopped_at = time.monotonic()
        self._reserved.close()
        self._reserved = _reserve()
        self._say(
            "ended",
            status=os.waitstatus_to_exitcode(status),
            killed=self._killed or self._kill_at is not None,
            state=self._state if self._killed and self._late else "",
            port=self._port,
        )
        self._child, self._kill_at = 0, None

    def _kill(self) -> None:
        if self._child and not self._killed:
            self._killed, self._state = True, state_of(self._child)
            os.kill(self._child, signal.SIGKILL)

    def _close(self) -> None:
        """Close the guardian's sockets in the trainer, except the port reserved for torch."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Peer | socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _end(self, status: int) -> NoReturn:
        """Kill the trainer and exit this guardian with ``status``."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process immediately inside the block. Python's own handler does not run
    inside torch's store, and the garbage collector drops exceptions that a handler raises."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reserve() -> socket.socket:
    """Return a socket bound to a free port. It does not listen, so the trainer can listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def _own_address(other: str) -> str:
    """Return the address at which hosts in the network of ``other`` reach this host."""
    with contextlib.suppress(OSError):
        own = address_towards(other)[1]
        return other if own.startswith("127.") or own == "::1" else own
    return other
