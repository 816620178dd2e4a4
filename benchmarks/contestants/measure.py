"""Rounds of all contestants by turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from contestants.process import ContestantError, MissingPackage, Process, environment
from contestants.registry import contestant, is_ours
from contestants.setting import Setting

Result = dict[str, Any]
"""Result of a contestant: ``numerics``, ``rounds`` (an answer of its process each), ``losses``
(from the first step on), ``start_seconds`` (imports, construction, warm-up, compilation); and
``missing`` or ``failed``, a line, if it is out."""


class Measurement:
    """The contestants of one run.

    Args:
        names: who takes part.
        setting: what they train.
        tuned_malloc: give the peers the memory settings that this trainer gives itself.
        timeout: seconds for a start and for a round.
        say: receives progress messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        setting: Setting,
        tuned_malloc: bool,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self.setting, self.tuned_malloc, self.timeout, self.say = (
            setting, tuned_malloc, timeout, say,
        )  # fmt: skip
        self.results: dict[str, Result] = {
            name: {"numerics": contestant(name).numerics_in(setting.dtype), "rounds": []}
            for name in names
        }

    def interleaved(self, rounds: int) -> dict[str, Result]:
        """All are started; in each round each makes its steps, in another order every time, while
        the others wait."""
        running = {name: process for name in self.results if (process := self._start(name))}
        try:
            chance = random.Random(1)
            for number in range(rounds):
                for name in chance.sample(list(running), len(running)):
                    if not self._round(running[name]):
                        del running[name]
                self.say(f"round {number + 1} of {rounds}")
        finally:
            for process in running.values():
                process.close()
        return self.results

    def one_at_a_time(self, rounds: int) -> dict[str, Result]:
        """Each is started, makes all its rounds and ends before the next one starts, so that one
        model at a time has to fit the device."""
        for name in self.results:
            process = self._start(name)
            if process is not None:
                for _ in range(rounds):
                    if not self._round(process):
                        break
                process.close()
        return self.results

    def _start(self, name: str) -> Process | None:
        result = self.results[name]
        # The trainer sets its own.
        tuned = self.tuned_malloc and not is_ours(name)
        try:
            process = Process(name, self.setting, environment(self.setting, tuned), self.timeout)
        except ContestantError as error:
            kind = "missing" if isinstance(error, MissingPackage) else "failed"
            result[kind] = str(error)
            self.say(f"{name} is skipped: {error}")
            return None
        result["losses"] = process.warmup_losses
        result["start_seconds"] = process.start_seconds
        self.say(f"{name} is ready after {process.start_seconds:.1f} s")
        return process

    def _round(self, process: Process) -> bool:
        result = self.results[process.name]
        try:
            answer = process.round()
        except ContestantError as error:
            result["failed"] = str(error)
            self.say(f"{process.name} is out: {error}")
            return False
        result["losses"] = result["losses"] + answer.pop("losses")
        result["rounds"].append(answer)
        return True
