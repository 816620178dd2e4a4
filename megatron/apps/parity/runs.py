"""Training runs to compare: through the engine, and in plain torch on one process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.data.loader import MicroBatches
from megatron.engine.environment import deterministic_kernels, distributed, training_device
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import StepResult
from megatron.engine.update.optimizer import Factors, factors_of, set_rates
from megatron.families import trained_spec
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.distillation.teacher import find_teacher
from megatron.features.preference import reference
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.random_ltd.layers import begin_step
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import dropout_seed
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import Run, parse_run, run_data
from megatron.training.build import build_trainer
from megatron.training.plan import TrainingPlan
from megatron.training.trainer import Callback, Step, Trainer

ORDERS = 3  # runs of one process that sum the micro batches in other orders
NUDGES = 3  # and from weights whose last bits differ
FIRST_STEP, FACTOR = 1e-6, 4
"""Allowed relative difference in the first float32 step, and in all steps as a multiple of the
effect of rounding on one process."""
EPSILON = torch.finfo(torch.float32).eps


@dataclass
class RunRecord:
    """A run as seen by one rank: each step's loss, gradient norm, loss scale and whether it was
    skipped, and the final slices of weights and moments by ``name/kind/start``."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    iteration: int = 0

    def add(self, result: StepResult) -> None:
        """Record the result of a step."""
        self.losses.append(float(result.loss))
        self.norms.append(float(result.grad_norm))
        self.scales.append(result.loss_scale)
        self.skipped.append(bool(result.skipped))


def train(argv: Sequence[str]) -> RunRecord:
    """Train with these flags. Collective: all processes of the layout must call this."""
    run = parse_run(None, argv)
    record = RunRecord()
    with deterministic_kernels(run.config), distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, record.add)
        trainer.fit()
        record.iteration = trainer.iteration
        for owned in owned_slices(trainer.engine):
            name = f"{owned.name}{shard_of(owned.param).part}"
            for kind in owned.kinds:
                values = owned.get(kind).detach().cpu()
                record.state[f"{name}/{kind}/{owned.slice.start}"] = values.numpy().copy()
    return record


def watched_trainer(run: Run, mesh: Mesh, watch: Callable[[StepResult], None]) -> Trainer:
    """Return a trainer that calls ``watch`` with the result of every step directly after it."""

    class Watching(Callback):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            watch(step.result)

    return build_trainer(run, mesh, [Watching()])


def teaching(
    config: RunConfig, mesh: Mesh, dtype: torch.dtype
) -> Callable[[Iterator[Any], int], Iterator[Any]]:
    """Return a function that adds the teacher's outputs to ``count`` micro batches. The teacher
    computes in ``dtype``. Without a teacher, the function returns its micro batches unchanged."""
    if not config.section(DistillationConfig).kd:
        return lambda batches, count: batches
    teacher = find_teacher(config).start(mesh, training_device())
    teacher.engine.model.to(dtype)
    return teacher.teach


class PlainTraining:
    """The same training without DeepSpeed: one process, torch's optimizer, a loop. The gradients of
    micro batches are summed in ``order``, and ``init`` replaces the model's initialisation.
    ``params`` are the trained parameters, with the clipped gradients of the last step."""

    def __init__(
        self,
        argv: Sequence[str],
        order: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        init: Init | None = None,
    ) -> None:
        run = parse_run(None, argv)
        self.options, self._seed = run.config.optimizer, run.config.training.seed
        self.spec = trained_spec(run.config)
        self._plan, self._order = TrainingPlan(run.config), order
        self.steps = min(
            self._plan.train_iters, run.config.training.exit_interval or self._plan.train_iters
        )
        self.model = LayerStack(self.spec.layers(TensorParallel()), run.config.parallel)
        self.params = dict(self.model.canonical_parameters())
        if init is not None:
            self.model.to(dtype)  # initialise in this dtype
        for name, param in self.params.items():
            if init is not None:
                param.init = init  # type: ignore[attr-defined]
            initialise(name, param, self._seed)
        self.model.to(dtype)
        self.params = {name: p for name, p in self.params.items() if p.requires_grad}
        self._optimizer = _plain_optimizer(self.params, run.config)
        data = run_data(run)
        if run.config.section(PreferenceConfig).needs_reference:
            reference.add_reference(run, Mesh(), data)
        datasets, collate, self._weighed = data.datasets, data.collate, data.weighed
        assert datasets.train is not None
        self._batches = MicroBatches(
            datasets.train, collate, micro_batch_size=self._plan.micro_batch_size
        )
        self._taught = teaching(run.config, Mesh(), dtype)
        self._iteration = self._consumed = 0

    def accumulate(self) -> float:
        """Compute the gradients of one step and return its loss."""
        plan = self._plan
        begin_step(self.model.layers, self._iteration)
        count = plan.batch_size.micro_batches(self._consumed)
        batches = plan.lengths.cut(self._batches, self._iteration)
        micro = [next(batches) for _ in range(count)]
        if self._weighed:
            mean_2 = torch.stack([batch.weights_2 for batch in micro]).mean(0)
            micro = [batch._replace(weights_2=batch.weights_2 / mean_2) for batch in micro]
        micro = list(self._taught(iter(micro), count))
        losses = []
        for place in self._order or range(count):
            if place >= count:
                continue
            seed = dropout_seed(self._seed, self._consumed + place * plan.micro_batch_size)
            state = self.spec.begin(micro[place]).changed(dropout_seed=seed)
            loss = self.spec.total(self.model(state).losses)
            (loss / count).backward()
            losses.append(float(loss.detach()))
        return sum(losses) / count

    def run(self) -> RunRecord:
        """Take the steps that are left and return their losses and gradient norms."""
        steps = [self.step() for _ in range(self._iteration, self.steps)]
        return RunRecord([loss for loss, _ in steps], [norm for _, norm in steps])

    def step(self) -> tuple[float, float]:
        """Update the weights once. Return the loss, and the gradient norm before clipping."""
        plan = self._plan
        set_rates(self._optimizer, *plan.rates(self._iteration, self._consumed))
        self._optimizer.zero_grad()
        loss = self.accumulate()
        params = list(self.params.values())
        grads = [param.grad for param in params if param.grad is not None]  # None if frozen
        # In float32, a large vocabulary alone would cause an error of 1e-5 in the norm.
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(params, self.options.clip_grad or math.inf, norm)
        self._optimizer.step()
        self._iteration += 1
        self._consumed += plan.batch_size.batch_size(self._consumed)
        return loss, float(norm)


