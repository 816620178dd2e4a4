"""A step of a layout on simulated ranks, compared with the same step on one process."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.apps.parity.ranks import environment
from megatron.apps.parity.symbolic.compare import (
    BOUND,
    Observed,
    PlainStep,
    Wrong,
    check_outcomes,
    check_slices,
    placed,
    tensor_of,
)
from megatron.apps.parity.symbolic.groups import ROOT, Fault
from megatron.apps.parity.symbolic.program import (
    Program,
    RankOutcome,
    make_initial,
    micro_batches,
    observe_modules,
)
from megatron.apps.parity.symbolic.world import World
from megatron.config import RunConfig
from megatron.config.engine import FastPathsConfig
from megatron.config.training import PrecisionConfig
from megatron.data.loader import TrainingData
from megatron.engine import backend
from megatron.engine.environment import prepare_deepspeed
from megatron.families import trained_spec
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.run.run import Run, run_data


@dataclass(frozen=True)
class Simulation:
    """Counts for a simulated step in which all ranks agree with one process."""

    ranks: int
    micro_batches: int
    collectives: int
    tensors: int


def exact(config: RunConfig) -> RunConfig:
    """Return the configuration in float64, without ZeRO and settings that only affect speed."""
    engine = replace(config.engine, zero_stage=0, deepspeed_config=None)
    fast = replace(FastPathsConfig(), torch_compile="off")
    return replace(config, engine=engine, precision=PrecisionConfig(), fast_paths=fast)


def simulate(run: Run, plain: Run) -> Simulation:
    """Simulate a step of the layout of ``run`` on all its ranks, and compare it with a step of
    ``plain`` on one process. Raises Fault for the first difference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    try:
        prepare_deepspeed()
        return _simulated(run, plain)
    finally:
        torch.set_num_threads(threads)


def _simulated(run: Run, plain: Run) -> Simulation:
    stage, axes = run.config.engine.zero_stage, run.config.parallel.axes
    config, data = exact(run.config), run_data(run)
    samples = run.config.parallel.data_parallel_size
    world = World(run.config.parallel.world_size)
    reference = reference_of(exact(plain.config), run_data(plain), samples)
    wrong: list[Wrong] = []
    judged = [0]

    def program(rank: int) -> RankOutcome:
        mesh = build_mesh(axes)
        part = Program(config, trained_spec(config), mesh, stage)
        make_initial(part)

        def observe(name: str, call: int, output: Any) -> None:
            expected = reference.outputs.get((name, mesh.samples.rank))
            values = tensor_of(output)
            if call or expected is None or values is None:
                return
            off = placed(values.detach(), expected.output, mesh.coordinates)
            judged[0] += off is not None
            if off is not None and not off <= BOUND:
                last = world.calls[rank][-1][1] if world.calls[rank] else "none"
                wrong.append(
                    Wrong(
                        expected.order,
                        rank,
                        f"output of {name} on rank {rank}: {off:.1e} off, relative to its "
                        f"largest; the collective before it is {last}",
                    )
                )

        observe_modules(part, observe)
        outcome = part.step(batches_of(data, config, mesh), micro_batches(config, mesh))
        outcome.slices = part.saved(stage)
        return outcome

    try:
        outcomes = world.run(program, _deepspeed)
        check_outcomes(outcomes, reference)
        check_slices(outcomes, reference)
    except Fault as error:
        first = f"{min(wrong)}; " if wrong else ""
        raise Fault(f"{first}{error}{_noted(error)}") from None
    except Exception as error:
        raise Fault(
            f"{type(error).__name__}: {error}{_noted(error)}, at {_last_line(error)}"
        ) from error
    if wrong:
        raise Fault(str(min(wrong)))
    count = sum(len(calls) for calls in world.calls)
    samples_each = config.training.micro_batch_size * samples
    each = config.training.global_batch_size // samples_each
    return Simulation(world.size, each, count, judged[0])


def _noted(error: BaseException) -> str:
    return "".join(f", {note}" for note in getattr(error, "__notes__", ()))


def _last_line(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(str(ROOT / "megatron")) and "symbolic" not in frame.filename
    ]
    if not frames:
        return "a line outside of the trainer"
    return f"{frames[-1].filename.removeprefix(str(ROOT) + '/')}:{frames[-1].lineno}"


def reference_of(config: RunConfig, data: TrainingData, samples: int) -> PlainStep:
    """Run the step on one process. Also record modules' outputs for the first micro batch of each
    of ``samples`` data-parallel ranks."""
    mesh, outputs, calls = Mesh(), dict[tuple[str, int], Observed](), Counter[str]()
    program = Program(config, trained_spec(config), mesh)
    make_initial(program)

    def observe(name: str, call: int, output: Any) -> None:
        values = tensor_of(output)
        calls[name] += 1
        if values is not None and call < samples:
            outputs[name, call] = Observed(len(outputs), values.detach().clone())

    observe_modules(program, observe)
    count = micro_batches(config, mesh)
    outcome = program.step(batches_of(data, config, mesh), count)
    # If a module is called several times per pass, a call does not identify a micro batch.
    once = {place: output for place, output in outputs.items() if calls[place[0]] == count}
    return PlainStep.of(outcome, once)


def batches_of(data: TrainingData, config: RunConfig, mesh: Mesh) -> Iterator[Any]:
    """Return an iterator over a rank's micro batches."""
    assert data.datasets.train is not None
    return data.batches(
        data.datasets.train,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=mesh.samples.rank,
        data_size=mesh.samples.size,
    )


@contextmanager
def _deepspeed() -> Iterator[None]:
    """In this context, DeepSpeed uses the current torch.distributed."""
    comm: Any = backend.deepspeed.comm.comm
    before, comm.cdb = comm.cdb, None
    try:
        with environment({"LOCAL_RANK": "0"}):  # DeepSpeed's pipelines read it
            backend.deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
            yield
    finally:
        comm.cdb = before
