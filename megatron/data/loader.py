"""The stream of one rank's micro batches, from any number of consumed samples on."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron.data.build import Datasets
from megatron.data.prefetch import AsArrays, Prefetcher, on_device
from megatron.data.sampler import MicroBatchSampler
from megatron.data.samples import SampleDataset

Batch = TypeVar("Batch")


class MicroBatches(Iterator[Batch], Generic[Batch]):
    """Iterates over micro batches; `consumed_samples` always says where the whole job stands, what
    is read ahead not counted.

    A training step takes as many as it has micro steps; the workers keep running between steps and
    between evaluations, which go on where the last one stopped.

    Args:
        dataset: sample i is int64[seq_length + 1].
        collate: makes one batch of a list of samples.
        micro_batch_size: samples of one rank in one micro step.
        data_rank: this rank among the `data_size` data-parallel ranks.
        consumed_samples: samples that all ranks together have read before.
        num_workers: processes that read ahead, with a thread of this one that takes their batches
            in; 0 reads in this one when asked.
        device: where batches are wanted; copies to a GPU overlap with its work.

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
        device: torch.device | None = None,
    ) -> None:
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._samples_per_micro_step = micro_batch_size * data_size
        sampler = MicroBatchSampler(
            len(dataset), consumed_samples, micro_batch_size, data_rank, data_size
        )
        ending = multiprocessing.RawValue(ctypes.c_bool, False)
        if num_workers:
            atexit.register(setattr, ending, "value", True)  # before multiprocessing's own hook
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # map-style by protocol, not by inheritance
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=AsArrays(collate) if num_workers else collate,
            num_workers=num_workers,
            worker_init_fn=partial(_leave_signals_to_the_trainer, ending),
            # The loader draws a seed for its workers: not from the global random state, which a
            # resumed run must find exactly where the first one left it.
            generator=torch.Generator(),
        )
        self._device = device if device is not None and device.type == "cuda" else None
        self._prefetcher: Prefetcher[Batch] | None = None
        self._batches: Iterator[Batch] = iter(loader)
        if num_workers:
            self._batches = self._prefetcher = Prefetcher(self._batches, device=self._device)

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
        if self._prefetcher is None and self._device is not None:
            batch = on_device(batch, self._device)
        return batch

    def close(self) -> None:
        """Stop the workers; there are no more batches."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._batches, self._prefetcher = iter(()), None


class TrainingData(NamedTuple):
    """What a model is trained and measured on.

    Attributes:
        datasets: samples of training, validation and test.
        collate: makes a micro batch of samples.
    """

    datasets: Datasets
    collate: Callable[[Sequence[Any]], Any]

    def batches(self, dataset: SampleDataset[Any], **options: Any) -> MicroBatches[Any]:
        """Micro batches of one of the datasets; the options are those of :class:`MicroBatches`."""
        return MicroBatches(dataset, self.collate, **options)


def _leave_signals_to_the_trainer(ending: Any, worker_id: int) -> None:
    """In a worker: let no signal end it but the one that the trainer sends at its own end.

    Schedulers signal every process of a job. The trainer then saves and stops; a worker that died
    first would take the save with it.
    """

    def on_terminate(number: int, frame: object) -> None:
        if ending.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
