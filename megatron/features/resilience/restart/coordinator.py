"""Coordinator of in-process restarts: decides when the trainers of a run start, what made them
fail, and how many restart.

It runs in the guardian of rank 0 and never blocks. Its clock advances with the guardian's loop, so
it stops while the whole job is suspended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from megatron.features.resilience.restart.peers import (
    UNANSWERED_MILLISECONDS,
    Message,
    Peer,
    differences,
)
from megatron.util.errors import RESTART_STATUS, one_line
from megatron.util.processes import death

logger = logging.getLogger(__name__)

USER_MISTAKE = 2  # exit code for invalid flags or input: a restart would not help
GONE = -1  # status of a trainer whose guardian is lost as well
# delay before failures are judged: the first one reported may not be the first that happened
JUDGING_SECONDS = 0.3
REPORT_SECONDS = 5.0  # time for other ranks to write their reports after one has found a hang
STOP_SECONDS = 30.0  # time limit for a guardian to end its trainer, after which it counts as lost
# time within which the death of a guardian's predecessor is detected
REPLACE_SECONDS = 2 * UNANSWERED_MILLISECONDS / 1000
# number of consecutive identical failures at the same step before giving up
MOST_ALIKE = {"error": 3, "signal": 10}
MOST_WITHOUT_SAVE = 30  # consecutive failures without a new checkpoint before giving up


@dataclass(frozen=True)
class Rules:
    """Restart limits set by flags.

    Attributes:
        restarts: maximum number of restarts; None for no limit.
        least: minimum number of ranks to continue with; None if all ranks are required.
        patience: seconds to wait at the start until all guardians have connected."""

    restarts: int | None = None
    least: int | None = None
    patience: float = 600.0


@dataclass(eq=False)
class Member:
    """Guardian and its trainer.

    Attributes:
        rank: rank given by the launcher; the trainer may have a smaller one.
        port: free port on the guardian's host, where the trainers can rendezvous.
        barred: True if its trainers failed repeatedly, so that it gets no more of them.
        until: time at which this guardian is refused if the previous guardian of its rank is still
            alive.
    """

    peer: Peer
    rank: int
    host: str
    process: int
    port: int
    running: bool = False
    barred: bool = False
    trainer: int = 0
    until: float = 0.0

    @property
    def name(self) -> str:
        """Description for messages."""
        return f"rank {self.rank} ({self.host}, process {self.trainer or self.process})"


@dataclass
class _Layout:
    """Parallel layout reported by the trainers; all zero until they report.

    Attributes:
        replica: number of ranks in a model replica.
        micro_batch: micro batch size.
        global_batch: global batch size."""

    replica: int = 0
    micro_batch: int = 0
    global_batch: int = 0

    def allows(self, size: int) -> bool:
        if not self.replica:
            return True
        data, rest = divmod(size, self.replica)
        return rest == 0 and data > 0 and self.global_batch % (data * self.micro_batch) == 0


@dataclass
class _Failures:
    """Record of the latest failures, used to judge whether restarts help."""

    key: tuple[int, int] | None = None
    alike: int = 0
    without_save: int = 0
    culprits: set[int] = field(default_factory=set)

    def add(self, status: int, iteration: int, rank: int, saved: bool) -> str | None:
        """Record a failure. ``saved`` is True if a checkpoint was saved since the previous failure.
        Return the reason why another restart is unlikely to help, or None."""
        if (status, iteration) != self.key or saved:
            self.key, self.alike, self.culprits = (status, iteration), 0, set()
        self.alike += 1
        self.culprits.add(rank)
        self.without_save = 0 if saved else self.without_save + 1
        if self.alike >= MOST_ALIKE["signal" if status < 0 else "error"]:
            return f"it has failed {self.alike} times at iteration {iteration}"
        if self.without_save >= MOST_WITHOUT_SAVE:
            return f"nothing was saved between the last {self.without_save} failures"
        return None


class RunState(str, Enum):
    """State of a run, as seen by the coordinator."""

    GATHERING = "gathering"  # guardians are still connecting
    RUNNING = "running"  # trainers are training
    STOPPING = "stopping"  # guardians are ending their trainers before a restart
    OVER = "over"


class RunEvent(Enum):
    """A message from a guardian, the loss of its connection, or the passing of time."""

    JOINED = auto()
    SIGNAL = auto()  # a stop was requested
    ENDED = auto()  # a trainer has exited, other than by its guardian's kill
    SAVED = auto()
    LOST = auto()  # a guardian with a running trainer is lost
    TICK = auto()


class Coordinator:
    """State machine of a run, with its transitions in :data:`ACTIONS`. ``own`` is the :func:`hello`
    of rank 0, and ``address`` the address at which other hosts reach rank 0's guardian."""

    def __init__(self, own: Message, address: str, rules: Rules) -> None:
        self.size: int = own["size"]
        self.address, self.rules = address, rules
        self.members: list[Member] = []
        self._own = own
        # guardians of a rank whose previous guardian may still be alive
        self._waiting: list[Member] = []
        self.state = RunState.GATHERING
        self.generation = -1
        self.stopped_by: int | None = None
        self._seconds = self._deadline = 0.0
        self._most = self.size
        self._layout, self._failures = _Layout(), _Failures()
        self._reports: list[tuple[Member, int, str]] = []
        self._iteration, self._saved, self._active = 0, False, 0

    def _handle(self, event: RunEvent, *facts: Any) -> None:
        """Run the action listed for the current state and ``event``, if there is one."""
        if (action := ACTIONS.get((self.state, event))) is not None:
            action(self, *facts)

    # Messages from guardians --------------------------------------------------------------------

    def joined(self, peer: Peer, hello: Message) -> Member | None:
        """Handle the ``hello`` of a new guardian. Return the guardian as a member, or None if it
        cannot take part. Raises KeyError or ValueError if the message is malformed."""
        host = one_line(hello["host"])[:256]
        member = Member(peer, hello["rank"], host, hello["process"], hello["port"])
        size, begun = hello["size"], self.generation >= 0
        if not 0 <= member.rank < size:
            raise ValueError(f"rank {member.rank} of {size}")
        holder = self._holder(member.rank)
        if other := differences(self._own, hello):
            self._refuse(member, f"started with another {one_line(', '.join(other[:4]))[:300]}")
        elif size != self.size and begun:
            self._refuse(member, f"WORLD_SIZE is {self.size} there and {size} here")
        elif size != self.size:
            mistake = (
                f"WORLD_SIZE is {size} on rank {member.rank} and {self.size} on rank 0; "
                "start all processes with the same number"
            )
            self._finish(USER_MISTAKE, mistake, [*self.members, member])
        elif holder and not begun:
            mistake = f"two processes have RANK={member.rank}; give each its own"
            self._finish(USER_MISTAKE, mistake, [*self.members, member])
        elif holder:
            member.until = self._seconds + REPLACE_SECONDS
            self._waiting.append(member)
            return member
        else:
            self._admit(member)
            return member
        return None

    def received(self, member: Member, message: Message) -> None:
        """Handle a message from a guardian. Messages of earlier generations are ignored, except for
        requests to stop."""
        kind = message["kind"]
        if member in self._waiting:
            if kind == "stopping":
                self._send(member, {"kind": "finish", "status": 128 + message["signal"]})
            return
        if kind == "stopping":
            self.stopped_by = self.stopped_by or message["signal"]
            self._handle(RunEvent.SIGNAL, message["signal"])
        if message.get("generation") != self.generation:
            return
        member.trainer = message.get("trainer", member.trainer)
        self._learn(message)
        if kind == "saved":
            self._handle(RunEvent.SAVED)
        elif kind == "ended":
            member.running, member.port = False, message["port"]
            if not message.get("killed"):
                self._handle(RunEvent.ENDED, member, message["status"])
            elif state := message.get("state"):
                # A suspended trainer has blocked the others; one that still ran was only slow to
                # end.
                tell = logger.warning if "stopped" in state else logger.info
                tell(f"{member.name} {state}; it was killed, since it had not ended in time")

    def left(self, member: Member, how: str) -> None:
        """Handle the end of a guardian's connection. ``how`` describes it for the log."""
        member.peer.close()
        if member in self._waiting:
            self._waiting.remove(member)
        if member in self.members:
            self.members.remove(member)
            if member.running:
                self._handle(RunEvent.LOST, member, GONE, f"{member.name}: its guardian {how}")
            member.running = False

    def tick(self, seconds: float) -> None:
        """Advance the clock by ``seconds`` and handle what is due."""
        self._seconds += seconds
        self._replace()
        self._handle(RunEvent.TICK)

    # Membership ---------------------------------------------------------------------------------

    def _holder(self, rank: int) -> Member | None:
        """Return the connected guardian of a rank, or None."""
        return next((member for member in self.members if member.rank == rank), None)

    def _admit(self, member: Member) -> None:
        self.members.append(member)
        self._handle(RunEvent.JOINED, member)

    def _refuse(self, member: Member, why: str) -> None:
        """End a process that does not belong to this run. The run is not affected."""
        logger.warning(f"{member.name} wanted to join this run, and is refused: {why}")
        self._send(member, {"kind": "finish", "status": USER_MISTAKE, "why": why})

    def _replace(self) -> None:
        """Admit restarted guardians whose predecessors are gone, and refuse overdue ones."""
        for member in list(self._waiting):
            holder = self._holder(member.rank)
            if holder is None:
                self._waiting.remove(member)
                self._admit(member)
            elif self._seconds >= member.until:
                self._refuse(member, f"its {holder.name} is alive")
                self.left(member, "is refused")

    def _learn(self, message: Message) -> None:
        self._iteration = max(self._iteration, message.get("iteration", 0))
        self._saved = self._saved or bool(message.get("saves"))
        if message.get("replica"):
            known = self._layout.global_batch
            self._layout = _Layout(
                message["replica"], message["micro_batch"], known or message["global_batch"]
            )

    # Actions of the table -----------------------------------------------------------------------

    def _gather(self) -> None:
        if len(self.members) == self.size:
            self._start(self.size, None)
        elif self._seconds > self.rules.patience:
            came = {member.rank for member in self.members}
            missing = [rank for rank in range(self.size) if rank not in came]
            self._finish(
                RESTART_STATUS,
                f"waited {self.rules.patience / 60:g} minutes (--distributed-timeout-minutes) "
                f"for ranks {', '.join(map(str, missing[:8]))} to start; see what they print",
            )

    def _stop_by_signal(self, number: int) -> None:
        self._finish(128 + number)

    def _announce_return(self, member: Member) -> None:
        logger.warning(
            f"{member.name} is back and waits for the next checkpoint, after which all ranks "
            "start again with it"
        )

    def _grow(self) -> None:
        """After a save, restart with more ranks if lost ranks have come back."""
        self._saved = True
        more = self._usable()
        if more is not None and more > self._active:
            self._stop(f"{more} ranks are there again, after {self._active}")

    def _note_end(self, member: Member, status: int) -> None:
        if status:
            hung = "has found that the run hangs or a rank is lost (exit status 3)"
            how = hung if status == RESTART_STATUS else death(status)
            self._report(member, status, f"{member.name} {how}")
        elif not self._reports and not any(other.running for other in self.members):
            self._finish(0)

    def _report(self, member: Member, status: int, what: str) -> None:
        """Record a failure. It is judged after other ranks have had time to report theirs."""
        if status < 0:
            self._deadline = self._seconds
        elif not self._reports:
            self._deadline = self._seconds + JUDGING_SECONDS
        self._reports.append((member, status, what))

    def _judge(self) -> None:
        """Find the failure that caused the others, and stop, restart or end the run."""
        if not self._reports or self._seconds < self._deadline:
            return
        member, status, what = min(self._reports, key=lambda report: _consequence(report[1]))
        self._reports.clear()
        if self.stopped_by is not None:
            self._finish(128 + self.stopped_by)
        elif status == USER_MISTAKE and self._may_be_too_many():
            self._most = self._active - 1
            self._stop(f"{self._active} ranks cannot train this model; fewer are tried")
        elif status == USER_MISTAKE:
            self._finish(USER_MISTAKE)
        elif hopeless := self._hopeless(member, status):
            self._finish(RESTART_STATUS, f"{what}; the run ends, since {hopeless}")
        else:
            self._stop(what, REPORT_SECONDS if status == RESTART_STATUS else 0.0)

    def _may_be_too_many(self) -> bool:
        return self._active > (self.rules.least or self._active) and not self._iteration

    def _hopeless(self, member: Member, status: int) -> str | None:
        """Return the reason why a restart would not help, or None. If only one rank keeps failing
        and the run can continue without it, the rank is barred instead."""
        why = self._failures.add(status, self._iteration, member.rank, self._saved)
        if why and self._failures.culprits == {member.rank} and self.rules.least:
            member.barred = True
            logger.warning(f"{member.name} gets no more work: {why}")
            self._failures = _Failures()
            return None
        return why

    def _start_again(self) -> None:
        """Restart once every trainer has ended. Guardians past the deadline count as lost."""
        late = [member for member in self.members if member.running]
        if late and self._seconds < self._deadline:
            return
        for member in late:
            logger.warning(f"{member.name}: its guardian has not ended it in time")
            self.left(member, "does not answer")
        restarts, size = self.rules.restarts, self._usable()
        if self.stopped_by is not None:
            self._finish(128 + self.stopped_by)
        elif restarts is not None and self.generation >= restarts:
            self._finish(
                RESTART_STATUS,
                f"{self._why}; the run ends after --inprocess-max-iterations {restarts}",
            )
        elif size is None:
            self._finish(RESTART_STATUS, f"{self._why}; {self._shortage()}")
        else:
            self._start(size, self._why)

    # Starting and ending ------------------------------------------------------------------------

    def _usable(self) -> int | None:
        """Return the largest usable world size, or None if too few ranks are available."""
        there = min(sum(not member.barred for member in self.members), self._most)
        if self.rules.least is None:
            return self.size if there == self.size else None
        sizes = range(there, self.rules.least - 1, -1)
        return next((size for size in sizes if self._layout.allows(size)), None)

    def _shortage(self) -> str:
        there, least = sum(not member.barred for member in self.members), self.rules.least
        if least is None:
            return (
                f"of {self.size} ranks {there} are left; --inprocess-min-world-size continues "
                "with fewer"
            )
        return (
            f"the {there} ranks that are left are not enough for a size of at least {least} "
            "(--inprocess-min-world-size) that the layout and "
            f"--global-batch-size {self._layout.global_batch} allow"
        )

    def _start(self, size: int, why: str | None) -> None:
        self.generation += 1
        chosen = choose(self.members, size)
        shared = {
            "generation": self.generation,
            "size": size,
            "address": self._address_of(chosen[0]),
            "port": chosen[0].port,
            "failure": why,
            "iteration": self._iteration,
            "batch": self._layout.global_batch,
        }
        if why is not None:
            fewer = "" if size == self.size else f" with {size} of {self.size} ranks"
            logger.warning(f"{why}; all ranks start again{fewer} (restart {self.generation})")
        self.state, self._active, self._saved = RunState.RUNNING, size, False
        self._iteration = 0
        for rank, member in enumerate(chosen):
            member.running = True
            self._send(member, {"kind": "start", "rank": rank, **shared})

    def _stop(self, why: str, grace: float = 0.0) -> None:
        self.state, self._why = RunState.STOPPING, why
        self._deadline = self._seconds + grace + STOP_SECONDS
        for member in [member for member in self.members if member.running]:
            self._send(member, {"kind": "stop", "generation": self.generation, "grace": grace})

    def _finish(
        self, status: int, why: str | None = None, members: Sequence[Member] | None = None
    ) -> None:
        self.state = RunState.OVER
        if why is not None:
            logger.error(f"error: {why}")
        for member in members or [*self.members, *self._waiting]:
            self._send(member, {"kind": "finish", "status": status})

    def _address_of(self, member: Member) -> str:
        """Return the address at which other trainers reach a guardian's trainer."""
        address = member.peer.address.removeprefix("::ffff:")
        if address == "::1" or address.startswith("127."):
            return self.address  # the host of this coordinator
        return address

    def _send(self, member: Member, message: dict[str, Any]) -> None:
        try:
            member.peer.send(message)
        except OSError:
            self.left(member, "does not answer")


