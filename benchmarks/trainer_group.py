"""Trainers of this project in processes of their own, which train when they are told to.

A group is the processes of one layout. It is built once and then runs steps whenever its parent
says so, while all other groups wait: measurements of several layouts or sizes can so take turns in
one run, and what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing as mp
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from products import product_seconds

GLOO_THREADS = ("gloo", "pt_gloo")
"""How the names of the threads begin that gloo's collectives run on."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the GPT that is trained, and of its batches.

    Attributes:
        layers: blocks.
        hidden: hidden size; heads are 64 wide.
        sequence: tokens of a sample.
        vocabulary: tokens of the vocabulary, a multiple of 128.
        micro_batch: samples that a process takes through the model at once.
        micro_batches: micro batches of a step.
    """

    layers: int = 4
    hidden: int = 256
    sequence: int = 256
    vocabulary: int = 8192
    micro_batch: int = 8
    micro_batches: int = 1

    def flags(self, replicas: int) -> list[str]:
        """Flags of ``pretrain_gpt.py`` that train this on made-up data."""
        heads = max(1, self.hidden // 64)
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {heads} --seq-length {self.sequence} "
            f"--micro-batch-size {self.micro_batch} "
            f"--global-batch-size {self.micro_batch * self.micro_batches * replicas} "
            f"--tokenizer-type NullTokenizer --vocab-size {self.vocabulary - 1} --mock-data "
            "--num-workers 0 --eval-iters 0 --lr 1e-4 --train-iters 100000 --peak-tflops 1 "
            "--hidden-dropout 0 --attention-dropout 0"
        ).split()

    @property
    def name(self) -> str:
        """Its numbers, for tables."""
        return (
            f"{self.layers} layers, hidden {self.hidden}, sequence {self.sequence}, "
            f"vocabulary {self.vocabulary:,}, {self.micro_batches} x {self.micro_batch} samples"
        )


@dataclass(frozen=True)
class LayoutFlags:
    """A layout by its flags.

    Attributes:
        name: short name, as in tables.
        processes: how many there are.
        replicas: data-parallel replicas.
        flags: what ``pretrain_gpt.py`` is given besides the model.
        copies: how many such trainings run beside each other, knowing nothing of each other.
        gloo: whether all collectives are left to gloo, also where ranks could share memory.
    """

    name: str
    processes: int
    replicas: int
    flags: tuple[str, ...] = ()
    copies: int = 1
    gloo: bool = False


def _layout(
    name: str,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    more: str = "",
    copies: int = 1,
    gloo: bool = False,
) -> LayoutFlags:
    sizes = ("--tensor-model-parallel-size", str(tensor))
    sizes += ("--pipeline-model-parallel-size", str(pipeline))
    flags = (*sizes, *more.split())
    return LayoutFlags(name, tensor * pipeline * data, data, flags, copies, gloo)


_ZERO = "--zero-stage"
LAYOUTS = {
    each.name: each
    for each in (
        _layout("dp1", more=f"{_ZERO} 1"),
        _layout("2 x dp1", more=f"{_ZERO} 1", copies=2),
        _layout("4 x dp1", more=f"{_ZERO} 1", copies=4),
        _layout("dp2", data=2, more=f"{_ZERO} 1"),
        _layout("dp2-zero2", data=2, more=f"{_ZERO} 2"),
        _layout("dp2-zero3", data=2, more=f"{_ZERO} 3"),
        _layout("tp2", tensor=2, more=f"{_ZERO} 1"),
        _layout("tp2-sp", tensor=2, more=f"{_ZERO} 1 --sequence-parallel"),
        _layout("tp2-gloo", tensor=2, more=f"{_ZERO} 1", gloo=True),
        _layout("tp2-sp-gloo", tensor=2, more=f"{_ZERO} 1 --sequence-parallel", gloo=True),
        _layout("pp2", pipeline=2, more=f"{_ZERO} 1"),
        _layout("dp4", data=4, more=f"{_ZERO} 1"),
        _layout("tp2-dp2", tensor=2, data=2, more=f"{_ZERO} 1"),
        _layout("tp4", tensor=4, more=f"{_ZERO} 1"),
        _layout("pp2-tp2", pipeline=2, tensor=2, more=f"{_ZERO} 1"),
    )
}
"""Layouts by name. "2 x dp1" are two trainings of one process each that know nothing of each other:
what two cores can do that share memory and caches, the most that two processes can reach. Those
with "gloo" leave to gloo what tensor-parallel ranks otherwise do in shared memory."""


@dataclass(frozen=True)
class Sample:
    """What a group's turn took.

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


