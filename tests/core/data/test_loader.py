"""The stream of micro batches: layouts, resume, workers, ends."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from samples import sampled

from megatron.data.gpt_batch import GPTCollator
from megatron.data.gpt_dataset import MockGPTDataset
from megatron.data.loader import LostWorkerError, MicroBatches
from megatron.data.samples import check_ids, checked_index
from megatron.util.errors import RESTART_STATUS

GLOBAL_BATCH = 8


class Numbers:
    """Sample i is [i, i]: shows what was read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(2, index)


def stream(count: int = 64, **arguments: int) -> MicroBatches:
    return MicroBatches(Numbers(count), np.stack, **arguments)


def numbers(batch: np.ndarray) -> tuple[int, ...]:
    return tuple(batch[:, 0].tolist())


@pytest.mark.parametrize("consumed", [0, 8, 16])
def test_layouts_see_the_same_micro_batches_per_step(consumed: int) -> None:
    """Data-parallel sizes 1, 2, 4 with 4, 2, 1 micro steps of 2 samples; 3 steps."""
    steps = {}
    for data_size in (1, 2, 4):
        ranks = [
            stream(micro_batch_size=2, data_rank=r, data_size=data_size, consumed_samples=consumed)
            for r in range(data_size)
        ]
        steps[data_size] = [
            {numbers(next(rank)) for rank in ranks for _ in range(4 // data_size)} for _ in range(3)
        ]
        assert all(rank.consumed_samples == consumed + 3 * GLOBAL_BATCH for rank in ranks)
    assert steps[1] == steps[2] == steps[4]
    assert sorted(i for batch in steps[1][0] for i in batch) == list(range(consumed, consumed + 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_any_count_gives_the_same_stream(workers: int) -> None:
    whole = [
        numbers(batch) for _, batch in zip(range(32), stream(micro_batch_size=2), strict=False)
    ]
    for done in (1, 2, 7, 31):
        resumed = stream(micro_batch_size=2, consumed_samples=2 * done, num_workers=workers)
        left = [numbers(next(resumed)) for _ in range(32 - done)]
        assert left == whole[done:]
        resumed.close()


def test_resume_at_another_data_parallel_size_in_a_ramp_up() -> None:
    """Global batches of 4, 4, 8, 8 samples on 1 rank; then on 2 ranks from the middle."""
    one = stream(micro_batch_size=1)
    steps = [[numbers(next(one))[0] for _ in range(size)] for size in (4, 4, 8, 8)]
    ranks = [
        stream(micro_batch_size=1, data_rank=r, data_size=2, consumed_samples=4) for r in (0, 1)
    ]
    for size, step in zip((4, 8, 8), steps[1:], strict=True):
        found = [numbers(next(rank))[0] for _ in range(size // 2) for rank in ranks]
        assert found == step


def test_end_of_the_dataset_is_an_error() -> None:
    batches = stream(10, micro_batch_size=4)
    next(batches), next(batches)
    with pytest.raises(ValueError, match="has 10 samples; 8 are consumed .* needs 4"):
        next(batches)


def test_read_ahead_does_not_raise_before_the_end() -> None:
    batches = stream(10, micro_batch_size=2, num_workers=2)
    assert [numbers(next(batches)) for _ in range(5)][-1] == (8, 9)
    with pytest.raises(ValueError, match="10 are consumed"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_leaves_the_global_random_state_alone(workers: int) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches = stream(micro_batch_size=2, num_workers=workers)
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
    batches.close()


def test_batches_through_workers() -> None:
    dataset = MockGPTDataset(40, 16, 100, seed=1, eod_token=99)
    collate = GPTCollator(99, True, True, True)
    here = MicroBatches(dataset, collate, micro_batch_size=4)
    there = MicroBatches(dataset, collate, micro_batch_size=4, num_workers=2)
    for _ in range(10):
        for a, b in zip(next(here), next(there), strict=True):
            assert a is b is None or torch.equal(a, b)
    there.close()


def test_workers_outlive_the_signal_that_asks_the_trainer_to_save() -> None:
    """And the trainer, whose signals a thread of its own hears, does not take it for its own."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    heard = signal.set_wakeup_fd(writer.fileno())
    before = set(multiprocessing.active_children())
    batches = stream(micro_batch_size=1, num_workers=2)
    next(batches), next(batches)  # one of each worker: both are up
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGUSR1)
    assert [numbers(next(batches))[0] for _ in range(60)] == list(range(2, 62))
    batches.close()
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
    signal.set_wakeup_fd(heard)
    with contextlib.suppress(BlockingIOError):
        assert set(reader.recv(64)) <= {signal.SIGCHLD}


PROGRAM = """
from test_loader import stream
batches = stream(micro_batch_size=1, num_workers=2)
next(batches)
{end}
"""


KILL_A_WORKER = """
import multiprocessing
multiprocessing.active_children()[0].kill()
for batch in batches: pass
"""


@pytest.mark.parametrize(
    ("end", "code"),
    sampled(
        [("raise SystemExit(3)", 3), ("raise ValueError('x')", 1), (KILL_A_WORKER, 1)],
        lambda case: case[0] == KILL_A_WORKER,
    ),
    ids=["exit", "error", "killed worker"],
)
def test_an_open_stream_does_not_keep_the_program_from_ending(end: str, code: int) -> None:
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([os.path.dirname(__file__), *sys.path])
    )
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    result = subprocess.run(program, env=environment, timeout=60, capture_output=True)
    assert result.returncode == code, result.stderr.decode()


class Failing(Numbers):
    """Fails at sample 5; at sample 3 the process that reads it ends."""

    def __init__(self, count: int, error: Exception | None, end: int | None = None) -> None:
        super().__init__(count)
        self.error, self.end = error, end

    def __getitem__(self, index: int) -> np.ndarray:
        if self.error is not None and index == 5:
            checked_index(1, 0) if isinstance(self.error, IndexError) else check_ids(
                np.array([7]), 5, index, lambda sample: []
            )
        if self.end is not None and index == 3:
            os.kill(os.getpid(), self.end) if self.end else os._exit(2)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_about_data_arrives_as_it_was_raised(workers: int) -> None:
    """And any other with the traceback of the process that it comes from."""
    for error, message in (
        (ValueError(), "^the token id 7, but the vocabulary has 5 ids"),
        (IndexError(), "sample 1 of a dataset of 0"),
    ):
        others = set(multiprocessing.active_children())  # of this session, as the pool's
        batches = MicroBatches(
            Failing(64, error), np.stack, micro_batch_size=2, num_workers=workers
        )
        next(batches), next(batches)
        with pytest.raises(type(error), match=message) as raised:
            next(batches)
        assert ("Traceback" in str(raised.value)) == (workers and isinstance(error, IndexError))
        for process in set(multiprocessing.active_children()) - others:
            with contextlib.suppress(RuntimeError):  # torch's, about the killed process
                process.kill()  # torch would wait for them for ten seconds
                process.join()


@pytest.mark.parametrize(
    "end, message",
    [
        (signal.SIGKILL, r"process \d+ of --num-workers, .* by SIGKILL .* memory runs out"),
        pytest.param(signal.SIGSEGV, "killed by SIGSEGV$", marks=pytest.mark.proof),
        pytest.param(signal.SIGBUS, "status 2; its message is above", marks=pytest.mark.proof),
        (0, r"process \d+ of --num-workers, .* exit status 2; its message is above"),
    ],
)
def test_a_lost_worker_is_explained(end: int, message: str) -> None:
    dataset = Failing(64, None, end)
    with pytest.raises(LostWorkerError, match=message) as raised:
        batches = MicroBatches(dataset, np.stack, micro_batch_size=1, num_workers=1)
        for _ in range(8):
            next(batches)
    assert raised.value.status == RESTART_STATUS


def test_a_lost_worker_interrupts_nothing_but_the_wait_for_its_batches() -> None:
    """Torch would raise at once, also in the middle of a save."""
    others = set(multiprocessing.active_children())
    batches = MicroBatches(Failing(64, None), np.stack, micro_batch_size=1, num_workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    for _ in range(100):  # a save, in which Python's handlers run
        time.sleep(0.001)
    with pytest.raises(LostWorkerError, match=f"process {worker.pid} of --num-workers"):
        for _ in range(64):
            next(batches)


def test_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(loader: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", full)
    with pytest.raises(OSError, match="--num-workers 2: /dev/shm.*--shm-size.*--num-workers 0"):
        stream(micro_batch_size=2, num_workers=2)
