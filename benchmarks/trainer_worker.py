"""One process of a trainer group: it builds the trainer and does what its parent asks for."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from products import StepShape

GLOO_THREADS = ("gloo", "pt_gloo")
"""Beginning of the names of the threads that gloo's collectives run on."""


@dataclass(frozen=True)
class Sample:
    """Costs of a group's turn.

    Attributes:
        steps: optimizer steps.
        cpu: CPU seconds of all processes, user and system.
        wall: seconds on the clock, of the slowest process.
        gloo: CPU seconds of the threads that gloo's collectives run on, of all processes; part of
            ``cpu``.
        system: CPU seconds of all processes in the kernel; part of ``cpu``.
        rss: the largest resident set of a process so far, in bytes.
        loss: loss of the last step.
    """

    steps: int
    cpu: float
    wall: float
    gloo: float
    system: float
    rss: int
    loss: float


def serve(pipe: Connection, environment: dict[str, str], flags: list[str]) -> None:
    """The life of a process: trains when the pipe says so, until its other end closes."""
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        _serve(pipe, flags)
        status = 0
    except BaseException:  # the parent is told why, whatever it is
        pipe.send((traceback.format_exc(), None))
        status = 1
    sys.stdout.flush()
    # Groups are not taken apart: gloo's threads may still hold tensors, as
    # megatron.run.process.ending_process says.
    os._exit(status)


def _serve(pipe: Connection, flags: list[str]) -> None:
    from megatron.engine.environment import distributed
    from megatron.run.run import parse_run
    from megatron.training.build import build_trainer

    run = parse_run(None, flags)
    logging.disable(logging.INFO)
    with distributed(run.config.parallel) as mesh:
        before = resident_bytes()
        worker = Worker(build_trainer(run, mesh), run, before)
        pipe.send((None, worker.parameters()))
        while True:
            try:
                question, argument = pipe.recv()
            except EOFError:
                os._exit(0)
            pipe.send((None, getattr(worker, question)(argument)))


class Worker:
    """A trainer, and what is asked of it.

    Args:
        trainer: a trainer of ``megatron.training``, with training data.
        run: the run that it was built for.
        before: resident bytes of the process before there was a model.
    """

    def __init__(self, trainer: Any, run: Any, before: int) -> None:
        self.trainer, self.run_of, self.before = trainer, run, before
        self.batches = trainer.data.batches(trainer.data.datasets.train, **trainer.reading())
        self.consumed, self.loss = 0, math.nan

    def parameters(self, _: None = None) -> int:
        """Elements of the parameters that this process's copy counts for."""
        from megatron.engine.update.optimizer import owned
        from megatron.parallel.mesh import MODEL

        engine = self.trainer.engine
        return sum(
            torch.Size(param.shard.local_shape(engine.mesh.coordinates)).numel()
            for param in engine.names
            if owned(param, engine.mesh, MODEL)
        )

    def step(self) -> None:
        """One optimizer step; the loss is read, as the log does in every tenth."""
        plan = self.trainer.plan
        micro_batches = plan.batch_size.micro_batches(self.consumed)
        result = self.trainer.engine.train_step(
            self.batches, micro_batches, self.consumed, lr=1e-4, weight_decay=0.01
        )
        self.consumed += plan.batch_size.batch_size(self.consumed)
        self.loss = float(result.loss)

    def run(self, steps: int) -> Sample:
        """Trains for some steps, from one barrier to the next."""
        dist.barrier()
        before, system = thread_seconds(), os.times().system
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        after = thread_seconds()
        gloo = sum(
            seconds - before.get(thread, 0.0)
            for thread, seconds in after.items()
            if thread[1].startswith(GLOO_THREADS)
        )
        kernel = os.times().system - system
        return Sample(steps, cpu, wall, gloo, kernel, peak_resident_bytes(), self.loss)

    def memory(self, _: None = None) -> tuple[int, float]:
        """The most bytes that were resident so far beyond those before there was a model, and the
        estimate of ``megatron.apps.planning`` for the rank that needs most."""
        from megatron.apps.planning.memory import peak_memory

        config = self.run_of.config
        micro_batches = self.trainer.plan.batch_size.micro_batches(self.consumed)
        layout = dataclasses.replace(
            config.layout(self.run_of.content), micro_batches=(micro_batches,)
        )
        model = config.model
        estimate = peak_memory(model, layout, config.training.micro_batch_size, micro_batches)
        return peak_resident_bytes() - self.before, estimate.total

    def sent(self, _: None = None) -> int:
        """Bytes that attention of a step sends from this rank to others which divide its
        sequences."""
        from megatron.features.context import exchange

        rank = self.trainer.engine.mesh.group("context").rank
        counted: list[int] = []

        def counting(name: str, count: Callable[..., int]) -> Any:
            function = getattr(exchange, name)

            def call(*args: Any, **options: Any) -> Any:
                counted.append(count(*args))
                return function(*args, **options)

            return mock.patch.object(exchange, name, call)

        def exchanged(x: torch.Tensor, sent: Sequence[int], *_: Any) -> int:
            return x.element_size() * (sum(sent) - sent[rank])

        def gathered(x: torch.Tensor, group: Any) -> int:
            return x.nbytes * (group.size - 1)

        def scattered(x: torch.Tensor, group: Any) -> int:
            return x.nbytes - x.nbytes // group.size

        with (
            counting("start_exchange", exchanged),
            counting("start_gather", gathered),
            counting("start_scatter", scattered),
        ):
            self.step()
        return sum(counted)

    def products(self, _: None = None) -> float:
        """CPU seconds of the matrix products of a replica's step, of its shapes, done here."""
        config = self.run_of.config
        micro_batches = self.trainer.plan.batch_size.micro_batches(self.consumed)
        shape = StepShape.of(config.model, config.training.micro_batch_size)
        dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        return micro_batches * shape.seconds(dtype)

    def profile(self, steps: int) -> list[tuple[str, int, float]]:
        """Name, calls and CPU seconds, without what they call, of torch's operators."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                self.step()
        return sorted(
            ((e.key, e.count, e.self_cpu_time_total / 1e6) for e in profile.key_averages()),
            key=lambda entry: -entry[2],
        )


def thread_seconds() -> dict[tuple[str, str], float]:
    """CPU seconds of each thread of this process, by its number and name."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            found[task.name, name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has ended
            continue
    return found


def resident_bytes() -> int:
    """Resident set of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The largest resident set that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
