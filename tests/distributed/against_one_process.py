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
    """Return the first difference of a step on ``size`` processes with the flags of a layout."""
    records = pool.run(size, job, [*argv, *layout])
    return first_difference(records, reference(*argv), layers_of(*argv))


@cache
def trained_alone(*argv: str) -> tuple[RunRecord, Drift]:
    """The training in plain torch, and how far rounding drives such trainings apart."""
    record = train_plainly(argv)
    return record, rounding_noise(argv, record)


def within(drift: Drift, bounds: Drift) -> bool:
    """True if no step's distance exceeds its bound."""
    return bool((drift.losses <= bounds.losses).all() and (drift.norms <= bounds.norms).all())


def check_training(
    pool: Pool,
    size: int,
    argv: Sequence[str],
    layout: Sequence[str],
    job: Callable[[list[str]], RunRecord] = train,
    fall: float | None = 0.1,
) -> list[RunRecord]:
    """Train on ``size`` processes with the flags of a layout, and return the ranks' records.
    Rounding must explain every rank's distance from plain torch (docs/guides/parity.md), and the
    loss must fall by ``fall``, unless that is None."""
    alone, noise = trained_alone(*argv)
    records = pool.run(size, job, [*argv, *layout], timeout=300)
    drift = Drift.between(records, alone)
    print(
        f"loss drift {drift.losses.max():.1e} (noise {noise.losses.max():.1e}), "
        f"norm drift {drift.norms.max():.1e} (noise {noise.norms.max():.1e})"
    )
    assert within(drift, noise.bounds(alone))
    if fall is not None:
        assert alone.losses[-1] < alone.losses[0] - fall, "the run must learn something"
    return records
