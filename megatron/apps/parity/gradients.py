"""Search for the gradient, weight or layer output in which a layout differs from one process.

There are two comparisons. The first is one step in float64, where rounding is so small that any
difference is an error. The second is the first step of a training run, where the gradients that
reached the optimizer are recovered from its first moments. DeepSpeed's gradient reduction does not
support float64, so the first comparison replaces it by a plain one. Layers, schedules and
communication are those of a training run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.apps.parity.runs import PlainTraining, teaching
from megatron.checkpoint.slices import Slice
from megatron.config import OptimizerConfig, PrecisionConfig
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_json import complete
from megatron.engine.environment import distributed, training_device
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import gradient_norm, owned
from megatron.families import trained_spec
from megatron.features.preference import reference
from megatron.features.preference.flags import PreferenceConfig
from megatron.model.layer_list import LayerSequence, LayerSpec, LayerState, initialise
from megatron.model.spec import ModelSpec
from megatron.parallel.context import Context
from megatron.parallel.mesh import ALONE, SHARDED, Coordinates, Group, Mesh
from megatron.parallel.random import dropout_seed
from megatron.parallel.shard import Init, Shard, shard_of
from megatron.run.run import Run, parse_run, run_data
from megatron.training.plan import TrainingPlan
from megatron.training.trainer import weighed_step

INIT = Init(std=0.3)  # a large std, also for biases, makes every gradient large

BOUND = 1e-12
"""Allowed error of a float64 value, relative to the gradient's maximum or to 1e-3 x the model's
largest gradient, whichever is more (key biases have a gradient of zero in theory)."""
GRADIENT_BOUND = 1e-4  # allowed relative error of a float32 gradient
UPDATE_BOUND = 1e-2
"""Allowed error of a float32 weight's change, relative to the parameter's largest change. In its
first step Adam divides a gradient by its magnitude, so a gradient near zero can move its weight
either way. Only weights with a gradient above 1e-3 x the parameter's largest are compared."""


@dataclass(frozen=True)
class Difference:
    """The first difference in the order of computation: the quantity, the global rank (None if the
    quantity is missing on all ranks), and the actual and the allowed difference."""

    what: str
    rank: int | None
    found: float
    allowed: float

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.what}: on no rank"
        return f"{self.what} on rank {self.rank}: {self.found:.1e} off, {self.allowed:.1e} allowed"


@dataclass(frozen=True)
class Gradient:
    """A rank's shard of a gradient in float64. One of a parameter's copies is ``owned``."""

    name: str
    shard: Shard
    owned: bool
    values: Tensor


@dataclass(frozen=True)
class GradientRecord:
    """One step as seen by one rank. Loss and gradients are means over data-parallel ranks.
    ``outputs`` has each layer's output for the first micro batch, by index in the layer list."""

    coordinates: Coordinates
    loss: float
    norm: float
    gradients: list[Gradient]
    outputs: dict[int, Tensor]


def gradients(argv: Sequence[str]) -> GradientRecord:
    """Take one step in the layout that the flags describe. Collective: every process calls this."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        return gradients_in(run, mesh)


def gradients_in(run: Run, mesh: Mesh) -> GradientRecord:
    """Take one step in existing process groups, ignoring ZeRO stage, dtype and DeepSpeed JSON. Only
    ``--torch-compile on`` compiles blocks, because it does not pay off for one step."""
    config = run.config
    fast = config.fast_paths
    if fast.torch_compile == "auto":
        fast = dataclasses.replace(fast, torch_compile="off")
    engine_config = dataclasses.replace(config.engine, zero_stage=0, deepspeed_config=None)
    config = dataclasses.replace(
        config, engine=engine_config, precision=PrecisionConfig(), fast_paths=fast
    )
    run = dataclasses.replace(run, config=config, content=complete({}, config))
    engine = build_engine(config, run.content, trained_spec(config), mesh, training_device())
    try:
        return _step(run, engine, mesh)
    finally:
        engine.close()


def average_by(engine: Any, average: Callable[[], None]) -> None:
    """Replace a DeepSpeed engine's averaging of gradients at stage 0, after a step's last micro
    batch, by ``average``. DeepSpeed's does not support float64, in which layouts are compared."""
    assert hasattr(engine, "allreduce_gradients"), "another version of DeepSpeed"

    def average_at_end(**_: Any) -> None:
        # Average once: an expert's gradient is divided by more ranks than it is summed over.
        if engine.is_gradient_accumulation_boundary():
            average()

    engine.allreduce_gradients = average_at_end


