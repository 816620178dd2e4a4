"""One rank's stream of micro batches, read ahead by worker processes and copied to the GPU.

Workers send batches as arrays through a pipe. torch would send every tensor through a file
descriptor of its own, which takes half a millisecond, far more than copying a few kilobytes. A
thread receives the arrays, converts them to tensors, and copies these to the GPU on a separate
stream. The training loop takes the batches from a queue.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import multiprocessing
import os
import queue
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.data.build import DataFile, Datasets, PortionSize
from megatron.data.sampler import MicroBatchSampler, without_samples
from megatron.data.samples import SampleDataset
from megatron.util.errors import RESTART_STATUS, FaultError, is_for_users, name_lost_pages
from megatron.util.phases import activity, phase
from megatron.util.processes import death, die_with_parent

Batch = TypeVar("Batch")

_SECONDS_BETWEEN_LOOKS = 0.5
"""Seconds between checks whether the watchdog has given up on a batch that does not arrive."""


class MicroBatches(Iterator[Batch], Generic[Batch]):
    """Iterator over micro batches. `num_workers` processes read ahead, and copies to a GPU overlap
    with its computation. Raises ValueError if a batch beyond the end of the dataset is requested.

    A training step consumes one batch per micro step. Workers keep running between steps and
    between evaluations, which continue where the last one stopped. `consumed_samples` is the
    position of the whole job. Samples that are only read ahead do not count.
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
        # torch counts only the core that a rank is bound to, and warns about the default of two.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader: DataLoader[Any] = DataLoader(
            _Samples(dataset, bool(num_workers)),  # type: ignore[arg-type]  # map-style by protocol
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=AsArrays(collate) if num_workers else collate,
            num_workers=num_workers,
            worker_init_fn=partial(_begin_worker, ending),
            # The loader draws a seed for its workers. Drawing from the global random state would
            # make a resumed run differ from the first one.
            generator=torch.Generator(),
        )
        self._device = device if device is not None and device.type == "cuda" else None
        self._prefetcher: Prefetcher[Batch] | None = None
        self._workers: Sequence[Any] = ()
        self._name = f"{len(dataset):,} samples, of which {consumed_samples:,} are consumed"
        with _naming_shared_memory(num_workers), _without_signals_of_workers():
            self._batches: Iterator[Batch] = iter(loader)
        if num_workers:
            workers = self._workers = getattr(self._batches, "_workers", ())
            # Runs before multiprocessing's exit hook, which would wait for a stopped worker.
            atexit.register(_continue, workers)
            check = partial(_check_alive, workers)
            self._batches = self._prefetcher = Prefetcher(
                self._batches, device=self._device, check=check
            )

    def __next__(self) -> Batch:
        try:
            with phase("data", self._name, self._readers if self._workers else None):
                batch = next(self._batches)
        except StalledDataError:
            # Otherwise multiprocessing would wait for these workers at exit.
            atexit.register(_kill, self._readers())
            raise
        except LostWorkerError:
            raise
        except RuntimeError:  # torch found a dead worker
            _check_alive(self._workers, ended=True)
            raise
        except StopIteration:
            raise ValueError(
                f"the dataset has {len(self._dataset)} samples; {self.consumed_samples} are "
                f"consumed and the next micro step needs {self._samples_per_micro_step}: it was "
                "built for fewer samples than this run needs"
            ) from None
        self.consumed_samples += self._samples_per_micro_step
        if self._prefetcher is None and self._device is not None:
            batch = _on_device(batch, self._device)
        return batch

    def _readers(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._batches, self._prefetcher = iter(()), None


class TrainingData(NamedTuple):
    """Datasets for training and evaluation, and the collator for their batches.

    Attributes:
        weighed: whether batches have ``weights_2``, and may differ in length.
        files: returns the files that the samples are made from.
        ordered: returns the training samples in order, without the given ``--skip-samples`` ranges;
            by default those of ``datasets.train``.
        sizes: returns the number of tokens and the weight of each training file, where known.
    """

    datasets: Datasets
    collate: Callable[[Sequence[Any]], Any]
    weighed: bool = False
    files: Callable[[], Sequence[DataFile]] = list
    ordered: Callable[[Sequence[str]], SampleDataset[Any] | None] | None = None
    sizes: Callable[[], Sequence[PortionSize]] = list

    def skipping(self, ranges: Sequence[str]) -> TrainingData:
        """Return the same data without the training samples in ``ranges``, which replace the
        current ranges. Raises ConfigError if a range is malformed or beyond the end of the data."""
        ordered = self.ordered or partial(without_samples, self.datasets.train)
        datasets = self.datasets._replace(train=ordered(ranges))
        return self._replace(datasets=datasets, ordered=ordered)

    def batches(self, dataset: SampleDataset[Any], **options: Any) -> MicroBatches[Any]:
        """Return an iterator over micro batches. ``options`` are those of :class:`MicroBatches`."""
        return MicroBatches(dataset, self.collate, **options)


class _Failure(NamedTuple):
    """Message that a worker sends instead of a batch if an error occurs."""

    error: Exception


@dataclass(frozen=True)
class _Samples:
    """Dataset that returns all samples of a micro batch at once. A worker returns errors for users
    as a :class:`_Failure`, because torch would turn a raised one into a traceback."""

    dataset: SampleDataset[Any]
    in_worker: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any] | _Failure:
        samples = []
        for number in numbers:
            try:
                samples.append(self.dataset[number])
            except (ValueError, OSError) as error:
                if not (self.in_worker and is_for_users(error)):
                    raise
                return _Failure(error)
        return samples


