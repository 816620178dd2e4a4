"""The path of a batch to a GPU, told by stand-ins for torch's streams and events: what is copied,
where, and who waits for what. tests/gpu/test_prefetch.py is on a GPU."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data.loader import Prefetcher

GPU = torch.device("cuda", 1)


class Batch(NamedTuple):
    tokens: np.ndarray
    mask: np.ndarray
    positions: np.ndarray | None


class Streams:
    """Notes what is done, and on which stream of which thread's device."""

    def __init__(self) -> None:
        self.done: list[tuple] = []
        self.local = threading.local()

    @property
    def current(self) -> str:
        return getattr(self.local, "stream", "compute")

    @property
    def device(self) -> int:
        return getattr(self.local, "device", 0)  # as in every new thread

    def note(self, what: str, *more: object) -> None:
        self.done.append((what, *more))


@pytest.fixture
def streams(monkeypatch) -> Streams:
    found = Streams()

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.name = found.current if device is None else f"copies on {device}"
            if device is not None:
                found.note("stream", found.device)

        def wait_event(self, event: "Event") -> None:
            found.note("wait", self.name, event.of)

    class Event:
        def record(self) -> None:
            self.of = found.current
            found.note("event", found.current)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, found.local.stream = found.current, stream.name
        yield
        found.local.stream = before

    def to(values: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        found.note("copy", found.current, device, non_blocking, values.pinned)
        return values

    def pin(values: Tensor) -> Tensor:
        pinned = values.clone()
        pinned.pinned = True
        return pinned

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream())
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: setattr(found.local, "device", device.index)
    )
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda _, stream: found.note("keep", stream.name), raising=False
    )
    return found


def test_copies_overlap_with_work_and_are_waited_for_where_they_are_used(streams):
    batches = Prefetcher(iter([Batch(np.zeros(2), np.ones(3), None)]), device=GPU)
    first = next(batches)
    batches.close()
    assert [None if x is None else x.tolist() for x in first] == [[0, 0], [1, 1, 1], None]
    copies = "copies on cuda:1"
    copy = ("copy", copies, GPU, True, True)
    assert streams.done == [
        ("stream", 1), copy, copy, ("event", copies),  # the thread, on its own GPU
        ("wait", "compute", copies), ("keep", "compute"), ("keep", "compute"),  # the reader
    ]  # fmt: skip


def test_an_error_of_the_gpu_reaches_the_reader(monkeypatch):
    """A thread that ended in silence would be waited for indefinitely."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        next(Prefetcher(iter([np.zeros(2)]), device=GPU))