@torch.no_grad()
def average_gradients(params: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Average gradients over all replicas, in place. Each is summed over the axes along which its
    parameter is replicated. The gradient of a parameter that is sharded over ``expert`` already
    includes the tokens of the other ranks along that axis."""
    for param in params:
        if param.grad is not None and mesh.dense.size > 1:
            group = mesh.replicas(shard_of(param))
            if group.size > 1:
                dist.all_reduce(param.grad, group=group.handle)
            param.grad /= mesh.dense.size


def _step(run: Run, engine: TrainEngine, mesh: Mesh) -> GradientRecord:
    config = run.config
    engine.model.double()
    for param, name in engine.names.items():
        param.init = INIT  # type: ignore[attr-defined]
        initialise(name, param, config.training.seed, mesh.coordinates)
    outputs = _observe(engine.sequences, engine.spec) if mesh.samples.rank == 0 else {}
    average_by(engine.engine, partial(average_gradients, engine.trained, mesh))
    plan = TrainingPlan(config)
    count = plan.batch_size.micro_batches(0)
    engine.prepare(count)
    samples = plan.micro_batch_size
    seeds = [
        dropout_seed(config.training.seed, (n * mesh.samples.size + mesh.samples.rank) * samples)
        for n in range(count)
    ]
    data = run_data(run)
    if config.section(PreferenceConfig).needs_reference:
        reference.add_reference(run, mesh, data)
    assert data.datasets.train is not None
    batches = plan.lengths.cut(
        data.batches(
            data.datasets.train,
            micro_batch_size=samples,
            data_rank=mesh.samples.rank,
            data_size=mesh.samples.size,
        ),
        0,
    )
    if data.weighed:
        batches, _ = weighed_step(batches, count, mesh, engine.device)
    taught = teaching(config, mesh, torch.float64)(batches, count)
    sums = engine.backend.accumulate(taught, seeds)
    norm = float(gradient_norm(list(engine.trained), mesh))
    grads = [
        Gradient(
            name, shard_of(param), owned(param, mesh, SHARDED), param.grad.detach().cpu().clone()
        )
        for param, name in engine.trained.items()
        if param.grad is not None
    ]
    loss = float(engine.spec.total(engine.mean_losses(sums, count)))
    return GradientRecord(mesh.coordinates, loss, norm, grads, outputs)


def reference_gradients(argv: Sequence[str]) -> GradientRecord:
    """Take the same step on one process, in plain torch."""
    plain = PlainTraining(argv, dtype=torch.float64, init=INIT)
    outputs = _observe([plain.model.sequence], plain.spec)
    loss = plain.accumulate()
    grads = [
        Gradient(name, shard_of(param), True, param.grad.clone())
        for name, param in plain.params.items()
        if param.grad is not None
    ]
    norm = float(gradient_norm(list(plain.params.values()), Mesh()))
    return GradientRecord(ALONE, loss, norm, grads, outputs)


def _observe(sequences: Sequence[LayerSequence], spec: ModelSpec) -> dict[int, Tensor]:
    """Make layers record their first output, hidden states or the final loss, by layer index."""
    outputs: dict[int, Tensor] = {}

    def note(place: int, state: LayerState) -> None:
        if place not in outputs:
            ended = state.losses.keys() == spec.losses.keys()
            output = spec.total(state.losses) if ended else state.hidden
            outputs[place] = output.detach().cpu().clone()

    for sequence in sequences:
        sequence.observe(note)
    return outputs


def first_difference(
    records: Sequence[GradientRecord], reference: GradientRecord, layers: Sequence[LayerSpec]
) -> Difference | None:
    """Compare all ranks' records with the reference. Return the first difference, or None."""
    after_blocks = max((place + 2 for place, layer in enumerate(layers) if layer.block), default=0)
    divided = any(record.coordinates.get("context", (0, 1))[1] > 1 for record in records)
    for place, layer in enumerate(layers):
        if layer.once_per_stage:
            continue  # such a layer changes no hidden states, and is not on all ranks
        if divided and after_blocks <= place < len(layers) - 1:
            continue  # the positions for which a head computes logits differ between ranks
        expected = reference.outputs[place]
        allowed = BOUND * float(expected.abs().max())
        head = place == len(layers) - 1
        what = "loss of the first micro batch" if head else f"output of {layer.name}"
        if not any(place in record.outputs for record in records):
            return Difference(what, None, math.inf, allowed)
        for rank, record in enumerate(records):
            if (output := record.outputs.get(place)) is None:
                continue
            share = expected
            if expected.dim() > 1:  # hidden states [B, S, H], possibly split along S
                part, parts = record.coordinates.get("context", (0, 1))
                share = Context(Group(tuple(range(parts)), part)).take(expected, 1)
            if output.shape != share.shape:
                part, parts = record.coordinates.get("tensor", (0, 1))
                share = share.chunk(parts, 1)[part]
            if not (distance := _distance(output, share)) <= allowed:
                return Difference(what, rank, distance, allowed)
    allowed = BOUND * abs(reference.loss)
    for rank, record in enumerate(records):
        if not abs(record.loss - reference.loss) <= allowed:
            return Difference("loss", rank, abs(record.loss - reference.loss), allowed)
    difference = _gradient_difference(records, reference)
    if difference is not None:
        return difference
    for rank, record in enumerate(records):
        if not abs(record.norm - reference.norm) <= BOUND * reference.norm:
            apart = abs(record.norm - reference.norm)
            return Difference("gradient norm", rank, apart, BOUND * reference.norm)
    return None


def _gradient_difference(
    records: Sequence[GradientRecord], reference: GradientRecord
) -> Difference | None:
    largest = max(float(g.values.abs().max()) for g in reference.gradients)
    expected, bounds = {}, {}
    for each in reversed(reference.gradients):  # in the order of the backward pass
        expected[each.name] = each.shard.join([each.values])
        bounds[each.name] = BOUND * max(float(each.values.abs().max()), 1e-3 * largest)

    def off(rank: int, own: Gradient) -> float:
        share = own.shard.cut(expected[own.name], records[rank].coordinates)
        return _distance(own.values, share)

    difference = _first_off("gradient", bounds, [record.gradients for record in records], off)
    if difference is not None:
        return difference
    for each in reference.gradients:
        # Each data-parallel rank has a whole model, so elements may occur several times.
        shares = (g for record in records for g in record.gradients if g.owned)
        missing = each.values.numel() - sum(g.values.numel() for g in shares if g.name == each.name)
        if missing > 0:
            return Difference(f"gradient of {each.name} ({missing} elements)", None, math.inf, 0.0)
    return None


def _first_off(
    kind: str,
    bounds: Mapping[str, float],
    ranks: Sequence[Iterable[Any]],
    off: Callable[[int, Any], float],
) -> Difference | None:
    """Return the first parameter in ``bounds`` that exceeds its bound on a rank."""
    for name, allowed in bounds.items():
        for rank, shares in enumerate(ranks):
            for share in shares:
                if share.name == name and not (distance := off(rank, share)) <= allowed:
                    return Difference(f"{kind} of {name}", rank, distance, allowed)
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else math.inf


@dataclass(frozen=True)
class SteppedSlice:
    """One rank's slice of a parameter after the first step, flat and padded with zeros. The
    gradient is before clipping, and None if the optimizer has no moments for the parameter."""

    name: str
    slice: Slice
    gradient: Tensor | None
    weight: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return this slice of ``whole``, a parameter that is padded as on one process."""
        elements = self.slice.cut(whole.narrow(0, 0, self.slice.shape[0]))
        return F.pad(elements, (0, self.weight.numel() - elements.numel()))


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the reference: its gradient before clipping, its weight after the first step,
    and the largest change of any element in that step."""

    gradient: Tensor
    weight: Tensor
    change: float


def stepped_slices(engine: TrainEngine, norm: float) -> list[SteppedSlice]:
    """Return this rank's slices directly after the first step, whose gradient norm is ``norm``."""
    options = engine.config.optimizer
    unclip = _clipping(options, norm) / (1 - options.adam_beta1)
    slices = []
    for part in owned_slices(engine):
        known = "exp_avg" in part.moments
        gradient = part.get("exp_avg").detach().cpu() * unclip if known else None
        weight = part.get("weight").detach().cpu().clone()
        slices.append(SteppedSlice(part.name, part.slice, gradient, weight))
    return slices


def first_step_of(training: PlainTraining) -> tuple[float, float, dict[str, WholeParameter]]:
    """Take the reference's first step. Return loss, gradient norm, and parameters by name."""
    before = {name: param.detach().clone() for name, param in training.params.items()}
    loss, norm = training.step()
    unclip = _clipping(training.options, norm)
    whole = {}
    for name, param in training.params.items():
        weight, change = param.detach().clone(), float((param.detach() - before[name]).abs().max())
        assert param.grad is not None
        whole[name] = WholeParameter(param.grad * unclip, weight, change)
    return loss, norm, whole


def _clipping(options: OptimizerConfig, norm: float) -> float:
    return max(1.0, (norm + 1e-6) / options.clip_grad) if options.clip_grad else 1.0


def first_step_difference(
    ranks: Sequence[Sequence[SteppedSlice]], reference: dict[str, WholeParameter]
) -> Difference | None:
    """Return the first parameter, in the order of the backward pass, whose gradient differs on a
    rank. If all gradients agree, return the first whose new weights differ."""
    difference = gradient_difference(ranks, reference)
    if difference is not None:
        return difference
    bounds = {}
    for name, whole in reversed(reference.items()):
        rounding = torch.finfo(torch.float32).eps * float(whole.weight.abs().max())
        bounds[name] = UPDATE_BOUND * whole.change + 4 * rounding

    def off(rank: int, own: SteppedSlice) -> float:
        whole = reference[own.name]
        compared = own.of(whole.gradient).abs() > 1e-3 * float(whole.gradient.abs().max())
        return float(((own.weight - own.of(whole.weight)).abs() * compared).max())

    return _first_off("new weights", bounds, ranks, off)


def gradient_difference(
    ranks: Sequence[Sequence[SteppedSlice]],
    reference: dict[str, WholeParameter],
    bound: float = GRADIENT_BOUND,
    floor: float = 1e-3,
) -> Difference | None:
    """Return the first parameter whose gradient differs by more than ``bound`` x the larger of the
    parameter's largest gradient and ``floor`` x the model's largest gradient."""
    maxima = {name: float(w.gradient.abs().max()) for name, w in reversed(reference.items())}
    largest = max(maxima.values())
    bounds = {name: bound * max(own, floor * largest) for name, own in maxima.items()}
    with_gradients = [[own for own in slices if own.gradient is not None] for slices in ranks]

    def off(rank: int, own: SteppedSlice) -> float:
        assert own.gradient is not None
        return float((own.gradient - own.of(reference[own.name].gradient)).abs().max())

    return _first_off("gradient", bounds, with_gradients, off)
