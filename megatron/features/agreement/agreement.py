"""Comparison of facts that the ranks of a run must have in common, through their rendezvous store.

It takes place before any collective, in which ranks with other sizes would hang. Every rank submits
a digest of its facts; rank 0 compares the digests and publishes a verdict. Only if digests differ,
one rank of each kind publishes its facts, so that all ranks end with the same error, which names
ranks, key and values. A rank that ends for another reason reports it in the same place, so that the
others do not wait for it.

A launcher's store outlives the processes that it restarts, and still has their entries. Therefore
every start has a name of its own. Rank 0 creates it and sends it to each rank that asks. All keys
of the start, including those of torch.distributed, begin with that name.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from megatron.parallel.meeting import (
    DisagreementError,
    Facts,
    Meeting,
    own_name,
    together_with_others,
)
from megatron.util.digests import digest
from megatron.util.json_text import parse_json

_SHOWN_KEYS = 4
_SHOWN_RANKS = 8
_SHOWN_HOSTS = 3
_SHOWN_CHARACTERS = 120
_PATIENCE = timedelta(seconds=5)
"""How long a rank that ends waits for the others to read its reason."""
_MARGIN = timedelta(seconds=10)
"""Extra time that other ranks wait, because rank 0 can give a better error message."""
_PAUSE = 0.005
"""Seconds between rank 0's checks for new arrivals."""


class Start:
    """One start of the processes of a run. A launcher's store may have the entries of several.

    Args:
        server: the store itself.
        timeout: how long a rank waits for the name of the start.
    """

    def __init__(self, server: dist.Store, rank: int, timeout: timedelta) -> None:
        self._server, self._rank, self._timeout = server, rank, timeout
        self._store: dist.Store | None = None
        self._name = ""
        self._seen, self._open = 0, list[int]()

    @property
    def store(self) -> dist.Store:
        """This start's namespace in the store. Ranks other than 0 first ask for the start's name.
        Raises torch's DistStoreError if rank 0 does not answer."""
        if self._store is None:
            self._name = self._asked() if self._rank else self._made()
            _meeting.start = f"start/{self._name}"
            _meeting.met.set()
            self._store = dist.PrefixStore(_meeting.start, self._server)
        return self._store

    def _made(self) -> str:
        name = uuid4().hex
        self._server.set("starts/newest", name)
        return name

    def _asked(self) -> str:
        """Request the name of the start from rank 0, and return it. The token is unique, so that
        an old answer cannot match."""
        token = uuid4().hex
        self._server.set(f"starts/caller/{self._server.add('starts/callers', 1)}", token)
        self._server.wait([f"starts/answer/{token}"], self._timeout)
        return self._server.get(f"starts/answer/{token}").decode()

    def tell(self) -> None:
        """Answer, on rank 0, all ranks that have asked for the name. Callers of earlier starts have
        ended."""
        callers = self._server.add("starts/callers", 0)
        self._open += range(self._seen + 1, callers + 1)
        self._seen = callers
        for number in tuple(self._open):
            caller = f"starts/caller/{number}"
            # a rank may end after it has announced itself and before it has asked
            if self._server.check([caller]):
                token = self._server.get(caller).decode()
                self._server.set(f"starts/answer/{token}", self._name)
                self._open.remove(number)

    def wait(self, key: str, timeout: timedelta) -> bool:
        """Wait, on rank 0, until ``key`` exists, and answer other ranks meanwhile. Return False
        after the timeout. Raises DisagreementError if another process acts as rank 0, too."""
        end = time.monotonic() + timeout.total_seconds()
        while not self.store.check([key]):
            if self._server.get("starts/newest").decode() != self._name:
                self._server.set("starts/newest", self._name)
                raise DisagreementError("two processes have RANK=0; give each its own")
            if time.monotonic() > end:
                return False
            self.tell()
            time.sleep(_PAUSE)
        return True


