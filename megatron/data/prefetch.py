"""Batches that are ready, and on the device, before they are asked for.

A batch from a worker process is worked up on the way: torch sends every tensor through a file
descriptor of its own, half a millisecond each, which for arrays of some kilobytes is far more than
copying them through the pipe. So they travel as arrays, and a thread takes them in: makes tensors
of them, and on a GPU copies them there on a stream of its own. The training loop finds them in a
queue.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Batch = TypeVar("Batch")


def mapped(batch: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A batch with ``change`` made to all its fields of a kind; other things as they are."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(mapped(field, kind, change) for field in batch)
    return batch


@dataclass(frozen=True)
class AsArrays(Generic[Batch]):
    """Collates samples to a batch whose tensors are arrays, for the way between processes."""

    collate: Callable[[Sequence[Any]], Batch]

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """A batch."""
        batch: Batch = mapped(self.collate(samples), Tensor, Tensor.numpy)
        return batch


class Prefetcher(Iterator[Batch], Generic[Batch]):
    """Takes batches from a source in a thread, and has them ready as tensors.

    Args:
        source: batches, of tensors or of arrays; only the thread asks for them. What it raises is
            raised when that batch is asked for, and there are none after it.
        device: where tensors are wanted; None leaves them where they are.
        ahead: batches that may be ready and unused.
    """

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device | None = None,
        ahead: int = 2,
    ) -> None:
        self._ready: queue.Queue[_Ready] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._end: BaseException | None = None
        self._thread = threading.Thread(
            target=_take_in,
            args=(source, device, self._ready, self._closing),
            name="prefetch",
            daemon=True,  # an error elsewhere must not wait for the data
        )
        self._thread.start()
        weakref.finalize(self, self._closing.set)  # the thread must not outlive its reader

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        found = self._ready.get()
        if found.error is not None:
            self._end = found.error
            raise self._end
        if found.copied is not None:
            use_from_here(found.batch, found.copied)
        batch: Batch = found.batch
        return batch

    def close(self) -> None:
        """Ends the thread; there are no more batches."""
        self._end = StopIteration()
        self._closing.set()
        with contextlib.suppress(queue.Empty):  # it may wait for room
            while True:
                self._ready.get_nowait()
        self._thread.join(timeout=5)  # it may be waiting for a worker that hangs


@dataclass(frozen=True)
class _Ready:
    batch: Any = None
    copied: torch.cuda.Event | None = None
    error: BaseException | None = None


def _take_in(
    source: Iterator[Any],
    device: torch.device | None,
    ready: queue.Queue[_Ready],
    closing: threading.Event,
) -> None:
    """The thread. It knows the source alone, so that an iterator that is let go of can end."""
    batches = _taken_in(source, device)
    while not closing.is_set():
        try:
            found = next(batches)
        except BaseException as error:  # the training loop's, whatever it is
            found = _Ready(error=error)
        while not closing.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(found, timeout=0.5)
                break
        if found.error is not None:
            return


def _taken_in(source: Iterator[Any], device: torch.device | None) -> Iterator[_Ready]:
    stream = None
    if device is not None and device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # a thread begins on the first GPU, whoever starts it
        stream = torch.cuda.Stream(device)
    for arrays in source:
        batch, copied = mapped(arrays, np.ndarray, torch.from_numpy), None
        if stream is not None:
            assert device is not None
            with torch.cuda.stream(stream):
                batch = on_device(batch, device)
                copied = torch.cuda.Event()
                copied.record()
        yield _Ready(batch, copied)


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch copied to a GPU by way of page-locked memory, on the current stream; the host does
    not wait."""

    def copy(values: Tensor) -> Tensor:
        return values.pin_memory().to(device, non_blocking=True)

    return mapped(batch, Tensor, copy)


def use_from_here(batch: Any, copied: torch.cuda.Event) -> None:
    """Lets the current stream work on a batch that another stream copies, once it is there; its
    memory is used for nothing else before that work is done."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)

    def keep(values: Tensor) -> Tensor:
        values.record_stream(stream)
        return values

    mapped(batch, Tensor, keep)
