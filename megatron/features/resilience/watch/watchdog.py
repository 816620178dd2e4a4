"""Watches the main thread of a rank, and ends the run where it does not advance.

Time is ticks that a thread counts, so that a process that was stopped is not late. Where the main
thread has not advanced for as many ticks as its phase may take, or does not obey a signal to end,
it asks the other ranks (:class:`RankExchange`). If their answers say who holds the run up, it
writes that and what every rank does, and ends the process; the launcher starts the run again.
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
"""Least limit of the phase ``start``, in which indexes are built, and models compiled, unless
``--hang-limits`` has another."""
_LOOKS_AROUND = 3  # ticks of waiting until a rank looks whether a process of its machine has ended
_SHORTEST_GRACE, _LONGEST_GRACE = 10, 25  # ticks from a signal to the end; schedulers kill at 30 s
_YIELD_TICKS = 5


class LostRankError(FaultError):
    """Another rank has ended or does not answer; ``status`` is the exit status of this process."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def hang_limits(config: RunConfig) -> dict[str, int]:
    """Ticks that each phase may take; 0 for no limit. Raises ConfigError for wrong
    ``--hang-limits``."""
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
    """Number of ticks since an activity advanced.

    Attributes:
        ticks: since it has.
        longest: of the recent waits after which it did.
    """

    def __init__(self, watched: Activity) -> None:
        self.watched, self.ticks, self.longest = watched, 0, 0
        self._moves = watched.moves

    def count(self) -> None:
        """A tick."""
        moves = self.watched.moves
        if self.watched is activity:  # a library's collectives advance, too
            moves += collectives_begun()
        if self.watched.phase == "save":  # which may wait for the one in the background
            moves += sum(other.moves for other in list(background.values()))
        if moves == self._moves:
            self.ticks += 1
            return
        self._moves = moves
        self.longest = max(self.ticks, self.longest * 9 // 10)
        self.ticks = 0


class WatchState(Enum):
    """States of a watchdog."""

    WATCHING = auto()
    YIELDING = auto()
    """Another rank has ended by an error; usually all ranks find the same one, and each ends by its
    own within :data:`_YIELD_TICKS`."""
    FAILED = auto()
    """The main thread ends by an error, and waits to learn whether another rank is the cause."""
    OVER = auto()


class WatchEvent(Enum):
    ASK_LATER = auto()  # the ranks have answered, and nothing is wrong yet
    RANK_ERROR = auto()  # a rank has ended with its own error
    RUN_ENDS = auto()  # the ranks have found what blocks the run
    TIME_UP = auto()
    FAILURE = auto()  # the main thread raises an error


class Watchdog:
    """The thread of one rank, within its context: :data:`ACTIONS` lists what it does, by state and
    event. ``limits`` are the ticks that each phase may take, ``tick`` their seconds."""

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
        self._ask_after = 0  # ticks before which it does not ask again
        self._signal, self._since_signal = "", 0
        self._failure: Exception | None = None  # by which the main thread ends
        self._verdict: HangVerdict | None = None
        """Verdict of a rank's error, while yielding, and the one that explains a failure."""
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
        # Python's own handlers do not run while the main thread is inside a library.
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
        """Tells the other ranks of an error of the main thread. One that says that others do not
        answer becomes a :class:`LostRankError` that names them. Leaves the other ranks at the end,
        as before the store ends; this one is still watched."""
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

    # What follows runs in the thread.

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
        """A tick."""
        self._main.count()
        self._since_signal = self._since_signal + 1 if self._main.ticks else 0
        self._ask_after = max(0, self._ask_after - 1) if self._main.ticks else 0
        self._yield_ticks -= 1
        if self._store is not None:
            self._store.count()
        self._watch_background()

    def _act(self) -> None:
        """One turn: the first event that there is, or else a question to the other ranks."""
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
        """Do what the table says; an event that it does not list in this state changes nothing."""
        if (action := ACTIONS.get((self._state, event))) is not None:
            action(self, verdict)

    def _ask(self, question: HangQuestion) -> None:
        """Ask the other ranks, or judge alone where the run has one rank or its store is silent."""
        if self._exchange is None or self._store is None:
            verdict = judge({self._rank: self._report()}, [], question)
        elif self._store.silent:
            verdict = self._store.judge_without(self._report(), question)
        else:
            self._exchange.ask(question)
            return
        self._handle(_event_of(verdict), verdict)

    def _question(self) -> HangQuestion | None:
        """Return a question to the other ranks, if there is a reason."""
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
        # Who waits for a rank that builds an index does not know that; the answers say so.
        limit = self._limits["step" if waits else activity.phase]
        if limit and idle >= limit:
            return HangQuestion(LIMIT)
        if self._signal and self._since_signal >= self._grace:
            return HangQuestion(SIGNAL, self._grace)
        return None

    @property
    def _grace(self) -> int:
        """Ticks after a signal for which nothing may advance."""
        longest = self._main.longest
        return max(min(_SHORTEST_GRACE + 2 * longest, _LONGEST_GRACE), longest * 3 // 2)

    def _report(self) -> Report:
        mine = {self._thread.ident}
        if self._exchange is not None:
            mine.add(self._exchange.ident)
        limit = self._limits[activity.phase]
        return report_of(activity, self._rank, self._main.ticks, limit, mine, self._failure)

    # Actions of the table.

    def _ask_later(self, verdict: HangVerdict) -> None:
        self._ask_after = verdict.again

    def _yield(self, verdict: HangVerdict) -> None:
        self._state, self._verdict, self._yield_ticks = WatchState.YIELDING, verdict, _YIELD_TICKS

    def _fail(self, _: HangVerdict | None) -> None:
        self._state = WatchState.FAILED

    def _explain(self, verdict: HangVerdict) -> None:
        """Report the problem to the main thread, which ends with an error."""
        self._state, self._verdict = WatchState.OVER, verdict
        self._explained.set()

    def _finish(self, verdict: HangVerdict) -> None:
        """Print the problem, write the report, and end the process."""
        exchange, store = self._exchange, self._store
        if self._data_given_up(verdict):
            return
        answers = exchange.answers if exchange is not None else {}
        who = f"rank {self._rank}: " if exchange is not None else ""
        note = f"{self._signal} cannot be obeyed: " if self._signal else ""
        line = f"{who}error: {note}{one_line(verdict.line)}; {_newest()}"
        body = ""
        # One rank has the answers of all; without a store each only has its own.
        if answers or store is None or store.silent:
            silent = exchange.silent if exchange is not None else []
            body = described(answers or {self._rank: self._report()}, silent)
        try:
            write_report(line, body, self._save)
            if exchange is not None and self._save is not None:
                write_collectives(self._save, self._rank)
            for helper in activity.helpers() if activity.helpers is not None else ():
                with contextlib.suppress(OSError):
                    os.kill(helper, signal.SIGKILL)  # one that is stopped would stay
            if exchange is not None:
                exchange.wait_until_heard()
        finally:  # even if a report fails, the launcher must restart the run
            self._end(verdict.status)
            self._stopping, self._state = True, WatchState.OVER

    def _data_given_up(self, verdict: HangVerdict) -> bool:
        """True if the main thread is to save instead: its data do not come, and no rank waits."""
        giving_up = self._exchange is None and activity.phase == "data" and activity.helpers
        if not giving_up or activity.give_up:
            return False
        note = f"{self._signal}: " if self._signal else ""
        activity.give_up = f"{note}{verdict.line}"
        self._ask_after = _LONGEST_GRACE
        return True

    def _watch_background(self) -> None:
        """Says once that a save in the background does not advance; the training does."""
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
"""Actions at an event; nothing where a pair is not listed."""


def _event_of(verdict: HangVerdict) -> WatchEvent:
    if not verdict.ends:
        return WatchEvent.ASK_LATER
    return WatchEvent.RANK_ERROR if verdict.by_error else WatchEvent.RUN_ENDS


def _newest() -> str:
    saved = activity.saved
    return f"the newest checkpoint is {saved}" if saved else "there is no checkpoint"


@contextlib.contextmanager
def watchdog_of(config: RunConfig) -> Iterator[Watchdog]:
    """The watchdog of a run, until the block ends. Raises what :func:`hang_limits` raises."""
    record_collectives(config.checkpoint.save)
    with phase("start"), Watchdog(hang_limits(config), config.checkpoint.save) as watchdog:
        activity.saved = activity.give_up = ""
        activity.iteration = 0
        yield watchdog
