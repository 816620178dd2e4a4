"""Ends training early: after signals, at limits, and after steps with non-finite values.

A run can only be saved between steps, so a signal handler only records the signal. Between steps
the loop checks for signals, agrees with the other ranks, saves and returns.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import first_reason
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.processes import ends_with_run

logger = logging.getLogger(__name__)

Subject = TypeVar("Subject")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run. Includes SIGHUP unless it is handled or ignored."""
    default = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    return (*STOP_SIGNALS, signal.SIGHUP) if default else STOP_SIGNALS


ASKED_ELSEWHERE = "a request to another rank"
"""Reason to stop on ranks that did not receive the request themselves."""

GPU_LAG = 2
"""Number of steps by which the CPU is ahead of a GPU. While the CPU waits for the second-last step,
the GPU still has the last one to run."""


class DelayedReads(Generic[Subject]):
    """Reads a few numbers from each step ``lag`` steps after they were queued, so that the CPU does
    not wait for the newest step. All ranks read the same step, and make the same decision."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._waiting: deque[tuple[Subject, Tensor, torch.cuda.Event | None]] = deque()

    @classmethod
    def on(cls, device: torch.device) -> DelayedReads[Subject]:
        """Return an instance whose lag suits the device."""
        return cls(GPU_LAG if device.type == "cuda" else 0)

    def add(self, subject: Subject, values: Tensor) -> None:
        """Queue the copy of ``values`` (1-D) to the CPU. ``subject`` identifies the values."""
        arrived = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((subject, values, arrived))

    def due(self, everything: bool = False) -> Iterator[tuple[Subject, list[float]]]:
        """Yield the values that are old enough (or all), oldest first. Waits for the device."""
        while len(self._waiting) > (0 if everything else self.lag):
            subject, values, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield subject, values.tolist()


class TrainingStopped(ValueError):
    """Training cannot continue. The message has the step and its sample numbers."""


JudgeFinite = Callable[[Trainer, Step, float, float], None]
"""Function that checks a step that was not skipped, given its loss and gradient norm."""


class NonFiniteGuard(Callback):
    """Stops training after a step whose loss or gradients were not finite. With ``fp16`` an
    overflow of scaled gradients is normal, unless the loss scale cannot fall further.

    The guard reads the loss and norm of all steps, and passes those of finite steps to each of
    :attr:`judges`. Each step is judged before the next one, however late its numbers arrive.

    Args:
        check: whether non-finite steps stop the run; otherwise they are skipped and counted.
        most: maximum number of consecutive skipped steps, at which the run ends; 0 for no limit.
        ruined: returns, on every rank, which weights or moments are not finite, or None.
        newest: returns, on every rank, a text that names the last good checkpoint.
        fresh: whether no step has updated the model before this run. A run that only skips steps
            then fails at its end; with ``fp16`` it prints a warning.
        replicas: raises an error, on every rank, if the ranks' copies of the model differ after an
            iteration, which would then be the reason to report.
    """

    def __init__(
        self,
        device: torch.device,
        fp16: bool,
        check: bool,
        most: int = 0,
        ruined: Callable[[], str | None] = lambda: None,
        newest: Callable[[], str] = lambda: "there is no earlier checkpoint",
        fresh: bool = False,
        replicas: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        self._replicas = replicas
        self.judges: list[JudgeFinite] = []
        self._device, self._fp16, self._check, self._most = device, fp16, check, most
        self._ruined, self._newest, self._fresh = ruined, newest, fresh
        self._skipped = 0
        """Number of consecutive skipped steps among those read so far."""
        self._reads: DelayedReads[Step] = DelayedReads.on(device)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Record a step, and check the one that is due. Raises TrainingStopped if it is bad."""
        result = step.result
        # In float32 a large finite float64 loss would become infinite. Python numbers are filled on
        # the device, since a copy from the CPU would wait for it.
        numbers = [
            number.double().reshape(())
            if torch.is_tensor(number)
            else torch.full((), float(number), dtype=torch.float64, device=self._device)
            for number in (result.skipped, result.loss, result.grad_norm)
        ]
        self._reads.add(step, torch.stack(numbers))
        # If the CPU knows that a step was skipped, it has already waited for the device.
        self._read(trainer, everything=result.skipped is True)

    def settle(self, trainer: Trainer) -> None:
        """Wait for all steps so far, and check them as :meth:`after_step` does. Also raises
        TrainingStopped at the end of a run that has changed no weight, except with fp16."""
        self._read(trainer, everything=True)
        if self._fresh and self._skipped and trainer.at_end:
            reason = (
                f"all {self._skipped} steps were skipped, as their gradients were not finite: the "
                "weights are those that the run began with"
            )
            if not self._fp16:
                raise TrainingStopped(reason)
            # A first scale that is too large takes some steps to fall; a short run can end before.
            self._fresh = False
            logger.warning(f"{reason}; train longer, or give a smaller --initial-loss-scale")

    def went_back(self, trainer: Trainer) -> None:
        self._skipped, self._reads = 0, DelayedReads.on(self._device)

    def _read(self, trainer: Trainer, everything: bool = False) -> None:
        for step, (skipped, loss, norm) in self._reads.due(everything):
            if skipped:
                self._judge_skipped(step, loss)
                continue
            self._skipped, self._fresh = 0, False
            for judge in self.judges:
                judge(trainer, step, loss, norm)

    def _judge_skipped(self, step: Step, loss: float) -> None:
        """Stop the run for a skipped step, unless it is an overflow of scaled fp16 gradients."""
        self._skipped += 1
        finite, last = math.isfinite(loss), step.first_sample + step.samples - 1
        what = "the gradients are not finite" if finite else f"the loss is {loss}"
        where = f"iteration {step.iteration}, samples {step.first_sample} to {last}"
        if step.result.scale_exhausted:
            self._stop(
                step,
                f"{what} in float16 at {where}, and the loss scale, {step.result.loss_scale:g}, is "
                "already the smallest (--min-loss-scale)",
                ". --bf16 has a larger range",
            )
        if self._check and not (self._fp16 and finite):
            self._stop(
                step,
                f"{what} at {where}{self._of_ranks(step)}",
                ". --no-check-for-nan-in-loss-and-grad skips such steps, while the weights are "
                "finite",
            )
        if self._skipped == self._most:
            self._stop(
                step,
                f"{self._skipped} steps in a row were skipped (--max-skipped-steps {self._most}): "
                f"{what} at {where}",
            )

    def _stop(self, step: Step, reason: str, remedy: str = "") -> NoReturn:
        self._replicas(step.iteration)
        raise TrainingStopped(f"{reason}; {self._weights()}{remedy}")

    def _of_ranks(self, step: Step) -> str:
        """Return the ranks with non-finite losses as text, if others' are finite. Collective."""
        own = float(step.result.own_loss)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ""
        by_rank: list[tuple[float, str]] = [(own, "")] * dist.get_world_size()
        dist.all_gather_object(by_rank, (own, socket.gethostname()))
        # Pipeline stages before the last report a loss of 0.
        wrong = [f"{n} ({host})" for n, (own, host) in enumerate(by_rank) if not math.isfinite(own)]
        if not wrong or not any(math.isfinite(own) and own for own, _ in by_rank):
            return ""
        return f", on rank {', '.join(wrong)} alone"

    def _weights(self) -> str:
        """Return a text about whether the weights are intact and where to continue. Collective."""
        reason = first_reason(self._ruined(), self._device)
        if reason is None:
            return f"the weights are as they were before it; {self._newest()}"
        return f"the model was ruined before it, since {reason}; {self._newest()}"