def of_launcher() -> bool:
    """Return whether the store belongs to the launcher, so that all ranks are clients."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connection(timeout: timedelta, is_master: bool = False) -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        timeout=timeout,
        # Do not wait for all workers, because the number of processes is itself compared.
        wait_for_workers=False,
        multi_tenant=True,  # torch.distributed opens the same store
    )


def start_name() -> str:
    """Return the name of this start of the run, once the ranks have met. It is the same on all
    ranks, and differs from that of every other start."""
    return _meeting.start.rpartition("/")[2]


def met(seconds: float = 0.0) -> bool:
    """Return whether the ranks have met, waiting up to this number of seconds. After that,
    :func:`connect` can be called."""
    return _meeting.met.wait(seconds)


def connect(timeout: timedelta) -> dist.Store:
    """Open another connection to this start's namespace in the store, once the ranks have met.
    Threads need their own connection, because one that waits blocks all other users of its
    connection."""
    return dist.PrefixStore(_meeting.start, _connection(timeout))


INIT_METHOD = "agreement://"
"""init_method with which torch.distributed connects the ranks that have met here."""


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    yield connect(timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


dist.register_rendezvous_handler(INIT_METHOD.partition(":")[0], _rendezvous)


class Agreement:
    """Comparisons of one run, which every rank makes in the same order.

    Args:
        timeout: how long to wait for the slowest rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout = timeout
        self._server = _connection(timeout, is_master=self._rank == 0 and not of_launcher())
        self._start = Start(self._server, self._rank, timeout)
        self._compared = 0
        self._hosts = {self._rank: socket.gethostname()}

    @property
    def _store(self) -> dist.Store:
        return self._start.store

    def compare(self, facts: Facts) -> None:
        """Raise DisagreementError on every rank if ranks differ in their facts or in the number of
        processes, if one of them has ended, or if one does not arrive in time."""
        text = json.dumps(dict(facts), sort_keys=True)
        here, self._compared = self._compared, self._compared + 1
        try:
            verdict = self._verdict(here, digest(text), facts)
        except dist.DistError as error:
            raise DisagreementError(
                f"rank {self._rank}: rank 0 has ended or does not answer; see its error ({error})"
            ) from error
        if "message" in verdict:
            self._store.add(f"{here}/heard", 1)
            if self._rank == 0:
                self._wait_for_listeners(here, self._size)
            raise DisagreementError(verdict["message"])
        if verdict["size"] != self._size:
            raise DisagreementError(_sizes(self._rank, self._size, verdict["size"]))

    def give_up(self, reason: str) -> None:
        """Tell the other ranks, which wait for this one now or later, that it ends."""
        if self._rank:
            self._hand_in(self._compared, {"reason": reason})
            self._store.add(f"{self._compared}/heard", 1)
            return
        self._publish(f"{self._compared}/verdict", {"message": f"{own_name()}: {reason}"})
        self._wait_for_listeners(self._compared, self._size - 1)

    def _verdict(self, here: int, own: str, facts: Facts) -> dict[str, Any]:
        self._hand_in(here, {"digest": own})
        kinds: list[list[int]] = []
        if self._rank == 0:
            outcome: dict[str, Any]
            try:
                kinds = self._kinds(here)
                speakers = [ranks[0] for ranks in kinds[: 1 + _SHOWN_KEYS]]
                outcome = {"size": self._size} if len(kinds) == 1 else {"speakers": speakers}
            except DisagreementError as error:
                outcome = {"message": str(error)}
            self._publish(f"{here}/verdict", outcome)
        verdict: dict[str, Any] = self._read(f"{here}/verdict")
        if "speakers" not in verdict:
            return verdict
        if self._rank in verdict["speakers"]:
            self._publish(f"{here}/facts/{self._rank}", dict(facts))
        if self._rank == 0:
            told = [self._read(f"{here}/facts/{ranks}") for ranks in verdict["speakers"]]
            self._publish(f"{here}/message", {"message": self._explained(kinds, told)})
        message: dict[str, Any] = self._read(f"{here}/message")
        return message

    def _hand_in(self, here: int, content: Mapping[str, Any]) -> None:
        number = self._store.add(f"{here}/handed in", 1)
        own = {"rank": self._rank, "size": self._size, "host": self._hosts[self._rank]}
        self._publish(f"{here}/{number}", {**own, **content})

    def _kinds(self, here: int) -> list[list[int]]:
        """Return, on rank 0, the ranks grouped by digest, the largest group first. Raises
        DisagreementError as soon as it is clear that the run cannot start, even if ranks are
        missing."""
        digests: dict[int, str] = {}
        for number in range(1, self._size + 1):
            if not self._start.wait(f"{here}/{number}", self._timeout):
                raise DisagreementError(self._missing(digests))
            kind = self._read(f"{here}/{number}")
            rank = kind["rank"]
            self._hosts[rank] = kind["host"]
            # a wrong number of processes may be the reason why the rank has ended
            if kind["size"] != self._size:
                raise DisagreementError(_sizes(rank, kind["size"], self._size))
            if "reason" in kind:
                raise DisagreementError(f"{self._named([rank])}: {kind['reason']}")
            if rank in digests:
                raise DisagreementError(f"two processes have RANK={rank}; give each its own")
            digests[rank] = kind["digest"]
        kinds: dict[str, list[int]] = {}
        for rank in sorted(digests):
            kinds.setdefault(digests[rank], []).append(rank)
        # Sorting is stable: of groups of equal size, rank 0's comes first.
        return sorted(kinds.values(), key=len, reverse=True)

    def _explained(self, kinds: Sequence[Sequence[int]], told: Sequence[Facts]) -> str:
        """Return the error message for all ranks. ``told`` has the facts of the first rank of each
        of ``kinds``."""
        (most, *minorities), (usual, *others) = kinds, told
        shown, more = list[str](), 0
        for ranks, explanation in zip(minorities, others, strict=False):
            for key in sorted(usual.keys() | explanation.keys()):
                if usual.get(key) == explanation.get(key):
                    continue
                if len(shown) == _SHOWN_KEYS:
                    more += 1
                    continue
                its, theirs = _excerpts(explanation.get(key), usual.get(key))
                who, all_else = self._named(ranks), self._named(most)
                shown.append(f"{key} is {its} on {who} and {theirs} on {all_else}")
        tail = f", and {more} more" if more else ""
        return (
            f"the processes of this run differ, and none of them starts: {'; '.join(shown)}{tail}; "
            "start all of them with the same flags, code, packages and files"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        """Describe the ranks in an error message, with their nodes if the run has several."""
        noun = "rank" if len(ranks) == 1 else "ranks"
        named = f"{noun} {_some(list(map(str, ranks)), _SHOWN_RANKS)}"
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in ranks if rank in self._hosts))
        if len(set(self._hosts.values())) == 1 or not hosts:
            return named
        return f"{named} ({_some(hosts, _SHOWN_HOSTS)})"

    def _missing(self, came: Mapping[int, str]) -> str:
        missing = [rank for rank in range(self._size) if rank not in came]
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        minutes, which = self._timeout.total_seconds() / 60, self._named(missing)
        return (
            f"process 0 of {self._size} waited {minutes:g} minutes "
            f"(--distributed-timeout-minutes) at {address} for {which}; start all with "
            "the same address and port, and see whether they print an error"
        )

    def _publish(self, key: str, content: object) -> None:
        self._store.set(key, json.dumps(content))

    def _read(self, key: str) -> Any:
        self._store.wait([key], self._timeout + _MARGIN)
        return parse_json(self._store.get(key), f"{key} in the store of the ranks", lenient=True)

    def _wait_for_listeners(self, here: int, count: int) -> None:
        """Wait until the other ranks have read the reason. If rank 0 ended first, the store would
        end with it."""
        end = time.monotonic() + _PATIENCE.total_seconds()
        while self._store.add(f"{here}/heard", 0) < count and time.monotonic() < end:
            self._start.tell()
            time.sleep(_PAUSE)


