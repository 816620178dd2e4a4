"""What the ranks of a run must have in common, compared through the store at which they meet.

Before any collective, which ranks with other sizes would not leave: every rank hands in a digest of
its facts, rank 0 compares them and publishes a verdict. Only where digests differ does one rank of
each kind publish its facts, so that all ranks end with the same error, which names ranks, key and
values. A rank that ends for another reason says so in the same place, and the others do not wait
for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.config import ConfigError
from megatron.util.digests import digest

Facts = Mapping[str, str]
"""What is compared, by the name that users know it by: a flag, a file, a variable."""

_SHOWN_KEYS = 4
_SHOWN_RANKS = 8
_SHOWN_CHARACTERS = 120
_PATIENCE = timedelta(seconds=5)
"""How long a rank that ends waits for the others to hear of it."""
_MARGIN = timedelta(seconds=10)
"""For which others wait longer than rank 0, which knows more."""


class DisagreementError(ConfigError):
    """The ranks of a run differ, or one of them has ended. All of them raise it."""


def together_with_others() -> bool:
    """Whether this process is one of several of a run, and knows where they meet."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    numbers = (os.environ.get(name, "") for name in needed if name != "MASTER_ADDR")
    return all(text.isdecimal() for text in numbers) and int(os.environ["WORLD_SIZE"]) > 1


