"""What workers of the pool do in tests of whole training runs, and the plain run beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.data.loader import MicroBatches
from megatron.engine.environment import distributed
from megatron.engine.state import fragments
from megatron.model.layer_list import initialise
from megatron.parallel.groups import SINGLE
from megatron.parallel.random import seed_micro_batch
from megatron.training.gpt import gpt_data, gpt_program
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run, parse_run
from megatron.training.trainer import Trainer

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --weight-decay 0.1 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --log-interval 1000"
).split()
"""Flags of a model that trains in milliseconds; dropout is on, by default."""


@dataclass
class Record:
    """What happened on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    iteration: int = 0


def train(argv: list[str]) -> Record:
    """Runs the trainer with these flags; for the pool."""
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

        trainer.engine.train_step = recorded_step  # type: ignore[method-assign]
        trainer.fit()
        record.iteration = trainer.iteration
        for part in fragments(trainer.engine):
            for kind, values in {"weight": part.weight, **part.moments}.items():
                record.state[f"{part.name}/{kind}/{part.start}"] = values.detach().numpy().copy()
    return record


def train_plainly(argv: list[str], order: list[int] | None = None) -> Record:
    """The same training without DeepSpeed: one process, torch's AdamW, a loop.

    Args:
        argv: flags.
        order: order in which the micro batches of a step are summed, to see what rounding does.
    """
    run = parse_run(None, argv)
    torch.set_num_threads(1)
    return _plain_loop(run, TrainingPlan(run.config), order)


def _plain_loop(run: Run, plan: TrainingPlan, order: list[int] | None) -> Record:
    config, program = run.config, gpt_program(run.config)
    datasets, collate = gpt_data(run)
    model = program.build(SINGLE)
    for name, param in model.canonical_parameters():
        initialise(name, param, config.training.seed, 0, 1)
    params = list(model.parameters())
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "decays": True},
            {"params": [p for p in params if p.dim() == 1], "decays": False},
        ],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    batches = MicroBatches(datasets.train, collate, micro_batch_size=plan.micro_batch_size)
    record, consumed = Record(), 0
    for iteration in range(plan.train_iters):
        progress = plan.progress(iteration, consumed)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate(progress)
            group["weight_decay"] = plan.weight_decay(progress) if group["decays"] else 0.0
        count = plan.batch_size.micro_batches(consumed)
        micro = [next(batches) for _ in range(count)]
        losses = []
        for place in order or range(count):
            seed_micro_batch(config.training.seed, consumed + place * plan.micro_batch_size)
            loss = program.loss(model(*program.inputs(micro[place])), micro[place], SINGLE)
            (loss / count).backward()
            losses.append(float(loss.detach()))
        clip = options.clip_grad or math.inf
        norm = torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()
        record.losses.append(sum(losses) / count)
        record.norms.append(float(norm))
        consumed += plan.batch_size.batch_size(consumed)
    return record
