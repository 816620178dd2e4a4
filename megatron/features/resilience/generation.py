"""What a trainer and the guardian that started it tell each other."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass


class TrainerProgress(ctypes.Structure):
    """Numbers in memory that a trainer shares with its guardian.

    Attributes:
        iteration: the last step that is done.
        saves: how many checkpoints this trainer has completed.
        replica: processes of one replica of the model.
        micro_batch: samples that a replica computes at a time.
        global_batch: samples of a step.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("iteration", "saves", "replica", "micro_batch", "global_batch")
    )
    iteration: int
    saves: int
    replica: int
    micro_batch: int
    global_batch: int

    @classmethod
    def shared(cls) -> TrainerProgress:
        """Zeros that forked processes share."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))


@dataclass(frozen=True)
class RunGeneration:
    """The trainers of a run between one failure and the next.

    Attributes:
        number: counts from 0.
        progress: where this trainer says how far it is.
        started: when the guardian began, by ``time.monotonic``.
        failure: why the trainers before it ended, in words; None for the first.
        failed_at: when that was, by ``time.monotonic``.
        lost_iteration: the last step that they had done.
        batch: the global batch size of the first trainers; 0 where it is not known.
    """

    number: int
    progress: TrainerProgress
    started: float
    failure: str | None = None
    failed_at: float = 0.0
    lost_iteration: int = 0
    batch: int = 0


class _Own:
    generation: RunGeneration | None = None


def current() -> RunGeneration | None:
    """That of this process; None where no guardian has started it."""
    return _Own.generation


def begin(generation: RunGeneration) -> None:
    """Says what this process is, once, when it begins."""
    _Own.generation = generation