ACTIONS: dict[tuple[RunState, RunEvent], Callable[..., None]] = {
    (RunState.GATHERING, RunEvent.TICK): Coordinator._gather,
    (RunState.GATHERING, RunEvent.SIGNAL): Coordinator._stop_by_signal,
    (RunState.RUNNING, RunEvent.JOINED): Coordinator._announce_return,
    (RunState.RUNNING, RunEvent.SAVED): Coordinator._grow,
    (RunState.RUNNING, RunEvent.ENDED): Coordinator._note_end,
    (RunState.RUNNING, RunEvent.LOST): Coordinator._report,
    (RunState.RUNNING, RunEvent.TICK): Coordinator._judge,
    (RunState.STOPPING, RunEvent.SIGNAL): Coordinator._stop_by_signal,
    (RunState.STOPPING, RunEvent.TICK): Coordinator._start_again,
}
"""Action for each state and event. Only ``_start``, ``_stop`` and ``_finish`` change the state."""


def _consequence(status: int) -> int:
    """Return how likely a failure is to be a consequence of another, from 0 to 3: death by a signal
    is the least likely, and a user mistake, which all ranks report, the most likely."""
    if status < 0:
        return 0
    return {RESTART_STATUS: 1, USER_MISTAKE: 3}.get(status, 2)


def choose(members: Sequence[Member], size: int) -> list[Member]:
    """Return the ``size`` guardians that get a trainer, ordered by rank. Hosts with the most
    available guardians are preferred, so that tensor-parallel ranks stay on one host."""
    able = [member for member in members if not member.barred]
    on_host = Counter(member.host for member in able)
    preferred = sorted(able, key=lambda member: (-on_host[member.host], member.rank))
    return sorted(preferred[:size], key=lambda member: member.rank)
