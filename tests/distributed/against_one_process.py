"""A layout against one process in plain torch: a step in float64, and a training in float32."""

from collections.abc import Callable, Sequence
from functools import cache

from pool import Pool
from training_jobs import gradients, train, train_plainly

from megatron.apps.parity.gradients import (
    Difference,
    GradientRecord,
    first_difference,
    reference_gradients,
)
from megatron.apps.parity.runs import Drift, RunRecord, rounding_noise
from megatron.families import trained_spec
from megatron.model.layer_list import LayerSpec
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run


@cache
def reference(*argv: str) -> GradientRecord:
    """The step in plain torch. Many cells of a table have the same one."""
    return reference_gradients(argv)


@cache
def layers_of(*argv: str) -> list[LayerSpec]:
    """The layers of a run's model, whose outputs are compared."""
    return trained_spec(parse_run(None, argv).config).layers(TensorParallel())


def difference(
    pool: Pool,
    size: int,
    argv: Sequence[str],
    layout: Sequence[str],
    job: Callable[[list[str]], GradientRecord] = gradients,
) -> Difference | None:
    """What first differs if ``size`` processes take the step with the flags of a layout."""
    records = pool.run(size, job, [*argv, *layout])
    return first_difference(records, reference(*argv), layers_of(*argv))


@cache
def trained_alone(*argv: str) -> tuple[RunRecord, Drift]:
    """The training in plain torch, and how far rounding drives such trainings apart."""
    record = train_plainly(argv)
    return record, rounding_noise(argv, record)


def check_training(
    pool: Pool,
    size: int,
    argv: Sequence[str],
    layout: Sequence[str],
    job: Callable[[list[str]], RunRecord] = train,
    learns: bool = True,
) -> list[RunRecord]:
    """Train on ``size`` processes with the flags of a layout, no further from plain torch than
    rounding explains (docs/guides/parity.md). The records of the ranks. Of drawn data a model
    ``learns`` nothing."""
    alone, noise = trained_alone(*argv)
    records = pool.run(size, job, [*argv, *layout], timeout=300)
    drift = Drift.between(records[:1], alone)
    print(
        f"loss drift {drift.losses.max():.1e} (noise {noise.losses.max():.1e}), "
        f"norm drift {drift.norms.max():.1e} (noise {noise.norms.max():.1e})"
    )
    assert drift.within(noise, alone)
    if learns:
        assert min(alone.losses) < 0.996 * alone.losses[0], "the run must learn something"
    return records
