"""Trainers of this project in processes of their own, which train when they are told to.

A group is the processes of one layout. It is built once and then runs steps whenever its parent
says so, while all other groups wait: measurements of several layouts or sizes can so take turns in
one run, and what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from layout_shapes import LayoutFlags, Shape
from trainer_worker import Sample, serve

from megatron.apps.parity.ranks import rank_environment

ON_CPU = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


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
                    env = rank_environment(rank, layout.processes, store.port) | ON_CPU
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
        except BaseException:  # an interrupt too must leave no process behind
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
        """Ask each process one of :class:`Worker`'s questions; all are asked at once."""
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


def take_turns(
    groups: Sequence[TrainerGroup], rounds: int, seconds: float, alongside: str | None = None
) -> tuple[list[list[Sample]], list[list[Any]]]:
    """Has groups train one after the other, round by round, in another order in each.

    Args:
        groups: the groups.
        rounds: how often each has its turn.
        seconds: about how many CPU seconds a turn takes.
        alongside: a question to the first process of a group in each of its turns.

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
            if alongside is not None:
                answers[place].append(groups[place].ask(alongside)[0])
    return samples, answers


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of the quotient of two measurements of the same round."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def as_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples for a JSON file."""
    return [dataclasses.asdict(sample) for sample in samples]
