"""Whole training steps, through the engine and without it: losses and gradient norms."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.data.loader import MicroBatches
from megatron.engine.environment import distributed
from megatron.engine.state import fragments
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.groups import SINGLE
from megatron.parallel.random import dropout_seed
from megatron.parallel.region import TensorParallel
from megatron.parallel.shard import Shard, shard_of
from megatron.training.gpt import gpt_data, gpt_program
from megatron.training.plan import TrainingPlan
from megatron.training.run import parse_run
from megatron.training.trainer import Trainer

ORDERS = 5
"""Runs of one process that sum in other orders, to see how far rounding alone drives them apart."""


@dataclass
class Record:
    """What happened in a run, on one rank.

    Attributes:
        losses: of every step.
        norms: gradient norm of every step.
        scales: loss scale of every step.
        skipped: whether the step changed nothing.
        state: fragments of weights and moments at the end, by ``name/kind/start``.
        iteration: steps done.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    iteration: int = 0


def train(argv: Sequence[str]) -> Record:
    """Trains with these flags; every process of the layout calls this."""
    run = parse_run(None, argv)
    record = Record()
    with distributed(run.config.parallel) as groups:
        datasets, collate = gpt_data(run)
        trainer = Trainer(run, gpt_program(run.config), datasets, collate, groups)
        step = trainer.engine.train_step

        def recorded_step(*args: Any) -> Any:
            result = step(*args)
            record.losses.append(float(result.loss))
            record.norms.append(result.grad_norm)
            record.scales.append(result.loss_scale)
            record.skipped.append(result.skipped)
            return result

        trainer.engine.train_step = recorded_step  # type: ignore
        trainer.fit()
        record.iteration = trainer.iteration
        for part in fragments(trainer.engine):
            name = f"{part.name}{part.shard.held or ''}"
            for kind, values in {"weight": part.weight, **part.moments}.items():
                values = values.detach().cpu()
                record.state[f"{name}/{kind}/{part.start}"] = values.numpy().copy()
    return record


def train_plainly(argv: Sequence[str], order: Sequence[int] | None = None) -> Record:
    """The same training without DeepSpeed: one process, torch's AdamW, a loop.

    Args:
        argv: flags.
        order: order in which the micro batches of a step are summed, to see what rounding does.
    """
    return _train_plainly(argv, order)[0]


def _train_plainly(
    argv: Sequence[str], order: Sequence[int] | None = None, steps: int | None = None
) -> tuple[Record, dict[str, Tensor]]:
    """See :func:`train_plainly`; also Adam's first moments at the end, by name."""
    run = parse_run(None, argv)
    config, program, plan = run.config, gpt_program(run.config), TrainingPlan(run.config)
    datasets, collate = gpt_data(run)
    assert datasets.train is not None
    model = LayerStack(program.layers(TensorParallel()), config.parallel)
    for name, param in model.canonical_parameters():
        initialise(name, param, config.training.seed, 0, 1)
    params = list(model.parameters())
    options = config.optimizer
    matrices = [p for p in params if len(shard_of(p).full_shape) > 1]
    vectors = [p for p in params if len(shard_of(p).full_shape) == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "decays": True}, {"params": vectors, "decays": False}],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    batches = MicroBatches(datasets.train, collate, micro_batch_size=plan.micro_batch_size)
    record, consumed = Record(), 0
    for iteration in range(steps or plan.train_iters):
        progress = plan.progress(iteration, consumed)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(progress)
            group["weight_decay"] = plan.weight_decay(progress) if group["decays"] else 0.0
        count = plan.batch_size.micro_batches(consumed)
        micro = [next(batches) for _ in range(count)]
        losses = []
        for place in order or range(count):
            inputs = program.inputs(micro[place])
            first_sample = consumed + place * plan.micro_batch_size
            logits = model(
                inputs.tokens_BS,
                inputs.position_ids_BS,
                inputs.document_ids_BS,
                dropout_seed=dropout_seed(config.training.seed, first_sample),
            )
            loss = program.loss(logits, micro[place], SINGLE)
            (loss / count).backward()
            losses.append(float(loss.detach()))
        clip = options.clip_grad or math.inf
        norm = torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(sum(losses) / count)
        record.norms.append(float(norm))
        consumed += plan.batch_size.batch_size(consumed)
    moments = {
        name: optimizer.state[param]["exp_avg"] for name, param in model.canonical_parameters()
    }
    return record, moments