class _Meeting:
    """Progress of this process towards meeting the other processes of its run."""

    def __init__(self) -> None:
        self.agreement: Agreement | None = None
        """Set while other processes may wait for this one."""
        self.began = False
        self.start = "start/alone"
        """Prefix of all keys of this start in the store."""
        self.met = threading.Event()


_meeting = _Meeting()


@contextlib.contextmanager
def agreeing(agreement: Agreement, facts: Facts) -> Iterator[None]:
    """Compare the initial facts of a run. Until :func:`settled` or the end of the context,
    :func:`compare` compares more facts, and the other processes are told of an error of this one.
    Raises DisagreementError as :meth:`Agreement.compare` does."""
    _meeting.agreement, _meeting.began = agreement, True
    try:
        agreement.compare(facts)
        yield
    except DisagreementError:
        raise
    except BaseException as error:  # an interrupt is reported to the others, too
        give_up(str(error) or repr(error))
        raise
    finally:
        _meeting.agreement = None


def compare(facts: Callable[[], Facts]) -> None:
    """Compare more facts inside :func:`agreeing`; do nothing outside. Raises DisagreementError as
    :meth:`Agreement.compare` does."""
    if _meeting.agreement is not None:
        _meeting.agreement.compare(facts())


def settled() -> None:
    """Mark the last comparison as done, after which no rank waits in the store."""
    _meeting.agreement = None


