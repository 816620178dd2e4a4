"""Many random faults on trainings of four processes, which restart by themselves.

    python tests/faults/run.py --campaign 200 --seed 1 --minutes 25

Each training has a random layout, saves in the background or not, and keeps checkpoints in memory
or not; its ranks are on two nodes (namespaces), and ``--inprocess-restart`` starts them again. Some
ten faults come at random moments. Whatever happens, a rank that is hurt must be named and no other,
every start must begin at or after the last step that was said to be saved, and the end must have
the weights of a training without faults, bit by bit. Where the guardians themselves end, as when
one is killed, this program is the launcher that starts all again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.fault import NAMED
from faults.network import Network, network
from faults.storage import Disk
from faults.training import LAYOUTS, STEPS, Layout, Training, Undisturbed, weights
from warm_runs import WarmRuns

FAULTS_OF_A_TRAINING = 10
ENDING_SECONDS = 240.0
"""After a deadly fault, however busy the machine is, all ranks have started again or ended."""
LIMIT = 12
"""Of ``--hang-seconds``: a rank of four on a busy machine may take seconds for a step."""
TRAINING_SECONDS = 1800.0
KILLED = re.compile(
    r"rank (\d+) \([^()]*\) (?:was killed by|ended with exit|is stopped .*it was killed)"
)
"""A rank that a guardian names."""
_SAVED = r"saved checkpoint (?:in memory )?at iteration (\d+)"
_BEGUN = r"(?:resumed from|nothing left to train:) \S+ (?:at iteration|has all) (\d+)"
_NOTHING = r"(starting from random weights)"
_EVENT = re.compile(f"{_SAVED}|{_BEGUN}|{_NOTHING}")
_AGAIN = re.compile(r"; (\d+) steps are computed again")


@dataclass
class Tally:
    """What a campaign did."""

    faults: Counter[str] = field(default_factory=Counter)
    trainings: int = 0
    starts: int = 0
    restarts: int = 0
    again: int = 0
    equal: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in self.faults.most_common())
        slowest = ", ".join(f"{name} {max(found):.0f} s" for name, found in self.seconds.items())
        return (
            f"{self.faults.total()} faults ({kinds}) in {self.trainings} trainings, {self.equal} "
            f"of which end with the undisturbed weights; {self.restarts} restarts by themselves, "
            f"{self.starts - self.trainings} by a launcher; {self.again} steps computed again; "
            f"slowest until all had started again or ended: {slowest or 'none'}; "
            f"{len(self.wrong)} things are wrong"
        )


@dataclass
class Scene:
    """A training, and what faults work with."""

    training: Training
    net: Network
    disk: Disk
    chance: random.Random

    def rank(self) -> int:
        return self.chance.randrange(self.training.layout.size)

    def trainer(self, rank: int) -> int | None:
        """The process of a rank that its guardian has forked; None while there is not one."""
        guardian = self.training.pids[rank]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
            if children:
                return int(children[0])
        return None

    def hurt(self, number: int, rank: int) -> bool:
        """Sends a signal to a trainer; whether there was one."""
        process = self.trainer(rank)
        if process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            return True
        return False

    def all(self, number: int) -> None:
        """Sends a signal to all guardians and trainers."""
        for rank in range(self.training.layout.size):
            self.training.signal(number, rank)
            self.hurt(number, rank)


Victims = frozenset[int]


def _signal(number: int) -> Callable[[Scene], Victims]:
    def send(scene: Scene) -> Victims:
        rank = scene.rank()
        return frozenset((rank,)) if scene.hurt(number, rank) else frozenset()

    return send


def _kill_two(scene: Scene) -> Victims:
    ranks = scene.chance.sample(range(scene.training.layout.size), 2)
    return frozenset(rank for rank in ranks if scene.hurt(signal.SIGKILL, rank))


def _kill_guardian(scene: Scene) -> Victims:
    rank = scene.rank()
    scene.training.signal(signal.SIGKILL, rank)
    return frozenset((rank,))


def _stop_all(scene: Scene) -> Victims:
    """What a launcher does that is told to end."""
    scene.training.signal(signal.SIGTERM)
    return frozenset()


def _cut(scene: Scene) -> Victims:
    """For longer than the limit of ranks that wait."""
    scene.net.cut()
    time.sleep(LIMIT + scene.chance.uniform(3, 8))
    scene.net.join()
    return frozenset()


def _slow_down(scene: Scene) -> Victims:
    """A rank that has a tenth of the time for two seconds."""
    rank = scene.rank()
    for _ in range(10):
        scene.hurt(signal.SIGSTOP, rank)
        time.sleep(0.18)
        scene.hurt(signal.SIGCONT, rank)
        time.sleep(0.02)
    return frozenset()


def _suspend(scene: Scene) -> Victims:
    """Guardians and trainers, sometimes for longer than the limit."""
    scene.all(signal.SIGSTOP)
    time.sleep(scene.chance.uniform(0.5, 1.5 * LIMIT))
    scene.all(signal.SIGCONT)
    return frozenset()


def _fill_disk(scene: Scene) -> Victims:
    scene.disk.fill()
    time.sleep(scene.chance.uniform(0.2, 1))
    scene.disk.clear()
    return frozenset()


def _cut_shortly(scene: Scene) -> Victims:
    scene.net.cut()
    time.sleep(scene.chance.uniform(0.2, 1.5))
    scene.net.join()
    return frozenset()


def _slow_link(scene: Scene) -> Victims:
    scene.net.slow("4mbit")
    time.sleep(1)
    scene.net.quick()
    return frozenset()


DEADLY = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGABRT": _signal(signal.SIGABRT),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "SIGTERM of a rank": _signal(signal.SIGTERM),
    "SIGTERM of all": _stop_all,
    "SIGKILL of two ranks": _kill_two,
    "SIGKILL of a guardian": _kill_guardian,
    "network cut": _cut,
}
"""After these the training starts again, or ends."""
HARMLESS = {
    "slow rank": _slow_down,
    "suspended job": _suspend,
    "disk full for a moment": _fill_disk,
    "network cut for a moment": _cut_shortly,
    "slow network": _slow_link,
}
"""After these it continues."""
NAMES_NOBODY = ("SIGTERM of a rank", "SIGTERM of all", "network cut")


def campaign(
    warm: WarmRuns, folder: Path, faults: int, seed: int, minutes: float, say: Callable[[str], None]
) -> Tally:
    """Faults until there were so many, or the time is over."""
    tally, deadline = Tally(), time.monotonic() + 60 * minutes
    undisturbed = Undisturbed(warm, folder)
    while tally.faults.total() < faults and time.monotonic() < deadline:
        own = seed + tally.trainings
        before = len(tally.wrong)
        place = folder / f"campaign{tally.trainings}"
        tally.trainings += 1
        most = min(FAULTS_OF_A_TRAINING, faults - tally.faults.total())
        with network() as net, _disk(place) as disk:
            story = Story(warm, place, net, disk, random.Random(own), most, tally)
            try:
                story.tell(undisturbed)
            except Exception as error:  # the others are tried
                tally.wrong.append(f"{type(error).__name__}: {error}"[:6000])
        say(f"seed {own}: {story}")
        for wrong in tally.wrong[before:]:
            say(f"== seed {own} is wrong: {wrong}")
        say(f"   so far: {tally}")
        if len(tally.wrong) == before:
            shutil.rmtree(place, ignore_errors=True)
    return tally


class Story:
    """One training with its faults."""

    def __init__(
        self,
        warm: WarmRuns,
        folder: Path,
        net: Network,
        disk: Disk,
        chance: random.Random,
        faults: int,
        tally: Tally,
    ) -> None:
        self.shape: Layout = chance.choice(LAYOUTS)
        self.extra = ["--async-save"] * chance.randint(0, 1)
        if chance.randint(0, 1):
            self.extra += ["--non-persistent-save-interval", "2"]
            self.extra += ["--non-persistent-local-ckpt-dir", "{folder}/memory"]
        flags = ["--save-interval", "4", "--keep-last", "3", "--max-failed-saves", "0"]
        flags += ["--inprocess-restart", "--distributed-timeout-minutes", "5"]
        flags += ["--hang-seconds", str(LIMIT), "--hang-limits", "start=200", "save=100"]
        self.training = Training(
            warm,
            folder,
            self.shape,
            [*flags, *self.extra],
            lambda rank: {"namespace": net.names[net.node_of(rank, self.shape.size)]},
            disk.folder / "save",
            lambda rank: net.variables(rank, self.shape.size),
            always=True,
        )
        self.scene = Scene(self.training, net, disk, chance)
        self.chance, self.most, self.tally = chance, faults, tally
        self.done: list[str] = []
        self.restarts = self.again = 0
        self.equal: bool | None = None
        self._texts: list[str] = []
        self._until = time.monotonic() + TRAINING_SECONDS

    def __str__(self) -> str:
        memory = "memory" if "--non-persistent-save-interval" in self.extra else "disk"
        saves = "async" if "--async-save" in self.extra else "sync"
        end = {True: "bitwise equal", False: "DIFFERENT", None: "not at its end"}[self.equal]
        return (
            f"{self.shape.name}, {memory}, {saves}; {', '.join(self.done)}; {self.restarts} "
            f"restarts by itself, {self.training.starts - 1} by the launcher; {self.again} steps "
            f"computed again; {end}"
        )

    def tell(self, undisturbed: Undisturbed) -> None:
        """From the first start to the end."""
        training = self.training
        try:
            while not (training.save / f"global_step{STEPS}").exists() or not training.ended:
                if time.monotonic() > self._until or training.starts > 2 * FAULTS_OF_A_TRAINING:
                    self._wrong(f"does not come to its end:\n{training.texts()[-3000:]}")
                    return
                self._start()
            self.equal = weights(training.save) == undisturbed.weights(self.shape)
            self.tally.equal += self.equal
            if not self.equal:
                self._wrong("the weights are not those without faults")
        finally:
            training.end()
            self._kill_rest()

    def _start(self) -> None:
        """All processes, until they have ended."""
        training = self.training
        training.start()
        self.tally.starts += 1
        try:
            while len(self.done) < self.most and self._moment():
                self._fault()
            with contextlib.suppress(AssertionError):
                training.until(lambda: False, "end", ENDING_SECONDS)
            if not training.ended:
                reached = training.iteration
                with contextlib.suppress(AssertionError):
                    training.until(lambda: training.iteration != reached, "step", ENDING_SECONDS)
                if training.iteration == reached and not training.ended:
                    self._wrong(f"does not end:\n{training.texts()[-3000:]}")
        finally:
            self.scene.all(signal.SIGCONT)
            training.end()
            self._kill_rest()
        text = training.text(0)
        self._texts.append(text)
        restarts, again = text.count("; all ranks start again"), sum(map(int, _AGAIN.findall(text)))
        self.restarts, self.again = self.restarts + restarts, self.again + again
        self.tally.restarts += restarts
        self.tally.again += again
        for wrong in lost_steps("\n".join(self._texts)):
            self._wrong(wrong)

    def _moment(self) -> bool:
        """A random moment of a start, or between some steps; whether the training still runs."""
        if self.chance.random() < 0.15:
            time.sleep(self.chance.uniform(0, 2))
        else:
            wanted = self.training.iteration + self.chance.randint(1, 4)
            with contextlib.suppress(AssertionError):
                self.training.until(
                    lambda: self.training.iteration >= wanted, "step", ENDING_SECONDS
                )
        return not self.training.ended

    def _fault(self) -> None:
        """One that is chosen at random, and what must come of it."""
        training = self.training
        deadly = self.chance.random() < 0.65
        kinds = DEADLY if deadly else HARMLESS
        name = self.chance.choice(sorted(kinds))
        before = [len(training.text(rank)) for rank in range(self.shape.size)]
        begin, at = time.monotonic(), training.iteration
        ending = at >= STEPS - 1
        victims = kinds[name](self.scene)
        self.tally.faults[name] += 1
        self.done.append(f"{name} {at}")

        def since() -> str:
            texts = (training.text(rank)[start:] for rank, start in enumerate(before))
            return "\n".join(texts)

        if not deadly:
            with contextlib.suppress(AssertionError):  # what follows from it, if anything does
                training.until(lambda: training.iteration != at, "step", 2 * LIMIT)
        elif victims or name in NAMES_NOBODY:
            again = "; all ranks start again"
            harmless = name == "network cut"  # it may have been in a save of one node
            with contextlib.suppress(AssertionError):
                training.until(
                    lambda: again in since() or (harmless and training.iteration != at),
                    "restart",
                    ENDING_SECONDS,
                )
            seconds = time.monotonic() - begin
            self.tally.seconds.setdefault(name, []).append(seconds)
            if again not in since() and not training.ended and not harmless:
                self._wrong(f"{name} of {sorted(victims)} at {at}: nothing in {ENDING_SECONDS:g} s:"
                            f"\n{training.texts()[-3000:]}")  # fmt: skip
        self._blame(name, victims, since(), at, ending or not victims)

    def _blame(self, name: str, victims: Victims, text: str, at: int, silent: bool) -> None:
        """Whether those that were hurt are named, and no others."""
        named = {int(rank) for rank in (*NAMED.findall(text), *KILLED.findall(text))}
        if named - victims and name not in NAMES_NOBODY:
            lines = [line for line in text.splitlines() if NAMED.search(line) or
                     KILLED.search(line)]  # fmt: skip
            self._wrong(
                f"{name} of {sorted(victims)} at {at}: names {sorted(named)}:\n  "
                + "\n  ".join(lines[:4])
            )
        if victims and not named and not silent and name != "SIGTERM of a rank":
            guardian = any(f"rank {rank} " in text for rank in victims)
            if not guardian:
                self._wrong(f"{name} of {sorted(victims)} at {at}: not named:\n{text[-2000:]}")

    def _kill_rest(self) -> None:
        """Trainers end with their guardians."""
        deadline = time.monotonic() + 20
        while _groups(self.training.pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left := _groups(self.training.pids):
            self._wrong(f"processes are left: {left}")
            for group in left:
                os.killpg(group, signal.SIGKILL)

    def _wrong(self, what: str) -> None:
        flags = " ".join(self.extra)
        self.tally.wrong.append(f"{self.shape.name} {flags}: {what}")


def _groups(processes: Sequence[int]) -> list[int]:
    """The groups that still have processes; a guardian and its trainer are one group."""
    found = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, 0)
            found.append(process)
    return found


def lost_steps(text: str) -> Iterator[str]:
    """Where a start has begun before a step that was said to be saved; one that follows a whole
    step again counts from there."""
    saved = 0
    for found in _EVENT.finditer(text):
        said, begun, nothing = found.groups()
        if said is not None:
            saved = max(saved, int(said))
        elif nothing is not None and saved:
            yield f"step {saved} was saved, and it began from random weights"
        elif begun is not None and int(begun) < saved:
            yield f"step {saved} was saved, and it began again at {begun}"


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[Disk]:
    mount = folder.with_name(f"{folder.name}-disk")
    mount.mkdir(parents=True)
    words: Sequence[str] = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", os.fspath(mount)]
    subprocess.run(words, check=True)
    try:
        yield Disk(mount)
    finally:
        subprocess.run(["umount", "-l", os.fspath(mount)], check=False)
