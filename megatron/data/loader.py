"""The stream of one rank's micro batches, from any number of consumed samples on."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron.data.gpt_dataset import SampleDataset
from megatron.data.sampler import MicroBatchSampler

Batch = TypeVar("Batch")


class MicroBatches(Iterator[Batch], Generic[Batch]):
    """Iterates over micro batches; `consumed_samples` always says where the whole job stands.

    A training step takes as many as it has micro steps; the workers keep running between steps and
    between evaluations, which go on where the last one stopped.

    Args:
        dataset: sample i is int64[seq_length + 1].
        collate: makes one batch of a list of samples.
        micro_batch_size: samples of one rank in one micro step.
        data_rank: this rank among the `data_size` data-parallel ranks.
        consumed_samples: samples that all ranks together have read before.
        num_workers: processes that read ahead; 0 reads in this one.
        pin_memory: page-locked memory, for copies to a GPU that overlap with work.

    Raises:
        ValueError: at the end of the dataset, when another batch is asked for.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        collate: Callable[[Sequence[np.ndarray]], Batch],
        *,
        micro_batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._samples_per_micro_step = micro_batch_size * data_size
        sampler = MicroBatchSampler(
            len(dataset), consumed_samples, micro_batch_size, data_rank, data_size
        )
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # map-style by protocol, not by inheritance
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_leave_signals_to_the_trainer,
            # The loader draws a seed for its workers: not from the global random state, which a
            # resumed run must find exactly where the first one left it.
            generator=torch.Generator(),
        )
        self._batches: Iterator[Batch] = iter(loader)
        # Workers ignore the signal that the interpreter would end them with: stop them before.
        atexit.register(_close_if_alive, weakref.ref(self))

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the dataset has {len(self._dataset)} samples; {self.consumed_samples} are "
                f"consumed and the next micro step needs {self._samples_per_micro_step}: it was "
                "built for fewer samples than this run asks for"
            ) from None
        self.consumed_samples += self._samples_per_micro_step
        return batch

    def close(self) -> None:
        """Stop the workers; there are no more batches."""
        self._batches = iter(())


def _leave_signals_to_the_trainer(worker_id: int) -> None:
    # Schedulers signal every process of a job. The trainer saves and stops; a worker that died
    # first would take the save with it. Workers end when the trainer does.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _close_if_alive(reference: weakref.ref[MicroBatches[Any]]) -> None:
    batches = reference()
    if batches is not None:
        batches.close()