class StopRequest:
    """Context in which a signal, the launcher's end or the time limit sets :attr:`requested`.

    SIGTERM, SIGUSR1 (slurm's ``--signal=USR1@300``), SIGHUP (a closed terminal; not if ``nohup``
    ignores it), and the first SIGINT (Ctrl-C) are recorded. A second SIGINT kills the process. The
    previous handlers are restored on exit. If the process then ends without an error, only SIGINT's
    is: another rank may be told to stop, and tell this one, before this one's signal comes.

    Args:
        watch_parent: whether to stop when the process that started this one has ended. DeepSpeed's
            launcher ends on a SIGTERM without forwarding it. By default only if a launcher set
            ``LOCAL_RANK``, since a plain ``nohup python`` must survive its shell.
        kill_switch: stop when this file exists. Raises TrainingStopped if it already does.
        started: time by ``clock`` from which the deadline counts; by default now.
    """

    def __init__(
        self,
        deadline_minutes: float | None = None,
        watch_parent: bool | None = None,
        kill_switch: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        self._deadline_minutes = deadline_minutes
        self._clock, self._started = clock, clock() if started is None else started
        self._parents = launcher_chain()
        self._watch_parent = "LOCAL_RANK" in os.environ if watch_parent is None else watch_parent
        self._received: str | None = None
        self._kill_switch = kill_switch
        if kill_switch is not None and os.path.exists(kill_switch):
            raise TrainingStopped(
                f"--kill-switch-file {kill_switch} exists, so the run does not start; delete it"
            )
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """Reason why this process should stop, such as ``"SIGTERM"``; None to continue."""
        if self._received is not None:
            return self._received
        if self._watch_parent and launcher_chain() != self._parents:
            return f"end of the launcher (process {self._parents[-1]})"
        # Path.exists would raise if the folder cannot be read, as on a lost disk.
        if self._kill_switch is not None and os.path.exists(self._kill_switch):
            return f"--kill-switch-file {self._kill_switch}"
        limit = self._deadline_minutes
        if limit is not None and self._clock() - self._started >= limit * 60:
            return f"--exit-duration-in-mins {limit:g}"
        return None

    def __enter__(self) -> StopRequest:
        self._previous = {each: signal.signal(each, self._record) for each in stop_signals()}
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        ends = error_type is None and ends_with_run.get()
        for number, handler in self._previous.items():
            if not ends or number == signal.SIGINT:
                # None is a handler that was not installed from Python. It cannot be restored.
                signal.signal(number, handler or signal.SIG_DFL)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Stopping(Callback):
    """Ends training after a signal, at a limit, or at a multiple of ``--exit-interval``. The ranks
    agree without waiting for the newest step."""

    def __init__(
        self, request: StopRequest, device: torch.device, ranks: int, exit_interval: int | None
    ) -> None:
        self._request, self._exit_interval = request, exit_interval
        self._device, self._alone = device, ranks == 1
        self._reads: DelayedReads[None] = DelayedReads.on(device)

    def __enter__(self) -> Stopping:
        self._request.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        self._request.__exit__(error_type, *error)

    def reason_to_stop(self, trainer: Trainer) -> str | None:
        interval = self._exit_interval
        if interval is not None and trainer.iteration % interval == 0 and not trainer.at_end:
            return f"--exit-interval {interval}"
        requested = self._request.requested
        if self._alone:
            return requested
        # Filled on the device: a copy from the CPU would wait for it.
        stops: Tensor = torch.full((1,), float(requested is not None), device=self._device)
        dist.all_reduce(stops, op=dist.ReduceOp.MAX)
        self._reads.add(None, stops)
        # No step follows at the end, so every request so far counts.
        if any(value > 0 for _, (value,) in self._reads.due(trainer.at_end)):
            return requested or ASKED_ELSEWHERE
        return None


def launcher_chain() -> tuple[int, ...]:
    """Return the parent's process id and, under DeepSpeed's launcher, also the id of its parent: a
    scheduler's SIGTERM ends the ``deepspeed`` command, but not the launcher process that it
    started. Other parents are not followed, since a shell is above them. A guardian
    (``--inprocess-restart``) is skipped: its parent is the launcher."""
    parent = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        if str(parent) == os.environ.get("MEGATRON_GUARDIAN"):
            parent = _parent_of(parent)
        if b"deepspeed.launcher.launch" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return (parent, _parent_of(parent))
    return (parent,)


def _parent_of(process: int) -> int:
    # The name, in parentheses, may contain anything. State and parent id follow it.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
