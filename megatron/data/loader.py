"""The stream of one rank's micro batches: read ahead by worker processes, ready on the device.

Workers send batches as arrays, through a pipe: torch would send every tensor through a separate
file descriptor, half a millisecond each, far more than copying some kilobytes. A thread receives
them, makes tensors of them and copies these to the GPU on a separate stream. The training loop
takes them from a queue.
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
"""After which a batch that does not come may have been given up."""


class MicroBatches(Iterator[Batch], Generic[Batch]):
    """Iterates over micro batches: `num_workers` processes read ahead, and copies to a GPU overlap
    with its work. ValueError if another batch is requested at the end of the dataset.

    A training step takes one per micro step; workers keep running between steps and between
    evaluations, which continue where the last one stopped. `consumed_samples` is the position of
    the whole job, without what is read ahead.
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
        # torch counts the one core that a rank is bound to, and advises against the default of two.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader: DataLoader[Any] = DataLoader(
            _Samples(dataset, bool(num_workers)),  # type: ignore[arg-type]  # map-style by protocol
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=AsArrays(collate) if num_workers else collate,
            num_workers=num_workers,
            worker_init_fn=partial(_begin_worker, ending),
            # The loader draws a seed for its workers. Not from the global random state, which a
            # resumed run must find exactly as the first run left it.
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
            # Before the hook of multiprocessing, which would wait for one that is stopped.
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
            # multiprocessing would wait for them at the end of the process.
            atexit.register(_kill, self._readers())
            raise
        except LostWorkerError:
            raise
        except RuntimeError:  # torch's, which has found a worker dead
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
    """The samples that a model is trained and evaluated on, and the collator of their batches.

    Attributes:
        weighed: whether batches have ``weights_2``, and may differ in length.
        files: returns what the samples are made of.
        ordered: makes the training samples in their order, without those of some ``--skip-samples``
            ranges; by default ``datasets.train`` without them.
        sizes: returns the tokens that the training samples are made of, by file, where known.
    """

    datasets: Datasets
    collate: Callable[[Sequence[Any]], Any]
    weighed: bool = False
    files: Callable[[], Sequence[DataFile]] = list
    ordered: Callable[[Sequence[str]], SampleDataset[Any] | None] | None = None
    sizes: Callable[[], Sequence[PortionSize]] = list

    def skipping(self, ranges: Sequence[str]) -> TrainingData:
        """The same without training samples of these ranges, instead of its current ranges. Raises
        ConfigError if a range is malformed or beyond the end of the data."""
        ordered = self.ordered or partial(without_samples, self.datasets.train)
        datasets = self.datasets._replace(train=ordered(ranges))
        return self._replace(datasets=datasets, ordered=ordered)

    def batches(self, dataset: SampleDataset[Any], **options: Any) -> MicroBatches[Any]:
        """Micro batches of one of the datasets; options: see :class:`MicroBatches`."""
        return MicroBatches(dataset, self.collate, **options)


class _Failure(NamedTuple):
    """Sent by a worker instead of a batch that it cannot make."""

    error: Exception


@dataclass(frozen=True)
class _Samples:
    """The samples of a micro batch. Errors name the sample; a worker returns those with a message
    for users, of which torch would make a traceback."""

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
    """Workers need semaphores, which are small files in /dev/shm."""
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
    """Leave SIGCHLD unchanged. Torch's handler, set when it starts workers, raises wherever the
    main thread is when one dies, be it in a save; that its batches do not come is enough to tell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if before is not None:  # a handler of a library in C, which Python cannot set again
            signal.signal(signal.SIGCHLD, before)


def _check_alive(workers: Sequence[Any], ended: bool = False) -> None:
    """Raises LostWorkerError if one of the processes has died; with ``ended`` also if one has ended
    as workers do after the last batch."""
    for worker in workers:
        code = worker.exitcode
        if code is None or (code == 0 and not ended):
            continue
        why = "; its message is above" if code >= 0 else ""
        raise LostWorkerError(
            f"process {worker.pid} of --num-workers, which reads data, {death(code)}{why}"
        )


def _begin_worker(ending: Any, worker_id: int) -> None:
    """In a worker: ignore all signals but the trainer's own at its end. Schedulers signal every
    process of a job. The trainer then saves and stops; a worker that died first would make the save
    fail. It ends with the trainer, even when it is stopped."""
    die_with_parent()
    signal.set_wakeup_fd(-1)  # that of the trainer's watchdog, which would take signals for its own

    def on_terminate(number: int, frame: object) -> None:
        if ending.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    name_lost_pages()  # torch has its own handler in workers


def _continue(workers: Sequence[Any]) -> None:
    """Lets workers that are stopped end with the others."""
    for worker in workers:
        with contextlib.suppress(OSError):
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGCONT)


def _kill(workers: Sequence[int]) -> None:
    """Ends workers that do not answer."""
    for worker in workers:
        with contextlib.suppress(OSError):
            os.kill(worker, signal.SIGKILL)


def mapped(batch: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A batch with ``change`` applied to all its fields of one type."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(mapped(field, kind, change) for field in batch)
    return batch


@dataclass(frozen=True)
class AsArrays(Generic[Batch]):
    """Collates samples to a batch of arrays instead of tensors, to send it to another process."""

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
    """The next batch does not arrive; the message names the cause."""


class LostWorkerError(FaultError):
    """A process that reads data has died; the message says which, and how."""

    status = RESTART_STATUS
    """The rank that lost it reports it."""


class Prefetcher(Iterator[Batch], Generic[Batch]):
    """Takes batches from a source in a thread and converts them to tensors. An error of the source
    is raised in the place of its batch, and ends the iteration. At most `ahead` batches are ready
    and unused. While a batch does not come, `check` is called, which may raise."""

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
            daemon=True,  # an error elsewhere must not wait for the data
        )
        self._thread.start()
        weakref.finalize(self, self._closing.set)  # the thread must not outlive its reader

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
        """The next one; StalledDataError if who watches gives it up."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=_SECONDS_BETWEEN_LOOKS)
            if activity.give_up:
                raise StalledDataError(activity.give_up)
            self._check()

    def close(self) -> None:
        self._end = StopIteration()
        self._closing.set()
        with contextlib.suppress(queue.Empty):  # the thread may be waiting for space
            while True:
                self._ready.get_nowait()
        self._thread.join(timeout=5)  # it may be waiting for a worker that hangs


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
    """The thread. It has no reference to the Prefetcher, so that an unused one is collected."""
    batches = _as_tensors(source, device)
    while not closing.is_set():
        try:
            batch = next(batches)
        except BaseException as error:  # any error, to be raised in the training loop
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
    """The batch copied to a GPU through page-locked memory on the current stream; the CPU does not
    synchronize."""
    return mapped(batch, Tensor, lambda t: t.pin_memory().to(device, non_blocking=True))


def _use_on_current_stream(batch: Any, copied: torch.cuda.Event) -> None:
    """Makes the current stream wait for a batch that another stream copies, and keeps its memory
    from being reused before the current stream is done with it."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)

    def keep(values: Tensor) -> Tensor:
        values.record_stream(stream)
        return values

    mapped(batch, Tensor, keep)
