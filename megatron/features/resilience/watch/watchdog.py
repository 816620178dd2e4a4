"""Watchdog of a rank, which ends the run if the main thread does not advance.

Time is measured in ticks that a thread counts, so that a process that was suspended is not late.
The watchdog asks the other ranks (:class:`RankExchange`) if the main thread has not advanced within
the limit of its phase, or does not obey a signal to end. If the answers show what blocks the run,
the watchdog reports it together with the activity of every rank, and ends the process. The launcher
then restarts the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto

from megatron.config import ConfigError, RunConfig
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.watch.exchange import (
    PATIENCE,
    RankExchange,
    StoreWatch,
    several_ranks,
)
from megatron.features.resilience.watch.processes import (
    collectives_begun,
    device_is_busy,
    failed_to_meet,
    monitor_thread,
    where_it_waits,
)
from megatron.features.resilience.watch.reports import (
    Report,
    described,
    record_collectives,
    report_of,
    write_collectives,
    write_report,
)
from megatron.features.resilience.watch.verdict import (
    LIMIT,
    LOST,
    SIGNAL,
    HangQuestion,
    HangVerdict,
    judge,
)
from megatron.util.errors import FaultError, one_line
from megatron.util.phases import PHASES, Activity, activity, background, phase

START_SECONDS = 3600
"""Minimum limit of the phase ``start``, in which indexes are built and models are compiled. An
entry in ``--hang-limits`` overrides it."""
# ticks of waiting before a rank checks whether a process on its machine has ended
_LOOKS_AROUND = 3
# ticks from a signal to the forced end; schedulers kill after 30 s
_SHORTEST_GRACE, _LONGEST_GRACE = 10, 25
_YIELD_TICKS = 5


class LostRankError(FaultError):
    """Another rank has ended or does not answer. ``status`` is the exit code of this process."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def hang_limits(config: RunConfig) -> dict[str, int]:
    """Return the number of ticks that each phase may take without progress; 0 for no limit. Raises
    ConfigError if ``--hang-limits`` is invalid."""
    given = config.section(ResilienceConfig)
    seconds = given.hang_seconds
    if seconds is None:
        seconds = 0.9 * 60 * config.parallel.distributed_timeout_minutes
    limits = dict.fromkeys(PHASES, round(seconds))
    if limits["start"]:
        limits["start"] = max(START_SECONDS, limits["start"])
    for item in given.hang_limits:
        name, equals, value = item.partition("=")
        if name not in PHASES or not equals:
            raise ConfigError(
                f"--hang-limits {item}: expected PHASE=SECONDS with one of {', '.join(PHASES)}"
            )
        try:
            limits[name] = math.ceil(float(value))
        except (ValueError, OverflowError):
            limits[name] = -1
        if limits[name] < 0:
            raise ConfigError(f"--hang-limits {item}: {value!r} is not a number of seconds")
    return limits