def give_up(reason: str) -> bool:
    """Tell the other processes of the run, if they may wait for this one, that it ends. Return
    whether they were told. Programs call this when they end, even before the processes have met."""
    line, agreement, told = reason.strip().partition("\n")[0], _meeting.agreement, False
    with contextlib.suppress(dist.DistError):
        if agreement is None and not _meeting.began and together_with_others():
            agreement = Agreement(_PATIENCE)
        if agreement is not None:
            agreement.give_up(line)
            told = True
    _meeting.began = True
    return told


def _sizes(rank: int, its: int, size: int) -> str:
    return (
        f"the processes of this run differ, and none of them starts: WORLD_SIZE is {its} on rank "
        f"{rank} and {size} on rank 0; start all of them with the same number"
    )


def _some(names: Sequence[str], most: int) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _excerpts(*values: str | None) -> list[str]:
    """Return values for an error message, shortened to the part in which long values begin to
    differ."""
    texts = ["missing" if value is None else value for value in values]
    if max(map(len, texts)) <= _SHOWN_CHARACTERS:
        return texts
    same = len(os.path.commonprefix(texts))
    start = max(0, same - _SHOWN_CHARACTERS // 2)
    cut = [text[start : start + _SHOWN_CHARACTERS] for text in texts]
    return [f"{'...' * (start > 0)}{text}..." for text in cut]


class RunMeeting(Meeting):
    """Meeting whose comparisons use the store at which the ranks meet."""

    init_method = INIT_METHOD

    def open(self, timeout: timedelta) -> None:
        self._agreement = Agreement(timeout)

    def begin(self, facts: Facts, lasting: bool) -> contextlib.AbstractContextManager[None]:
        if lasting:
            return agreeing(self._agreement, facts)
        self._agreement.compare(facts)
        return contextlib.nullcontext()

    def facts(self, run: Any, *more: Any) -> Facts:
        from megatron.features.agreement.facts import run_facts

        return run_facts(run.config, run.content, *more)

    def compare_data(self, data: Any) -> None:
        from megatron.features.agreement.facts import data_facts

        compare(lambda: data_facts(data.files()))

    def compare_checkpoints(self, checkpoints: Sequence[Any], config: Any = None) -> None:
        from megatron.features.agreement.facts import checkpoint_facts

        compare(lambda: checkpoint_facts(checkpoints, config))
        settled()

    def give_up(self, reason: str) -> bool:
        return give_up(reason)
