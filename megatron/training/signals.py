"""Notices that the run should stop, agrees with the other ranks, and tells the training loop.

A step is the smallest thing that can be saved, so nothing happens inside a signal handler but a
note; the loop asks between steps, agrees with the other ranks, saves and leaves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.lagged import LaggedReads, lag_on
from megatron.training.trainer import Callback, Trainer

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Context in which a signal, a lost launcher or the time limit becomes :attr:`requested`.

    SIGTERM and SIGUSR1 (slurm's ``--signal=USR1@300``) and the first SIGINT (Ctrl-C) are noted; a
    second SIGINT kills the process as if nobody handled it. On exit the earlier handlers are back.
    Must be entered in the main thread, as Python demands for signal handlers.

    Args:
        deadline_minutes: stop this long after construction (``--exit-duration-in-mins``).
        watch_parent: stop when the process that started this one is gone. DeepSpeed's launcher
            leaves on SIGTERM without passing it on, and its workers would train on unseen. By
            default only where a launcher set ``LOCAL_RANK``: a plain ``nohup python`` has to
            survive the shell that it came from.
        clock: seconds from a monotonic clock.
    """

    def __init__(
        self,
        deadline_minutes: float | None = None,
        watch_parent: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_minutes = deadline_minutes
        self._clock = clock
        self._started = clock()
        self._parents = launcher_chain()
        self._watch_parent = "LOCAL_RANK" in os.environ if watch_parent is None else watch_parent
        self._received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """Why this process should stop, ``"SIGTERM"`` for instance; None while it should go on."""
        if self._received is not None:
            return self._received
        if self._watch_parent and launcher_chain() != self._parents:
            return f"end of the launcher (process {self._parents[-1]})"
        limit = self._deadline_minutes
        if limit is not None and self._clock() - self._started >= limit * 60:
            return f"--exit-duration-in-mins {limit:g}"
        return None

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopAgreement:
    """Whether any rank wants to stop, found out without waiting for the newest step.

    Args:
        device: where collectives work.
        ranks: number of processes.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._alone = device, ranks == 1
        self._reads: LaggedReads[None] = LaggedReads(lag_on(device))

    def reached(self, here: bool, at_end: bool) -> bool:
        """Whether a rank has asked; every rank must call it after every step.

        Args:
            here: whether this rank asks.
            at_end: whether no step follows, so that all that was asked counts.
        """
        if self._alone:
            return here
        # Filled on the device: a copy from the host would wait for it.
        asked: Tensor = torch.full((1,), float(here), device=self._device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self._reads.add(None, asked)
        return any(value > 0 for _, (value,) in self._reads.due(at_end))


class Stopping(Callback):
    """Ends the training where a signal, a limit or ``--exit-interval`` asks for it.

    Args:
        request: what asks this process.
        device: where collectives work.
        ranks: number of processes.
        exit_interval: stop after a step that this divides.
    """

    def __init__(
        self, request: StopRequest, device: torch.device, ranks: int, exit_interval: int | None
    ) -> None:
        self._request, self._exit_interval = request, exit_interval
        self._agreement = StopAgreement(device, ranks)

    def __enter__(self) -> Stopping:
        self._request.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        """Puts the earlier signal handlers back."""
        self._request.__exit__(error_type, *error)

    def reason_to_stop(self, trainer: Trainer) -> str | None:
        """See :meth:`Callback.reason_to_stop`."""
        interval = self._exit_interval
        if interval is not None and trainer.iteration % interval == 0 and not trainer.at_end:
            return f"--exit-interval {interval}"
        asked = self._request.requested
        if self._agreement.reached(asked is not None, trainer.at_end):
            return asked or "a request to another rank"
        return None


def launcher_chain() -> tuple[int, ...]:
    """Process ids of the parent, and of the parent's parent where DeepSpeed's launcher has two.

    The ``deepspeed`` command starts ``deepspeed.launcher.launch``, which starts the workers; it is
    the command that gets a scheduler's SIGTERM, and the process between lives on. Above any other
    parent is a shell, whose end means nothing.
    """
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        if b"deepspeed.launcher.launch" not in command:
            return (parent,)
        # Behind the name, which may hold anything but is the last to be in brackets: state, parent.
        status = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        return (parent, int(status[1]))
    except (OSError, IndexError, ValueError):
        return (parent,)