@contextlib.contextmanager
def _naming_shared_memory(num_workers: int) -> Iterator[None]:
    """Add a remedy to errors about /dev/shm, where workers' semaphores are small files."""
    try:
        yield
    except OSError as error:
        if not num_workers or error.errno not in (errno.ENOSPC, errno.EACCES, errno.ENOENT):
            raise
        raise OSError(
            f"--num-workers {num_workers}: /dev/shm, by which processes share memory, cannot be "
            f"written ({error.strerror}); make it larger (docker run --shm-size 1g, or mount -o "
            "remount,size=1g /dev/shm) or delete what is left there, or give --num-workers 0"
        ) from error


@contextlib.contextmanager
def _without_signals_of_workers() -> Iterator[None]:
    """Keep torch from installing its SIGCHLD handler, which raises an error anywhere in the main
    thread, even in a save, when a worker dies. Missing batches reveal a dead worker anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:  # None: set by a C library, so Python cannot restore it
            signal.signal(signal.SIGCHLD, before)


def _check_alive(workers: Sequence[Any], ended: bool = False) -> None:
    """Raise LostWorkerError if a worker has died, or with ``ended`` if it has exited at all."""
    for worker in workers:
        code = worker.exitcode
        if code is None or (code == 0 and not ended):
            continue
        why = "; its message is above" if code >= 0 else ""
        raise LostWorkerError(
            f"process {worker.pid} of --num-workers, which reads data, {death(code)}{why}"
        )


def _begin_worker(ending: Any, worker_id: int) -> None:
    """Make a worker ignore SIGINT, SIGUSR1, SIGUSR2, and SIGTERM until the trainer exits.
    Schedulers signal every process of a job; the trainer then saves, which would fail if a worker
    had died. A worker ends with the trainer, even if it is stopped."""
    die_with_parent()
    signal.set_wakeup_fd(-1)  # otherwise the trainer's watchdog reads the worker's signals

    def on_terminate(number: int, frame: object) -> None:
        if ending.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    name_lost_pages()  # replaces torch's own handler in workers


def _continue(workers: Sequence[Any]) -> None:
    """Send SIGCONT to stopped workers, so that they can exit."""
    for worker in workers:
        with contextlib.suppress(OSError):
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGCONT)


def _kill(workers: Sequence[int]) -> None:
    """Kill workers that do not respond."""
    for worker in workers:
        with contextlib.suppress(OSError):
            os.kill(worker, signal.SIGKILL)


def mapped(batch: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a batch with ``change`` applied to all its values of the type ``kind``."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(mapped(field, kind, change) for field in batch)
    return batch


@dataclass(frozen=True)
class AsArrays(Generic[Batch]):
    """Collator whose batches contain arrays instead of tensors, for sending to another process."""

    collate: Callable[[Sequence[Any]], Batch]

    def __call__(self, samples: Sequence[Any] | _Failure) -> Batch | _Failure:
        if isinstance(samples, _Failure):
            return samples
        try:
            batch: Batch = mapped(self.collate(samples), Tensor, Tensor.numpy)
        except (ValueError, OSError) as error:
            if not is_for_users(error):
                raise
            return _Failure(error)
        return batch


class StalledDataError(FaultError):
    """Raised when the next batch does not arrive. The message gives the cause."""


class LostWorkerError(FaultError):
    """Raised when a data worker has died. The message gives its process id and how it died."""

    status = RESTART_STATUS
    """Exit code of the rank whose worker died."""


class Prefetcher(Iterator[Batch], Generic[Batch]):
    """Iterator that reads batches from a source in a thread and converts them to tensors. At most
    `ahead` batches are queued. An error in the source is raised in place of its batch and ends the
    iteration. `check` is called while a batch does not arrive, and may raise."""

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device | None = None,
        ahead: int = 2,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._ready: queue.Queue[_Ready] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._end: BaseException | None = None
        self._thread = threading.Thread(
            target=_fill_queue,
            args=(source, device, self._ready, self._closing),
            name="prefetch",
            daemon=True,  # the thread must not delay the exit after an error
        )
        self._thread.start()
        weakref.finalize(self, self._closing.set)  # stops the thread

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        ready = self._next_ready()
        if ready.error is not None:
            self._end = ready.error
            raise self._end
        if ready.copied is not None:
            _use_on_current_stream(ready.batch, ready.copied)
        batch: Batch = ready.batch
        return batch

    def _next_ready(self) -> _Ready:
        """Return the next item. Raises StalledDataError if the watchdog has given up on it."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_SECONDS_BETWEEN_LOOKS)
            if activity.give_up:
                raise StalledDataError(activity.give_up)
            self._check()

    def close(self) -> None:
        self._end = StopIteration()
        self._closing.set()
        with contextlib.suppress(queue.Empty):  # unblocks a thread that waits for space
            while True:
                self._ready.get_nowait()
        self._thread.join(timeout=5)  # it may wait for a worker that hangs


