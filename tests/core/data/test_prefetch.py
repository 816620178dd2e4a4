"""Batches that are taken in ahead: the same ones, in order, with their errors, and no further."""

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron.data.gpt_batch import GPTBatch, GPTCollator
from megatron.data.loader import AsArrays, Prefetcher, mapped


class Pair(NamedTuple):
    first: np.ndarray | None
    name: str


class Source(Iterator[Pair]):
    """Counts what is taken; ends or fails where told."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.taken, self.count, self.error = 0, count, error

    def __next__(self) -> Pair:
        if self.taken == self.count:
            raise self.error or StopIteration
        self.taken += 1
        return Pair(np.full(2, self.taken), "x")


def wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_same_batches_in_order_as_tensors():
    found = list(Prefetcher(Source(20)))
    assert [batch.first.tolist() for batch in found] == [[n, n] for n in range(1, 21)]
    assert all(torch.is_tensor(batch.first) and batch.name == "x" for batch in found)


@pytest.mark.parametrize("ahead", [1, 3])
def test_takes_so_many_ahead_and_no_more(ahead):
    source = Source(20)
    batches = Prefetcher(source, ahead=ahead)
    for used in range(3):
        # Those in the queue, and the one in the hands of the thread.
        wait_until(lambda used=used: source.taken == used + ahead + 1)
        time.sleep(0.02)
        assert source.taken == used + ahead + 1
        next(batches)
    batches.close()


def test_an_error_is_raised_with_its_batch_and_again():
    batches = Prefetcher(Source(2, ValueError("document 7 is cut short")))
    assert [next(batches).first[0] for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="document 7"):
            next(batches)


@pytest.mark.parametrize("take", [0, 3])
def test_close_ends_the_thread(take):
    batches = Prefetcher(Source(1000))
    for _ in range(take):
        next(batches)
    batches.close()
    assert not batches._thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


def test_thread_ends_with_its_reader():
    batches = Prefetcher(Source(1000))
    thread = batches._thread
    del batches
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_arrays_carry_a_batch_whole():
    collate = GPTCollator(9, reset_position_ids=True, eod_mask_loss=True)
    samples = [np.array([1, 9, 3, 4, 9]), np.array([5, 6, 7, 8, 2])]
    arrays, batch = AsArrays(collate)(samples), collate(samples)
    assert isinstance(arrays, GPTBatch) and isinstance(arrays.tokens_BS, np.ndarray)
    again = mapped(arrays, np.ndarray, torch.from_numpy)
    for found, expected in zip(again, batch, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or (found.dtype == expected.dtype and torch.equal(found, expected))


def test_the_loop_finds_batches_that_another_thread_has_made():
    made: list[int] = []

    def source() -> Iterator[np.ndarray]:
        for number in range(6):
            made.append(threading.get_ident())
            yield np.full(1, number)

    batches = Prefetcher(source())
    for number in range(4):
        # The next two are there before anybody asks, and no more are made meanwhile.
        wait_until(lambda: batches._ready.qsize() == 2)
        assert len(made) in (number + 2, number + 3)
        assert next(batches).item() == number
    assert threading.get_ident() not in made
    batches.close()
