"""Runs on a number of nodes that may change: a node that is asked to leave does not end the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.training.stopping import ASKED_ELSEWHERE, STOP_SIGNALS, launcher_chain
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import FaultError

_SIGNALS = frozenset(signal.Signals(number).name for number in STOP_SIGNALS)


class NodeLeftError(FaultError):
    """Another node leaves the run; the launcher starts this process again."""


def is_elastic() -> bool:
    """Whether nodes may leave the torchrun that has started this process, and return: it was given
    ``--nnodes MIN:MAX``, in its command line or in ``PET_NNODES``."""
    try:
        line = Path(f"/proc/{launcher_chain()[0]}/cmdline").read_text(errors="replace")
    except OSError:
        return False
    return is_range(given_nodes(line.split("\0")) or os.environ.get("PET_NNODES", ""))


def given_nodes(words: Sequence[str]) -> str | None:
    """The value of ``--nnodes`` in a command line, as torchrun reads it; None without one."""
    found = None
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):  # what follows is the program's
            break
        if word == "--nnodes":
            found = value
        elif word.startswith("--nnodes="):
            found = word.partition("=")[2]
    return found


def is_range(nodes: str) -> bool:
    """Whether a number of nodes is ``MIN:MAX``."""
    least, _, most = nodes.partition(":")
    return least.isdecimal() and most.isdecimal()


class ElasticNodes(Callback):
    """After the last step and its save: where signals have stopped some ranks of an elastic run and
    not others, the others end as after a fault, so that their launchers continue without them."""

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        """Raises NodeLeftError on ranks that continue, and SystemExit on those that leave: they do
        not wait for each other any more."""
        reasons: list[str | None] = [reason] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        leaving = [n for n, why in enumerate(reasons) if why is not None and _is_leaving(why)]
        if len(leaving) in (0, len(reasons)) or not all(map(_of_nodes, reasons)):
            return
        if dist.get_rank() in leaving:
            raise SystemExit(0)
        ranks = f"rank{'s'[: len(leaving) > 1]} {', '.join(map(str, leaving))}"
        raise NodeLeftError(
            f"{ranks} left the run after iteration {trainer.iteration} ({reasons[leaving[0]]}); "
            "the others start again"
        )


def _of_nodes(reason: str | None) -> bool:
    """Whether a reason to stop is not one of the run, such as its time limit or its end."""
    return reason is not None and (_is_leaving(reason) or reason == ASKED_ELSEWHERE)


def _is_leaving(reason: str) -> bool:
    return reason in _SIGNALS or reason.startswith("end of the launcher")