class _Ready(NamedTuple):
    batch: Any = None
    copied: torch.cuda.Event | None = None
    error: BaseException | None = None


def _fill_queue(
    source: Iterator[Any],
    device: torch.device | None,
    ready: queue.Queue[_Ready],
    closing: threading.Event,
) -> None:
    """Run the prefetch thread. It has no reference to the Prefetcher, so that can be collected."""
    batches = _as_tensors(source, device)
    while not closing.is_set():
        try:
            batch = next(batches)
        except BaseException as error:  # any error, raised again in the training loop
            batch = _Ready(error=error)
        while not closing.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(batch, timeout=0.5)
                break
        if batch.error is not None:
            return


def _as_tensors(source: Iterator[Any], device: torch.device | None) -> Iterator[_Ready]:
    stream = None
    if device is not None and device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # a new thread starts on the first GPU
        stream = torch.cuda.Stream(device)
    for arrays in source:
        if isinstance(arrays, _Failure):
            raise arrays.error
        batch, copied = mapped(arrays, np.ndarray, torch.from_numpy), None
        if stream is not None:
            assert device is not None
            with torch.cuda.stream(stream):
                batch = _on_device(batch, device)
                copied = torch.cuda.Event()
                copied.record()
        yield _Ready(batch, copied)


def _on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch copied to a GPU through pinned memory on the current stream, without
    synchronizing the CPU."""
    return mapped(batch, Tensor, lambda t: t.pin_memory().to(device, non_blocking=True))


def _use_on_current_stream(batch: Any, copied: torch.cuda.Event) -> None:
    """Make the current stream wait until another stream has copied a batch, and keep the batch's
    memory from being reused before the current stream has used it."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)

    def keep(values: Tensor) -> Tensor:
        values.record_stream(stream)
        return values

    mapped(batch, Tensor, keep)