class Agreement:
    """The comparisons of one run, in the same order on every rank.

    Args:
        timeout: how long to wait for the slowest rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout = timeout
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Without waiting for all of them: the number of processes is compared, too.
        self._server = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self._rank == 0 and not agents,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # torch.distributed opens the same one
        )
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"agreement/{restarts}", self._server)
        self._compared = 0

    def compare(self, facts: Facts) -> None:
        """Raises DisagreementError on every rank if they differ in facts or in their number, one of
        them has ended, or one does not come in time."""
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
        """Tells the other ranks that this one ends, where they wait for it now or later."""
        if self._rank:
            self._hand_in(self._compared, {"reason": reason})
            self._store.add(f"{self._compared}/heard", 1)
            return
        self._publish(f"{self._compared}/verdict", {"message": f"rank 0: {reason}"})
        self._wait_for_listeners(self._compared, self._size - 1)

    def _verdict(self, here: int, own: str, facts: Facts) -> dict[str, Any]:
        self._hand_in(here, {"digest": own})
        kinds: list[list[int]] = []
        if self._rank == 0:
            found: dict[str, Any]
            try:
                kinds = self._kinds(here)
                speakers = [ranks[0] for ranks in kinds[: 1 + _SHOWN_KEYS]]
                found = {"size": self._size} if len(kinds) == 1 else {"speakers": speakers}
            except DisagreementError as error:
                found = {"message": str(error)}
            self._publish(f"{here}/verdict", found)
        verdict: dict[str, Any] = self._read(f"{here}/verdict")
        if "speakers" not in verdict:
            return verdict
        if self._rank in verdict["speakers"]:
            self._publish(f"{here}/facts/{self._rank}", dict(facts))
        if self._rank == 0:
            told = [self._read(f"{here}/facts/{ranks}") for ranks in verdict["speakers"]]
            self._publish(f"{here}/message", {"message": _explained(kinds, told)})
        message: dict[str, Any] = self._read(f"{here}/message")
        return message

    def _hand_in(self, here: int, content: Mapping[str, Any]) -> None:
        number = self._store.add(f"{here}/handed in", 1)
        own = {"rank": self._rank, "size": self._size}
        self._publish(f"{here}/{number}", {**own, **content})

    def _kinds(self, here: int) -> list[list[int]]:
        """Rank 0: ranks of equal digests, the largest group first. Raises DisagreementError as soon
        as it is clear that the run cannot start, whoever has not come yet."""
        digests: dict[int, str] = {}
        for number in range(1, self._size + 1):
            try:
                found = self._read(f"{here}/{number}", self._timeout)
            except dist.DistStoreError:
                raise DisagreementError(self._missing(digests)) from None
            rank = found["rank"]
            if found["size"] != self._size:  # which may be why it has ended
                raise DisagreementError(_sizes(rank, found["size"], self._size))
            if "reason" in found:
                raise DisagreementError(f"rank {rank}: {found['reason']}")
            if rank in digests:
                raise DisagreementError(f"two processes have RANK={rank}; give each its own")
            digests[rank] = found["digest"]
        kinds: dict[str, list[int]] = {}
        for rank in sorted(digests):
            kinds.setdefault(digests[rank], []).append(rank)
        return sorted(kinds.values(), key=len, reverse=True)  # that of rank 0 first among equals

    def _missing(self, came: Mapping[int, str]) -> str:
        missing = [rank for rank in range(self._size) if rank not in came]
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return (
            f"process 0 of {self._size} waited {self._timeout.total_seconds() / 60:g} minutes "
            f"(--distributed-timeout-minutes) at {address} for {_named(missing)}; start all with "
            "the same address and port, and see whether they print an error"
        )

    def _publish(self, key: str, content: object) -> None:
        self._store.set(key, json.dumps(content))

    def _read(self, key: str, timeout: timedelta | None = None) -> Any:
        self._store.wait([key], timeout or self._timeout + _MARGIN)
        return json.loads(self._store.get(key))

    def _wait_for_listeners(self, here: int, count: int) -> None:
        """Until the others have read why; they could not, if the first rank had ended."""
        end = time.monotonic() + _PATIENCE.total_seconds()
        while self._store.add(f"{here}/heard", 0) < count and time.monotonic() < end:
            time.sleep(0.01)


class _Meeting:
    """Where this process stands with the others of its run."""

    agreement: Agreement | None = None
    """While they may wait for this one."""
    began = False


_meeting = _Meeting()


@contextlib.contextmanager
def agreeing(agreement: Agreement, facts: Facts) -> Iterator[None]:
    """Compares what a run begins with; until :func:`settled`, or the end of the block,
    :func:`compare` compares more, and the others learn of an error of this process. Raises
    DisagreementError as :meth:`Agreement.compare`."""
    _meeting.agreement, _meeting.began = agreement, True
    try:
        agreement.compare(facts)
        yield
    except DisagreementError:
        raise
    except BaseException as error:  # the others learn of an interrupt too
        give_up(str(error) or repr(error))
        raise
    finally:
        _meeting.agreement = None


def compare(facts: Callable[[], Facts]) -> None:
    """Compares more facts within :func:`agreeing`; nothing without. Raises DisagreementError as
    :meth:`Agreement.compare`."""
    if _meeting.agreement is not None:
        _meeting.agreement.compare(facts())


def settled() -> None:
    """After the last comparison: nobody waits in the store any more."""
    _meeting.agreement = None


def give_up(reason: str) -> bool:
    """Tells the other processes of the run that this one ends, if they may wait for it, and returns
    whether they were told. Called by what ends a program, also before the processes have met."""
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


def _explained(kinds: Sequence[Sequence[int]], told: Sequence[Facts]) -> str:
    """The error of all ranks: ``told`` are the facts of the first rank of each of ``kinds``."""
    (most, *minorities), (usual, *others) = kinds, told
    shown, more = list[str](), 0
    for ranks, found in zip(minorities, others, strict=False):
        for key in sorted(usual.keys() | found.keys()):
            if usual.get(key) == found.get(key):
                continue
            if len(shown) == _SHOWN_KEYS:
                more += 1
                continue
            its, theirs = _excerpts(found.get(key), usual.get(key))
            shown.append(f"{key} is {its} on {_named(ranks)} and {theirs} on {_named(most)}")
    tail = f", and {more} more" if more else ""
    return (
        f"the processes of this run differ, and none of them starts: {'; '.join(shown)}{tail}; "
        "start all of them with the same flags, code, packages and files"
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    return f"ranks {first}" + (f" and {more} more" if more > 0 else "")


def _excerpts(*values: str | None) -> list[str]:
    """Values for a line: where they are long, the part in which they begin to differ."""
    texts = ["missing" if value is None else value for value in values]
    if max(map(len, texts)) <= _SHOWN_CHARACTERS:
        return texts
    same = len(os.path.commonprefix(texts))
    start = max(0, same - _SHOWN_CHARACTERS // 2)
    cut = [text[start : start + _SHOWN_CHARACTERS] for text in texts]
    return [f"{'...' * (start > 0)}{text}..." for text in cut]
