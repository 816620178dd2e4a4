"""Numbers of single steps: the points of TensorBoard under Megatron-DeepSpeed's tags, every
``--tensorboard-log-interval`` steps, and the norms and counts of ``--log-params-norm`` and
``--log-num-zeros-in-grad``, which the log lines have too. Tensors stay on the device until the next
log line, so that no step waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.engine.statistics import state_norms
from megatron.training.metrics import numbers
from megatron.training.plan import TrainingPlan
from megatron.training.trainer import Step, Trainer
from megatron.training.writers import STEP, RunWriter


class _Point(NamedTuple):
    iteration: int
    samples: int
    tokens: int
    values: Mapping[str, Tensor | float]
    marks: Sequence[Any]


class StepPoints:
    """The numbers of a run's steps; every rank has one."""

    def __init__(self, config: RunConfig, plan: TrainingPlan) -> None:
        self._config, self._plan = config, plan
        self._points: list[_Point] = []
        self.params_norm: Tensor | None = None
        """2-norm of the weights after the last step, if its log line or its point has it."""

    def before_step(self, trainer: Trainer) -> None:
        """Lets the engine count zeros where the step shows them."""
        logging, following = self._config.logging, trainer.iteration + 1
        trainer.engine.counts_zeros = logging.log_num_zeros_in_grad and self._shown(following)
        timed = logging.log_timers_to_tensorboard and logging.timing_log_level > 0
        trainer.engine.timed = timed and self._is_point(following)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Measures what the step shows; communicates with the other ranks."""
        logging, point = self._config.logging, self._is_point(step.iteration)
        norms: Mapping[str, Tensor] = {}
        if point and logging.log_optimizer_states_to_tensorboard:
            norms = state_norms(trainer.engine)
        elif logging.log_params_norm and self._shown(step.iteration):
            norms = state_norms(trainer.engine, ["weight"])
        self.params_norm = norms.get("weight_l2") if logging.log_params_norm else None
        if not point:
            return
        values = dict(self._values(trainer, step))
        if logging.log_optimizer_states_to_tensorboard:
            values |= {f"optimizer/{name}": value for name, value in norms.items()}
        samples = trainer.consumed_samples
        tokens = self._plan.lengths.tokens(samples)
        if trainer.engine.mesh.world.rank == 0:
            marks = trainer.engine.marks
            self._points.append(_Point(step.iteration, samples, tokens, values, marks))

    def write(self, writer: RunWriter) -> None:
        """Writes the points since the last call."""
        points, self._points = self._points, []
        for iteration, samples, tokens, values, marks in points:
            read = dict(zip(values, numbers(list(values.values())), strict=True))
            between = map(_seconds, marks, marks[1:])  # after the device has been waited for
            read |= dict(zip(("forward-backward-time", "optimizer-time"), between, strict=False))
            writer.scalars(STEP, iteration, read, samples=samples, tokens=tokens)

    def went_back(self) -> None:
        """Forgets points of steps that are void."""
        self._points = []

    def _is_point(self, iteration: int) -> bool:
        logging = self._config.logging
        return (
            "tensorboard" in logging.trackers and not iteration % logging.tensorboard_log_interval
        )

    def _shown(self, iteration: int) -> bool:
        logged = not iteration % self._config.logging.log_interval
        return logged or iteration >= self._plan.train_iters or self._is_point(iteration)

    def _values(self, trainer: Trainer, step: Step) -> Iterator[tuple[str, Tensor | float]]:
        logging, result = self._config.logging, step.result
        for name, loss in result.losses.items():
            yield f"lm-loss-training/{name}", loss
        yield "seqlen/actual_seq_length", step.seq_length
        if self._plan.lengths.grows:
            yield "seqlen/curriculum_seqlen", step.seq_length
        if logging.log_learning_rate_to_tensorboard:
            yield "learning-rate/learning-rate", step.learning_rate
        if logging.log_batch_size_to_tensorboard:
            yield "batch-size/batch-size", step.samples
        if logging.log_loss_scale_to_tensorboard and self._config.precision.fp16:
            yield "loss-scale/loss-scale", result.loss_scale
        if logging.log_world_size_to_tensorboard:
            yield "world-size/world-size", trainer.engine.mesh.world.size
        yield "grad-norm/grad-norm", result.grad_norm
        if result.zeros is not None:
            yield "num-zeros/num-zeros", result.zeros
        if self.params_norm is not None:
            yield "params-norm/params-norm", self.params_norm
        if logging.log_memory_to_tensorboard:
            yield from _memory(trainer.engine.device)


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _memory(device: torch.device) -> Iterator[tuple[str, float]]:
    """Memory in use: of torch's allocator on a GPU, of the whole process on a CPU."""
    if device.type != "cuda":
        yield "mem-allocated-bytes", psutil.Process().memory_info().rss
        return
    stats = torch.cuda.memory_stats(device)
    yield "mem-reserved-bytes", stats["reserved_bytes.all.current"]
    yield "mem-allocated-bytes", stats["allocated_bytes.all.current"]
    yield "mem-allocated-count", stats["allocation.all.current"]
