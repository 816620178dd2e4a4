"""Reasons to end a training early: signals, limits, and steps that are not finite.

A step is the smallest unit that can be saved, so a signal handler only records the signal; the loop
checks between steps, agrees with the other ranks, saves and returns.
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
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import first_reason
from megatron.training.trainer import Callback, Step, Trainer

logger = logging.getLogger(__name__)

Subject = TypeVar("Subject")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that stop a run: SIGHUP too, unless ``nohup`` or a program ignores or handles it."""
    default = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    return (*STOP_SIGNALS, signal.SIGHUP) if default else STOP_SIGNALS


ASKED_ELSEWHERE = "a request to another rank"
"""Reason of a rank that stops without being asked itself."""

GPU_LAG = 2
"""Steps that the CPU is ahead of a GPU: while it waits for the step before the last, the GPU still
has the last one to do."""


class DelayedReads(Generic[Subject]):
    """Reads a few numbers of each step ``lag`` steps after they were queued, so that the CPU does
    not wait for the newest step. All ranks read the same step at the same time, and decide the
    same."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._waiting: deque[tuple[Subject, Tensor, torch.cuda.Event | None]] = deque()

    @classmethod
    def on(cls, device: torch.device) -> DelayedReads[Subject]:
        """With the lag that suits a device."""
        return cls(GPU_LAG if device.type == "cuda" else 0)

    def add(self, subject: Subject, values: Tensor) -> None:
        """Queues the copy of ``values`` (1-D) to the CPU; ``subject`` is returned with them."""
        arrived = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((subject, values, arrived))

    def due(self, everything: bool = False) -> Iterator[tuple[Subject, list[float]]]:
        """The values that are old enough, or all of them, oldest first; waits for the device."""
        while len(self._waiting) > (0 if everything else self.lag):
            subject, values, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield subject, values.tolist()


class TrainingStopped(ValueError):
    """Training cannot continue; the message names the step and its samples."""


JudgeFinite = Callable[[Trainer, Step, float, float], None]
"""Judges a step that was not skipped, by its loss and gradient norm."""


class NonFiniteGuard(Callback):
    """Stops training after a step whose loss or gradients were not finite; with ``fp16`` an
    overflow of scaled gradients is a normal event, unless the scale cannot fall further.

    It reads the numbers of all steps, and passes those of the others to each of :attr:`judges`: a
    step is judged before the next one, however late the numbers arrive.

    Args:
        check: whether such steps stop the run; else they are skipped and counted.
        most: number of skipped steps in a row that ends the run; 0 for no limit.
        ruined: says on every rank which weights or moments are not finite; None if all are.
        newest: says on every rank which checkpoint is the last good one.
        fresh: whether no step has updated the model before this run; one that only skips steps then
            fails at its end, or with ``fp16`` says so.
        replicas: raises an error, on every rank, if the ranks' copies of the model differ after an
            iteration: then one of them is the reason.
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
        """Steps in a row, up to the last one read."""
        self._reads: DelayedReads[Step] = DelayedReads.on(device)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Records a step, and checks the one that is due. Raises TrainingStopped if that one must
        be the last."""
        result = step.result
        # In float32 a large finite float64 loss would look infinite. What is no tensor is filled
        # on the device: a copy from the CPU would wait for it.
        numbers = [
            number.double().reshape(())
            if torch.is_tensor(number)
            else torch.full((), float(number), dtype=torch.float64, device=self._device)
            for number in (result.skipped, result.loss, result.grad_norm)
        ]
        self._reads.add(step, torch.stack(numbers))
        # Where the CPU knows that a step was skipped, it has waited for the device already.
        self._read(trainer, everything=result.skipped is True)

    def settle(self, trainer: Trainer) -> None:
        """Checks all steps so far, which waits for them; as :meth:`after_step`. Raises
        TrainingStopped also at the end of a training that has changed no weight, without fp16."""
        self._read(trainer, everything=True)
        if self._fresh and self._skipped and trainer.at_end:
            reason = (
                f"all {self._skipped} steps were skipped, as their gradients were not finite: the "
                "weights are those that the run began with"
            )
            if not self._fp16:
                raise TrainingStopped(reason)
            # A first scale that is too large takes some steps to fall; a short run ends before.
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
        """An overflow of scaled fp16 gradients is part of training; anything else is not."""
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
        """Return the ranks whose losses are not finite, if others' are; every rank must ask."""
        own = float(step.result.own_loss)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ""
        by_rank: list[tuple[float, str]] = [(own, "")] * dist.get_world_size()
        dist.all_gather_object(by_rank, (own, socket.gethostname()))
        # Stages of a pipeline before the last have 0.
        wrong = [f"{n} ({host})" for n, (own, host) in enumerate(by_rank) if not math.isfinite(own)]
        if not wrong or not any(math.isfinite(own) and own for own, _ in by_rank):
            return ""
        return f", on rank {', '.join(wrong)} alone"

    def _weights(self) -> str:
        """Return a line about the model's state, and the place to continue from."""
        reason = first_reason(self._ruined(), self._device)
        if reason is None:
            return f"the weights are as they were before it; {self._newest()}"
        return f"the model was ruined before it, since {reason}; {self._newest()}"


