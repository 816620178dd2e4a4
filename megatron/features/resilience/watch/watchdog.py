"""Watches the main thread of a rank, and ends the run where it does not advance.

A thread counts ticks of a second. Time is what it counts, never the clock: a process that was
stopped and continued, or a machine that slept, is not late. Where the main thread has not advanced
(:data:`megatron.util.phases.activity`) for as many ticks as its phase may take, or a signal to end
is not obeyed, it asks the other ranks (:class:`RankExchange`). If their answers say who holds the
run up, it writes that and what every rank does, and ends the process, so that the launcher starts
the run again.
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
from types import TracebackType

from megatron.config import ConfigError, RunConfig
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.watch.exchange import (
    PATIENCE,
    RankExchange,
    several_ranks,
)
from megatron.features.resilience.watch.processes import (
    GONE,
    collectives_begun,
    device_is_busy,
    failed_to_meet,
    is_gone,
    state_of,
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
from megatron.util.errors import FaultError, monitor_thread, one_line
from megatron.util.phases import PHASES, Activity, activity, background, phase

START_SECONDS = 3600
"""Limit of the phase ``start`` of a rank that works, unless ``--hang-limits`` has another: indexes
are built, and models compiled."""
_TICK = 1.0
_LOOKS_AROUND = 3
"""Ticks of waiting after which a rank looks whether a process beside it has ended."""
_STORE_PATIENCE = 8
"""Ticks for which the store may be silent."""
_SHORTEST_GRACE, _LONGEST_GRACE = 10, 25
"""Ticks that a signal to end leaves to a step; schedulers kill after 30 s."""
_BESIDE = 5
"""Ticks for which a rank may still end by an error of its own when another has."""


class LostRankError(FaultError):
    """Another rank has ended or does not answer; the message names it, ``status`` is the exit
    status of this process."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def hang_limits(config: RunConfig) -> dict[str, int]:
    """Ticks that each phase may take; 0 for no limit. Raises ConfigError if ``--hang-limits`` names
    an unknown phase, or a value is not a number of seconds."""
    given = config.section(ResilienceConfig)
    seconds = given.hang_seconds
    if seconds is None:
        seconds = 0.9 * 60 * config.parallel.distributed_timeout_minutes
    limits = dict.fromkeys(PHASES, round(seconds))
    if limits["start"]:
        limits["start"] = max(START_SECONDS, limits["start"])
    for item in given.hang_limits:
        name, found, value = item.partition("=")
        if name not in PHASES or not found:
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
    """For how many ticks an activity has not advanced.

    Attributes:
        ticks: since it has.
        longest: of the recent waits after which it did.
    """

    def __init__(self, watched: Activity) -> None:
        self.watched, self.ticks, self.longest = watched, 0, 0
        self._moves = watched.moves

    def count(self) -> None:
        """A tick."""
        found = self.watched.moves
        if self.watched is activity:  # a library's collectives advance, too
            found += collectives_begun()
        if self.watched.phase == "save":  # which may wait for the one in the background
            found += sum(other.moves for other in list(background.values()))
        if found == self._moves:
            self.ticks += 1
            return
        self._moves = found
        self.longest = max(self.ticks, self.longest * 9 // 10)
        self.ticks = 0


class Watchdog:
    """The thread of one rank, within its context.

    Args:
        limits: ticks that each phase may take.
        save: folder for the report of a hang; None for none.
        end: ends the process with an exit status.
        tick: seconds between looks.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        save: str | None = None,
        end: Callable[[int], None] = os._exit,
        tick: float = _TICK,
    ) -> None:
        self._limits, self._save, self._end, self._tick = dict(limits), save, end, tick
        self._rank, size = several_ranks()
        together = size > 1 and "MASTER_PORT" in os.environ
        self._exchange = RankExchange(self._report, self._rank, size) if together else None
        self._main = Idleness(activity)
        self._beside: dict[int, Idleness] = {}
        """Of the threads in the background."""
        self._tries_again = 0
        """Ticks before which it does not ask again."""
        self._silence, self._rounds = 0, 0
        """Ticks in which the store has said nothing, and what it had said before."""
        self._looking: threading.Thread | None = None
        self._store_gone = False
        """Whether the machine with the store does not answer."""
        self._signal, self._since_signal = "", 0
        self._failure: Exception | None = None
        """By which the main thread ends."""
        self._explanation: HangVerdict | None = None
        self._explained = threading.Event()
        self._ending: tuple[HangVerdict, int] | None = None
        """What ends the run in so many ticks."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.part()
        self._stopping = True
        self._wake()
        self._thread.join(2 * PATIENCE)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        if not self._thread.is_alive():
            self._reader.close()
            self._writer.close()

    def part(self) -> None:
        """Leaves the other ranks, as before the store ends; this one is still watched."""
        if self._exchange is not None:
            self._exchange.stop()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Within it the other ranks hear of an error of the main thread. One that says that others
        do not answer becomes a :class:`LostRankError` that names them."""
        try:
            yield
        except Exception as error:
            verdict = self._explanation_of(error)
            if verdict is not None and failed_to_meet(error):
                line = f"{verdict.line}; {_newest()}"
                raise LostRankError(line, verdict.status) from error
            raise

    def _explanation_of(self, error: Exception) -> HangVerdict | None:
        if self._exchange is None or not self._exchange.connected:
            return None
        self._failure = error
        self._wake()
        self._explained.wait(4 * PATIENCE)
        return self._explanation

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
        self._tries_again = max(0, self._tries_again - 1) if self._main.ticks else 0
        if self._exchange is not None:
            self._silence = self._silence + 1 if self._exchange.rounds == self._rounds else 0
            self._rounds = self._exchange.rounds
        if self._ending is not None:
            self._ending = self._ending[0], self._ending[1] - 1
        self._watch_background()

    def _act(self) -> None:
        exchange = self._exchange
        verdict = exchange.take_verdict() if exchange is not None else None
        if self._failure is not None and self._ending is not None and self._explanation is None:
            # Another rank has said why it ends, before its connections broke.
            self._explained_by(self._ending[0])
        elif verdict is not None:
            self._obey(verdict)
        elif self._ending is not None and self._ending[1] <= 0:
            self._finish(self._ending[0])
        elif (question := self._question()) is not None:
            if exchange is None:
                self._obey(judge({self._rank: self._report()}, [], question))
            elif exchange.error or self._silence >= _STORE_PATIENCE:
                self._finish(self._without_store(exchange, question))
            else:
                exchange.ask(question)

    def _question(self) -> HangQuestion | None:
        """Why to ask the other ranks now, if there is a reason."""
        if self._failure is not None:
            return None if self._explanation is not None else HangQuestion(LOST)
        idle = self._main.ticks
        if not idle or self._tries_again:
            return None
        waits = where_it_waits() is not None
        if self._exchange is not None and idle >= _LOOKS_AROUND:
            waits = waits or device_is_busy()
        if waits and idle == _LOOKS_AROUND and self._exchange is not None:
            self._exchange.look_at_neighbours()
        if waits and idle >= _LOOKS_AROUND and self._exchange is not None:
            self._exchange.look_at_machines()
            if self._silence >= _STORE_PATIENCE:
                self._look_at_store()
        if self._store_gone:
            return HangQuestion(LOST)
        # Who waits for a rank that builds an index does not know that; the answers say so.
        limit = self._limits["step" if waits else activity.phase]
        if limit and idle >= limit:
            return HangQuestion(LIMIT)
        if self._signal and self._since_signal >= self._grace:
            return HangQuestion(SIGNAL, self._grace)
        return None

    def _look_at_store(self) -> None:
        """Learns, in a thread of its own, whether the machine with the store still answers."""
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._ask_for_store, daemon=True)
            self._looking.start()

    def _ask_for_store(self) -> None:
        self._store_gone = is_gone(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

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

    def _obey(self, verdict: HangVerdict) -> None:
        if not verdict.ends:
            self._tries_again = verdict.again
        elif verdict.by_error and self._failure is None:
            # Usually all ranks find the same error, and each ends by its own.
            self._ending = self._ending or (verdict, _BESIDE)
        else:
            self._finish(verdict)

    def _without_store(self, exchange: RankExchange, question: HangQuestion) -> HangVerdict:
        """What this rank makes of a store that does not answer, and so of the others."""
        own = self._report()
        alone = judge({self._rank: own}, [], question)
        if alone.ranks and not own.lost and not own.device:
            return alone
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        failed = f"{own.name} has lost its connections at iteration {own.iteration}"
        waits = failed if own.error else f"{own.name} waits in {own.place}: {own.site}"
        if not exchange.connected:
            line = f"the store at {address}, where the ranks meet, was never reached; {waits}"
            return HangVerdict((), line)
        owner = exchange.owner
        ranks = (0,) if owner is not None else ()
        name = owner.name if owner is not None else f"the launcher at {address}"
        here = owner is not None and owner.space == own.space
        state = state_of(owner.pid) if owner is not None and here else ""
        what = "does not answer" + (f": its process {state}" if state else "")
        if owner is not None and not here and self._store_gone:
            what += f": machine or network of {owner.host} is gone"
        elif owner is not None and not here:
            what += f": it is stopped, or machine or network of {owner.host} is gone"
        if state == GONE or (exchange.error and not state):
            what = "has ended"
        return HangVerdict(ranks, f"{name}, which has the store of the ranks, {what}; {waits}")

    def _finish(self, verdict: HangVerdict) -> None:
        """Says what is the matter, writes the report, and ends the process."""
        exchange = self._exchange
        answers = exchange.answers if exchange is not None else {}
        if self._failure is not None:
            self._explained_by(verdict)
            return
        if self._data_given_up(verdict):
            return
        who = f"rank {self._rank}: " if exchange is not None else ""
        note = f"{self._signal} cannot be obeyed: " if self._signal else ""
        line = f"{who}error: {note}{one_line(verdict.line)}; {_newest()}"
        # One rank has the answers of all; without a store each has its own.
        if answers or exchange is None or exchange.error or self._silence >= _STORE_PATIENCE:
            silent = exchange.silent if exchange is not None else []
            body = described(answers or {self._rank: self._report()}, silent)
        else:
            body = ""
        try:
            write_report(line, body, self._save)
            if exchange is not None and self._save is not None:
                write_collectives(self._save, self._rank)
            for helper in activity.helpers() if activity.helpers is not None else ():
                with contextlib.suppress(OSError):
                    os.kill(helper, signal.SIGKILL)  # one that is stopped would stay
            if exchange is not None:
                exchange.wait_until_heard()
        finally:  # whatever a report fails by, the launcher must start the run again
            self._end(verdict.status)
            self._stopping = True

    def _explained_by(self, verdict: HangVerdict) -> None:
        """Tells the main thread, which ends by an error, what is the matter."""
        self._explanation = verdict
        self._explained.set()

    def _data_given_up(self, verdict: HangVerdict) -> bool:
        """Whether the main thread shall save what it has instead: its data do not come, and no
        other rank waits."""
        giving_up = self._exchange is None and activity.phase == "data" and activity.helpers
        if not giving_up or activity.give_up:
            return False
        note = f"{self._signal}: " if self._signal else ""
        activity.give_up = f"{note}{verdict.line}"
        self._tries_again = _LONGEST_GRACE
        return True

    def _watch_background(self) -> None:
        """Says once that a save in the background does not advance; the training does."""
        for ident in set(self._beside) - set(background):
            del self._beside[ident]
        limit = self._limits["save"]
        for ident, found in list(background.items()):
            idle = self._beside.setdefault(ident, Idleness(found))
            idle.count()
            if not limit or idle.ticks != limit:
                continue
            report = report_of(found, self._rank, limit, limit, thread=ident)
            if not report.waits:
                file = f", waiting for {report.waited_for}" if report.waited_for else ""
                line = (
                    f"WARNING: {report.name}: the save in the background, {report.place}, has not "
                    f"advanced for {limit} s{file}; the training continues until the next save"
                )
                write_report(line, "", None)


def _newest() -> str:
    saved = activity.saved
    return f"the newest checkpoint is {saved}" if saved else "there is no checkpoint"


@contextlib.contextmanager
def watchdog_of(config: RunConfig) -> Iterator[Watchdog]:
    """The watchdog of a run that begins in this process, until the block ends. Raises what
    :func:`hang_limits` raises."""
    record_collectives(config.checkpoint.save)
    with phase("start"), Watchdog(hang_limits(config), config.checkpoint.save) as watchdog:
        activity.saved = activity.give_up = ""
        activity.iteration = 0
        yield watchdog
