"""Loss and gradients of one step in float64, of a layout and of one process.

In float64 rounding is so small that whatever differs between the two is an error. DeepSpeed's own
reduction refuses float64, so a plain one takes its place; layers, schedules and communication are
those of a training run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.config import PrecisionConfig, RunConfig
from megatron.data.loader import MicroBatches
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_json import complete
from megatron.engine.deepspeed_patches import average_by
from megatron.engine.environment import distributed, training_device
from megatron.engine.gradient_norm import average_gradients, gradient_norm, owned
from megatron.engine.train_engine import TrainEngine
from megatron.families import spec_of
from megatron.model.layer_list import LayerSequence, LayerSpec, LayerStack, LayerState, initialise
from megatron.model.spec import ModelSpec
from megatron.parallel.mesh import ALONE, SHARDED, Coordinates, Mesh
from megatron.parallel.random import dropout_seed
from megatron.parallel.shard import Init, Shard, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run, parse_run, run_data

INIT = Init(std=0.3)
"""Wider than at the start of a training, biases too, so that every gradient is large."""


@dataclass(frozen=True)
class Gradient:
    """A rank's share of a gradient.

    Attributes:
        name: canonical name of the parameter.
        shard: how it is cut.
        owned: whether this rank's copy counts.
        values: the gradient, float64.
    """

    name: str
    shard: Shard
    owned: bool
    values: Tensor


@dataclass(frozen=True)
class GradientRecord:
    """What one rank saw of one step.

    Attributes:
        coordinates: its place in the mesh.
        loss: mean over micro batches and data ranks.
        norm: global norm of the gradients.
        gradients: of the parameters that it holds (part of), averaged over data ranks.
        outputs: of the layers that it ran, for the first micro batch of the step; by place in the
            layer list.
    """

    coordinates: Coordinates
    loss: float
    norm: float
    gradients: list[Gradient]
    outputs: dict[int, Tensor]


def gradients(argv: Sequence[str]) -> GradientRecord:
    """One step of the layout that the flags describe; every process of it calls this."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        return gradients_in(run, mesh)


def gradients_in(run: Run, mesh: Mesh) -> GradientRecord:
    """The same, within process groups that exist.

    The layout's ZeRO stage and number format, and the DeepSpeed JSON, play no part.
    """
    engine_config = dataclasses.replace(run.config.engine, zero_stage=0, deepspeed_config=None)
    config = dataclasses.replace(run.config, engine=engine_config, precision=PrecisionConfig())
    run = dataclasses.replace(run, config=config, content=complete({}, config))
    engine = build_engine(
        config, run.content, spec_of(config.model, config.parallel), mesh, training_device()
    )
    try:
        return _step(run, engine, mesh)
    finally:
        engine.close()


def _step(run: Run, engine: TrainEngine, mesh: Mesh) -> GradientRecord:
    config = run.config
    engine.model.double()
    for param, name in engine.names.items():
        _widen(name, param, config, mesh.coordinates)
    outputs = _observe(engine.sequences, engine.spec) if mesh.data.rank == 0 else {}
    average_by(engine.engine, lambda: average_gradients(engine.names, mesh))
    plan = TrainingPlan(config)
    count = plan.batch_size.micro_batches(0)
    engine.prepare(count)
    samples = plan.micro_batch_size
    seeds = [
        dropout_seed(config.training.seed, (n * mesh.data.size + mesh.data.rank) * samples)
        for n in range(count)
    ]
    batches = _batches(run, plan, mesh)
    sums = engine.backend.accumulate(batches, seeds)
    norm = float(gradient_norm(list(engine.names), mesh))
    found = [
        Gradient(
            name, shard_of(param), owned(param, mesh, SHARDED), param.grad.detach().cpu().clone()
        )
        for param, name in engine.names.items()
        if param.grad is not None
    ]
    loss = float(engine.spec.total(engine.mean_losses(sums, count)))
    return GradientRecord(mesh.coordinates, loss, norm, found, outputs)


def reference_gradients(argv: Sequence[str]) -> GradientRecord:
    """The same step on one process, without DeepSpeed: a loop over the micro batches."""
    run = parse_run(None, argv)
    config, program, plan = (
        run.config,
        spec_of(run.config.model, run.config.parallel),
        TrainingPlan(run.config),
    )
    model = LayerStack(program.layers(TensorParallel()), config.parallel).double()
    names = dict(model.canonical_parameters())
    for name, param in names.items():
        _widen(name, param, config, ALONE)
    outputs = _observe([model.sequence], program)
    count = plan.batch_size.micro_batches(0)
    mesh, total = Mesh(), 0.0
    batches = _batches(run, plan, mesh)
    for number in range(count):
        batch = next(batches)
        seed = dropout_seed(config.training.seed, number * plan.micro_batch_size)
        loss = program.total(model(program.begin(batch)._replace(dropout_seed=seed)).losses)
        (loss / count).backward()
        total += float(loss.detach())
    found = [
        Gradient(name, shard_of(param), True, param.grad.clone())
        for name, param in names.items()
        if param.grad is not None
    ]
    norm = float(gradient_norm(list(names.values()), mesh))
    return GradientRecord(ALONE, total / count, norm, found, outputs)