class StopRequest:
    """Context in which a signal, a lost launcher or the time limit becomes :attr:`requested`.

    SIGTERM, SIGUSR1 (slurm's ``--signal=USR1@300``), SIGHUP (a closed terminal), unless ``nohup``
    ignores it, and the first SIGINT (Ctrl-C) are recorded; a second SIGINT kills the process. On
    exit the previous handlers are restored. Python requires that it is entered in the main thread.

    Args:
        watch_parent: stop when the process that started this one is gone, as DeepSpeed's launcher
            is after a SIGTERM, which it keeps to itself. By default only where a launcher set
            ``LOCAL_RANK``: a plain ``nohup python`` has to survive its shell.
        kill_switch: stop when this file exists. Raises TrainingStopped if it already does.
        started: when the deadline's minutes began, by ``clock``; by default now.
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
        """Reason for which this process should stop, such as ``"SIGTERM"``; None while it should
        continue."""
        if self._received is not None:
            return self._received
        if self._watch_parent and launcher_chain() != self._parents:
            return f"end of the launcher (process {self._parents[-1]})"
        # Not Path.exists, which raises where the folder cannot be read, as on a disk that is gone.
        if self._kill_switch is not None and os.path.exists(self._kill_switch):
            return f"--kill-switch-file {self._kill_switch}"
        limit = self._deadline_minutes
        if limit is not None and self._clock() - self._started >= limit * 60:
            return f"--exit-duration-in-mins {limit:g}"
        return None

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class StopAgreement:
    """Agreement of the ranks to stop, without waiting for the newest step."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._alone = device, ranks == 1
        self._reads: DelayedReads[None] = DelayedReads.on(device)

    def reached(self, here: bool, at_end: bool) -> bool:
        """True if a rank wants to stop; every rank must call it after every step. ``at_end``: no
        step follows, so every request so far counts."""
        if self._alone:
            return here
        # Filled on the device: a copy from the CPU would wait for it.
        request: Tensor = torch.full((1,), float(here), device=self._device)
        dist.all_reduce(request, op=dist.ReduceOp.MAX)
        self._reads.add(None, request)
        return any(value > 0 for _, (value,) in self._reads.due(at_end))


class Stopping(Callback):
    """Ends the training at a signal, a limit or after a multiple of ``--exit-interval``."""

    def __init__(
        self, request: StopRequest, device: torch.device, ranks: int, exit_interval: int | None
    ) -> None:
        self._request, self._exit_interval = request, exit_interval
        self._agreement = StopAgreement(device, ranks)

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
        if self._agreement.reached(requested is not None, trainer.at_end):
            return requested or ASKED_ELSEWHERE
        return None


def launcher_chain() -> tuple[int, ...]:
    """Process ids of the parent, and of the parent's parent where DeepSpeed's launcher has two: a
    scheduler's SIGTERM ends the command, and the process between lives on. Above any other parent
    is a shell. A guardian (``--inprocess-restart``) is no launcher, but its parent is."""
    parent = os.getppid()
    try:
        if str(parent) == os.environ.get("MEGATRON_GUARDIAN"):
            parent = _parent_of(parent)
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        if b"deepspeed.launcher.launch" not in command:
            return (parent,)
        return (parent, _parent_of(parent))
    except (OSError, IndexError, ValueError):
        return (parent,)


def _parent_of(process: int) -> int:
    # The name is the last field in brackets and may contain anything; state and parent follow.
    status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(status[1])
