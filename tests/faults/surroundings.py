"""Faults of what ranks stand on: network, storage, numbers in memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

from faults.fault import Fault
from faults.network import Network, two_nodes
from faults.storage import Disk, freezable_disk, small_disk
from faults.training import (
    DP2,
    DP2_ZERO1,
    DP2_ZERO3,
    DP4,
    HANG_SECONDS,
    ONE,
    PP2DP2,
    TP2DP2,
    Training,
)


def of_network() -> Iterator[Fault]:
    for shape in (DP2, DP4, PP2DP2, TP2DP2):
        short = shape.name.replace(" ", "-").replace(",", "").lower()
        yield Fault(
            f"cut-{short}",
            "`ip link set down` between two nodes",
            r"machine or network|network of",
            lambda training, net: net.cut(),
            mend=lambda training, net: net.join(),
            shape=shape,
            limit=HANG_SECONDS + 5,
            statuses=frozenset((3,)),
            place=two_nodes(shape.size),
        )
    yield Fault(
        "short-cut",
        "the link of two nodes down for 2 s (no alarm)",
        r"iteration +40/",
        _cut_shortly,
        limit=60.0,
        statuses=frozenset(),
        culprits=frozenset(),
        place=two_nodes(2),
    )
    yield Fault(
        "slow-link",
        "tc tbf: 2 Mbit/s between two nodes (no alarm)",
        r"iteration +40/",
        lambda training, net: net.slow("2mbit"),
        mend=lambda training, net: net.quick(),
        limit=120.0,
        statuses=frozenset(),
        culprits=frozenset(),
        place=two_nodes(2),
    )


def _cut_shortly(training: Training, net: Network) -> None:
    net.cut()
    time.sleep(2)
    net.join()


def of_storage() -> Iterator[Fault]:
    for name, flags in (("", ()), ("-async", ("--async-save",))):
        often = ("--save-interval", "2", *flags)
        for shape in (ONE, DP2):
            yield Fault(
                f"full-disk{name}-{shape.size}",
                "no space left on the disk of --save" + name.replace("-", ", "),
                r"WARNING: no checkpoint at iteration|No space left on device",
                lambda training, disk: disk.fill(),
                mend=lambda training, disk: disk.clear(),
                shape=shape,
                flags=often,
                limit=10.0,
                statuses=frozenset((2,)),
                place=small_disk,
            )
        yield Fault(
            f"freeze{name}",
            "the disk of --save stops answering (fsfreeze)" + name.replace("-", ", "),
            r"rank \d+ \([^)]*\) has not advanced[^\n]*save",
            lambda training, disk: disk.freeze(),
            mend=lambda training, disk: disk.thaw(),
            flags=(*often, "--hang-limits", "start=120", f"save={HANG_SECONDS}"),
            limit=HANG_SECONDS,
            mended_first=True,
            place=freezable_disk,
        )
        yield Fault(
            f"slow-disk{name}",
            "the disk of --save stops for 4 s (no alarm)" + name.replace("-", ", "),
            r"iteration +40/",
            _freeze_shortly,
            mend=lambda training, disk: disk.thaw(),
            flags=often,
            limit=60.0,
            statuses=frozenset(),
            culprits=frozenset(),
            place=freezable_disk,
        )
    yield Fault(
        "space-again",
        "no space left on the disk of --save during one save",
        r"WARNING: no checkpoint at iteration",
        _fill_shortly,
        flags=("--save-interval", "4"),
        limit=10.0,
        statuses=frozenset(),
        place=small_disk,
    )
    yield Fault(
        "read-only",
        "an error of the disk of --save, which the system then mounts read-only (ext4)",
        r"Read-only file system",
        lambda training, disk: disk.fail(),
        mend=lambda training, disk: disk.repair(),
        flags=("--save-interval", "2"),
        limit=10.0,
        statuses=frozenset((2,)),
        place=freezable_disk,
    )
    yield Fault(
        "deleted-folder",
        "the folder of --save is deleted",
        r"saved checkpoint at iteration 40",
        lambda training, disk: shutil.rmtree(training.save, ignore_errors=True),
        flags=("--save-interval", "5"),
        limit=60.0,
        statuses=frozenset(),
        culprits=frozenset(),
    )


def _freeze_shortly(training: Training, disk: Disk) -> None:
    disk.freeze()
    time.sleep(4)
    disk.thaw()


def _fill_shortly(training: Training, disk: Disk) -> None:
    disk.fill()
    training.until(lambda: "WARNING: no checkpoint" in training.texts(), "failed save")
    disk.clear()


def of_numbers() -> Iterator[Fault]:
    compared = ("--save-interval", "5", "--check-replicas-interval", "2")
    for shape in (DP2, DP2_ZERO1, DP2_ZERO3, DP4):
        short = shape.name.replace(" ", "-").replace(",", "").lower()
        if shape is DP2_ZERO3:
            continue  # at stage 3 no rank has a copy of another's weights
        yield Fault(
            f"flip-{short}",
            "one bit of a weight of rank 1 flipped",
            r"rank 1\b[^\n]*differ|differ[^\n]*rank 1\b",
            inside=("after", 1, 8, "flip weight"),
            shape=shape,
            flags=compared,
            limit=10.0,
        )
    yield Fault(
        "nan-weight",
        "a weight of rank 1 becomes NaN",
        r"the loss is nan at iteration 9|rank 1 \([^\n]*differs from rank 0",
        inside=("step", 1, 8, "nan weight"),
        limit=10.0,
        statuses=frozenset((2, 3)),
    )
    yield Fault(
        "straggler",
        "rank 1 sleeps 2 s in every step",
        r"rank 1 \([^\n]*times as long for its own part of a step",
        inside=("steps", 1, 4, "nap"),
        flags=("--save-interval", "5", "--straggler-window", "5"),
        limit=70.0,
        statuses=frozenset(),
    )


SURROUNDINGS = (*of_network(), *of_storage(), *of_numbers())