class TrainerGroup:
    """The processes of one layout; built when the object is, closed by :meth:`close`.

    Args:
        layout: the layout.
        shape: the model and its batches.
        flags: further flags of the trainer.
    """

    def __init__(self, layout: LayoutFlags, shape: Shape, flags: Sequence[str] = ()) -> None:
        self.layout, self.shape = layout, shape
        self.pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        # A store of its own for each training: no port is free at one moment and taken at the next.
        self.stores: list[dist.TCPStore] = []
        command = [*shape.flags(layout.replicas), *layout.flags, *flags]
        context = mp.get_context("spawn")
        try:
            for _ in range(layout.copies):
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                self.stores.append(store)
                for rank in range(layout.processes):
                    env = rank_environment(rank, layout.processes, store.port)
                    env["MEGATRON_NO_HOST_MEMORY"] = str(int(layout.gloo))
                    pipe, far_end = context.Pipe()
                    process = context.Process(
                        target=serve,
                        args=(far_end, env, command),
                        daemon=True,
                    )
                    process.start()
                    far_end.close()
                    self.pipes.append(pipe)
                    self.processes.append(process)
            self.parameters = sum(self._replies()) // (layout.replicas * layout.copies)
        except BaseException:
            self.close()
            raise

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all its trainings."""
        shape = self.shape
        samples = shape.micro_batch * shape.micro_batches * self.layout.replicas
        return samples * shape.sequence * self.layout.copies

    def run(self, steps: int) -> Sample:
        """Trains for some steps."""
        samples = self.ask("run", steps)
        return Sample(
            steps,
            sum(sample.cpu for sample in samples),
            max(sample.wall for sample in samples),
            sum(sample.gloo for sample in samples),
            sum(sample.system for sample in samples),
            max(sample.rss for sample in samples),
            samples[0].loss,
        )

    def ask(self, question: str, argument: Any = None) -> list[Any]:
        """What each process says to one of :class:`Worker`'s questions; all are asked at once."""
        for pipe in self.pipes:
            pipe.send((question, argument))
        return self._replies()

    def memory(self) -> tuple[int, float]:
        """Bytes at the peak so far of the process that needed most, beyond those before there was a
        model, and the estimate for it."""
        answers = self.ask("memory")
        return max(measured for measured, _ in answers), answers[0][1]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def _replies(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                error, value = pipe.recv()
            except EOFError:
                error, value = "the process died", None
            if error is not None:
                raise RuntimeError(f"{self.layout.name}, process {rank}: {error}")
            answers.append(value)
        return answers


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher would tell a rank, for one thread each on this machine's CPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is the parent's; rank 0 would otherwise make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def serve(pipe: Connection, environment: dict[str, str], flags: list[str]) -> None:
    """The life of a process: trains when the pipe says so, until its other end closes."""
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        _serve(pipe, flags)
        status = 0
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        status = 1
    sys.stdout.flush()
    # Groups are not taken apart: gloo's threads may still hold tensors, as
    # megatron.training.run.end_process_after says.
    os._exit(status)


def _serve(pipe: Connection, flags: list[str]) -> None:
    from megatron.engine.environment import distributed
    from megatron.training.gpt import gpt_data, gpt_program
    from megatron.training.run import parse_run
    from megatron.training.trainer import Trainer

    run = parse_run(None, flags)
    logging.disable(logging.INFO)
    with distributed(run.config.parallel) as groups:
        datasets, collate = gpt_data(run)
        before = resident_bytes()
        worker = Worker(Trainer(run, gpt_program(run.config), datasets, collate, groups), before)
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
        before: resident bytes of the process before there was a model.
    """

    def __init__(self, trainer: Any, before: int) -> None:
        self.trainer, self.before = trainer, before
        self.batches = trainer._batches(trainer.datasets.train, 0, 0)
        self.consumed, self.loss = 0, math.nan

    def parameters(self, _: None = None) -> int:
        """Elements of the parameters that this process's copy counts for."""
        engine = self.trainer.engine
        size = engine.groups.tensor.size
        return sum(
            torch.Size(param.shard.local_shape(size)).numel()
            for param in engine.names
            if engine.owns(param)
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
        estimate of ``megatron.planning`` for the rank that needs most."""
        from megatron.config.layouts import Layout
        from megatron.planning.memory import peak_memory

        config = self.trainer.config
        micro_batches = self.trainer.plan.batch_size.micro_batches(self.consumed)
        layout = dataclasses.replace(
            Layout.of(config, self.trainer.run.content), micro_batches=(micro_batches,)
        )
        model = config.model
        estimate = peak_memory(model, layout, config.training.micro_batch_size, micro_batches)
        return peak_resident_bytes() - self.before, estimate.total

    def products(self, _: None = None) -> float:
        """CPU seconds of the matrix products of a replica's step, of its shapes, done here."""
        training = self.trainer.config.training
        micro_batches = self.trainer.plan.batch_size.micro_batches(self.consumed)
        return micro_batches * product_seconds(
            self.trainer.config.model, training.micro_batch_size, self.trainer.config.precision.bf16
        )

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


def take_turns(
    groups: Sequence[TrainerGroup], rounds: int, seconds: float, beside: str | None = None
) -> tuple[list[list[Sample]], list[list[Any]]]:
    """Has groups train one after the other, round by round, in another order in each.

    Args:
        groups: the groups.
        rounds: how often each has its turn.
        seconds: about how many CPU seconds a turn takes.
        beside: a question to the first process of a group in each of its turns.

    Returns:
        The samples of each group, one of each round, and the answers to the question.
    """
    for group in groups:  # buffers, caches and optimizer state are there from the second step on
        group.run(1)
    steps = [max(1, round(seconds / group.run(1).cpu)) for group in groups]
    samples: list[list[Sample]] = [[] for _ in groups]
    answers: list[list[Any]] = [[] for _ in groups]
    for number in range(rounds):
        order = range(len(groups)) if number % 2 == 0 else range(len(groups) - 1, -1, -1)
        for place in order:
            samples[place].append(groups[place].run(steps[place]))
            if beside is not None:
                answers[place].append(groups[place].ask(beside)[0])
    return samples, answers


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of the quotient of two measurements of the same round."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def machine() -> dict[str, Any]:
    """Processor, cores and versions that a result is of."""
    import deepspeed

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def as_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples for a JSON file."""
    return [dataclasses.asdict(sample) for sample in samples]