def _plain_optimizer(
    params: Mapping[str, nn.Parameter], config: RunConfig
) -> torch.optim.Optimizer:
    """Return torch's optimizer, with one parameter group per parameter."""
    options = config.optimizer
    factors = factors_of({param: name for name, param in params.items()}, config)
    groups = [
        {
            "params": [param],
            "decays": shard_of(param).decays if each.decays is None else each.decays,
            "wd_factor": each.decay,
            "lr_factor": each.rate,
            "decoupled": each.decoupled,
            "eps": options.adam_eps * each.epsilon,
        }
        for param in params.values()
        for each in (factors.get(param, Factors()),)
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=options.sgd_momentum)
    if options.optimizer != "adam":
        raise ConfigError(
            f"--optimizer {options.optimizer}: the training without DeepSpeed has AdamW and SGD; "
            "compare with one of these"
        )
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas)


@dataclass(frozen=True)
class Drift:
    """Difference between runs and a reference in each step, as the maximum over the runs: absolute
    for the loss, relative for the gradient norm."""

    losses: np.ndarray
    norms: np.ndarray

    @classmethod
    def between(cls, records: Sequence[RunRecord], reference: RunRecord) -> Drift:
        norms = np.array(reference.norms)
        return cls(
            np.max([np.abs(np.subtract(r.losses, reference.losses)) for r in records], axis=0),
            np.max([np.abs(np.subtract(r.norms, norms)) / norms for r in records], axis=0),
        )

    def bounds(self, reference: RunRecord) -> Drift:
        """Return the largest drift that this noise explains: a relative 1e-6 in the first step, and
        4 x the noise in any, since a layout splits more sums than the runs that were measured."""
        bounds = Drift(
            np.full_like(self.losses, FACTOR * self.losses.max()),
            np.full_like(self.norms, FACTOR * self.norms.max()),
        )
        bounds.losses[0] = min(bounds.losses[0], FIRST_STEP * abs(reference.losses[0]))
        bounds.norms[0] = min(bounds.norms[0], FIRST_STEP)
        return bounds


def rounding_noise(argv: Sequence[str], reference: RunRecord) -> Drift:
    """Measure the effect of rounding on one process. It is the largest distance to runs that sum
    the micro batches in other orders, to runs whose first weights are rounded otherwise, and to a
    run in float64, but at least float32's resolution. Other orders do not suffice: a layout also
    splits GEMMs, and one or two micro batches have a single order."""
    plan = TrainingPlan(parse_run(None, argv).config)
    count = plan.global_batch_size // plan.micro_batch_size
    shuffle = random.Random(1)
    orders = [shuffle.sample(range(count), count) for _ in range(ORDERS)]
    records = [PlainTraining(argv, order).run() for order in orders]
    records += [nudged(argv, seed).run() for seed in range(NUDGES)]
    drift = Drift.between([*records, PlainTraining(argv, dtype=torch.float64).run()], reference)
    return Drift(
        np.maximum(drift.losses, EPSILON * np.abs(reference.losses)),
        np.maximum(drift.norms, EPSILON),
    )


def nudged(argv: Sequence[str], seed: int) -> PlainTraining:
    """Return a training whose weights are multiplied by 1, 1 + epsilon or 1 - epsilon."""
    training, generator = PlainTraining(argv), torch.Generator().manual_seed(seed)
    for param in training.params.values():
        steps = torch.randint(-1, 2, param.shape, generator=generator)
        param.data *= 1 + EPSILON * steps.to(param)
    return training
