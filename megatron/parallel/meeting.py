"""The processes of a run before torch.distributed connects them: which one this is, and what they
tell each other."""

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
"""Compared values, by the name that users know them by: a flag, a file, a variable."""


class DisagreementError(ConfigError):
    """The ranks of a run differ, or one of them has ended. All of them raise it."""


def on_several_nodes() -> bool:
    """True if the processes of the run are on more than one node, as far as the launcher says."""
    if not together_with_others():
        return False
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ""))
    return not here.isdecimal() or int(here) < int(os.environ["WORLD_SIZE"])


def own_name() -> str:
    """This rank in words, with its node where there are several."""
    rank = f"rank {os.environ.get('RANK', '0')}"
    return f"{rank} ({socket.gethostname()})" if on_several_nodes() else rank


def together_with_others() -> bool:
    """True if this process is one of several in a run, and has their meeting point."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    numbers = (os.environ.get(name, "") for name in needed if name != "MASTER_ADDR")
    return all(text.isdecimal() for text in numbers) and int(os.environ["WORLD_SIZE"]) > 1


class Meeting:
    """Comparisons of the processes of a run until its training begins, which a feature makes. Here
    nothing is compared, and torch.distributed connects the processes as the environment says.

    Attributes:
        init_method: the argument of torch.distributed's ``init_process_group``.
    """

    init_method: str | None = None

    def open(self, timeout: timedelta) -> None:
        """Connect to the others. Raises torch's DistError if they cannot be reached."""

    def begin(self, facts: Facts, lasting: bool) -> AbstractContextManager[None]:
        """Compare what the processes begin with. If it is ``lasting``, they compare more within the
        context, and learn there of an error of this one. Raises DisagreementError if they differ,
        one of them has ended, or one does not come in time."""
        return nullcontext()

    def facts(self, run: Any, *more: Any) -> Facts:
        """Return what the processes of a :class:`~megatron.run.run.Run` must have in common, of
        which ``more`` are configurations of a tool."""
        return {}

    def compare_data(self, data: Any) -> None:
        """Compare the files of a :class:`~megatron.data.loader.TrainingData`. Raises
        DisagreementError if they differ."""

    def compare_checkpoints(self, checkpoints: Sequence[Any], config: Any = None) -> None:
        """Compare each :class:`~megatron.checkpoint.source.FoundCheckpoint` that is loaded, as the
        last comparison; with the ``config`` of a run also those that its flags name next to them.
        Raises DisagreementError if they differ."""

    def give_up(self, reason: str) -> bool:
        """Tell the other processes that this one ends, if they may wait for it, and return whether
        they were told. Called by what ends a program, also before the processes have met."""
        return False


@cache
def run_meeting() -> Meeting:
    """Return the meeting of this process's run."""
    meetings = (feature.meeting() for feature in features().values())
    return next((meeting for meeting in meetings if meeting is not None), Meeting())
