"""Processes of a run before torch.distributed connects them: the rank of this process, and what all
processes compare before training."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

from megatron.config import ConfigError
from megatron.config.features import features

Facts = Mapping[str, str]
"""Values to compare, keyed by a name that users know: a flag, a file or an environment variable."""


class DisagreementError(ConfigError):
    """Raised on all ranks of a run if their facts differ or one of them has ended."""


def on_several_nodes() -> bool:
    """Return whether the launcher's environment variables describe processes on several nodes."""
    if not together_with_others():
        return False
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ""))
    return not here.isdecimal() or int(here) < int(os.environ["WORLD_SIZE"])


def own_name() -> str:
    """Return this rank's name for messages, with its host name if there are several nodes."""
    rank = f"rank {os.environ.get('RANK', '0')}"
    return f"{rank} ({socket.gethostname()})" if on_several_nodes() else rank


def together_with_others() -> bool:
    """Return whether this process is one of several and the environment has their rendezvous."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    numbers = (os.environ.get(name, "") for name in needed if name != "MASTER_ADDR")
    return all(text.isdecimal() for text in numbers) and int(os.environ["WORLD_SIZE"]) > 1


class Meeting:
    """Comparison of a run's processes before training begins. A feature implements it. This base
    class compares nothing, and torch.distributed connects the processes by environment variables.

    Attributes:
        init_method: the argument of torch.distributed's ``init_process_group``.
    """

    init_method: str | None = None

    def open(self, timeout: timedelta) -> None:
        """Connect to the other processes. Raises torch's DistError if they cannot be reached."""

    def begin(self, facts: Facts, lasting: bool) -> AbstractContextManager[None]:
        """Compare the facts of all processes. If ``lasting``, the returned context is for later
        comparisons, and the other processes learn of an error of this process within it. Raises
        DisagreementError if facts differ, or a process has ended or does not respond in time."""
        return nullcontext()

    def facts(self, run: Any, *more: Any) -> Facts:
        """Return the facts on which the processes of a :class:`~megatron.run.run.Run` must agree.
        ``more`` are configurations of a tool."""
        return {}

    def compare_data(self, data: Any) -> None:
        """Compare the files of a :class:`~megatron.data.loader.TrainingData` across processes.
        Raises DisagreementError if they differ."""

    def compare_checkpoints(self, checkpoints: Sequence[Any], config: Any = None) -> None:
        """Compare each :class:`~megatron.checkpoint.source.FoundCheckpoint` to load across
        processes. This is the last comparison. With a run's ``config``, other checkpoints that its
        flags specify are compared too. Raises DisagreementError if they differ."""

    def give_up(self, reason: str) -> bool:
        """Tell processes that may be waiting for this one that it ends, and return whether they
        were told. Called when a program ends, possibly before the processes have connected."""
        return False


@cache
def run_meeting() -> Meeting:
    """Return this process's :class:`Meeting` with the other processes of its run."""
    meetings = (feature.meeting() for feature in features().values())
    return next((meeting for meeting in meetings if meeting is not None), Meeting())