class Idleness:
    """Counter of the ticks since an activity last advanced.

    Attributes:
        ticks: ticks since the last progress.
        longest: longest recent interval without progress, decaying over time.
    """

    def __init__(self, watched: Activity) -> None:
        self.watched, self.ticks, self.longest = watched, 0, 0
        self._moves = watched.moves

    def count(self) -> None:
        """Count a tick, or reset the count if the activity has advanced."""
        moves = self.watched.moves
        if self.watched is activity:  # collectives started by a library also count as progress
            moves += collectives_begun()
        if self.watched.phase == "save":  # a save may wait for the previous one in the background
            moves += sum(other.moves for other in list(background.values()))
        if moves == self._moves:
            self.ticks += 1
            return
        self._moves = moves
        self.longest = max(self.ticks, self.longest * 9 // 10)
        self.ticks = 0


class WatchState(Enum):
    """State of a watchdog."""

    WATCHING = auto()
    YIELDING = auto()
    """Another rank has ended with an error. Usually all ranks encounter the same error, so this
    rank gets :data:`_YIELD_TICKS` ticks to end with its own."""
    FAILED = auto()
    """The main thread has failed, and waits to learn whether another rank caused the error."""
    OVER = auto()


class WatchEvent(Enum):
    ASK_LATER = auto()  # the ranks have answered, and nothing is wrong yet
    RANK_ERROR = auto()  # a rank has ended with its own error
    RUN_ENDS = auto()  # the ranks have identified what blocks the run
    TIME_UP = auto()
    FAILURE = auto()  # the main thread has raised an error


class Watchdog:
    """Watchdog of one rank, a thread that runs inside the ``with`` block. :data:`ACTIONS` lists its
    actions by state and event. ``limits`` are the ticks that each phase may take without progress,
    and ``tick`` is the length of a tick in seconds."""

    def __init__(
        self,
        limits: Mapping[str, int],
        save: str | None = None,
        end: Callable[[int], None] = os._exit,
        tick: float = 1.0,
    ) -> None:
        self._limits, self._save, self._end, self._tick = dict(limits), save, end, tick
        self._rank, size = several_ranks()
        together = size > 1 and "MASTER_PORT" in os.environ
        self._exchange = RankExchange(self._report, self._rank, size) if together else None
        self._store = None if self._exchange is None else StoreWatch(self._exchange)
        self._state = WatchState.WATCHING
        self._main = Idleness(activity)
        self._background: dict[int, Idleness] = {}
        self._ask_after = 0  # ticks until the next question is allowed
        self._signal, self._since_signal = "", 0
        self._failure: Exception | None = None  # error with which the main thread ends
        self._verdict: HangVerdict | None = None
        """Verdict about another rank's error while yielding, or about the cause of ``_failure``."""
        self._yield_ticks = 0
        self._explained = threading.Event()
        self._thread = monitor_thread(
            self._run, "watchdog", "hangs are no longer found by this rank"
        )
        self._stopping = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup: int | None = None

    def __enter__(self) -> Watchdog:
        # A wake-up file descriptor is needed because Python's own signal handlers do not run while
        # the main thread is inside a library.
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if self._exchange is not None:
            self._exchange.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._part()
        self._stopping = True
        self._wake()
        self._thread.join(2 * PATIENCE)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        if not self._thread.is_alive():
            self._reader.close()
            self._writer.close()

    def _part(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()

    @contextlib.contextmanager
    def among_ranks(self) -> Iterator[None]:
        """Tell the other ranks about an error of the main thread. An error caused by ranks that do
        not respond becomes a :class:`LostRankError` that names them. At the end of the block the
        exchange with other ranks stops, before the store closes, but this rank is still watched."""
        try:
            yield
        except Exception as error:
            verdict = self._explanation_of(error)
            if verdict is not None and failed_to_meet(error):
                line = f"{verdict.line}; {_newest()}"
                raise LostRankError(line, verdict.status) from error
            raise
        finally:
            self._part()

    def _explanation_of(self, error: Exception) -> HangVerdict | None:
        if self._exchange is None or not self._exchange.connected:
            return None
        self._failure = error
        self._wake()
        return self._verdict if self._explained.wait(4 * PATIENCE) else None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    # The methods below run in the watchdog's thread.

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], self._tick)
            if self._stopping:
                return
            if ready:
                self._hear(self._reader.recv(64))
            else:
                self._count()
            self._act()

    def _hear(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGTERM, signal.SIGUSR1) and not self._signal:
                self._signal, self._since_signal = signal.Signals(number).name, 0

    def _count(self) -> None:
        """Count a tick."""
        self._main.count()
        self._since_signal = self._since_signal + 1 if self._main.ticks else 0
        self._ask_after = max(0, self._ask_after - 1) if self._main.ticks else 0
        self._yield_ticks -= 1
        if self._store is not None:
            self._store.count()
        self._watch_background()

    def _act(self) -> None:
        """Handle the first pending event, or else ask the other ranks if there is a reason."""
        if self._failure is not None and self._state is WatchState.YIELDING:
            self._handle(WatchEvent.FAILURE, self._verdict)
            return
        if self._failure is not None:
            self._handle(WatchEvent.FAILURE, None)
        verdict = self._exchange.take_verdict() if self._exchange is not None else None
        if verdict is not None:
            self._handle(_event_of(verdict), verdict)
        elif self._state is WatchState.YIELDING and self._yield_ticks <= 0:
            self._handle(WatchEvent.TIME_UP, self._verdict)
        elif (question := self._question()) is not None:
            self._ask(question)

    def _handle(self, event: WatchEvent, verdict: HangVerdict | None) -> None:
        """Run the action listed for the current state and ``event``, if there is one."""
        if (action := ACTIONS.get((self._state, event))) is not None:
            action(self, verdict)

    def _ask(self, question: HangQuestion) -> None:
        """Ask the other ranks. A single rank, or one whose store is silent, judges alone."""
        if self._exchange is None or self._store is None:
            verdict = judge({self._rank: self._report()}, [], question)
        elif self._store.silent:
            verdict = self._store.judge_without(self._report(), question)
        else:
            self._exchange.ask(question)
            return
        self._handle(_event_of(verdict), verdict)

    def _question(self) -> HangQuestion | None:
        """Return the question to ask the other ranks, or None if there is no reason to ask."""
        if self._failure is not None:
            return HangQuestion(LOST) if self._state is WatchState.FAILED else None
        idle = self._main.ticks
        if not idle or self._ask_after:
            return None
        waits = where_it_waits() is not None
        if self._exchange is not None and self._store is not None and idle >= _LOOKS_AROUND:
            waits = waits or device_is_busy()
            if waits and idle == _LOOKS_AROUND:
                self._exchange.look_at_neighbours()
            if waits:
                self._exchange.look_at_machines()
                self._store.look()
        if self._store is not None and self._store.machine_gone:
            return HangQuestion(LOST)
        # A waiting rank does not know that another builds an index; the answers tell.
        limit = self._limits["step" if waits else activity.phase]
        if limit and idle >= limit:
            return HangQuestion(LIMIT)
        if self._signal and self._since_signal >= self._grace:
            return HangQuestion(SIGNAL, self._grace)
        return None

    @property
    def _grace(self) -> int:
        """Number of ticks without progress that are allowed after a signal."""
        longest = self._main.longest
        return max(min(_SHORTEST_GRACE + 2 * longest, _LONGEST_GRACE), longest * 3 // 2)

    def _report(self) -> Report:
        mine = {self._thread.ident}
        if self._exchange is not None:
            mine.add(self._exchange.ident)
        limit = self._limits[activity.phase]
        return report_of(activity, self._rank, self._main.ticks, limit, mine, self._failure)

    # Actions of the table ACTIONS.

    def _ask_later(self, verdict: HangVerdict) -> None:
        self._ask_after = verdict.again

    def _yield(self, verdict: HangVerdict) -> None:
        self._state, self._verdict, self._yield_ticks = WatchState.YIELDING, verdict, _YIELD_TICKS

    def _fail(self, _: HangVerdict | None) -> None:
        self._state = WatchState.FAILED

    def _explain(self, verdict: HangVerdict) -> None:
        """Pass the verdict to the main thread, which is about to end with an error."""
        self._state, self._verdict = WatchState.OVER, verdict
        self._explained.set()

    def _finish(self, verdict: HangVerdict) -> None:
        """Print the verdict, write the report, and end the process."""
        exchange, store = self._exchange, self._store
        if self._data_given_up(verdict):
            return
        answers = exchange.answers if exchange is not None else {}
        who = f"rank {self._rank}: " if exchange is not None else ""
        note = f"{self._signal} cannot be obeyed: " if self._signal else ""
        line = f"{who}error: {note}{one_line(verdict.line)}; {_newest()}"
        body = ""
        # The rank that asked has all answers. Without a store, each rank reports itself.
        if answers or store is None or store.silent:
            silent = exchange.silent if exchange is not None else []
            body = described(answers or {self._rank: self._report()}, silent)
        try:
            write_report(line, body, self._save)
            if exchange is not None and self._save is not None:
                write_collectives(self._save, self._rank)
            for helper in activity.helpers() if activity.helpers is not None else ():
                with contextlib.suppress(OSError):
                    os.kill(helper, signal.SIGKILL)  # a suspended process would not end by itself
            if exchange is not None:
                exchange.wait_until_heard()
        finally:  # the launcher must restart the run even if a report fails
            self._end(verdict.status)
            self._stopping, self._state = True, WatchState.OVER

    def _data_given_up(self, verdict: HangVerdict) -> bool:
        """In a run with only one rank that waits for data, ask the main thread to give up waiting
        and save. Return whether it was asked; this happens only once."""
        giving_up = self._exchange is None and activity.phase == "data" and activity.helpers
        if not giving_up or activity.give_up:
            return False
        note = f"{self._signal}: " if self._signal else ""
        activity.give_up = f"{note}{verdict.line}"
        self._ask_after = _LONGEST_GRACE
        return True

    def _watch_background(self) -> None:
        """Warn once if a background save does not advance. Training continues meanwhile."""
        for ident in set(self._background) - set(background):
            del self._background[ident]
        limit = self._limits["save"]
        for ident, seen in list(background.items()):
            idle = self._background.setdefault(ident, Idleness(seen))
            idle.count()
            if not limit or idle.ticks != limit:
                continue
            report = report_of(seen, self._rank, limit, limit, thread=ident)
            if not report.waits:
                file = f", waiting for {report.waited_for}" if report.waited_for else ""
                line = (
                    f"WARNING: {report.name}: the save in the background, {report.place}, has not "
                    f"advanced for {limit} s{file}; the training continues until the next save"
                )
                write_report(line, "", None)


ACTIONS: dict[tuple[WatchState, WatchEvent], Callable[..., None]] = {
    (WatchState.WATCHING, WatchEvent.ASK_LATER): Watchdog._ask_later,
    (WatchState.WATCHING, WatchEvent.RANK_ERROR): Watchdog._yield,
    (WatchState.WATCHING, WatchEvent.RUN_ENDS): Watchdog._finish,
    (WatchState.WATCHING, WatchEvent.FAILURE): Watchdog._fail,
    (WatchState.YIELDING, WatchEvent.ASK_LATER): Watchdog._ask_later,
    (WatchState.YIELDING, WatchEvent.RUN_ENDS): Watchdog._finish,
    (WatchState.YIELDING, WatchEvent.TIME_UP): Watchdog._finish,
    (WatchState.YIELDING, WatchEvent.FAILURE): Watchdog._explain,
    (WatchState.FAILED, WatchEvent.RANK_ERROR): Watchdog._explain,
    (WatchState.FAILED, WatchEvent.RUN_ENDS): Watchdog._explain,
}
"""Action for each state and event. Pairs that are not listed have no effect."""


def _event_of(verdict: HangVerdict) -> WatchEvent:
    if not verdict.ends:
        return WatchEvent.ASK_LATER
    return WatchEvent.RANK_ERROR if verdict.by_error else WatchEvent.RUN_ENDS


def _newest() -> str:
    saved = activity.saved
    return f"the newest checkpoint is {saved}" if saved else "there is no checkpoint"


@contextlib.contextmanager
def watchdog_of(config: RunConfig) -> Iterator[Watchdog]:
    """Run a watchdog in the block. Raises ConfigError if ``--hang-limits`` is invalid."""
    record_collectives(config.checkpoint.save)
    with phase("start"), Watchdog(hang_limits(config), config.checkpoint.save) as watchdog:
        activity.saved = activity.give_up = ""
        activity.iteration = 0
        yield watchdog
