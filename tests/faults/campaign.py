"""Many random faults on trainings of four processes, which are started again until they end.

    python tests/faults/run.py --campaign 200 --seed 1 --minutes 25

Each training has a random layout, saves in the background or not, and keeps checkpoints in memory
or not; its ranks are on two nodes (namespaces). Some ten faults come at random moments. Whatever
happens, the next start must begin at or after the last step that was said to be saved, and the end
must have the weights of a training without faults, bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults.fault import NAMED
from faults.network import Network, network
from faults.storage import Disk
from faults.training import HANG_SECONDS, LAYOUTS, STEPS, Training, Undisturbed, weights
from warm_runs import WarmRuns

FAULTS_OF_A_TRAINING = 10
ENDING_SECONDS = 60.0
"""After a fault that ends a training, however busy the machine is: its limit, and what a launcher
waits for."""


@dataclass
class Tally:
    """What a campaign did."""

    faults: Counter[str] = field(default_factory=Counter)
    trainings: int = 0
    starts: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in self.faults.most_common())
        return (
            f"{self.faults.total()} faults ({kinds}) in {self.trainings} trainings, which were "
            f"started {self.starts} times; {len(self.wrong)} things are wrong"
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


def _signal(number: int) -> Callable[[Scene], frozenset[int]]:
    def send(scene: Scene) -> frozenset[int]:
        rank = scene.rank()
        scene.training.signal(number, rank)
        return frozenset((rank,))

    return send


def _slow_down(scene: Scene) -> frozenset[int]:
    """A rank that has a tenth of the time for two seconds."""
    rank = scene.rank()
    for _ in range(10):
        scene.training.signal(signal.SIGSTOP, rank)
        time.sleep(0.18)
        scene.training.signal(signal.SIGCONT, rank)
        time.sleep(0.02)
    return frozenset()


def _suspend(scene: Scene) -> frozenset[int]:
    scene.training.signal(signal.SIGSTOP)
    time.sleep(scene.chance.uniform(0.5, 3))
    scene.training.signal(signal.SIGCONT)
    return frozenset()


def _fill_disk(scene: Scene) -> frozenset[int]:
    scene.disk.fill()
    time.sleep(scene.chance.uniform(0.2, 1))
    scene.disk.clear()
    return frozenset()


def _cut(scene: Scene) -> frozenset[int]:
    scene.net.cut()
    return frozenset()


def _cut_shortly(scene: Scene) -> frozenset[int]:
    scene.net.cut()
    time.sleep(scene.chance.uniform(0.2, 1.5))
    scene.net.join()
    return frozenset()


def _slow_link(scene: Scene) -> frozenset[int]:
    scene.net.slow("4mbit")
    time.sleep(1)
    scene.net.quick()
    return frozenset()


DEADLY = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGABRT": _signal(signal.SIGABRT),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "network cut": _cut,
}
"""After these the training ends."""
HARMLESS = {
    "slow rank": _slow_down,
    "suspended job": _suspend,
    "disk full for a moment": _fill_disk,
    "network cut for a moment": _cut_shortly,
    "slow network": _slow_link,
}
"""After these it continues, or ends and loses nothing."""


def campaign(
    warm: WarmRuns, folder: Path, faults: int, seed: int, minutes: float, say: Callable[[str], None]
) -> Tally:
    """Faults until there were so many, or the time is over."""
    tally, deadline = Tally(), time.monotonic() + 60 * minutes
    undisturbed = Undisturbed(warm, folder)
    while tally.faults.total() < faults and time.monotonic() < deadline:
        chance = random.Random(seed + tally.trainings)
        before = len(tally.wrong)
        place = folder / f"campaign{tally.trainings}"
        _one_training(warm, place, chance, tally, undisturbed)
        tally.trainings += 1
        say(str(tally))
        for wrong in tally.wrong[before:]:
            say(f"== seed {seed + tally.trainings - 1}: {wrong}")
        if len(tally.wrong) == before:
            shutil.rmtree(place, ignore_errors=True)
    return tally


def _one_training(
    warm: WarmRuns, folder: Path, chance: random.Random, tally: Tally, undisturbed: Undisturbed
) -> None:
    shape = chance.choice(LAYOUTS)
    flags = ["--save-interval", "4", "--keep-last", "3", "--max-failed-saves", "0"]
    flags += ["--async-save"] * chance.randint(0, 1)
    if chance.randint(0, 1):
        flags += ["--non-persistent-save-interval", "2"]
        flags += ["--non-persistent-local-ckpt-dir", "{folder}/memory"]
    with network() as net, _disk(folder) as disk:
        training = Training(
            warm,
            folder,
            shape,
            flags,
            lambda rank: {"namespace": net.names[net.node_of(rank, shape.size)]},
            disk.folder / "save",
            lambda rank: net.variables(rank, shape.size),
            always=True,
        )
        what = f"{shape.name}, {' '.join(flags)}"
        done, last = 0, 0
        try:
            while True:
                training.start()
                tally.starts += 1
                while done < FAULTS_OF_A_TRAINING and not training.ended:
                    if not _wait_for_moment(training, chance):
                        break
                    done += 1
                    scene = Scene(training, net, disk, chance)
                    if _one_fault(scene, tally, what):
                        break
                if done >= FAULTS_OF_A_TRAINING:
                    with contextlib.suppress(AssertionError):
                        training.until(lambda: False, "end", 2 * ENDING_SECONDS)
                training.signal(signal.SIGCONT)
                training.end()
                net.join()
                net.quick()
                disk.clear()
                if training.resumed < last and "iteration " in training.text(0):
                    tally.wrong.append(
                        f"{what}: step {last} was saved, and it began again at {training.resumed}"
                    )
                last = max([last, *training.saved])
                if (training.save / f"global_step{STEPS}").exists():
                    break
                if training.starts > 4 * FAULTS_OF_A_TRAINING:
                    tally.wrong.append(f"{what}: does not come to its end:\n{training.texts()}")
                    return
            if weights(training.save) != undisturbed.weights(shape):
                tally.wrong.append(f"{what}: the weights are not those without faults")
        finally:
            training.end()


def _wait_for_moment(training: Training, chance: random.Random) -> bool:
    """A random moment of the start, or between some steps; whether the training still runs."""
    if chance.random() < 0.15:
        time.sleep(chance.uniform(0, 2))
    else:
        wanted = max(training.iteration, training.resumed) + chance.randint(1, 5)
        with contextlib.suppress(AssertionError):
            training.until(lambda: training.iteration >= wanted, "step", ENDING_SECONDS)
    return not training.ended


def _one_fault(scene: Scene, tally: Tally, what: str) -> bool:
    """Whether it ends the training."""
    chance, training = scene.chance, scene.training
    deadly = chance.random() < 0.6
    kinds = DEADLY if deadly else HARMLESS
    name = chance.choice(sorted(kinds))
    tally.faults[name] += 1
    at = training.iteration
    victims = kinds[name](scene)
    if not deadly:
        return False
    healthy = [rank for rank in range(training.layout.size) if rank not in victims]
    with contextlib.suppress(AssertionError):
        training.until(
            lambda: all(training.status(rank) is not None for rank in healthy),
            "end",
            ENDING_SECONDS,
        )
    left = [rank for rank in healthy if training.status(rank) is None]
    begun = at > 0
    if left and begun:
        tally.wrong.append(
            f"{what}: {name} at iteration {at}: ranks {left} still run after {ENDING_SECONDS:g} s "
            f"(limit {HANG_SECONDS} s):\n{training.texts()[-1500:]}"
        )
    named = {int(rank) for rank in NAMED.findall(training.texts())}
    if begun and name != "network cut" and named - victims:
        tally.wrong.append(f"{what}: {name} of {sorted(victims)}, blamed {sorted(named)}")
    if begun and name == "SIGSTOP" and not named and not left:
        tally.wrong.append(f"{what}: {name} of {sorted(victims)} at iteration {at}: nobody named")
    return True


@contextlib.contextmanager
def _disk(folder: Path):  # type: ignore[no-untyped-def]
    mount = folder.with_name(f"{folder.name}-disk")
    mount.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", os.fspath(mount)]
    subprocess.run(words, check=True)
    try:
        yield Disk(mount)
    finally:
        subprocess.run(["umount", "-l", os.fspath(mount)], check=False)
