"""A training that faults are tried on: its processes, what they print, where they are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from faults.program import BEGUN, VARIABLE
from safetensors.numpy import load_file
from warm_runs import WarmRuns, alive, kill, output_of, status_of

STEPS = 40
PACE = 0.05
PATIENCE = 240.0
"""Seconds in which anything that is waited for happens, however busy the machine is."""
HANG_SECONDS = 6
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    f"--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters {STEPS} "
    f"--log-interval 1 --hang-seconds {HANG_SECONDS} --hang-limits start=120 save=20"
).split()


@dataclass(frozen=True)
class Layout:
    """How a training is laid out over its processes."""

    name: str
    size: int
    flags: tuple[str, ...] = ()


def layout(name: str, size: int, flags: str = "") -> Layout:
    return Layout(name, size, tuple(flags.split()))


ONE = layout("1 process", 1)
DP2 = layout("2 data-parallel, ZeRO 0", 2, "--zero-stage 0")
DP2_ZERO1 = layout("2 data-parallel, ZeRO 1", 2, "--zero-stage 1")
DP2_ZERO2 = layout("2 data-parallel, ZeRO 2", 2, "--zero-stage 2")
DP2_ZERO3 = layout("2 data-parallel, ZeRO 3", 2, "--zero-stage 3")
TP2 = layout("2 tensor-parallel", 2, "--tensor-model-parallel-size 2 --zero-stage 0")
PP2 = layout("2 stages", 2, "--pipeline-model-parallel-size 2 --zero-stage 0")
DP4 = layout("4 data-parallel, ZeRO 1", 4, "--zero-stage 1")
DP4_ZERO3 = layout("4 data-parallel, ZeRO 3", 4, "--zero-stage 3")
TP2DP2 = layout("2 tensor x 2 data, ZeRO 1", 4, "--tensor-model-parallel-size 2 --zero-stage 1")
PP2DP2 = layout("2 stages x 2 data, ZeRO 1", 4, "--pipeline-model-parallel-size 2 --zero-stage 1")
PP2TP2 = layout(
    "2 stages x 2 tensor",
    4,
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 0",
)
LAYOUTS = (DP4, DP4_ZERO3, TP2DP2, PP2DP2, PP2TP2)
"""Of four processes."""


class Training:
    """One training, which may be started several times; everything is below ``folder``.

    Args:
        warm: the process that its ranks are forked from.
        flags: after those of every training; ``{save}`` is the folder of checkpoints.
        place: what :mod:`faults.program` does in a rank; a fault in the first start only.
        save: the folder of checkpoints, if it is not below ``folder``.
        variables: of the environment of each rank.
        always: whether its fault and the pace count in later starts, too.
    """

    def __init__(
        self,
        warm: WarmRuns,
        folder: Path,
        shape: Layout,
        flags: Sequence[str] = (),
        place: Callable[[int], Mapping[str, Any]] = lambda rank: {},
        save: Path | None = None,
        variables: Callable[[int], Mapping[str, object]] = lambda rank: {},
        always: bool = False,
    ) -> None:
        self.warm, self.folder, self.layout = warm, folder, shape
        self.save = save or folder / "save"
        self.flags = [flag.format(save=self.save, folder=folder) for flag in flags]
        self.place, self.variables, self._always = place, variables, always
        self.starts = 0
        self.pids: list[int] = []

    def start(self, faulty: bool = True) -> None:
        """Starts all ranks; they continue from the newest checkpoint."""
        faulty = faulty or self._always
        self.folder.mkdir(exist_ok=True, parents=True)
        self.starts += 1
        argv = [*FLAGS, *self.layout.flags, "--save", self.save, "--load", self.save, *self.flags]

        def variables(rank: int) -> dict[str, object]:
            place = {"pace": PACE if faulty else 0.0, **self.place(rank)}
            if not faulty:
                place.pop("fault", None)
            return {VARIABLE: json.dumps(place), **self.variables(rank)}

        self.pids = self.warm.start(argv, self.layout.size, self.output, variables)

    @property
    def output(self) -> Path:
        """Of rank 0, in the latest start."""
        return self.folder / f"output{self.starts}"

    def text(self, rank: int) -> str:
        """What a rank has printed in the latest start."""
        found = output_of(self.output, rank)
        return found.read_text(errors="replace") if found.exists() else ""

    def texts(self) -> str:
        return "\n".join(map(self.text, range(self.layout.size)))

    @property
    def iteration(self) -> int:
        """The last step that was logged in the latest start."""
        found = re.findall(r"\] iteration +(\d+)/", self.text(0))
        return int(found[-1]) if found else 0

    @property
    def saved(self) -> list[int]:
        """The iterations that the latest start said it had saved."""
        return [int(n) for n in re.findall(r"saved checkpoint at iteration (\d+) ", self.texts())]

    @property
    def resumed(self) -> int:
        """Where the latest start began."""
        found = re.search(
            r"(?:resumed from|nothing left to train:) \S+ (?:at iteration|has all) (\d+)",
            self.text(0),
        )
        return int(found[1]) if found else 0

    def status(self, rank: int) -> int | None:
        """How a rank of the latest start has ended; None while it runs."""
        return status_of(self.output, rank)

    @property
    def statuses(self) -> list[int | None]:
        return [self.status(rank) for rank in range(self.layout.size)]

    @property
    def ended(self) -> bool:
        return None not in self.statuses

    def reach(self, iteration: int) -> None:
        """Waits until a step is logged."""
        self.until(lambda: self.iteration >= iteration, f"iteration {iteration}")

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> bool:
        """Waits until something is so, or all ranks have ended. Raises AssertionError with what was
        printed if neither happens."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ended:
                return bool(condition())
            assert time.monotonic() < deadline, f"no {what} in {seconds:g} s:\n{self.texts()}"
            time.sleep(0.02)
        return True

    def begun(self) -> bool:
        """Whether the fault inside a rank has begun."""
        return BEGUN in self.texts()

    def workers(self, rank: int) -> list[int]:
        """The processes that a rank has started."""
        return [child.pid for child in psutil.Process(self.pids[rank]).children()]

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to some ranks, or to all."""
        for rank in ranks or range(self.layout.size):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def end(self) -> None:
        """SIGKILL to what is left, as launchers do; the ranks' exit statuses are known then."""
        running = [pid for pid, status in zip(self.pids, self.statuses, strict=True)
                   if status is None]  # fmt: skip
        self.signal(signal.SIGCONT)
        if alive(running):
            kill(running)
        deadline = time.monotonic() + 10
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.02)

    def finish(self) -> None:
        """Starts it again without the fault, and waits for its end."""
        self.start(faulty=False)
        try:
            self.until(lambda: False, "end")
        finally:
            self.end()
        assert set(self.statuses) == {0}, self.texts()


def weights(save: Path, iteration: int = STEPS) -> dict[str, bytes]:
    """Every tensor of a checkpoint, optimizer included."""
    found = {}
    for file in sorted((save / f"global_step{iteration}").glob("*.safetensors")):
        for key, value in load_file(file).items():
            found[f"{file.name} {key}"] = value.tobytes()
    return found


class Undisturbed:
    """The same trainings without a fault, each made once."""

    def __init__(self, warm: WarmRuns, folder: Path) -> None:
        self._warm, self._folder = warm, folder
        self._made: dict[tuple[str, ...], dict[str, bytes]] = {}

    def weights(self, shape: Layout, flags: Sequence[str] = ()) -> dict[str, bytes]:
        """At the end of a training."""
        key = (shape.name, *flags)
        if key not in self._made:
            training = Training(
                self._warm, self._folder / f"undisturbed{len(self._made)}", shape, flags
            )
            training.finish()
            self._made[key] = weights(training.save)
            assert self._made[key], training.texts()
        return self._made[key]