@dataclass(frozen=True)
class Moment:
    """A rank's part of Adam's first moment of a parameter: 1 - beta1 times the clipped gradient,
    after one step.

    Attributes:
        name: canonical name of the parameter.
        shard: how it is cut.
        tensor: (rank, size) of the tensor-parallel group.
        start: where the part starts in the flattened local share.
        values: the part.
    """

    name: str
    shard: Shard
    tensor: tuple[int, int]
    start: int
    values: Tensor


def first_moments(argv: Sequence[str]) -> list[Moment]:
    """Adam's first moments after one step; every process of the layout calls this."""
    run = parse_run(None, [*argv, "--exit-interval", "1"])
    with distributed(run.config.parallel) as groups:
        datasets, collate = gpt_data(run)
        trainer = Trainer(run, gpt_program(run.config), datasets, collate, groups)
        trainer.fit()
        tensor = groups.tensor.rank, groups.tensor.size
        return [
            Moment(part.name, part.shard, tensor, part.start, values.detach().cpu().clone())
            for part in fragments(trainer.engine)
            for kind, values in part.moments.items()
            if kind == "exp_avg"
        ]


def reference_first_moments(argv: Sequence[str]) -> dict[str, Tensor]:
    """Whole first moments by name, after one step on one process without DeepSpeed."""
    return _train_plainly(argv, steps=1)[1]


def first_moment_difference(
    ranks: Sequence[Sequence[Moment]], reference: dict[str, Tensor], bound: float = 1e-4
) -> str | None:
    """The first parameter, in the order of the backward pass, whose moment differs on a rank by
    more than ``bound`` times the largest that the parameter has, or 1e-3 x the model's largest."""
    largest = max(float(values.abs().max()) for values in reference.values())
    for name, whole in reversed(reference.items()):
        allowed = bound * max(float(whole.abs().max()), 1e-3 * largest)
        for rank, moments in enumerate(ranks):
            for moment in moments:
                if moment.name != name:
                    continue
                canonical = whole.narrow(0, 0, moment.shard.canonical_shape[0])
                share = moment.shard.cut(canonical, *moment.tensor).reshape(-1)
                share = share[moment.start : moment.start + moment.values.numel()]
                found = float((moment.values - share).abs().max())
                if not found <= allowed:
                    return (
                        f"moment of {name} on rank {rank}: {found:.1e} off, {allowed:.1e} allowed"
                    )
    return None


@dataclass(frozen=True)
class Drift:
    """How far runs are from the reference, step by step; the largest of several runs.

    Attributes:
        losses: absolute differences of the loss.
        norms: differences of the gradient norm, relative to it.
    """

    losses: np.ndarray
    norms: np.ndarray

    @classmethod
    def between(cls, records: Sequence[Record], reference: Record) -> Drift:
        """The drift of records from the reference."""
        norms = np.array(reference.norms)
        return cls(
            np.max([np.abs(np.subtract(r.losses, reference.losses)) for r in records], axis=0),
            np.max([np.abs(np.subtract(r.norms, norms)) / norms for r in records], axis=0),
        )

    def within(self, noise: Drift, reference: Record) -> bool:
        """Whether rounding explains it: 1e-6 relative at the first step, then 4 x the noise."""
        return bool(
            self.losses[0] <= 1e-6 * abs(reference.losses[0])
            and self.norms[0] <= 1e-6
            and self.losses.max() <= 4 * noise.losses.max()
            and self.norms.max() <= 4 * noise.norms.max()
        )


def rounding_noise(argv: Sequence[str], reference: Record) -> Drift:
    """The largest drift of runs on one process that sum micro batches in other orders.

    The model is cut up differently in every layout, which changes more sums than these orders do;
    hence the factor of :meth:`Drift.within`.
    """
    count = TrainingPlan(parse_run(None, argv).config).batch_size.micro_batches(0)
    shuffle = random.Random(1)
    orders = [shuffle.sample(range(count), count) for _ in range(ORDERS)]
    return Drift.between([train_plainly(argv, order) for order in orders], reference)