def _widen(name: str, param: nn.Parameter, config: RunConfig, coordinates: Coordinates) -> None:
    param.init = INIT  # type: ignore[attr-defined]
    initialise(name, param, config.training.seed, coordinates)


def _batches(run: Run, plan: TrainingPlan, mesh: Mesh) -> Iterator[Any]:
    datasets, collate = run_data(run)
    assert datasets.train is not None
    return MicroBatches(
        datasets.train,
        collate,
        micro_batch_size=plan.micro_batch_size,
        data_rank=mesh.data.rank,
        data_size=mesh.data.size,
    )


def _observe(sequences: Sequence[LayerSequence], spec: ModelSpec) -> dict[int, Tensor]:
    """Has layers leave a copy of the first output of each: hidden states, of the last the loss."""
    outputs: dict[int, Tensor] = {}

    def note(place: int, state: LayerState) -> None:
        if place not in outputs:
            ended = state.losses.keys() == spec.losses.keys()
            output = spec.total(state.losses) if ended else state.hidden
            outputs[place] = output.detach().cpu().clone()

    for sequence in sequences:
        sequence.observe(note)
    return outputs


@dataclass(frozen=True)
class Difference:
    """The first thing that differs, in the order in which a step computes.

    Attributes:
        what: layer output, loss, gradient of a parameter, or gradient norm.
        rank: global rank on which it was seen; None where no rank has it.
        found: largest difference.
        allowed: largest difference that rounding explains.
    """

    what: str
    rank: int | None
    found: float
    allowed: float

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.what}: on no rank"
        return f"{self.what} on rank {self.rank}: {self.found:.1e} off, {self.allowed:.1e} allowed"


BOUND = 1e-12
"""Relative to the larger of a gradient's maximum and 1e-3 x the model's largest gradient: a key
bias has a gradient of exactly zero in theory."""


def first_difference(
    records: Sequence[GradientRecord], reference: GradientRecord, layers: Sequence[LayerSpec]
) -> Difference | None:
    """Compares all copies of everything on all ranks.

    Args:
        records: one per global rank.
        reference: one process.
        layers: the layer list.
    """
    for place, layer in enumerate(layers):
        expected = reference.outputs[place]
        allowed = BOUND * float(expected.abs().max())
        head = place == len(layers) - 1
        what = "loss of the first micro batch" if head else f"output of {layer.name}"
        if not any(place in record.outputs for record in records):
            return Difference(what, None, math.inf, allowed)
        for rank, record in enumerate(records):
            if place in record.outputs:
                output = record.outputs[place]
                share = _share_of_output(expected, output, record.coordinates)
                found = _distance(output, share)
                if not found <= allowed:
                    return Difference(what, rank, found, allowed)
    allowed = BOUND * abs(reference.loss)
    for rank, record in enumerate(records):
        if not abs(record.loss - reference.loss) <= allowed:
            return Difference("loss", rank, abs(record.loss - reference.loss), allowed)
    difference = _gradient_difference(records, reference)
    if difference is not None:
        return difference
    for rank, record in enumerate(records):
        if not abs(record.norm - reference.norm) <= BOUND * reference.norm:
            found = abs(record.norm - reference.norm)
            return Difference("gradient norm", rank, found, BOUND * reference.norm)
    return None


def _gradient_difference(
    records: Sequence[GradientRecord], reference: GradientRecord
) -> Difference | None:
    largest = max(float(g.values.abs().max()) for g in reference.gradients)
    missing = {g.name: g.values.numel() for g in reference.gradients}
    for expected in reversed(reference.gradients):  # in the order of the backward pass
        allowed = BOUND * max(float(expected.values.abs().max()), 1e-3 * largest)
        canonical = expected.shard.join([expected.values])
        for rank, record in enumerate(records):
            for gradient in record.gradients:
                if gradient.name != expected.name:
                    continue
                share = gradient.shard.cut(canonical, record.coordinates)
                found = _distance(gradient.values, share)
                if not found <= allowed:
                    return Difference(f"gradient of {expected.name}", rank, found, allowed)
                if gradient.owned:
                    missing[expected.name] -= share.numel()
    # Data-parallel ranks each hold a whole model.
    for name, count in missing.items():
        if count > 0:
            return Difference(f"gradient of {name} ({count} elements)", None, math.inf, 0.0)
    return None


def _share_of_output(expected: Tensor, output: Tensor, coordinates: Coordinates) -> Tensor:
    """What of a layer's whole output a rank should have: the loss, or hidden states [B, S, H],
    which are perhaps cut along S."""
    rank, size = coordinates.get("tensor", (0, 1))
    return expected if output.shape == expected.shape else expected.chunk(size, 1)[rank]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else math.inf
