"""Messages between the watchdogs of the ranks, through the rendezvous store.

Each rank writes a heartbeat about every second, and checks whether another rank has asked why the
run does not advance. Every rank answers such a question with a :class:`Report`. The rank that asked
collects the answers, and has the processes of silent ranks examined by ranks on the same machine.
It then publishes a verdict, on which all ranks act. All this runs in a separate thread, because a
store that does not answer blocks its caller indefinitely.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.features.agreement import agreement
from megatron.features.resilience.watch.processes import (
    GONE,
    Door,
    SilentMachines,
    is_gone,
    process_space,
    state_letter,
    state_of,
)
from megatron.features.resilience.watch.reports import Report, Silent
from megatron.features.resilience.watch.verdict import LOST, HangQuestion, HangVerdict, judge
from megatron.util.json_text import parse_json
from megatron.util.phases import activity

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds to wait for an answer, counted in pauses of the thread
_PAUSE = 0.2
_LINGERS = 10.0
"""Seconds for which the store stays open after a verdict, also counted in pauses."""
_STORE_PATIENCE = 8  # ticks without an answer after which the store counts as silent
_COUNTS = ("heard", "answers")
_CONNECTING = timedelta(minutes=10)
_EVERY = 1.0
_LOOKED_AT = 1.0  # seconds to wait for other ranks to examine processes on their machines
_NEIGHBOURS = 64  # maximum number of processes on its own machine that a waiting rank examines
_RANKS_PER_SECOND = 2000  # maximum number of heartbeats per second for the store


class RankExchange:
    """Thread that exchanges messages from :meth:`start` to :meth:`stop`. ``report`` returns this
    rank's answer to a question.

    Attributes:
        rounds: counter that grows as long as the store answers.
        answers: reports of all ranks, if this rank asked the last question.
    """

    def __init__(self, report: Callable[[], Report], rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.rounds = 0
        self.verdict: HangVerdict | None = None
        self.answers: dict[int, Report] = {}
        self.silent: list[Silent] = []
        self.owner: Silent | None = None  # rank that hosts the store; None if the launcher hosts it
        if not agreement.of_launcher():
            self.owner = Silent(0, "", 0, "", 0)
        self.error = ""  # reason why the store can no longer be used
        self._report = report
        self._host, self._space = socket.gethostname(), process_space()
        self._question: HangQuestion | None = None
        self._look = False
        self._far = False
        self._machines = SilentMachines()
        self._firsts: dict[str, int] = {}  # lowest rank on each other machine
        self._beats = 0
        self._asked = 0
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._heard = threading.Event()
        self._heard.set()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._neighbours: dict[int, int] = {}
        self._every = max(_EVERY, size / _RANKS_PER_SECOND)

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    @property
    def connected(self) -> bool:
        """True if the store has ever answered."""
        return self.rounds > 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the exchange. Must be called before the store closes."""
        self.wait_until_heard()
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def wait_until_heard(self) -> None:
        """If this process hosts the store, wait until the ranks have read the verdict."""
        self._heard.wait(2 * _LINGERS)

    def ask(self, question: HangQuestion) -> None:
        """Ask all ranks, unless a question from this rank is already pending."""
        if self._question is None:
            self._question = question
            self._woken.set()

    def take_verdict(self) -> HangVerdict | None:
        """Return the verdict and clear it. Return None if there is no new verdict."""
        verdict, self.verdict = self.verdict, None
        return verdict

    def look_at_neighbours(self) -> None:
        """Request a check for ended processes of other ranks on this machine."""
        self._look = True
        self._woken.set()

    def look_at_machines(self) -> None:
        """Request a check whether other machines still answer. Has an effect only on rank 0."""
        self._far = self.rank == 0

    def _run(self) -> None:
        self._door = Door(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        try:
            self._store = self._connect()
            while not self._stopping.is_set():
                self._round()
                self._woken.wait(_PAUSE if self._owner_unknown else self._every)
                self._woken.clear()
        except Exception as error:  # any error means that the store or its network has failed
            self.error = str(error).partition("\n")[0] or repr(error)
            logger.debug("the watchdog's store ended", exc_info=True)
        finally:
            self._door.close()

    def _connect(self) -> Any:
        """Return a separate connection, because a shared one blocks while another thread waits."""
        # Connect as soon as the rendezvous is complete: a rank may be suspended in its first steps,
        # and only its heartbeat identifies it.
        while not agreement.met(_PAUSE):
            if self._stopping.is_set():
                raise ConnectionError("the ranks have not met")
        return dist.PrefixStore("watchdog", agreement.connect(_CONNECTING))

    def _round(self) -> None:
        self._beat()
        if self._store.check([f"{self._asked}/question"]):
            self._answer(self._asked)
        elif self._question is not None:
            own = json.dumps([self.rank, self._question.reason, self._question.grace])
            first = self._store.compare_set(f"{self._asked}/question", "", own).decode()
            if first == own:
                self._lead(self._asked, self._question)
            else:
                self._answer(self._asked)
        elif self._look:
            self._look = False
            self._look_around()
        elif self._far:
            self._far = False
            self._look_far()
        self.rounds += 1

    def _beat(self) -> None:
        self._beats += 1
        self._door.clear()
        life = [self._host, self._space, os.getpid(), activity.phase, activity.iteration]
        life += [*self._door.address, self._beats]
        self._store.set(f"life/{self.rank}", json.dumps(life))
        if self._owner_unknown:
            self.owner = self._last_of(0)

    @property
    def _owner_unknown(self) -> bool:
        return self.owner is not None and not self.owner.pid

    def _last_of(self, rank: int) -> Silent:
        """Return the last heartbeat of a rank."""
        if not self._store.check([f"life/{rank}"]):
            return Silent(rank, "", 0, "", 0)
        host, space, pid, phase, iteration, *_ = self._said(f"life/{rank}")
        return Silent(rank, host, pid, phase, iteration, space=space)

    def _said(self, key: str) -> Any:
        """Return a message from the store. Raises ValueError if it is not valid JSON."""
        return parse_json(self._store.get(key), f"{key} in the watchdog's store", lenient=True)

    def _hand_in(self, number: int) -> None:
        place = self._store.add(f"{number}/answers", 1)
        content = json.dumps(self._report().to_json())
        self._store.set(f"{number}/answer/{place}", content)

    def _answer(self, number: int) -> None:
        """Answer a question, examine processes on this machine, and wait for the verdict."""
        self._hand_in(number)
        looked = False
        for _ in self._pauses(4 * PATIENCE):
            if self._store.check([f"{number}/verdict"]):
                answer = self._said(f"{number}/verdict")
                self._store.add(f"{number}/heard", 1)
                self._close(number, HangVerdict.of_json(answer))
                return
            if not looked and self._store.check([f"{number}/silent"]):
                looked = True
                for rank, space, pid in self._said(f"{number}/silent"):
                    if space == self._space and pid:
                        self._store.set(f"{number}/state/{rank}", state_of(pid))
        # The rank that asked has ended or was suspended. Any rank that still waits will ask again.
        self._close(number, HangVerdict((), "", ends=False, again=1))

    def _lead(self, number: int, question: HangQuestion) -> None:
        """Collect the answers to this rank's question, and publish the verdict."""
        self._hand_in(number)
        answers: dict[int, Report] = {}
        read = 0
        for _ in self._pauses(PATIENCE):
            read = self._read_answers(number, read, answers)
            if len(answers) == self.size or self._all_others_gone(answers):
                break
        silent = [self._last_of(rank) for rank in range(self.size) if rank not in answers]
        if silent:
            asked = [[one.rank, one.space, one.pid] for one in silent]
            self._store.set(f"{number}/silent", json.dumps(asked))
            silent = self._with_states(number, silent, answers)
            self._read_answers(number, read, answers)  # include late answers of slow ranks
            silent = [one for one in silent if one.rank not in answers]
        verdict = judge(answers, silent, question)
        self.answers, self.silent = answers, silent
        self._store.set(f"{number}/verdict", json.dumps(verdict.to_json()))
        self._store.add(f"{number}/heard", 1)
        self._close(number, verdict)

    def _read_answers(self, number: int, read: int, answers: dict[int, Report]) -> int:
        there = self._store.add(f"{number}/answers", 0)
        while read < there and self._store.check([f"{number}/answer/{read + 1}"]):
            read += 1
            report = Report.of_json(self._said(f"{number}/answer/{read}"))
            answers[report.rank] = report
        return read

    def _all_others_gone(self, answers: Mapping[int, Report]) -> bool:
        """Return whether all ranks without an answer ran on this machine and have ended."""
        missing = [rank for rank in range(self.size) if rank not in answers]
        if len(missing) > _NEIGHBOURS:
            return False
        last = [self._last_of(rank) for rank in missing]
        return all(one.space == self._space and state_of(one.pid) == GONE for one in last)

    def _with_states(
        self, number: int, silent: Sequence[Silent], answers: Mapping[int, Report]
    ) -> list[Silent]:
        spaces = {report.space for report in answers.values()}
        for one in silent:
            if one.space == self._space and one.pid:
                self._store.set(f"{number}/state/{one.rank}", state_of(one.pid))
        expected = [f"{number}/state/{one.rank}" for one in silent if one.space in spaces]
        for _ in self._pauses(_LOOKED_AT if expected else 0):
            if self._store.check(expected):
                break
        reports = []
        for one in silent:
            key = f"{number}/state/{one.rank}"
            known = self._store.get(key).decode() if self._store.check([key]) else ""
            reports.append(replace(one, state=known))
        return reports

    def _close(self, number: int, verdict: HangVerdict) -> None:
        self._asked, self._question = number + 1, None
        if not (verdict.ends and self.owner is not None and self.rank == 0):
            self.verdict = verdict
            return
        self._heard.clear()
        self.verdict = verdict
        try:
            for _ in self._pauses(_LINGERS):
                heard, answers = (self._store.add(f"{number}/{what}", 0) for what in _COUNTS)
                if heard >= answers:
                    break
        finally:
            self._heard.set()

    def _pauses(self, seconds: float) -> Iterator[None]:
        """Yield, pausing a fifth of a second after each. ``seconds`` is counted in pauses, because
        a process that was suspended has not waited."""
        for _ in range(max(1, round(seconds / _PAUSE))):
            yield
            self.rounds += 1
            time.sleep(_PAUSE)

    def _look_around(self) -> None:
        """Ask all ranks if the process of another rank on this machine has ended."""
        if not self._neighbours:
            self._neighbours = {
                one.rank: one.pid
                for one in map(self._last_of, self._likely_neighbours())
                if one.space == self._space
            }
        if any(state_letter(pid) in (None, "Z", "X") for pid in self._neighbours.values()):
            self.ask(HangQuestion(LOST))

    def _look_far(self) -> None:
        """Ask all ranks if another machine no longer answers."""
        if not self._firsts:
            spaces = {rank: self._last_of(rank).space for rank in reversed(range(self.size))}
            if not all(spaces.values()):
                return  # a rank has not written a heartbeat yet
            self._firsts = {there: rank for rank, there in spaces.items() if there != self._space}
        said = {}
        for there, rank in self._firsts.items():
            *_, address, port, beats = self._said(f"life/{rank}")
            said[there] = (beats, (address, port))
        if self._machines.look(said):
            self.ask(HangQuestion(LOST))

    def _likely_neighbours(self) -> list[int]:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or self.size
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0")) if local < self.size else 0
        neighbours = range(max(0, first), min(first + local, self.size))
        return [rank for rank in neighbours if rank != self.rank][:_NEIGHBOURS]


class StoreWatch:
    """Monitor that detects when the rendezvous store, or the machine that hosts it, stops
    answering."""

    def __init__(self, exchange: RankExchange) -> None:
        self._exchange = exchange
        self._silence, self._rounds = 0, 0
        self.machine_gone = False
        self._looking: threading.Thread | None = None

    @property
    def silent(self) -> bool:
        """True if the other ranks cannot be asked, because the store does not answer."""
        return bool(self._exchange.error) or self._silence >= _STORE_PATIENCE

    def count(self) -> None:
        """Count a tick."""
        rounds = self._exchange.rounds
        self._silence = self._silence + 1 if rounds == self._rounds else 0
        self._rounds = rounds

    def look(self) -> None:
        """If the store is silent, check in a separate thread whether its machine still answers."""
        busy = self._looking is not None and self._looking.is_alive()
        if self._silence >= _STORE_PATIENCE and not busy:
            self._looking = threading.Thread(target=self._look, daemon=True)
            self._looking.start()

    def _look(self) -> None:
        self.machine_gone = is_gone(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def judge_without(self, own: Report, question: HangQuestion) -> HangVerdict:
        """Judge by this rank's own report, and by the state of the process that hosts the store."""
        exchange = self._exchange
        alone = judge({own.rank: own}, [], question)
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
        if owner is not None and not here and self.machine_gone:
            what += f": machine or network of {owner.host} is gone"
        elif owner is not None and not here:
            what += f": it is stopped, or machine or network of {owner.host} is gone"
        if state == GONE or (exchange.error and not state):
            what = "has ended"
        return HangVerdict(ranks, f"{name}, which has the store of the ranks, {what}; {waits}")


def several_ranks() -> tuple[int, int]:
    """Return the rank of this process and the world size; (0, 1) without a launcher."""
    with contextlib.suppress(ValueError, KeyError):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1
